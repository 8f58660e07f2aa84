"""How long folds and figures take at 1 M rows: ``python -m tests.views.bench_views``."""

from __future__ import annotations

import sys
from functools import partial

from tests.trace.bench_trace import measure
from tests.trace.strategies import example_trace
from workbench.replay import collectives, memory, states
from workbench.trace import steps
from workbench.views import VIEWS, draw


def main() -> None:
    """Measure what the notebook waits for: a fold of one rank, a figure of all."""
    trace = example_trace(num_ranks=4, num_units=33, steps=160)
    rank, last = trace.rank(0), steps(trace)[-1]
    sys.stdout.write(f"{trace.num_rows} rows, {len(trace.ranks)} ranks\n")
    measure("memory: series of one rank", lambda: memory.series(rank))
    measure("memory: peak of one rank", lambda: memory.peak(rank))
    measure("states: at the last event of one rank", lambda: states.at(rank, rank.end_seq - 1))
    measure("states: spans of one rank", lambda: states.spans(rank))
    measure("collectives: table of one rank", lambda: collectives.table(rank))
    measure("collectives: one step compared", lambda: collectives.compare(trace, last))
    for name in VIEWS:
        measure(f"figure: {name}", partial(draw, name, trace))
    for name in ("memory", "states", "timeline"):
        measure(f"figure: {name}, all steps", partial(draw, name, trace, steps=len(steps(trace))))


if __name__ == "__main__":
    main()
