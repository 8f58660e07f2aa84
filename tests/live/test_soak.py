"""A long run: once the trace has its full size, the kernel's memory per view stops growing."""

import gc
import itertools
import tracemalloc

from tests.helpers.live_view import DashboardView
from tests.helpers.long_trace import long_trace
from workbench.live.messages import AskFeed, AskWindow
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace import advance
from workbench.trace.columns import RankTrace, Trace

KEPT, STEP, LOOKS = 2_000, 400, 30
MAY_GROW = 64 * 1024
"""In bytes, over the last two thirds of the looks."""


def states_of_a_record(trace):
    """Yield the trace at successive times: the last KEPT rows of each rank, and the state before them."""
    starts = {r.rank: r.start for r in trace.ranks}
    for end in range(KEPT, KEPT + LOOKS * STEP, STEP):
        ranks = []
        for whole in trace.ranks:
            first = end - KEPT
            start = starts[whole.rank]
            starts[whole.rank] = start = advance(start, whole.rows[start.seq : first])
            ranks.append(RankTrace(whole.rank, whole.rows[first:end].copy(), start))
        yield Trace(trace.header, tuple(ranks))


def test_of_a_full_record_a_view_keeps_no_more_and_no_more():
    answers, ticks, sizes = DashboardView(), itertools.count(), []
    records = states_of_a_record(long_trace(num_ranks=2, rows_per_rank=KEPT + LOOKS * STEP))
    gc.freeze()  # garbage collections skip objects of other tests and imports
    tracemalloc.start()
    try:
        for number, trace in enumerate(records):
            pulse = ClusterSnapshot(trace=trace)
            answer, _ = answers.answer(AskFeed(), pulse, lambda: next(ticks) / 10)
            assert answer["restart"] == (number == 0)
            begin_us, end_us = answer["begin_us"], answer["now"]["t_us"]
            window = AskWindow(number=number, from_us=begin_us, to_us=end_us)
            assert answers.answer(window, pulse, lambda: 0.0)[0]["counts"]["spans"] > 0
            del trace, pulse, answer
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert sizes[-1] - sizes[LOOKS // 3] < MAY_GROW
