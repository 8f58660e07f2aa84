"""The notebooks of the course: their exercises, the solutions of these, and a kernel that runs one after the other.

A cell with ``nbgrader.solution`` in its metadata is the answer of an exercise; the next cell with ``nbgrader.grade``
checks it. The solutions are those of ``workbench.cli.course_copy``.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import nbformat
import nbformat.v4
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.helpers.package_source import REPO
from workbench.base import ports
from workbench.cli.course_copy import solutions

FOLDER = REPO / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOUR, INSIDE = FOLDER / "01_tour.ipynb", FOLDER / "02_inside_a_step.ipynb"
TIMEOUT_S = 300

ATTEMPTS = REPO / "tests" / "course" / "attempts"

_VIEW = re.compile("%fsdp (comms|layout|memory|states|timeline)( .*)?")
_SAYS = "says"
_NEXT = """
import os
os.chdir({folder!r})
os.environ["WORKBENCH_RANKS"] = "{num_ranks}"
"""
_WARM = """
%load_ext workbench
%fsdp start -n 2
%fsdp stop
"""
_CLEAN = """
import os
for name in ("WORKBENCH_ACTIVATIONS", "WORKBENCH_COMM"):
    os.environ.pop(name, None)
get_ipython().extension_manager.unload_extension("workbench")
get_ipython().run_line_magic("reset", "-f")
"""


class Attempt(NamedTuple):
    """An attempt at an exercise: what its check has to say, empty if it has to pass, and the source of the answer."""

    says: str
    source: str


@dataclass(frozen=True)
class Exercise:
    """An exercise of a notebook.

    Attributes:
        grade_id: of its answer.
        answer: position of the cell with the answer.
        check: position of the cell that checks it.
    """

    grade_id: str
    answer: int
    check: int


def exercises(notebook: NotebookNode) -> tuple[Exercise, ...]:
    """Return the exercises of a notebook, in order."""
    of_cells = [cell.metadata.get("nbgrader", {}) for cell in notebook.cells]
    answers = [place for place, each in enumerate(of_cells) if each.get("solution") and not each.get("grade")]
    checks = [place for place, each in enumerate(of_cells) if each.get("grade")]
    assert len(answers) == len(checks), "each answer has one check"
    found = tuple(
        Exercise(of_cells[answer]["grade_id"], answer, check) for answer, check in zip(answers, checks, strict=True)
    )
    ends = [*answers, len(of_cells)][1:]
    assert all(each.answer < each.check < end for each, end in zip(found, ends, strict=True))
    return found


def attempts(path: Path) -> Mapping[str, Sequence[Attempt]]:
    """Return the attempts at each exercise of the notebook at ``path``, by ``grade_id``.

    ``tests/course/attempts/NAME.py`` has them, each below a comment with the ``grade_id`` and what its check has to
    say; ``right`` if it has to pass::

        # %% collectives-mean: issued 1 all-reduce (not 0)
        # %%fsdp
        ...
    """
    file = ATTEMPTS / f"{path.stem}.py"
    if not file.exists():
        return {}
    _, *parts = re.split(r"^# %% ([\w-]+): (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: dict[str, list[Attempt]] = {}
    for grade_id, verdict, code in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        source = re.sub(r"^(\s*)# (?=%{1,2}\w)", r"\1", code, flags=re.MULTILINE).strip()
        found.setdefault(grade_id, []).append(Attempt("" if verdict == "right" else verdict, source))
    return found


def with_attempts(
    notebook: NotebookNode, path: Path, tried: Mapping[str, Sequence[Attempt]] | None = None
) -> NotebookNode:
    """Return a copy of ``notebook`` in which each exercise is tried as stored, with each attempt at it, and solved.

    ``tried`` has the attempts, those of :func:`attempts` if None. Checks are marked with what they have to say, and
    cells of attempts may raise. Only the solution is also drawn: a view changes nothing.
    """
    made, tried = copy.deepcopy(notebook), attempts(path) if tried is None else tried
    cells, done = [], 0
    for each in exercises(notebook):
        cells += made.cells[done : each.answer]
        stored = Attempt("CheckFailed", made.cells[each.answer].source)
        solution = Attempt("", solutions(path)[each.grade_id])
        for attempt in [stored, *tried.get(each.grade_id, ()), solution]:
            own = copy.deepcopy(made.cells[each.answer : each.check + 1])
            if attempt is not solution:
                own = [cell for cell in own if not _VIEW.fullmatch(cell.source)]
                for cell in own:
                    cell.metadata["tags"] = ["raises-exception"]
            own[0].source = attempt.source
            own[-1].metadata[_SAYS] = attempt.says
            cells += own
        done = each.check + 1
    made.cells = [*cells, *made.cells[done:]]
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
    return made


def wrong_verdicts(ran: NotebookNode) -> list[str]:
    """Return which checks of a notebook of :func:`with_attempts` that ran said something else, as text."""
    found, source = [], ""
    for cell in ran.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            source = cell.source
        if _SAYS in cell.metadata and not _is_as_said(failure(cell), cell.metadata[_SAYS]):
            found.append(f"expected {cell.metadata[_SAYS] or 'passed'!r}, got {failure(cell) or 'passed'}\n{source}")
    return found


def _is_as_said(failed: str, says: str) -> bool:
    return says in failed if says else not failed


def assert_kept_without_outputs(path: Path) -> None:
    """Check that the notebook at ``path`` is valid and stored as one that never ran."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")


class WarmKernel:
    """A kernel that runs notebooks one after the other in one folder, and keeps what forks the ranks.

    Args:
        folder: where they run.
        environment: of the kernel.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ports.of_a_kernel())
        run_sync(self._kernel.start_kernel)(
            env=dict(environment), cwd=str(folder), extra_arguments=["--IPKernelApp.log_level=ERROR"]
        )
        self._client = NotebookClient(
            _notebook(), km=self._kernel, timeout=TIMEOUT_S, iopub_timeout=TIMEOUT_S, store_widget_state=False
        )

    def warm(self) -> None:
        """Start and stop ranks, so that all processes exist that stay."""
        self._execute(_notebook(_WARM, _CLEAN))

    def run(self, notebook: NotebookNode, num_ranks: int = 2) -> NotebookNode:
        """Run ``notebook`` on a number of ranks; return it with its outputs. What it defined is removed."""
        try:
            self._execute(_notebook(_NEXT.format(folder=str(self._folder), num_ranks=num_ranks)))
            return self._execute(notebook)
        finally:
            self._execute(_notebook(_CLEAN))

    def end(self) -> None:
        """End the kernel."""
        if self._client.kc is not None:
            self._client.kc.stop_channels()
        run_sync(self._kernel.shutdown_kernel)()

    def _execute(self, notebook: NotebookNode) -> NotebookNode:
        self._client.nb = notebook
        return self._client.execute()


def texts(cell: NotebookNode) -> str:
    """Return the text of a cell's outputs."""
    return "\n".join(output.get("data", {}).get("text/plain", output.get("text", "")) for output in cell.outputs)


def failure(cell: NotebookNode) -> str:
    """Return the name and the text of the error of a cell; empty without one."""
    return "\n".join(f"{each.ename}: {each.evalue}" for each in cell.outputs if each.output_type == "error")


def _notebook(*sources: str) -> NotebookNode:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
