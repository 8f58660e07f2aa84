"""A JupyterLab or a Notebook 7 server with a notebook, and its page in a real browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import ConsoleMessage, Page

from tests.helpers.browser import PATIENCE_MS, SHARED
from tests.helpers.waiting import end, wait_until
from workbench.base import ports
from workbench.cli.jupyter_extensions import PANEL
from workbench.cli.main import lab_command

LONG_SCENES = [
    pytest.mark.thorough,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]
"""Marks of a file with long scenes in JupyterLab."""

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
TOKEN = "test"
SERVER = ("--no-browser", "--allow-root", "--ServerApp.port=0", f"--IdentityProvider.token={TOKEN}")
KERNEL = "window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status"
HERE = ("http://127.0.0.1", "http://localhost", "data:", "blob:")


@contextmanager
def jupyterlab(
    folder: Path, cells: Sequence[str], *, panel: Path | None = None, has_one_kernel: bool = True
) -> Iterator[str]:
    """Yield the address of a JupyterLab with a notebook of ``cells`` and the panel built in the folder ``panel``."""
    notebook = write_notebook(folder / "run.ipynb", cells)
    fixed = ports.of_a_kernel() if has_one_kernel else {}
    extra = ["--LabApp.expose_app_in_browser=True", *(f"--KernelManager.{name}={port}" for name, port in fixed.items())]
    with _server(folder, lab_command(notebook, [*SERVER, *extra]), panel) as address:
        yield f"{address}lab/tree/run.ipynb?token={TOKEN}&reset"


@contextmanager
def notebook7(folder: Path, cells: Sequence[str], *, panel: Path) -> Iterator[str]:
    """Yield the address of a Notebook 7 with a notebook of ``cells`` and the panel built in the folder ``panel``."""
    write_notebook(folder / "run.ipynb", cells)
    extra = [
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={folder}",
        "--JupyterNotebookApp.expose_app_in_browser=True",
    ]
    with _server(folder, [sys.executable, "-m", "notebook", *SERVER, *extra], panel) as url:
        yield f"{url}notebooks/run.ipynb?token={TOKEN}"


@contextmanager
def _server(folder: Path, command: Sequence[str], panel: Path | None) -> Iterator[str]:
    """Yield the address of the server that ``command`` starts, with its configuration and files in ``folder``."""
    runtime = folder / "runtime"
    pages = folder / "config" / "labconfig" / "page_config.json"
    pages.parent.mkdir(parents=True)
    pages.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    env = os.environ | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    if panel is not None:
        extensions = folder / "share" / "labextensions"
        extensions.mkdir(parents=True)
        (extensions / PANEL).symlink_to(panel)
        env["JUPYTER_PATH"] = str(extensions.parent)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = wait_until(lambda: process.poll() is not None or _address(runtime), timeout_s=90)
        assert isinstance(address, str), (folder / "log").read_text()[-2000:]  # the server has ended
        yield address
    finally:
        end(process, 60)  # it stops its kernels; afterwards it sometimes waits forever for a thread of AnyIO


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """Write a notebook with ``cells``."""
    import nbformat

    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # otherwise JupyterLab asks for a kernel
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=kernel), path)
    return path


def _address(runtime: Path) -> str | None:
    """Return the address that the server has written, once it answers there; otherwise None."""
    try:
        url = json.loads(next(runtime.glob("jpserver-*.json")).read_text())["url"]
        with urllib.request.urlopen(f"{url}api?token={TOKEN}"):
            return url
    except (StopIteration, ValueError, OSError):  # not written yet, partly written, or not listening yet
        return None


@dataclass
class NotebookPage:
    """A page, the addresses that it requested, and the errors of its console."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def outside(self) -> list[str]:
        """Requests that left this machine."""
        return [url for url in self.requests if not url.startswith(HERE)]

    def cell(self, number: int):
        """Return a cell of the notebook."""
        return self.page.locator(".jp-CodeCell").nth(number)

    def run(self, number: int) -> None:
        """Start a cell and return at once."""
        self.page.evaluate(
            """(number) => {
                const panel = window.jupyterapp.shell.currentWidget, runs = (window.runs ??= {});
                panel.content.activeCellIndex = number;
                panel.content.deselectAll();
                runs[number] = "runs";
                window.jupyterapp.commands.execute("notebook:run-cell").then(() => (runs[number] = "has ended"));
            }""",
            number,
        )

    def ends(self, number: int) -> None:
        """Wait until the current run of a cell has ended."""
        self.page.wait_for_function("(number) => window.runs[number] === 'has ended'", arg=number)

    def do(self, number: int) -> None:
        """Run a cell and wait until it has ended."""
        self.run(number)
        self.ends(number)

    def change_theme(self, name: str) -> None:
        """Change to the theme ``"Light"`` or ``"Dark"``, and wait until the page has applied it.

        JupyterLab removes its splash screen 200 ms after each change: after two quick changes, it removes it twice.
        """
        theme, is_over = f"JupyterLab {name}", "() => document.getElementById('jupyterlab-splash') === null"
        self.page.wait_for_function(is_over)
        change = "(theme) => window.jupyterapp.commands.execute('apputils:change-theme', {theme})"
        self.page.evaluate(change, theme)
        self.page.wait_for_function("(theme) => document.body.dataset.jpThemeName === theme", arg=theme)
        self.page.wait_for_function(is_over)

    def reads(self, number: int, text: str) -> None:
        """Wait until a cell's output, which is drawn after the cell has ended, contains ``words``; scroll to it."""
        output = self.cell(number).locator(".jp-OutputArea-output")
        output.filter(has_text=text).first.scroll_into_view_if_needed()


def _is_ours(message: ConsoleMessage) -> bool:
    """Return whether it is an error, other than that of JupyterLab's debugger when a kernel ends during its request."""
    return message.type == "error" and not message.text.startswith(
        "Could not restore the debugger state: Canceled future"
    )


def _words(message: ConsoleMessage) -> str:
    """Return an error, and for one of a request its address."""
    is_request = message.text.startswith("Failed to load resource")
    return f"{message.text} {message.location['url']}" if is_request else message.text


@contextmanager
def open_notebook(url: str, chromium: str) -> Iterator[NotebookPage]:
    """Yield the notebook in the browser, with its kernel ready."""
    with SHARED.browser(chromium) as browser:
        found = NotebookPage(browser.new_page(viewport={"width": 1400, "height": 1100}))
        try:
            found.page.set_default_timeout(PATIENCE_MS)
            found.page.on("request", lambda request: found.requests.append(request.url))
            found.page.on(
                "console", lambda message: found.errors.append(_words(message)) if _is_ours(message) else None
            )
            found.page.on("pageerror", lambda error: found.errors.append(error.stack or str(error)))
            begin(found.page, url)
            yield found
        finally:
            found.page.close()  # with the rest of its profile


def begin(page: Page, url: str) -> None:
    """Reload the notebook, and wait until its kernel is ready."""
    page.goto(url)
    page.wait_for_selector(".jp-CodeCell")
    page.click(".jp-CodeCell .cm-content")
    page.wait_for_function(f"() => {KERNEL} === 'idle'")
