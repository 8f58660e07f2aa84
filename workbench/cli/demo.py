"""``workbench demo``: run the tour from top to bottom, write it as a page and a trace, and print a summary."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from workbench.base.text_formats import format_bytes, format_duration, plural
from workbench.cli.notebook_page import to_page
from workbench.cli.notebook_run import notebook_client
from workbench.course.predictions import UNATTENDED
from workbench.errors import WorkbenchError, without_colours
from workbench.replay import collectives, shards, training
from workbench.trace.columns import Trace, steps
from workbench.trace.file import load

PAGE = "tour.html"
TRACE = "tour.trace"  # the name that the tour exports to
CELL_TIMEOUT_S = 300

_HELDOUT = re.compile(r"held-out loss (\d+\.\d+), unigram (\d+\.\d+)")  # as the tour prints it

Say = Callable[[str], None]
"""Receives a line for the user."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class DemoError(WorkbenchError):
    """The tour could not be run to its end; the message names the cell."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Measured and expected communication of one rank in some steps.

    Attributes:
        num_steps: number of steps compared.
        calls: collectives issued.
        num_bytes: sum of their payloads.
        expected_calls: collectives expected from the number of units and passes.
        expected_bytes: payload expected likewise.
    """

    computed = ("as_expected",)

    num_steps: int
    calls: int
    num_bytes: int
    expected_calls: int
    expected_bytes: int

    @property
    def as_expected(self) -> bool:
        """Whether calls and bytes match."""
        return (self.calls, self.num_bytes) == (self.expected_calls, self.expected_bytes)


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The tour ran from top to bottom.

    Attributes:
        page: the page that was written.
        trace: the trace that was written.
        seconds: how long it took.
        communication: of one rank in all steps.
        losses: every pair of held-out loss and loss of a unigram model that the tour printed, in nats per character.
    """

    page: Path
    trace: Path
    seconds: float
    communication: Communication
    losses: tuple[tuple[float, float], ...]


def run(notebook: Path, folder: Path, say: Say = _say) -> DemoReport:
    """Run ``notebook``, and write the page and the trace into ``folder``.

    Args:
        notebook: the notebook.
        folder: where it runs.
        say: called with each line on the progress, and of a summary.

    Raises:
        DemoError: a cell failed, or the notebook left no trace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE).unlink(missing_ok=True)
    begin = time.monotonic()
    executed = execute(_without_checks(nbformat.read(notebook, as_version=4)), folder, say)
    if not (folder / TRACE).exists():
        raise DemoError(f"the tour finished but did not write {folder / TRACE}")
    (folder / PAGE).write_text(to_page(executed, title="FSDP workbench: the tour"), encoding="utf-8")
    trace = load(folder / TRACE)
    report = DemoReport(
        page=folder / PAGE,
        trace=folder / TRACE,
        seconds=time.monotonic() - begin,
        communication=communication(trace),
        losses=heldout_losses(executed),
    )
    say(f"\nThe tour ran from top to bottom in {report.seconds:.0f} s.\n")
    for name, value in summary(trace, report.losses):
        say(f"  {name:<14} {value}")
    say("")
    for path in (report.page, report.trace):
        say(f"  {path}  {format_bytes(path.stat().st_size)}")
    return report


def execute(notebook: NotebookNode, folder: Path, say: Say = _say) -> NotebookNode:
    """Run every cell of ``notebook`` in a new kernel of this Python, in ``folder``; return it with its outputs.

    Predictions need no answer.

    Args:
        notebook: the notebook.
        folder: where it runs.
        say: called with a line on each cell.

    Raises:
        DemoError: a cell raised, took longer than :data:`CELL_TIMEOUT_S`, or the kernel died.
    """
    doing = "before the first cell"

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal doing
        if cell.cell_type == "code":
            doing = f"in cell {cell_index + 1} of {len(notebook.cells)}: {_first_line(cell)}"
            say(f"  [{cell_index + 1:>2}/{len(notebook.cells)}] {_first_line(cell)}")

    try:
        with notebook_client(notebook, folder, CELL_TIMEOUT_S, on_cell_start=note) as client:
            executed: NotebookNode = client.execute(env={**os.environ, UNATTENDED: "1"})
    except CellExecutionError as error:
        raise DemoError(
            f"{without_colours(error.traceback)}\n\nthe notebook failed {doing}\n{error.ename}: {error.evalue}"
        ) from error
    except CellTimeoutError as error:
        raise DemoError(f"the notebook failed {doing}\nit took longer than {CELL_TIMEOUT_S} s") from error
    except RuntimeError as error:  # also if it dies before it answers
        raise DemoError(f"the notebook failed {doing}\nthe notebook's kernel failed: {error}") from error
    return executed


