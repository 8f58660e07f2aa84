"""A headless Chromium without a network, and the errors and warnings of its pages."""

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from workbench.agents import screenshot

PATIENCE_MS = 240_000
"""Timeout of one browser operation: long, as the machine may be busy."""

_FIREFOX = ("firefox", "firefox-esr", "/Applications/Firefox.app/Contents/MacOS/firefox")


def find_chromium() -> str | None:
    """Return the path of the browser to use, None if there is none: the machine's, or playwright's own."""
    return screenshot.find_chromium() or _of_playwright()


def find_firefox() -> str | None:
    """Return the path of Firefox, None if there is none; Puppeteer cannot drive playwright's build of it."""
    named = os.environ.get("WORKBENCH_FIREFOX")
    return next(filter(None, map(shutil.which, [named] if named else _FIREFOX)), None)


@functools.cache
def _of_playwright() -> str | None:
    """Return the path of playwright's own Chromium; None if it or its driver does not run here."""
    code = "import playwright.sync_api as p\nwith p.sync_playwright() as driver: print(driver.chromium.executable_path)"
    try:
        found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run([found, "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found


@contextmanager
def _launched(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", *screenshot.FLAGS], timeout=PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


class SharedBrowser:
    """A browser for all pages of a test file: a start costs as much as five pages."""

    def __init__(self) -> None:
        self._last = ExitStack()
        self._browser: Browser | None = None
        self._drivers: set[psutil.Process] = set()

    @property
    def processes(self) -> frozenset[psutil.Process]:
        """The processes of the driver and of the browser, which starts helpers at any time."""
        return frozenset(self._drivers).union(*(driver.children(recursive=True) for driver in self._drivers))

    def begin(self, chromium: str) -> None:
        """Start the browser; it runs until :meth:`end`."""
        before = set(psutil.Process().children())
        self._browser = self._last.enter_context(_launched(chromium))
        self._drivers = set(psutil.Process().children()) - before

    def end(self) -> None:
        """End the browser, if it runs."""
        self._last.close()
        self._browser, self._drivers = None, set()

    @contextmanager
    def browser(self, chromium: str) -> Iterator[Browser]:
        """Yield the shared browser, or a temporary one if none runs."""
        if self._browser is not None:
            yield self._browser
            return
        with _launched(chromium) as browser:
            yield browser


SHARED = SharedBrowser()


@dataclass
class OfflinePage:
    """A page, the addresses that it requested, and the errors and warnings of its console."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        """Requests other than for files and for data within the page."""
        return [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]


@contextmanager
def open_offline(chromium: str, file: Path) -> Iterator[OfflinePage]:
    """Open a local file in a fresh profile, with the network off."""
    with SHARED.browser(chromium) as browser:
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        opened = OfflinePage(context.new_page())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on(
            "console",
            lambda message: opened.complaints.append(message.text) if message.type in {"error", "warning"} else None,
        )
        try:
            opened.page.goto(file.as_uri())
            yield opened
        finally:
            context.close()


_FIGURES = """() => [...document.querySelectorAll(".plotly-graph-div")].map(div => {
    const box = div.getBoundingClientRect();
    const marks = div.querySelectorAll(".plot path, .plot .point, .trace path, .cell-text, canvas");
    return {width: box.width, height: box.height, marks: marks.length};
})"""


def figures(page: Page) -> list[dict[str, float]]:
    """Return the size in pixels and the number of drawn marks of each plotly figure, once all are drawn."""
    page.wait_for_function(f"() => ({_FIGURES})().every(({{marks}}) => marks > 0)")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    return page.evaluate(_FIGURES)


OUTWARD = re.compile("share|cloud|chart studio|plotly", re.IGNORECASE)
"""Title of a button that uploads a figure or leaves the page."""


def mode_bars(page: Page | Locator) -> list[list[str]]:
    """Return the titles of the buttons over each figure: ``[["Download plot as a PNG", ...], ...]``."""
    titles = "(bars) => bars.map((bar) => [...bar.querySelectorAll('.modebar-btn')].map((each) => each.dataset.title))"
    return page.locator(".modebar-container").evaluate_all(titles)


NARROW = {"width": 300, "height": 900}
"""A window that is narrower than figures are designed for."""

_LINES = """() => [...document.querySelectorAll(".gtitle")].map((title) => {
    const {right, width} = title.getBoundingClientRect();
    return {lines: title.querySelectorAll("tspan.line").length, isSeen: width > 0 && right <= innerWidth};
})"""


def titles_follow_the_width(page: Page) -> bool:
    """Return whether every figure's title wraps to more lines, and stays visible, when the window becomes narrow."""
    wide = page.evaluate(_LINES)
    page.set_viewport_size(NARROW)
    more = f"(wide) => ({_LINES})().every(({{lines, isSeen}}, place) => isSeen && lines > wide[place].lines)"
    page.wait_for_function(more, arg=wide)
    return len(wide) > 0
