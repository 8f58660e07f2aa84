"""Where the parts of the panel are in a page, for all tests that look at it."""

from __future__ import annotations

import psutil
from playwright.sync_api import Locator, expect

from tests.helpers.jupyterlab import SHOTS, Opened

SHOW = "window.jupyterapp.shell.activateById('fsdp-workbench-panel')"
"""Shows the panel."""


def panel(lab: Opened) -> Locator:
    return lab.page.locator(".fsdp-Panel")


def section(lab: Opened, name: str) -> Locator:
    return panel(lab).get_by_role("region", name=name)


def row(lab: Opened, rank: int) -> Locator:
    """A rank in the list of them."""
    return section(lab, "Ranks").get_by_role("listitem").nth(rank)


def process_of(lab: Opened, rank: int) -> psutil.Process:
    """The process of a rank, of which the panel tells."""
    return psutil.Process(int((row(lab, rank).get_attribute("title") or "").rsplit(maxsplit=1)[1]))


def tool(lab: Opened, name: str) -> Locator:
    return panel(lab).get_by_role("button", name=name, exact=True)


def reply(lab: Opened) -> Locator:
    """The newest reply, under the buttons."""
    return panel(lab).locator(".fsdp-Reply")


def headline(lab: Opened) -> Locator:
    """How the ranks are, in one line of the panel."""
    return lab.page.locator(".fsdp-Headline")


def status_bar(lab: Opened) -> Locator:
    return lab.page.locator(".fsdp-Status button")


def dashboard(lab: Opened) -> Locator:
    """The dashboard in its tab."""
    return lab.page.locator(".fsdp-Dashboard")


def shot(lab: Opened, name: str) -> None:
    """Keep a picture of the page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"panel_{name}.png").write_bytes(lab.page.screenshot())


def run(lab: Opened, command: str, **args: object) -> None:
    """Do a command of JupyterLab, and return when it has ended."""
    script = "async ([command, args]) => { await window.jupyterapp.commands.execute(command, args); }"
    lab.page.evaluate(script, [command, args])


def to(lab: Opened, name: str) -> None:
    """Have a notebook in front, its kernel ready."""
    run(lab, "docmanager:open", path=name)
    lab.page.wait_for_function(
        """(name) => {
            const panel = window.jupyterapp.shell.currentWidget;
            return panel.context?.path === name && panel.sessionContext.session?.kernel?.status === "idle";
        }""",
        arg=name,
    )
    expect(panel(lab).locator(".fsdp-Whose")).to_have_text(name)
