"""The command ``workbench``: ``demo``, ``lab`` and ``doctor``.

Each word loads what it needs only when it is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench import __version__
from workbench.errors import UsageError, WorkbenchError
from workbench.ports import LOOPBACK

TOUR = "01_tour.ipynb"

_PACKAGE = Path(__file__).parent
_CHECKOUT = _PACKAGE.parent / "notebooks"  # of a clone
_INSTALLED = _PACKAGE / "notebooks"  # of a wheel


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``workbench`` and return its exit code: 0 well, 1 something failed, 2 wrong usage."""
    args, rest = _parser().parse_known_args(argv)
    if rest and args.word != "lab":
        _parser().error(f"unknown argument {rest[0]!r}")
    try:
        if args.word == "lab":
            return _lab(rest)
        return _demo(Path(args.out)) if args.word == "demo" else _doctor()
    except WorkbenchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except ImportError as error:
        sys.stderr.write(f"{error}\nThe installation is not complete: install the workbench again with pip.\n")
        return 1


def find_tour() -> Path:
    """Return the tour: of the clone this package is run from, or the one that came with it.

    Raises:
        UsageError: it is in neither place.
    """
    for folder in (_CHECKOUT, _INSTALLED):
        if (folder / TOUR).exists():
            return folder / TOUR
    raise UsageError(f"{TOUR} is neither in {_CHECKOUT} nor in {_INSTALLED}; install the workbench again")


def lab_command(tour: Path, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that opens ``tour`` in JupyterLab, reachable from this machine only.

    Args:
        tour: the notebook.
        extra: further arguments for JupyterLab; they win over ours.
    """
    root = f"--ServerApp.root_dir={tour.parent}"
    return [sys.executable, "-m", "jupyterlab", f"--ServerApp.ip={LOOPBACK}", root, *extra, str(tour)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="workbench", description="See, debug and teach sharded training.")
    parser.add_argument("--version", action="version", version=f"workbench {__version__}")
    words = parser.add_subparsers(dest="word", required=True, metavar="demo | lab | doctor")
    demo = words.add_parser("demo", help="run the tour; write it as a page and a trace")
    demo.add_argument("--out", default="build/demo", metavar="FOLDER", help="where to (default build/demo)")
    words.add_parser("lab", help="open the tour in JupyterLab; further arguments go to JupyterLab")
    words.add_parser("doctor", help="say what is installed, try it, and say what to do about what is missing")
    return parser


def _demo(folder: Path) -> int:
    from workbench import demo  # noqa: PLC0415 - loaded when used

    if demo.run(find_tour(), folder):
        return 0
    sys.stderr.write("The collectives are not those of the closed form; `%fsdp comms` in the page shows which.\n")
    return 1


def _lab(extra: Sequence[str]) -> int:
    tour = find_tour()
    if tour.parent == _INSTALLED:  # one does not work inside an installed package
        tour = Path(shutil.copy(tour, Path.cwd())) if not Path(TOUR).exists() else Path(TOUR).absolute()
    os.execv(sys.executable, lab_command(tour, extra))


def _doctor() -> int:
    from workbench import doctor  # noqa: PLC0415 - loaded when used

    return 0 if doctor.run() else 1


if __name__ == "__main__":
    sys.exit(main())
