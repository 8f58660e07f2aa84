"""What of this installation Jupyter finds: extensions of JupyterLab and Notebook."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_core.paths import jupyter_path

PANEL = "fsdp-workbench"
"""Name of our extension."""

REMEDY = (
    "all else works without it; for the panel, install Node 20 or newer and then the workbench again, "
    "in the environment that JupyterLab runs in"
)


def has_extension(name: str) -> bool:
    """Return whether Jupyter finds the extension ``name``."""
    folders: list[str] = jupyter_path("labextensions")
    return any((Path(folder) / name / "package.json").exists() for folder in folders)


def panel_notice() -> str:
    """Return that the panel is missing, in a sentence; empty if it is there, or if nobody would look for it.

    Only a Jupyter server names the session in a kernel's environment: a terminal and a notebook that is run by itself
    have no panel.
    """
    if "JPY_SESSION_NAME" not in os.environ or has_extension(PANEL):
        return ""
    return f"panel not installed: {REMEDY}."
