"""Growth over 8 hours of training: memory of a notebook's kernel, and of a page that shows the dashboard.

The training is simulated: the ranks' control channels answer with rows of a simulated job, some seconds at a time, and
the dashboard's clock runs faster. All else is as in a notebook: the session's collector drains the ranks into its
trace, and a dashboard's view in a headless Chromium inside JupyterLab requests updates until the 8 hours are over. So
everything that grows with rows, steps and hours grows realistically; only the answers are fewer than a page would get
in 8 hours.

Memory is what would be free if the process ended (unique set size), sampled throughout: growth is from before anything
was recorded or shown to the maximum.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.pixels import READY, chromium
from tests.helpers.jupyterlab import NotebookPage, jupyterlab, open_notebook
from tests.helpers.long_trace import Repeated
from tests.helpers.package_source import REPO
from tests.helpers.simulated_job import Setup, simulate
from workbench.protocol.commands import RankRequest
from workbench.protocol.rank_messages import Drain, DrainReply, Position, RecordSummary
from workbench.session.snapshot import ClusterSnapshot, pulse
from workbench.session.trace_collector import TraceCollector
from workbench.trace import advance, header_to_dict, key_frame_to_dict
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.row_compression import to_wire

Tree = dict[str, Any]
HOURS = 8.0
NUM_RANKS, NUM_UNITS = 4, 8
STEP_S = 0.5
SECONDS_A_LOOK = 30.0
FASTER = 300
"""How much faster the dashboard's clock runs: about as much as the hours do."""
SAMPLE_MS = 500

_RUNNING = Position(doing="step", commands=1)

CELLS = [
    f"""
import json, os, sys
sys.path.insert(0, {str(REPO)!r})
from bench.soak import LongRun, faster
from workbench.widgets.dashboard import DashboardWidget
run = LongRun(hours=HOURS)
print(os.getpid())
""",
    "dash = DashboardWidget(run, clock=faster)\ndash",
    "run.is_over.wait()",
    "dash.close()\nprint(json.dumps(run.facts()))",
]
PREPARE, SHOW, WAIT, FACTS = range(4)


def faster() -> float:
    """Return the seconds of a clock that runs :data:`FASTER` times as fast as normal."""
    return FASTER * time.monotonic()


class LongRun:
    """A workbench whose ranks have trained for a while longer at each look, until the hours are over.

    Args:
        hours: duration of the training.
        seconds_a_look: training time between two looks.

    Attributes:
        is_over: set when the hours are over.
    """

    def __init__(self, hours: float = HOURS, seconds_a_look: float = SECONDS_A_LOOK) -> None:
        short = _slowed(simulate(Setup(num_ranks=NUM_RANKS, num_units=NUM_UNITS, steps=3)))
        self._channels = Doors(short)
        self._collector = TraceCollector()
        self._steps_a_look = max(1, round(seconds_a_look / STEP_S))
        self._num_steps = round(hours * 3600 / STEP_S)
        self._lock = threading.Lock()
        self._looks = 0
        self.is_over = threading.Event()

    def pulse(self) -> ClusterSnapshot:
        """Let time pass, and return the snapshot."""
        with self._lock:
            self._looks += 1
            self._channels.num_steps = min(self._channels.num_steps + self._steps_a_look, self._num_steps)
            self._collector.drain(self._channels, range(NUM_RANKS), timeout_s=1.0)
            if self._channels.num_steps == self._num_steps:
                self.is_over.set()
            return pulse(self._collector.trace, [True] * NUM_RANKS, self._collector.positions)

    def activity(self) -> tuple[object, ...]:
        """Return an empty tuple: no rank runs."""
        return ()

    def facts(self) -> Tree:
        """Return how much was recorded, and how much of it is kept."""
        trace = self._collector.trace
        return {
            "hours": self._channels.num_steps * STEP_S / 3600,
            "steps": self._channels.num_steps,
            "rows": sum(rank_trace.end_seq for rank_trace in trace.ranks),
            "rows_kept": trace.num_rows,
            "looks": self._looks,
        }


