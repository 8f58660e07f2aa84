"""Locators of the panel's parts in a page, for all tests of the panel."""

from __future__ import annotations

import psutil
from playwright.sync_api import Locator, expect

from tests.helpers.jupyterlab import SHOTS, NotebookPage

SHOW = "window.jupyterapp.shell.activateById('fsdp-workbench-panel')"
"""Shows the panel."""


def panel(lab: NotebookPage) -> Locator:
    return lab.page.locator(".fsdp-Panel")


def section(lab: NotebookPage, name: str) -> Locator:
    return panel(lab).get_by_role("region", name=name)


def row(lab: NotebookPage, rank: int) -> Locator:
    """Return a rank's entry in the list of ranks."""
    return section(lab, "Ranks").get_by_role("listitem").nth(rank)


def process_of(lab: NotebookPage, rank: int) -> psutil.Process:
    """Return the process of a rank, from the id that the panel shows."""
    return psutil.Process(int((row(lab, rank).get_attribute("title") or "").rsplit(maxsplit=1)[1]))


def tool(lab: NotebookPage, name: str) -> Locator:
    return panel(lab).get_by_role("button", name=name, exact=True)


def reply(lab: NotebookPage) -> Locator:
    """Return the newest reply, below the buttons."""
    return panel(lab).locator(".fsdp-Reply")


def headline(lab: NotebookPage) -> Locator:
    """Return the line of the panel that summarizes the ranks."""
    return lab.page.locator(".fsdp-Headline")


def status_bar(lab: NotebookPage) -> Locator:
    return lab.page.locator(".fsdp-Status button")


def dashboard(lab: NotebookPage) -> Locator:
    """Return the dashboard in its tab."""
    return lab.page.locator(".fsdp-Dashboard")


def shot(lab: NotebookPage, name: str) -> None:
    """Save a screenshot of the page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"panel_{name}.png").write_bytes(lab.page.screenshot())


def run(lab: NotebookPage, command: str, **args: object) -> None:
    """Run a command of JupyterLab and return when it has ended."""
    script = "async ([command, args]) => { await window.jupyterapp.commands.execute(command, args); }"
    lab.page.evaluate(script, [command, args])


def to(lab: NotebookPage, name: str) -> None:
    """Bring a notebook to the front, and wait until its kernel is ready."""
    run(lab, "docmanager:open", path=name)
    lab.page.wait_for_function(
        """(name) => {
            const panel = window.jupyterapp.shell.currentWidget;
            return panel.context?.path === name && panel.sessionContext.session?.kernel?.status === "idle";
        }""",
        arg=name,
    )
    expect(panel(lab).locator(".fsdp-Whose")).to_have_text(name)
