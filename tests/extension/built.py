"""The panel, built once for all tests that need it."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import hatch_build
from tests.source import REPO

HERE = str(Path(sys.executable).parent)
"""Where the Node that the tests brought is, if the machine has none."""


def with_node() -> dict[str, str]:
    """Return the environment with a Node to be found."""
    return os.environ | {"PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), HERE))}


def built_panel() -> Path:
    """Return the folder of the built panel; it is built if its sources are newer. One process does it at a time."""
    (REPO / "build").mkdir(exist_ok=True)
    with (REPO / "build" / "panel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hatch_build.build_panel(REPO, with_node())
    return hatch_build.panel_folder(REPO)
