from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import Setup, cuttings, example_trace, simulate, traces
from workbench.events import Category, Edge, Kind, Phase
from workbench.replay import memory
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.keyframe import advance as advance_key_frame
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame


@st.composite
def pooled(draw: st.DrawFn) -> Trace:
    """Draw traces of jobs whose unsharded parameters come from a pool that keeps freed memory, or not."""
    trace = draw(traces())
    return trace if draw(st.booleans()) else with_pool(trace)


def with_pool(trace: Trace) -> Trace:
    """Add rows of a pool to the trace: bytes that UNSHARDED_PARAMS free become RESERVED, and are reused."""
    return Trace(trace.header, tuple(_with_pool(rank) for rank in trace.ranks))


def _with_pool(rank: RankTrace) -> RankTrace:
    rows, kept, out = rank.rows, 0, []
    for row in rows:
        out.append(row)
        if row["kind"] in (Kind.ALLOC, Kind.FREE) and row["category"] == Category.UNSHARDED_PARAMS:
            delta = max(-kept, -int(row["num_bytes"]))
            if delta:
                kept += delta
                twin = row.copy()
                twin["category"], twin["num_bytes"] = Category.RESERVED, delta
                twin["kind"] = Kind.ALLOC if delta > 0 else Kind.FREE
                out.append(twin)
    grown = np.array(out, ROW_DTYPE).reshape(-1)
    grown["seq"] = rank.start.seq + np.arange(len(grown))
    return RankTrace(rank.rank, grown, rank.start)


def live_by_hand(rank: RankTrace) -> list[tuple[int, tuple[int, ...]]]:
    """Return (seq, live bytes per class) before the first row and after each row."""
    live = list(rank.start.bytes_by_category)
    found = [(rank.start.seq - 1, tuple(live))]
    for row in rank.rows:
        if row["kind"] in (Kind.ALLOC, Kind.FREE):
            live[row["category"]] += int(row["num_bytes"])
        found.append((int(row["seq"]), tuple(live)))
    return found


def used(live: tuple[int, ...]) -> int:
    return sum(num_bytes for category, num_bytes in enumerate(live) if category != Category.RESERVED)


@given(st.data())
def test_prefix_law(data):
    for rank in data.draw(pooled()).ranks:
        whole = pieces = memory.start(rank.start)
        for cut in data.draw(cuttings(len(rank.rows))):
            pieces = memory.advance(pieces, rank.rows[cut])
        assert pieces == memory.advance(whole, rank.rows)


@given(pooled())
def test_allocated_minus_freed_is_live(trace: Trace):
    for rank in trace.ranks:
        after = memory.advance(memory.start(rank.start), rank.rows)
        moved = rank.rows["num_bytes"][np.isin(rank.rows["kind"], (Kind.ALLOC, Kind.FREE))].sum()
        assert sum(after.bytes_by_category) == sum(rank.start.bytes_by_category) + moved
        assert after.bytes_by_category == advance_key_frame(rank.start, rank.rows).bytes_by_category


@given(pooled())
def test_series_is_what_adding_up_by_hand_gives(trace: Trace):
    for rank in trace.ranks:
        by_hand = dict(live_by_hand(rank))
        found = memory.series(rank)
        assert [tuple(live) for live in found.num_bytes.tolist()] == [by_hand[seq] for seq in found.seq.tolist()]
        assert found.reserved.tolist() == [by_hand[seq][Category.RESERVED] for seq in found.seq.tolist()]
        assert found.total.tolist() == [used(by_hand[seq]) for seq in found.seq.tolist()]
        moves = np.isin(rank.rows["kind"], (Kind.ALLOC, Kind.FREE))
        assert len(found.seq) == (1 + moves.sum() if len(rank.rows) else 0)


@given(pooled(), st.integers(1, 40))
def test_peak_is_the_first_highest_moment_and_no_thinning_loses_it(trace: Trace, max_moments: int):
    for rank in trace.ranks:
        by_hand = live_by_hand(rank)
        top = max(used(live) for _, live in by_hand)
        found = memory.peak(rank)
        assert found.num_bytes == used(found.bytes_by_category) == top
        assert found.seq == next(seq for seq, live in by_hand if used(live) == top)
        assert found.bytes_by_category == dict(by_hand)[found.seq]
        thin = memory.series(rank, max_moments)
        assert len(thin.seq) <= 1 + max(4, max_moments)
        if len(rank.rows):
            assert thin.total.max() == top
            assert found.seq in thin.seq
            assert thin.num_bytes[-1].tolist() == list(by_hand[-1][1])
            assert [tuple(live) for live in thin.num_bytes.tolist()] == [dict(by_hand)[s] for s in thin.seq.tolist()]


def test_after_a_step_only_shards_and_what_the_optimizer_keeps_remain():
    rank = example_trace().ranks[0]
    live = memory.advance(memory.start(rank.start), rank.rows).bytes_by_category
    kept = {Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.OPTIMIZER_STATE}
    assert {Category(i) for i, num_bytes in enumerate(live) if num_bytes} == kept


def test_a_peak_before_the_first_row_is_the_key_frames():
    live = (5,) + (0,) * (len(Category) - 1)
    found = memory.peak(RankTrace(0, np.empty(0, ROW_DTYPE), KeyFrame(seq=7, bytes_by_category=live)))
    assert (found.num_bytes, found.seq, found.step, found.unit, found.phase) == (5, 6, -1, -1, Phase.IDLE)
    assert memory.describe_peak(Header(), found) == "outside forward and backward: no units unsharded"


