"""A notebook of the repository: what is checked of it as it is stored, and its outputs once it has run."""

from collections.abc import Sequence
from pathlib import Path

import nbformat

from tests.helpers.course_notebooks import assert_only_solutions_pass, solved
from workbench.cli.course_copy import solutions
from workbench.cli.demo import execute


def assert_kept_without_outputs(path: Path) -> None:
    """Check that the notebook at ``path`` is valid and stored as one that never ran."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")


def run_notebook(path: Path, folder: Path) -> Sequence[tuple[str, str]]:
    """Run the notebook at ``path`` in ``folder``; return the source and the text of each code cell, in order.

    Its exercises are tried as they are stored, and then solved; only the solutions pass.
    """
    notebook = solved(nbformat.read(path, as_version=4), solutions(path))
    execute(notebook, folder)
    assert_only_solutions_pass(notebook)
    return [
        (c.source, "\n".join(o.get("data", {}).get("text/plain", o.get("text", "")) for o in c.outputs))
        for c in notebook.cells
        if c.cell_type == "code"
    ]
