"""The times of a trace of 1 M rows: loading, finding the state at an event, drawing, and other work.

4 ranks, 33 units, 160 steps. A state is what the dashboard shows under its cursor: all ranks, bytes by class, units,
and what each rank was doing. A figure is what a command such as ``%fsdp memory`` draws by default.

:func:`measure_scale`: the same for 512 ranks, wide or long (:mod:`tests.helpers.many_ranks`), and the cost of a
dashboard.
"""

import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.helpers.long_trace import long_trace
from tests.helpers.many_ranks import LONG, WIDE, Scale, trace_of
from tests.helpers.simulated_job import example_trace
from workbench.live.live_trace import LiveTrace
from workbench.live.messages import AskAt, AskFeed
from workbench.live.state_at import StateAt
from workbench.live.view_server import Looking, ViewServer
from workbench.replay import collectives, memory, states
from workbench.reports.explanations import ANSWERS, explain
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace import TraceBuilder, advance, check, load, partners, save, steps, to_perfetto
from workbench.trace.columns import RankTrace, Trace
from workbench.views import VIEWS, draw

Tree = dict[str, Any]
NUM_STEPS = 160
ROWS_OF_100_UNITS = 4_800
"""Rows that a rank writes in a step of 100 units."""


def measure_trace(repeats: int, num_states: int, num_steps: int = NUM_STEPS) -> Tree:
    """Return milliseconds.

    ``load_ms``, ``first_state_ms`` (the last event, with nothing of the trace cached) and ``figure_ms`` (of the slowest
    view) are medians of ``repeats``; ``state_ms`` is the worse of ``first_state_ms`` and the median of ``num_states``
    random events, found one after the other as for a cursor; ``explain_ms`` is that of the slowest explanation of a
    newly read trace of 4 ranks, 100 units and 100 steps.

    Args:
        repeats: repetitions of each.
        num_states: number of random events.
        num_steps: of the trace; 160 make 1 M rows.
    """
    trace = example_trace(num_ranks=4, num_units=33, steps=num_steps)
    found: Tree = {"num_rows": trace.num_rows, **_files(trace, repeats), **_states(trace, repeats, num_states)}
    figures = {name: median_ms(partial(draw, name, trace), repeats) for name in VIEWS}
    found |= {"figures_ms": figures, "figure_ms": max(figures.values())}
    found |= {"explain_ms": _explained(repeats, min(num_steps, 100))}
    return found | {"others_ms": {name: median_ms(work, min(repeats, 3)) for name, work in _others(trace).items()}}


def _explained(repeats: int, num_steps: int) -> float:
    """Return the time of the slowest explanation of 100 units, each of a newly read trace; 4 ranks."""
    trace = long_trace(num_ranks=4, rows_per_rank=ROWS_OF_100_UNITS * num_steps, num_units=100)
    return max(
        statistics.median(median_ms(partial(explain, _unread(trace), subject), 1) for _ in range(repeats))
        for subject in ("", *ANSWERS, "blocks.50", "1")
    )


def _unread(trace: Trace) -> Trace:
    """Return the trace with nothing of it cached."""
    return Trace(trace.header, tuple(RankTrace(rank.rank, rank.rows, rank.start) for rank in trace.ranks))


SCALES = {"wide": WIDE, "long": LONG}


def measure_scale(name: str, repeats: int, num_states: int) -> Tree:
    """Return milliseconds, and MB: of the process with the trace, and what a dashboard adds.

    ``load_ms`` and the figures are medians of ``repeats``; ``first_figures_ms`` are for a newly loaded trace.
    ``first_answer_ms`` is for a dashboard's first answer, ``state_ms`` is the median of random times under its cursor,
    ``state_p95_ms`` their 95th percentile.
    """
    return measure_scale_of(SCALES[name], repeats, num_states)