class Doors:
    """Control channels of ranks that have trained ``num_steps`` steps so far."""

    def __init__(self, short: Trace) -> None:
        self.num_steps = 0
        self._header = header_to_dict(short.header)
        self._ranks = {rank_trace.rank: Repeated(rank_trace) for rank_trace in short.ranks}
        self._frames = {r.rank: advance(r.start, self._ranks[r.rank].before) for r in short.ranks}

    def ask(
        self, request: RankRequest[Any], ranks: Iterable[int] | None = None, timeout_s: float = 2.0
    ) -> dict[int, Any]:
        """Answer a drain."""
        assert isinstance(request, Drain)
        return {rank: self._recorded(rank, request.known[rank]) for rank in ranks or ()}

    def _recorded(self, rank: int, known: RecordSummary) -> DrainReply:
        run = self._ranks[rank]
        is_first = known.next_seq == 0
        begin = 0 if is_first else (known.next_seq - len(run.before)) // run.num_rows
        packed = (run.before.tobytes() if is_first else b"") + run.copies(begin, self.num_steps).tobytes()
        end_seq = len(run.before) + self.num_steps * run.num_rows
        return DrainReply(
            rows=memoryview(to_wire(packed)),
            lost=0,
            key_frame=key_frame_to_dict(replace(self._frames[rank], seq=end_seq)),  # a step leaves the state unchanged
            header=None if known.header_version else self._header,
            header_version=1,
            position=replace(_RUNNING, rank=rank),
        )


def _slowed(trace: Trace) -> Trace:
    """Return the trace with steps that take :data:`STEP_S`."""
    longest_ns = max(Repeated(rank_trace).step_ns for rank_trace in trace.ranks)
    ranks = []
    for rank_trace in trace.ranks:
        rows = rank_trace.rows.copy()
        rows["t_ns"] = (rows["t_ns"] * (STEP_S * 1e9 / longest_ns)).astype(rows["t_ns"].dtype)
        ranks.append(RankTrace(rank_trace.rank, rows, rank_trace.start))
    return Trace(trace.header, tuple(ranks))


def measure_soak(hours: float = HOURS) -> Tree:
    """Return the maximum growth of kernel and page in MB, ``kernel_mb`` and ``page_mb``, and facts about the run."""
    cells = [cell.replace("HOURS", str(hours)) for cell in CELLS]
    with (
        tempfile.TemporaryDirectory() as folder,
        jupyterlab(Path(folder), cells) as url,
        open_notebook(url, chromium()) as lab,
    ):
        lab.do(PREPARE)
        kernel = psutil.Process(int(_written(lab, PREPARE)))
        begin = time.monotonic()
        samples = [_memory(kernel)]
        lab.page.evaluate(READY, SHOW)
        lab.run(WAIT)
        while lab.page.evaluate("(number) => window.runs[number] === 'runs'", WAIT):
            lab.page.wait_for_timeout(SAMPLE_MS)
            samples.append(_memory(kernel))
        lab.do(FACTS)
        facts = json.loads(_written(lab, FACTS))
    of_kernel, of_page = zip(*samples, strict=True)
    return {
        "kernel_mb": growth_mb(of_kernel),
        "page_mb": growth_mb(of_page),
        "kernel_last_mb": (of_kernel[-1] - of_kernel[0]) / 1e6,
        "page_last_mb": (of_page[-1] - of_page[0]) / 1e6,
        "seconds": time.monotonic() - begin,
        **facts,
    }


def growth_mb(samples: Sequence[int]) -> float:
    """Return the maximum growth since the first sample, of bytes, in MB."""
    return (max(samples) - samples[0]) / 1e6


def _written(lab: NotebookPage, number: int) -> str:
    return lab.cell(number).locator(".jp-OutputArea-output").first.inner_text()


def _memory(kernel: psutil.Process) -> tuple[int, int]:
    """Return the bytes of the kernel, and of the page renderers."""
    of_pages = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            of_pages += child.memory_full_info().uss if "--type=renderer" in child.cmdline() else 0
    return kernel.memory_full_info().uss, of_pages


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_soak()) + "\n")
