"""``workbench demo``: run the tour from top to bottom, keep it as a page and a trace, and say what came out."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

from workbench import ports
from workbench.errors import WorkbenchError
from workbench.notebook_page import to_page
from workbench.replay import collectives, shards, training
from workbench.trace.columns import Trace, steps
from workbench.trace.file import load
from workbench.views.theme import format_bytes, format_duration, plural

PAGE = "tour.html"
TRACE = "tour.trace"  # the name that the tour exports to
CELL_TIMEOUT_S = 300
START_TIMEOUT_S = 300  # of the notebook's kernel

_HELDOUT = re.compile(r"held-out loss (\d+\.\d+), unigram (\d+\.\d+)")  # as the tour prints it

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class DemoError(WorkbenchError):
    """The tour could not be run to its end; the message names the cell."""


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What one rank communicated in some steps, measured and expected.

    Attributes:
        num_steps: steps that were compared.
        calls: collectives issued.
        num_bytes: their payloads together.
        expected_calls: by the number of units and passes.
        expected_bytes: likewise.
    """

    num_steps: int
    calls: int
    num_bytes: int
    expected_calls: int
    expected_bytes: int

    @property
    def as_expected(self) -> bool:
        """Whether both numbers are the expected ones."""
        return (self.calls, self.num_bytes) == (self.expected_calls, self.expected_bytes)


def run(notebook: Path, folder: Path) -> bool:
    """Run ``notebook``, write page and trace into ``folder`` and say what came out.

    Returns:
        whether every step communicated what is expected.

    Raises:
        DemoError: a cell failed, or the notebook left no trace.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACE).unlink(missing_ok=True)
    begin = time.monotonic()
    executed = execute(nbformat.read(notebook, as_version=4), folder)
    if not (folder / TRACE).exists():
        raise DemoError(f"the tour ran to its end, but did not write {folder / TRACE}")
    (folder / PAGE).write_text(to_page(executed, title="FSDP workbench: the tour"), encoding="utf-8")
    trace = load(folder / TRACE)
    _say(f"\nThe tour ran from top to bottom in {time.monotonic() - begin:.0f} s.\n")
    for name, value in summary(trace, heldout_losses(executed)):
        _say(f"  {name:<14} {value}")
    _say("")
    for path in (folder / PAGE, folder / TRACE):
        _say(f"  {path}  {format_bytes(path.stat().st_size)}")
    return communication(trace).as_expected


def execute(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Run every cell of ``notebook`` in a fresh kernel of this Python, in ``folder``; returns it with its outputs.

    Raises:
        DemoError: a cell raised, took longer than :data:`CELL_TIMEOUT_S`, or the kernel died.
    """
    doing = "before the first cell"

    def note(cell: NotebookNode, cell_index: int) -> None:
        nonlocal doing
        if cell.cell_type == "code":
            doing = f"in cell {cell_index + 1} of {len(notebook.cells)}: {_first_line(cell)}"
            _say(f"  [{cell_index + 1:>2}/{len(notebook.cells)}] {_first_line(cell)}")

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        startup_timeout=START_TIMEOUT_S,
        iopub_timeout=CELL_TIMEOUT_S,  # outputs take another way than the reply, and may come later
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # else it warns that its loopback sockets are plain TCP
        on_cell_start=note,
    )
    # kernels installed for the user may belong to another Python: look at none of them
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ports.of_a_kernel())
    client.km = kernel
    try:
        executed: NotebookNode = client.execute()
    except CellExecutionError as error:
        raise DemoError(
            f"{_COLOUR.sub('', error.traceback)}\n\nthe tour failed {doing}\n{error.ename}: {error.evalue}"
        ) from error
    except CellTimeoutError as error:
        raise DemoError(f"the tour failed {doing}\nit took longer than {CELL_TIMEOUT_S} s") from error
    except RuntimeError as error:  # also before it could answer
        raise DemoError(f"the tour failed {doing}\nthe notebook's kernel cannot go on: {error}") from error
    finally:
        # of a kernel that does not start nbclient forgets the manager, for which it asks when this process exits
        client.km = kernel
    return executed


def heldout_losses(executed: NotebookNode) -> tuple[tuple[float, float], ...]:
    """Return each (held-out loss, unigram loss) that the tour printed, in nats per character."""
    texts = (text for cell in executed.cells for output in cell.get("outputs", []) for text in _texts(output))
    return tuple((float(loss), float(unigram)) for text in texts for loss, unigram in _HELDOUT.findall(text))


def communication(trace: Trace) -> Communication:
    """Return what one rank communicated in all steps of ``trace``, beside what is expected.

    It is the first rank that differs from what is expected, rank 0 if none does. Every unit counts in the steps in
    which it was in use, also one that was undone later.
    """
    in_use = replace(trace.header, units=tuple(replace(unit, retired=False, gone=False) for unit in trace.header.units))
    found = [c for step in steps(trace) for c in collectives.compare(Trace(in_use, trace.ranks), step)]
    rank = next((c.ranks[0] for c in found if c.differs), 0)
    own = [c for c in found if rank in c.ranks]
    expected = [c.expected for c in own if c.expected is not None]
    return Communication(
        num_steps=len(steps(trace)),
        calls=sum(c.calls for c in own),
        num_bytes=sum(c.num_bytes for c in own),
        expected_calls=sum(e.calls for e in expected),
        expected_bytes=sum(e.num_bytes for e in expected),
    )


def summary(trace: Trace, heldout: tuple[tuple[float, float], ...]) -> Iterator[tuple[str, str]]:
    """Yield what came out, as (name, value) in the order they are read.

    Args:
        trace: of the whole tour.
        heldout: as :func:`heldout_losses` returns.
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
    """Everything in an output that is text."""
    yield from (value for value in (output.get("text"), *output.get("data", {}).values()) if isinstance(value, str))


def _first_line(cell: NotebookNode) -> str:
    """What a person would call the cell: its first line; of a ``%%fsdp`` cell the first one of its code as well."""
    lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].startswith("%%") else 1]) if lines else "(empty)"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
