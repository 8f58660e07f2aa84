"""Lookup of the JupyterLab and Notebook extensions that Jupyter finds in this installation."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_core.paths import jupyter_path

PANEL = "fsdp-workbench"
"""Name of our extension."""

REMEDY = (
    "everything else works without it; for the panel, install Node 20 or newer, then reinstall the workbench, in "
    "JupyterLab's environment"
)


def has_extension(name: str) -> bool:
    """Return whether Jupyter finds the extension ``name``."""
    folders: list[str] = jupyter_path("labextensions")
    return any((Path(folder) / name / "package.json").exists() for folder in folders)


def has_panel() -> bool:
    """Return whether the notebook of this kernel has the panel: a Jupyter server started it, with our extension."""
    return "JPY_SESSION_NAME" in os.environ and has_extension(PANEL)


def panel_notice() -> str:
    """Return a sentence that says that the panel is missing; empty if it is installed or could not be shown anyway.

    Only a kernel of a Jupyter server has the session's name in its environment; a terminal and a notebook that nbclient
    runs have no panel.
    """
    if "JPY_SESSION_NAME" not in os.environ or has_extension(PANEL):
        return ""
    return f"panel not installed: {REMEDY}."
