"""A headless Chromium without a network, and what it complains about."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

NO_BROWSER = "WORKBENCH_NO_BROWSER"
PATIENCE_MS = 90_000
"""How long a browser may take for one thing: a machine may be busy with others."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_MAC = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """Path of the browser to use, None if there is none."""
    named = os.environ.get("WORKBENCH_CHROMIUM")
    found = [named] if named else [*map(shutil.which, _NAMES), *_MAC]
    return next((path for path in found if path and Path(path).exists()), None)


@dataclass
class Opened:
    """A page, every address it asked for, and every complaint of its console."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        """Requests for anything but files and what the page itself holds."""
        return [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]


@contextmanager
def open_offline(chromium: str, file: Path) -> Iterator[Opened]:
    """Open a local file with the network off, in a fresh profile."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE_MS)
        context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE_MS)
        opened = Opened(context.new_page())
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
            browser.close()


_FIGURES = """() => [...document.querySelectorAll(".plotly-graph-div")].map(div => {
    const box = div.getBoundingClientRect();
    const marks = div.querySelectorAll(".plot path, .plot .point, .trace path, .cell-text, canvas");
    return {width: box.width, height: box.height, marks: marks.length};
})"""


def figures(page: Page) -> list[dict[str, float]]:
    """Of each plotly figure on the page, once all are drawn: its size in pixels and how many marks it drew."""
    page.wait_for_function(f"() => ({_FIGURES})().every(({{marks}}) => marks > 0)")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
    return page.evaluate(_FIGURES)


NARROW = {"width": 300, "height": 900}
"""A window that is narrower than figures are made for."""

_LINES = """() => [...document.querySelectorAll(".gtitle")].map((title) => {
    const {right, width} = title.getBoundingClientRect();
    return {lines: title.querySelectorAll("tspan.line").length, isSeen: width > 0 && right <= innerWidth};
})"""


def titles_follow_the_width(page: Page) -> bool:
    """Whether the title of every figure gets more lines, and stays in sight, when the window becomes narrow."""
    wide = page.evaluate(_LINES)
    page.set_viewport_size(NARROW)
    more = f"(wide) => ({_LINES})().every(({{lines, isSeen}}, place) => isSeen && lines > wide[place].lines)"
    page.wait_for_function(more, arg=wide)
    return len(wide) > 0
