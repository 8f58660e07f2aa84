"""The panel, built once for all tests that need it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hatch_build
from tests.helpers.package_source import REPO

HERE = str(Path(sys.executable).parent)
"""Folder of the Node that the tests' environment installs, for a machine that has none."""


def with_node() -> dict[str, str]:
    """Return the environment with Node on its PATH."""
    return os.environ | {"PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), HERE))}


@contextmanager
def alone() -> Iterator[None]:
    """Lock ``extension/`` against the other test processes."""
    (REPO / "build").mkdir(exist_ok=True)
    with (REPO / "build" / "panel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built_panel() -> Path:
    """Return the folder of the built panel; build it first if its sources are newer."""
    with alone():
        hatch_build.build_panel(REPO, with_node())
    return hatch_build.panel_folder(REPO)


def bundle_bytes(panel: Path) -> int:
    """Return the size of the scripts of a built panel, in bytes."""
    return sum(path.stat().st_size for path in (panel / "static").glob("*.js"))


def run_script(name: str) -> None:
    """Run a script of ``extension/package.json``; if it fails, raise with its output."""
    with alone():
        hatch_build.run_script(REPO, name, with_node())