def test_series_of_nothing_is_empty():
    found = memory.series(RankTrace(0, np.empty(0, ROW_DTYPE)))
    assert found.num_bytes.shape == (0, len(Category))
    assert len(found.total) == 0


def test_peak_in_words():
    trace = example_trace(num_units=4)
    found = memory.peak(trace.slice(step=1).rank(0))
    assert found.step == 1
    words = memory.describe_peak(trace.header, found)
    assert words == (
        "backward of blocks.1: 2 units unsharded, next all-gather (blocks.0) in flight, "
        "gradients of blocks.2 being reduced"
    )


def rows_of(*entries):
    """Return rows of (kind, edge, unit, phase, category, num_bytes)."""
    rows = np.zeros(len(entries), ROW_DTYPE)
    rows["seq"] = rows["t_ns"] = np.arange(len(entries))
    rows["comm_group"] = rows["comm_seq"] = -1
    for row, (kind, edge, unit, phase, category, num_bytes) in zip(rows, entries, strict=True):
        row["kind"], row["edge"], row["unit"], row["phase"] = kind, edge, unit, phase
        row["category"], row["num_bytes"] = category, num_bytes
    return rows


def alloc(unit, phase, category=Category.SNAPSHOTS):
    return Kind.ALLOC, Edge.INSTANT, unit, phase, category, 8


def begin(kind, unit, phase):
    return kind, Edge.BEGIN, unit, phase, 255, 0


def end(kind, unit, phase):
    return kind, Edge.END, unit, phase, 255, 0


@pytest.mark.parametrize(
    ("entries", "unit"),
    [
        ([begin(Kind.FORWARD, 1, 1), alloc(0, Phase.FORWARD, Category.ALL_GATHER_BUFFERS)], 1),
        ([begin(Kind.FORWARD, 1, 1), alloc(0, Phase.FORWARD, Category.UNSHARDED_PARAMS)], 0),
        ([begin(Kind.BACKWARD, 1, 3), begin(Kind.BACKWARD, 0, 3), alloc(1, Phase.BACKWARD)], 0),
        ([begin(Kind.FORWARD, 0, 1), end(Kind.FORWARD, 0, 1), alloc(2, Phase.FORWARD)], 2),
        ([alloc(0, Phase.PRE_BACKWARD), begin(Kind.BACKWARD, 1, 3)], 1),
        ([alloc(0, Phase.PRE_BACKWARD)], 0),
        ([end(Kind.BACKWARD, 1, 3), alloc(2, Phase.POST_BACKWARD)], 1),
        ([alloc(2, Phase.OPTIMIZER)], 2),
    ],
)
def test_the_unit_at_work_when_most_is_live(entries, unit):
    assert memory.peak(RankTrace(0, rows_of(*entries))).unit == unit


def test_the_peak_names_concurrent_work():
    header = simulate(Setup(num_units=4)).header
    found = memory.peak(RankTrace(0, np.empty(0, ROW_DTYPE)))
    words = {
        "phase": Phase.FORWARD,
        "unit": 3,
        "unsharded_units": (0, 3),
        "in_flight": (1, 2),
        "reducing": (2,),
    }
    sentence = memory.describe_peak(header, memory.Peak(**(vars(found) | words)))
    assert (
        sentence == "forward of (root): 2 units unsharded, 2 all-gathers in flight, gradients of blocks.2 being reduced"
    )


def test_pooled_bytes_are_not_part_of_the_peak():
    trace = example_trace(num_units=4)
    pooled_trace = with_pool(trace)
    plain, found = (memory.peak(t.slice(step=1).rank(0)) for t in (trace, pooled_trace))
    assert found.num_bytes == plain.num_bytes
    assert found.bytes_by_category[Category.UNSHARDED_PARAMS] == plain.bytes_by_category[Category.UNSHARDED_PARAMS]
    assert memory.describe_peak(trace.header, found) == memory.describe_peak(trace.header, plain)
    series = memory.series(pooled_trace.rank(0))
    assert series.reserved.max() == memory.most_reserved(pooled_trace.rank(0)) > 0
    assert memory.most_reserved(trace.rank(0)) == 0
    assert series.total.max() == memory.peak(pooled_trace.rank(0)).num_bytes


def test_after_missing_rows_bytes_are_the_key_frames_and_the_higher_peak_stays():
    def key_frame(seq, sharded, reserved=0):
        live = [0] * len(Category)
        live[Category.SHARDED_PARAMS], live[Category.RESERVED] = sharded, reserved
        return KeyFrame(seq=seq, bytes_by_category=tuple(live))

    first = memory.start(key_frame(10, 50))
    assert (first.peak_bytes, first.peak_seq, first.peak_bytes_by_category) == (
        50,
        9,
        key_frame(0, 50).bytes_by_category,
    )
    for later in (key_frame(30, 40), key_frame(30, 50), key_frame(30, 0, reserved=99)):
        resumed = memory.resume(first, later)
        assert resumed == replace(first, bytes_by_category=later.bytes_by_category)
    assert memory.resume(first, key_frame(30, 51)) == memory.start(key_frame(30, 51))


def test_of_each_bin_the_first_the_lowest_the_highest_and_the_last_are_kept():
    t_ns = np.array([100, 101, 102, 103, 104, 105, 106, 105, 108, 109])
    total = np.array([5, 1, 9, 9, 5, 7, 7, 7, 8, 8])
    assert memory.envelope(t_ns, total, 2).tolist() == [0, 1, 2, 4, 5, 8, 9]
    assert memory.envelope(t_ns, total, 1).tolist() == [0, 1, 2, 9]
    assert memory.envelope(t_ns[:1], total[:1], 4).tolist() == [0]
