"""``workbench grade``: run a notebook without a browser, and collect its checks and predictions.

The checks that a notebook has are known from the source of its cells, so one that never ran is a check that failed. A
cell of nbgrader with ``grade: true`` and without ``check`` is one check too: it passes if the cell raises nothing.
"""

from __future__ import annotations

import ast
import asyncio
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard

import nbformat
import psutil
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from workbench.base.fault import listed
from workbench.base.text_formats import plural
from workbench.cli.notebook_run import notebook_client
from workbench.cluster import processes
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.reaper import Reaper
from workbench.course.checks import CHECK_MIME, CheckFailed
from workbench.course.predictions import PREDICTION_MIME, UNATTENDED
from workbench.errors import UsageError, without_colours
from workbench.reports.tables import Table

TIMEOUT_S = 1800
"""Seconds that a notebook may take."""

CELL_TIMEOUT_S = 120
"""Seconds that a cell may take if the others run on after it."""

Status = Literal["passed", "failed", "not reached"]

_POLL_S = 0.1
_END_S = 5.0  # for which processes may end by themselves


@dataclass(frozen=True, kw_only=True)
class GradedCheck:
    """The result of one check.

    Attributes:
        name: of the check.
        cell: number of its cell in the notebook, from 1.
        points: what it is worth.
        status: whether it passed, failed, or never ran.
        sentences: of the findings that failed, or why it never ran; of those that passed if it passed.
        part: the part of the points that a check that failed gets, below 1.
        measured: numbers that rank solutions on a leader board, by name; the fewer, the better.
    """

    computed = ("score",)

    name: str
    cell: int
    points: float
    status: Status
    sentences: tuple[str, ...] = ()
    part: float = 0
    measured: Mapping[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """The points that it gets."""
        return self.points * (1 if self.status == "passed" else self.part)


@dataclass(frozen=True, kw_only=True)
class GradedPrediction:
    """A prediction that a notebook revealed.

    Attributes:
        name: of the prediction.
        question: what was asked.
        predicted: the answer; None: there was none.
        measured: what was measured.
        distance: how far apart they are, in words; empty without a prediction.
    """

    name: str
    question: str
    predicted: float | str | None
    measured: float | str
    distance: str


@dataclass(frozen=True, kw_only=True)
class GradeReport:
    """The checks and predictions of a notebook that ran.

    Attributes:
        notebook: the notebook.
        seconds: how long it ran.
        checks: in the order of the notebook; at least one.
        predictions: likewise.
        problem: why the notebook did not run to its end; empty if it did.
        changed: checks of the course that the notebook has in another form, by name.
        course: the notebook of the course that has them; None: it is not made of one, or was graded against another
            notebook.
    """

    computed = ("score", "max_score", "passed")

    notebook: Path
    seconds: float
    checks: tuple[GradedCheck, ...]
    predictions: tuple[GradedPrediction, ...] = ()
    problem: str = ""
    changed: tuple[str, ...] = ()
    course: Path | None = None

    @property
    def score(self) -> float:
        """Sum of the points that the checks get."""
        return sum(check.score for check in self.checks)

    @property
    def max_score(self) -> float:
        """Sum of the points of all checks."""
        return sum(check.points for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.status == "passed" for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        results = [(check.name, f"{check.score:g} of {check.points:g}", check.status) for check in self.checks]
        yield from Table(head=("check", "points", "result"), rows=results).lines()
        for check in self.checks:
            if check.status != "passed":
                yield f"\n{check.name} (cell {check.cell})"
                yield from (f"  {sentence}" for sentence in check.sentences)
        if self.predictions:
            yield ""
            rows = [
                (each.name, "-" if each.predicted is None else str(each.predicted), str(each.measured), each.distance)
                for each in self.predictions
            ]
            yield from Table(head=("prediction", "predicted", "answer", "distance"), rows=rows).lines()
        passed = sum(check.status == "passed" for check in self.checks)
        yield f"\n{passed} of {plural(len(self.checks), 'check')} passed: {self.score:g} of {self.max_score:g} points"
        if self.problem:
            yield f"The notebook did not run to its end: {self.problem}"
        if self.changed:
            yield (
                f"Not as in the course: {listed(self.changed)}. To grade with the checks of the course: "
                f"--against {self.course}"
            )


def grade(
    path: Path,
    *,
    against: Path | None = None,
    course: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    cell_timeout_s: float | None = None,
    keep_going: bool = False,
) -> GradeReport:
    """Run a notebook in its own folder, in a new kernel of this Python, and return its checks; no file is changed.

    All processes that it started have ended when this returns or raises, also after Ctrl-C.

    Args:
        path: the notebook.
        against: the instructor's copy, whose graded cells take the place of those of ``path``; only these count.
        course: folder of the course. Without ``against``, a notebook that has cells of a notebook in it has to have all
            checks of that: one that was removed counts as not reached, and one that was changed is named.
        timeout_s: seconds that the notebook may take.
        cell_timeout_s: seconds that a cell may take; None: as many as are left, with ``keep_going`` at most
            :data:`CELL_TIMEOUT_S`.
        keep_going: whether cells after one that raised, or took too long and was interrupted, still run.

    Raises:
        UsageError: a file is missing or is not a notebook, there is no check, its points are no number, or the kernel
            did not start.
    """
    notebook = read_notebook(path)
    cells = {index: found for index, cell in enumerate(notebook.cells) if (found := graded_cell(cell)) is not None}
    if against is not None:
        notebook, cells = with_cells_of(notebook, read_notebook(against))
    if not cells:
        raise UsageError(
            f'{against or path} has no check, so there is nothing to grade: a cell needs check("name", ...) of '
            "workbench.course, or nbgrader's grade: true"
        )
    for cell in notebook.cells:
        if cell.cell_type == "code":  # outputs of an earlier run are no results of this one
            cell.outputs, cell.execution_count = [], None
    for index in cells:  # the checks after one that failed still count
        tags = notebook.cells[index].metadata.get("tags", [])
        notebook.cells[index].metadata["tags"] = sorted({*tags, "raises-exception"})
    begin = time.monotonic()
    limit = CELL_TIMEOUT_S if cell_timeout_s is None and keep_going else cell_timeout_s
    problem = _run(
        notebook, path.resolve().parent, timeout_s, timeout_s if limit is None else limit, keep_going=keep_going
    )
    seconds = time.monotonic() - begin
    checks = [check for index, cell in sorted(cells.items()) for check in _results(notebook, index, cell, problem)]
    original: Path | None = None
    changed: list[str] = []
    if against is None:
        checks += _unexpected(notebook, {check.name for check in checks})
        original = None if course is None else find_original(notebook, course)
    if original is not None:
        changed, removed = differences(notebook, read_notebook(original))
        checks += [_check(each, len(notebook.cells), "not reached", f"not reached: {_REMOVED}") for each in removed]
    return GradeReport(
        notebook=path,
        seconds=seconds,
        checks=tuple(checks),
        predictions=tuple(_predictions(notebook)),
        problem=problem,
        changed=tuple(changed),
        course=original,
    )


def read_notebook(path: Path) -> NotebookNode:
    """Return the notebook in a file.

    Raises:
        UsageError: the file is missing or is not a notebook.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # older notebooks lack cell ids
            found: NotebookNode = nbformat.reads(path.read_text("utf-8"), as_version=4)
            nbformat.validate(found)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UsageError(
            f"{path} is not a notebook ({why}): give a file that Jupyter saved, such as 01.ipynb"
        ) from error
    return found


# ---- the checks that a notebook has


@dataclass(frozen=True, kw_only=True)
class ExpectedCheck:
    """A check in the source of a cell.

    Attributes:
        name: of the check.
        points: what it is worth.
        is_cell: whether it is the cell itself, which passes if it raises nothing.
    """

    name: str
    points: float
    is_cell: bool = False


def graded_cell(cell: NotebookNode) -> tuple[ExpectedCheck, ...] | None:
    """Return the checks of a cell; None if it has none.

    The points of nbgrader's metadata are divided among the checks of the cell in proportion to their own.

    Raises:
        UsageError: these points are no number.
    """
    if cell.cell_type != "code":
        return None
    found = tuple(_checks_in(cell.source))
    meta = _nbgrader(cell)
    is_automatic = bool(meta.get("grade")) and not meta.get("solution")
    if not is_automatic:
        return found or None
    name, points = str(meta.get("grade_id", "cell")), meta.get("points", 1)
    if not _is_worth(points):
        raise UsageError(
            f'the cell {name!r} has "points": {points!r} in nbgrader\'s metadata: write a number from 0 on'
        )
    if not found:
        return (ExpectedCheck(name=name, points=float(points), is_cell=True),)
    total = sum(check.points for check in found) or 1
    return tuple(replace(check, points=check.points * points / total) for check in found)


def _is_worth(points: object) -> TypeGuard[float]:
    """Return whether ``points`` is a number that a check can be worth."""
    if isinstance(points, bool) or not isinstance(points, int | float):
        return False
    return math.isfinite(points) and points >= 0


def _nbgrader(cell: NotebookNode) -> Mapping[str, Any]:
    found = cell.metadata.get("nbgrader", {})
    return found if isinstance(found, Mapping) else {}


def _checks_in(source: str) -> Iterator[ExpectedCheck]:
    """Yield the calls of ``check`` with a literal name in the code of a cell, in order; magics are no code."""
    try:
        tree = ast.parse(TransformerManager().transform_cell(source))  # type: ignore[no-untyped-call]
    except SyntaxError:
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name == "check" and call.args and isinstance(call.args[0], ast.Constant):
            points = next((each.value for each in call.keywords if each.arg == "points"), None)
            worth: object = points.value if isinstance(points, ast.Constant) else 1
            yield ExpectedCheck(name=str(call.args[0].value), points=float(worth) if _is_worth(worth) else 1.0)


def with_cells_of(
    notebook: NotebookNode, reference: NotebookNode
) -> tuple[NotebookNode, dict[int, tuple[ExpectedCheck, ...]]]:
    """Return a notebook with the graded cells of the instructor's copy, and the checks by index of the cell.

    A cell takes the place of the cell with the same ``grade_id`` of nbgrader, the same id, or the same names of checks;
    one that the notebook lacks is put after the cell that precedes it in the copy, or else at the end.
    """
    cells = deepcopy(list(notebook.cells))
    placed: list[tuple[NotebookNode, tuple[ExpectedCheck, ...]]] = []
    previous: list[NotebookNode] = []
    for cell in reference.cells:
        checks = graded_cell(cell)
        if checks is None:
            previous.append(cell)
            continue
        fresh = deepcopy(cell)
        taken = [index for index, each in enumerate(cells) if not any(each is own for own, _ in placed)]
        same = next((index for is_same in _SAME for index in taken if is_same(cells[index], cell)), None)
        if same is not None:
            cells[same] = fresh
        else:
            before = (index for each in reversed(previous) for index, own in enumerate(cells) if _is_same(own, each))
            cells.insert(next(before, len(cells) - 1) + 1, fresh)
        placed.append((fresh, checks))
        previous.append(fresh)
    result = deepcopy(notebook)
    result.cells = cells
    index_of = {id(cell): index for index, cell in enumerate(cells)}
    return result, {index_of[id(cell)]: checks for cell, checks in placed}


def find_original(notebook: NotebookNode, course: Path) -> Path | None:
    """Return the notebook of a course with which a notebook has most cells in common; None if it has none."""
    mine = _identities(notebook)
    shared = {path: len(mine & _identities(read_notebook(path))) for path in sorted(course.glob("*.ipynb"))}
    best = max(shared, key=shared.__getitem__, default=None)
    return best if best is not None and shared[best] else None


def _identities(notebook: NotebookNode) -> set[str]:
    """Return the ids of the cells of exercises and of their checks."""
    return {str(name) for cell in notebook.cells if (name := _nbgrader(cell).get("grade_id"))}


def differences(notebook: NotebookNode, original: NotebookNode) -> tuple[list[str], list[ExpectedCheck]]:
    """Return the names of the checks of ``original`` that ``notebook`` has in another form, and those that it lacks."""
    changed, removed = [], []
    for cell in original.cells:
        checks = graded_cell(cell) or ()
        same = next((each for is_same in _SAME for each in notebook.cells if is_same(each, cell)), None)
        has = {check.name for check in (same and graded_cell(same)) or ()}
        removed += [check for check in checks if check.name not in has]
        if same is not None and same.source.strip() != cell.source.strip():
            changed += [check.name for check in checks if check.name in has]
    return changed, removed


_REMOVED = "the notebook does not have this check of the course any more"


def _has_same_grade_id(cell: NotebookNode, other: NotebookNode) -> bool:
    wanted = _nbgrader(other).get("grade_id")
    return bool(wanted) and _nbgrader(cell).get("grade_id") == wanted


def _has_same_id(cell: NotebookNode, other: NotebookNode) -> bool:
    return bool(other.get("id")) and cell.get("id") == other.get("id")


def _has_same_checks(cell: NotebookNode, other: NotebookNode) -> bool:
    names, others = ([check.name for check in graded_cell(each) or ()] for each in (cell, other))
    return bool(others) and names == others


_SAME = (_has_same_grade_id, _has_same_id, _has_same_checks)


def _is_same(cell: NotebookNode, other: NotebookNode) -> bool:
    return cell is other or _has_same_grade_id(cell, other) or _has_same_id(cell, other)


# ---- the run


class _Client(NotebookClient):
    """A client that keeps errors and the records of the course: what else a cell shows may have no end."""

    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        """Add the output that a message has, if grading needs it."""
        if msg["msg_type"] == "error" or {CHECK_MIME, PREDICTION_MIME} & msg["content"].get("data", {}).keys():
            return super().output(outs, msg, display_id, cell_index)
        return None

    async def async_execute_cell(self, *args: Any, **options: Any) -> NotebookNode:  # noqa: ANN401 - as nbclient's
        """Run a cell; at its limit the kernel is killed, as one that is interrupted while it ends prints its errors."""
        try:
            return await super().async_execute_cell(*args, **options)
        except CellTimeoutError:
            self.shutdown_kernel = "immediate"
            raise


def _run(notebook: NotebookNode, folder: Path, timeout_s: float, cell_timeout_s: float, *, keep_going: bool) -> str:
    """Run a notebook, which receives the outputs; return why it did not run to its end, or an empty text.

    Args:
        notebook: the notebook.
        folder: where it runs.
        timeout_s: seconds that it may take.
        cell_timeout_s: seconds that a cell may take.
        keep_going: see :func:`grade`.

    Raises:
        UsageError: the kernel did not start.
    """
    deadline = time.monotonic() + timeout_s
    mark, begun, problem = uuid.uuid4().hex, -1, ""
    has_ended = threading.Event()

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal begun
        if cell.cell_type == "code":
            begun = cell_index

    async def execute(env: Mapping[str, str]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # a task that nbclient forgets at a timeout
        await client.async_execute(env=env)

    def run() -> None:
        nonlocal problem
        environment = {**os.environ, UNATTENDED: "1", processes.MARKER: mark}
        try:
            asyncio.run(execute(env=environment))
        except Exception as error:  # noqa: BLE001 - also of the kernel's process or its sockets
            problem = _problem(error, begun, _after(timeout_s, cell_timeout_s, deadline))
        finally:
            has_ended.set()

    options = {
        "timeout_func": lambda _cell: max(int(min(cell_timeout_s, deadline - time.monotonic())), 1),
        "allow_error_names": [CheckFailed.__name__],
        "allow_errors": keep_going,
        "interrupt_on_timeout": keep_going,
        "on_cell_start": note,
    }
    reaper = Reaper(mark)  # ends the processes if this one is killed
    try:
        with (
            CountInterrupts() as interrupts,  # raised at any other line, Ctrl-C would leave the kernel
            processes.adopting_orphans() as brood,
            notebook_client(notebook, folder, max(int(timeout_s), 1), _Client, **options) as client,
        ):
            # in a thread: in the main thread nbclient handles Ctrl-C itself, and leaves the processes of ranks
            threading.Thread(target=run, name="graded notebook").start()
            if not _wait(
                has_ended, interrupts, lambda within_s: _end_processes(mark, brood, within_s), deadline + _END_S
            ):
                problem = f"cell {begun + 1} was running {_after(timeout_s, cell_timeout_s, 0)}"
    finally:
        reaper.close(_END_S)
    if interrupts.count:
        raise KeyboardInterrupt
    if begun < 0 and problem:
        raise UsageError(f"the notebook did not run: {problem}")
    return problem


def _problem(error: Exception, begun: int, after: str) -> str:
    """Return why a notebook did not run to its end, as text.

    Args:
        error: that nbclient raised.
        begun: index of the newest cell; -1: none has begun.
        after: which limit it has reached, if it has.
    """
    if isinstance(error, CellExecutionError):
        return f"cell {begun + 1} raised {_error(error.ename, error.evalue)}"
    if isinstance(error, CellTimeoutError):
        return f"cell {begun + 1} was running {after}"
    return f"the kernel died in cell {begun + 1}: {error}" if begun >= 0 else f"the kernel failed: {error}"


def _after(timeout_s: float, cell_timeout_s: float, deadline: float) -> str:
    """Return which limit a cell has reached, as text."""
    is_over = time.monotonic() >= deadline - 1  # nbclient has whole seconds
    return f"when the notebook had taken {timeout_s:g} s" if is_over else f"after {cell_timeout_s:g} s"


def _wait(
    has_ended: threading.Event, interrupts: CountInterrupts, end: Callable[[float], None], deadline: float
) -> bool:
    """Wait until the notebook has ended, also by Ctrl-C, and ``end`` its processes within a number of seconds.

    Returns:
        Whether it ended before the ``deadline``, of the monotonic clock.
    """
    is_late = False
    while not has_ended.wait(_POLL_S):
        is_late = is_late or time.monotonic() > deadline
        if interrupts.count or is_late:
            end(0.0)
    end(_END_S)
    return not is_late


def _end_processes(mark: str, brood: Callable[[], set[psutil.Process]], within_s: float) -> None:
    """End the processes of a run; they have some time to end by themselves.

    Args:
        mark: in their environment, unless they have changed it.
        brood: returns all processes below this one.
        within_s: the time, in seconds.
    """
    deadline = time.monotonic() + within_s
    while (found := processes.belonging(mark, brood())) and time.monotonic() < deadline:
        processes.wait_for_end(found, 0.1)
    while found := processes.belonging(mark, brood()):  # a process that ends may have started another one
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        processes.wait_for_end(found, 1.0)


# ---- its outputs


def _results(
    notebook: NotebookNode, index: int, checks: Sequence[ExpectedCheck], problem: str
) -> Iterator[GradedCheck]:
    """Yield the results of the checks of one cell."""
    cell = notebook.cells[index]
    records = [record for record in _records(cell, CHECK_MIME) if _is_whole(record)]
    error = _error_of(cell)
    for check in checks:
        mine = [record for record in records if record.get("name") == check.name]
        if mine:
            records.remove(mine[0])
            yield _of_record(mine[0], check, index)
        elif check.is_cell and cell.execution_count and not error:
            yield _check(check, index, "passed")
        elif check.is_cell and error:
            yield _check(check, index, "failed", error)
        else:
            ran = bool(cell.execution_count)
            why = f"cell {index + 1} raised {error}" if error else "its cell ran without calling it" if ran else problem
            yield _check(check, index, "not reached", f"not reached: {why}")


def _check(check: ExpectedCheck, index: int, status: Status, *sentences: str) -> GradedCheck:
    return GradedCheck(name=check.name, cell=index + 1, points=check.points, status=status, sentences=sentences)


def _is_whole(record: Mapping[str, Any]) -> bool:
    """Return whether a record is one that ``check`` makes; a cell can display anything."""
    findings = record.get("findings")
    return (
        isinstance(record.get("name"), str)
        and _is_worth(record.get("points"))
        and isinstance(findings, list)
        and all(isinstance(each, Mapping) and "sentence" in each for each in findings)
    )


def _of_record(record: Mapping[str, Any], check: ExpectedCheck, index: int) -> GradedCheck:
    passed = record.get("passed") is True
    sentences = [each["sentence"] for each in record["findings"] if each.get("ok") is passed]
    found = _check(check, index, "passed" if passed else "failed", *map(str, sentences))
    score, measured = record.get("score", 0), record.get("measured", {})
    is_part = not passed and _is_worth(score) and 0 <= score < record["points"]
    numbers = measured if isinstance(measured, Mapping) else {}
    return replace(
        found,
        part=score / record["points"] if is_part else 0,
        measured={str(name): float(number) for name, number in numbers.items() if _is_worth(number)},
    )


def _unexpected(notebook: NotebookNode, names: set[str]) -> Iterator[GradedCheck]:
    """Yield the results of checks whose names are not literals in the source."""
    for index, cell in enumerate(notebook.cells):
        for record in _records(cell, CHECK_MIME):
            if _is_whole(record) and record["name"] not in names:
                check = ExpectedCheck(name=record["name"], points=record["points"])
                yield _of_record(record, check, index)


def _predictions(notebook: NotebookNode) -> Iterator[GradedPrediction]:
    for cell in notebook.cells:
        for record in _records(cell, PREDICTION_MIME):
            yield GradedPrediction(
                name=str(record.get("name")),
                question=str(record.get("question")),
                predicted=record.get("predicted"),
                measured=record.get("measured", ""),
                distance=str(record.get("distance", "")),
            )


def _records(cell: NotebookNode, mime: str) -> list[Mapping[str, Any]]:
    """Return the records of one kind in the outputs of a cell."""
    found = (output.get("data", {}).get(mime) for output in cell.get("outputs", []))
    return [record for record in found if isinstance(record, Mapping)]


def _error_of(cell: NotebookNode) -> str:
    """Return the error that a cell raised, as text; empty if it raised none."""
    errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
    return _error(errors[-1].ename, errors[-1].evalue) if errors else ""


def _error(name: str, text: str) -> str:
    first = without_colours(text).strip().partition("\n")[0]
    return f"{name}: {first[:300]}" if first else name