def _without_checks(notebook: NotebookNode) -> NotebookNode:
    """Return ``notebook`` without the cells that check exercises, which the reader has not solved."""
    kept = [cell for cell in notebook.cells if not cell.metadata.get("nbgrader", {}).get("grade")]
    return NotebookNode(notebook, cells=kept)


def heldout_losses(executed: NotebookNode) -> tuple[tuple[float, float], ...]:
    """Return every (held-out loss, unigram loss) that the tour printed, in nats per character."""
    texts = (text for cell in executed.cells for output in cell.get("outputs", []) for text in _texts(output))
    return tuple((float(loss), float(unigram)) for text in texts for loss, unigram in _HELDOUT.findall(text))


def communication(trace: Trace) -> Communication:
    """Return the measured and the expected communication of one rank's units in all steps of ``trace``.

    The rank is the first that differs from the expectation, or rank 0. A unit that was undone later counts in the steps
    in which it was in use. Collectives of no unit, such as that of a gradient's norm, have no expectation.
    """
    found = [c for step in steps(trace) for c in collectives.compare(trace, step)]
    rank = next((c.ranks[0] for c in found if c.differs), 0)
    own = [c for c in found if rank in c.ranks and c.unit >= 0]
    expected = [c.expected for c in own if c.expected is not None]
    return Communication(
        num_steps=len(steps(trace)),
        calls=sum(c.calls for c in own),
        num_bytes=sum(c.num_bytes for c in own),
        expected_calls=sum(e.calls for e in expected),
        expected_bytes=sum(e.num_bytes for e in expected),
    )


def summary(trace: Trace, heldout: tuple[tuple[float, float], ...]) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary as (name, value), in display order.

    Args:
        trace: trace of the whole tour.
        heldout: result of :func:`heldout_losses`.
    """
    devices = ", ".join(sorted({rank.device for rank in trace.header.ranks}))
    total = shards.totals(shards.shards(trace.header))
    yield "ranks", f"{trace.header.world_size} ({devices})"
    yield "parameters", f"{total.num_elements:,} in {plural(total.num_params, 'tensor')}"
    if heldout:
        (before, unigram), (after, _) = heldout[0], heldout[-1]
        yield "held-out loss", f"{before:.3f} -> {after:.3f} nats per character; a unigram model has {unigram:.3f}"
    at_rest, whole = format_bytes(total.bytes_at_rest), format_bytes(total.bytes_unsharded)
    yield "full model", f"{whole} of parameters; each rank keeps {at_rest} between uses"
    sent = communication(trace)
    yield (
        "collectives",
        f"{sent.calls:,} calls, {sent.num_bytes:,} B on each rank in {plural(sent.num_steps, 'step')}; "
        f"expected {sent.expected_calls:,} and {sent.expected_bytes:,}: "
        + ("equal" if sent.as_expected else "NOT equal"),
    )
    yield "step time", f"{format_duration(training.summary(trace).step_ns)} (median)"


def _texts(output: NotebookNode) -> Iterator[str]:
    """Yield every text in an output."""
    yield from (value for value in (output.get("text"), *output.get("data", {}).values()) if isinstance(value, str))


def _first_line(cell: NotebookNode) -> str:
    """Return the first line of a cell as its title, with the first line of code if it is a ``%%fsdp`` cell."""
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].startswith("%%") else 1]) if lines else "(empty)"
