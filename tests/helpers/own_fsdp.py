"""The FSDP written by hand in ``notebooks/08_write_your_own_fsdp.ipynb``, for tests that run it elsewhere."""

from typing import Any

import nbformat
import torch.distributed as dist

from tests.helpers.course_notebooks import FOLDER
from workbench.cli.course_copy import solutions

NOTEBOOK = FOLDER / "08_write_your_own_fsdp.ipynb"
MODEL, FLAT, ENGINE, ADAPTERS, PLAIN = "own-model", "own-flat", "own-fsdp", "own-adapters", "own-plain"
FSDP = MODEL, FLAT, ENGINE, ADAPTERS
"""The cells that define the model, its step and the engine, and shard the model."""


def source_of(cell_id: str) -> str:
    """Return the code of a ``%%fsdp`` cell; of an exercise, that of its solution."""
    (cell,) = (cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.id == cell_id)
    magic, _, code = solutions(NOTEBOOK).get(cell_id, cell.source).partition("\n")
    assert magic == "%%fsdp"
    return code


def run_cells(*cell_ids: str, names: dict[str, Any] | None = None, unwatched: bool = False) -> dict[str, Any]:
    """Run cells on this rank; return their variables.

    Args:
        cell_ids: of the cells.
        names: variables that exist already.
        unwatched: leave out the lines that announce something.
    """
    names = {"rank": dist.get_rank(), "world_size": dist.get_world_size()} if names is None else names
    if unwatched:
        names["units"] = None  # the line that makes them is left out
    for cell_id in cell_ids:
        exec(without_marks(source_of(cell_id)) if unwatched else source_of(cell_id), names)
    return names


def without_marks(code: str) -> str:
    """Return code without its lines that end in ``# watch``; the body of a ``with`` among them moves out."""
    kept: list[str] = []
    left_out = -1  # indentation of a `with` whose body is being moved
    for line in code.splitlines():
        indent = len(line) - len(line.lstrip())
        if line and indent <= left_out:
            left_out = -1
        if line.endswith("  # watch"):
            left_out = indent if line.lstrip().startswith("with ") else left_out
            continue
        kept.append(line[4:] if left_out >= 0 and line else line)
    return "\n".join(kept)