def measure_scale_of(scale: Scale, repeats: int, num_states: int) -> Tree:
    """Measure as :func:`measure_scale` does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scale.trace"
        num_rows, save_ms = _saved(scale, path)
        load_ms = median_ms(lambda: load(path), repeats)
        file_mb = path.stat().st_size / 1e6
        trace = load(path)
    first = {view: median_ms(partial(draw, view, trace), 1) for view in VIEWS}
    figures = {view: median_ms(partial(draw, view, trace), repeats) for view in VIEWS}
    live = LiveTrace()
    answers, pulse = ViewServer(live), ClusterSnapshot(trace=trace, record="scale.trace")

    def ask(question: Looking) -> tuple[dict[str, Any], list[bytes]]:
        live.show(pulse)
        return answers.answer(question, time.monotonic)

    before_mb = _present_mb()
    first_answer_ms = median_ms(partial(ask, AskFeed()), 1)
    begin_us, end_us = 0.0, ask(AskAt(t_us=1e18))[0]["moment"]["t_us"]
    draw_number = random.Random(0)
    looked_up = sorted(
        median_ms(partial(ask, AskAt(t_us=draw_number.uniform(begin_us, end_us))), 1) for _ in range(num_states)
    )
    return {
        "num_rows": num_rows,
        "rows_mb": trace.num_rows * trace.ranks[0].rows.itemsize / 1e6,
        "save_ms": save_ms,
        "load_ms": load_ms,
        "file_mb": file_mb,
        "first_figures_ms": first,
        "figures_ms": figures,
        "figure_ms": max(figures.values()),
        "first_answer_ms": first_answer_ms,
        "state_ms": statistics.median(looked_up),
        "state_p95_ms": looked_up[int(0.95 * len(looked_up))],
        "loaded_mb": before_mb,
        "dashboard_mb": _present_mb() - before_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def _saved(scale: Scale, path: Path) -> tuple[int, float]:
    trace = trace_of(scale)
    return trace.num_rows, median_ms(lambda: save(trace, path), 1)


def _present_mb() -> float:
    """Return the memory of this process, in MB."""
    return psutil.Process().memory_info().rss / 1e6


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the median time in milliseconds."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def _files(trace: Trace, repeats: int) -> Tree:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.trace"
        save_ms = median_ms(lambda: save(trace, path), repeats)
        return {
            "save_ms": save_ms,
            "load_ms": median_ms(lambda: load(path), repeats),
            "file_mb": path.stat().st_size / 1e6,
        }


def _states(trace: Trace, repeats: int, num_states: int) -> Tree:
    last = trace.ranks[0]
    first_ms = median_ms(lambda: StateAt().at_row(trace, last.rank, last.end_seq - 1), repeats)
    moments, draw_number = StateAt(), random.Random(0)
    events = [(draw_number.choice(trace.ranks), draw_number.random()) for _ in range(num_states)]
    looked_up = [
        median_ms(partial(moments.at_row, trace, r.rank, r.start.seq + int(place * len(r.rows))), 1)
        for r, place in events
    ]
    found_ms = statistics.median(looked_up)
    return {
        "first_state_ms": first_ms,
        "random_state_ms": found_ms,
        "random_state_worst_ms": max(looked_up),
        "beside_ms": median_ms(lambda: moments.beside(trace, last.rank, last.end_seq // 2, 1), repeats),
        "state_ms": max(first_ms, found_ms),
    }


def _others(trace: Trace) -> dict[str, Callable[[], object]]:
    """Return other work whose cost grows with the trace."""
    rank, last = trace.rank(0), steps(trace)[-1]
    packed, after = rank.rows.tobytes(), advance(rank.start, rank.rows)
    return {
        "slice of one step": lambda: trace.slice(step=last),
        "key frame after one rank": lambda: advance(rank.start, rank.rows),
        "partners of one rank": lambda: partners(rank.rows),
        "builder, one rank at once": lambda: TraceBuilder().append(0, packed, key_frame=after),
        "memory: series of one rank": lambda: memory.series(rank),
        "memory: peak of one rank": lambda: memory.peak(rank),
        "states: spans of one rank": lambda: states.spans(rank),
        "collectives: table of one rank": lambda: collectives.table(rank),
        "collectives: one step compared": lambda: collectives.compare(trace, last),
        "check all rules": lambda: check(trace),
        "to_perfetto, one step": lambda: to_perfetto(trace.slice(step=last)),
        **{
            f"figure: {name}, all steps": partial(draw, name, trace, steps=len(steps(trace)))
            for name in ("memory", "states", "timeline")
        },
    }
