"""``workbench course --pages``: the first notebooks of the course as pages, for readers without an installation.

Each notebook runs, and its page has the pictures of this run. On the page, what follows a prediction is hidden until
the reader has locked a guess.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from workbench.cli.demo import execute
from workbench.cli.notebook_page import to_page
from workbench.errors import UsageError

NOTEBOOKS = ("00_replay", "01_tour")

_CHECK = "*Here the notebook checks your answer against the run: `workbench course` opens it.*"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def write_pages(source: Path, folder: Path, say: Callable[[str], None] = _say) -> Iterator[Path]:
    """Run the first notebooks of the folder ``source``, write a page of each into ``folder``, and yield its path.

    Args:
        source: the notebooks, and the recordings that they open.
        folder: where the pages are written; a page that is there is replaced.
        say: called with a line on each cell.

    Raises:
        DemoError: a cell failed.
        UsageError: a page cannot be written.
    """
    for name in NOTEBOOKS:
        with tempfile.TemporaryDirectory(prefix="workbench-course-") as where:
            for recording in source.glob("*.trace"):
                shutil.copy(recording, where)
            notebook = nbformat.read(source / f"{name}.ipynb", as_version=4)
            ran = execute(_without_checks(notebook), Path(where), say)
        page = folder / f"{name}.html"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            page.write_text(to_page(ran, title=_title(notebook), asks=True), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {page}: {error.strerror}") from error
        yield page


def _without_checks(notebook: NotebookNode) -> NotebookNode:
    """Return a notebook in which a sentence takes the place of each check: a page has nobody's answers."""
    cells = [
        nbformat.v4.new_markdown_cell(_CHECK, id=cell.id) if cell.metadata.get("nbgrader", {}).get("grade") else cell
        for cell in notebook.cells
    ]
    return NotebookNode(notebook, cells=cells)


def _title(notebook: NotebookNode) -> str:
    """Return the heading of a notebook."""
    return str(notebook.cells[0].source).partition("\n")[0].lstrip("# ")
