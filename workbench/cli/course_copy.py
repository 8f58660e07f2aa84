"""``workbench course``: copy the notebooks of the course into a folder of the reader, for a class also with solutions.

``solutions/NAME.py`` beside the notebooks holds a solution per ``grade_id``::

    # %% collectives-mean
    # %%fsdp
    mean = total / world_size

A comment that begins with ``# %%`` and a ``grade_id`` begins a solution. As in jupytext, a magic is a comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.fault import listed
from workbench.base.text_formats import plural
from workbench.errors import UsageError

SOLUTIONS = "solutions"
"""Folder of the solutions, beside the notebooks."""

NBGRADER_SOURCE, NBGRADER_CONFIG = "source", "nbgrader_config.py"
"""In a course of nbgrader: the folder of its assignments before they are released, and its configuration."""

Change = Callable[[str, str], str]
"""Makes the source of the cell of an exercise from its starting point and its solution."""

_HEAD = re.compile(r"^# %% ([\w-]+)$", re.MULTILINE)
_MAGIC = re.compile(r"^(\s*)# (?=%{1,2}\w)", re.MULTILINE)
_STUB = 'c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE"}'
_CONFIG = f"""\
c = get_config()
{_STUB}  # below the starting point, which stays
c.ExecutePreprocessor.timeout = 300
"""


@dataclass(frozen=True, kw_only=True)
class CourseCopy:
    """The notebooks of the course in a folder.

    Attributes:
        folder: where they are.
        new: files that were copied, relative to the folder.
        kept: files that were there and differ from those of this version.
        first: the notebook to open.
        advice: what else to do, as a sentence; empty for nothing.
    """

    folder: Path
    new: tuple[str, ...]
    kept: tuple[str, ...]
    first: Path
    advice: str = ""

    def __str__(self) -> str:
        copied = f"{plural(len(self.new), 'file')} copied to {self.folder}"
        if self.kept:
            copied = (
                f"{copied}; not replaced, as they differ from this version: {listed(self.kept)}. To get one as it "
                "comes with the workbench, rename yours and repeat the command"
            )
        return ". ".join(filter(None, (copied, self.advice)))


def copy_course(source: Path, folder: Path, change: Change | None = None) -> CourseCopy:
    """Copy the notebooks, and what they show, from ``source`` to ``folder``; files that are there stay as they are.

    Args:
        source: the notebooks.
        folder: where they are copied to.
        change: makes the source of the cell of an exercise from its starting point and the solution: with
            :func:`with_solution` or :func:`for_nbgrader`, the copy has solutions. None: the copy is for students.

    Raises:
        UsageError: the copy fails, or is for nbgrader, which would not find it there.
    """
    if change is for_nbgrader and folder.parent.name != NBGRADER_SOURCE:
        raise UsageError(
            f"nbgrader looks for an assignment in the folder {NBGRADER_SOURCE} of its course, not in {folder}: "
            f"workbench course {NBGRADER_SOURCE}/lab --nbgrader"
        )
    new, kept = [], []
    try:
        for name in _files(source):
            mine, content = folder / name, (source / name).read_bytes()
            if change is not None and name.endswith(".ipynb"):
                content = changed(content.decode(), solutions(source / name), change).encode()
            if not mine.exists():
                mine.parent.mkdir(parents=True, exist_ok=True)
                mine.write_bytes(content)
                new.append(name)
            elif mine.read_bytes() != content:
                kept.append(name)
        advice = _configure_nbgrader(folder.parents[1]) if change is for_nbgrader else ""
    except OSError as error:
        raise UsageError(f"cannot copy the notebooks to {folder}: {error.strerror}") from error
    first = min(path for path in folder.glob("*.ipynb") if (source / path.name).exists())
    return CourseCopy(folder=folder, new=tuple(new), kept=tuple(kept), first=first, advice=advice)


def solutions(path: Path) -> Mapping[str, str]:
    """Return the solution of each exercise of the notebook at ``path``, by ``grade_id``; empty if it has none."""
    file = path.parent / SOLUTIONS / f"{path.stem}.py"
    if not file.exists():
        return {}
    _, *parts = _HEAD.split(file.read_text(encoding="utf-8"))
    return {name: _MAGIC.sub(r"\1", code).strip() for name, code in zip(parts[::2], parts[1::2], strict=True)}


def changed(notebook: str, by_id: Mapping[str, str], change: Change) -> str:
    """Return a notebook, as text, in which ``change`` made the cells of exercises of start and solution."""
    found: dict[str, Any] = json.loads(notebook)
    for cell in found["cells"]:
        meta = cell["metadata"].get("nbgrader", {})
        if meta.get("solution") and meta.get("grade_id") in by_id:
            text = change("".join(cell["source"]), by_id[meta["grade_id"]])
            cell["source"] = text.splitlines(keepends=True)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def with_solution(_start: str, solution: str) -> str:
    """Return the solution: the copy of a teacher."""
    return solution


def for_nbgrader(start: str, solution: str) -> str:
    """Return a cell of which nbgrader's ``generate_assignment`` keeps the starting point: the solution is a region.

    A cell that writes a file has no place for both, so its region is empty.
    """
    magic = solution.partition("\n")[0] if solution.startswith("%%") else ""
    is_file = magic.startswith("%%writefile")
    body = "" if is_file else solution.removeprefix(magic).strip("\n") + "\n"
    return f"{start}\n\n### BEGIN SOLUTION\n{body}### END SOLUTION"


def _configure_nbgrader(course: Path) -> str:
    """Write the configuration of a course unless it has one; return what to add to that, as a sentence."""
    config = course / NBGRADER_CONFIG
    if not config.exists():
        config.write_text(_CONFIG)
    return "" if "code_stub" in config.read_text() else f"So that starting points run, add to {config}: {_STUB}"


def _files(source: Path) -> Iterator[str]:
    """Yield the files below a folder, relative to it, without solutions, hidden ones and those that Jupyter keeps."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.is_file() and name.parts[0] != SOLUTIONS and not any(p.startswith((".", "__")) for p in name.parts):
            yield name.as_posix()
