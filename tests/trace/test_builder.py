import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_key_frames, cuttings, example_trace, traces
from workbench.errors import TraceError
from workbench.trace import RankTrace, Trace, TraceBuilder, advance
from workbench.trace.earlier_steps import EarlierSteps
from workbench.trace.schema import ROW_DTYPE, GroupInfo, Header, KeyFrame


def drains_of(rank: RankTrace, parts: list[slice]) -> list[tuple[int, bytes, KeyFrame]]:
    """Return the drains of one rank: rows up to each cut and the state after them."""
    drains, state = [], rank.start
    for part in parts:
        rows = rank.rows[part]
        state = advance(state, rows)
        drains.append((rank.rank, rows.tobytes(), state))
    return drains


@st.composite
def interleaved(draw: st.DrawFn, trace: Trace) -> list[tuple[int, bytes, KeyFrame]]:
    """Draw any split of each rank's rows into drains, and any interleaving of the ranks' drains."""
    queues = [drains_of(r, draw(cuttings(len(r.rows)))) for r in trace.ranks]
    order = draw(st.permutations([n for n, queue in enumerate(queues) for _ in queue]))
    return [queues[n].pop(0) for n in order]


def build(trace: Trace, drains: list[tuple[int, bytes, KeyFrame]], **options: int) -> TraceBuilder:
    builder = TraceBuilder(**options)
    builder.update_header(trace.header)
    for rank, packed, key_frame in drains:
        builder.append(rank, packed, key_frame=key_frame)
    return builder


@given(traces(whole=True), st.data())
def test_any_split_and_interleaving_gives_the_trace(trace, data):
    assert build(trace, data.draw(interleaved(trace))).snapshot() == trace


@given(traces(whole=True), st.integers(1, 400), st.data())
def test_few_rows_kept_are_the_newest_with_the_exact_state_before_them(trace, max_rows, data):
    kept = build(trace, data.draw(interleaved(trace)), max_rows=max_rows).snapshot()
    assert kept.num_rows <= max_rows
    for rank, whole in zip(kept.ranks, trace.ranks, strict=True):
        earlier = EarlierSteps().then(whole.rows[: rank.start.seq])
        assert rank == dataclasses.replace(whole.cut(rank.start.seq, whole.end_seq), earlier=earlier)
    assert kept == build(trace, data.draw(interleaved(trace)), max_rows=max_rows).snapshot()


@pytest.mark.parametrize(
    ("lengths", "room", "kept"),
    [((5, 5), 20, (5, 5)), ((9, 9), 10, (5, 5)), ((2, 9, 9), 12, (2, 5, 5)), ((0, 4, 9), 5, (0, 2, 2))],
)
def test_the_ranks_with_most_rows_give_theirs_up(lengths, room, kept):
    rank = example_trace(num_ranks=1, steps=1).rank(0)
    builder = TraceBuilder(max_rows=room)
    for number, length in enumerate(lengths):
        part = rank.cut(0, length)
        builder.append(number, part.rows.tobytes(), key_frame=advance(part.start, part.rows))
    assert tuple(len(r.rows) for r in builder.snapshot().ranks) == kept


def test_a_snapshot_never_changes_and_shares_memory():
    trace = example_trace(num_ranks=1)
    drains = drains_of(trace.rank(0), [slice(n, n + 10) for n in range(0, 500, 10)])
    builder, snapshots = TraceBuilder(max_rows=60), []
    for rank, packed, key_frame in drains:
        builder.append(rank, packed, key_frame=key_frame)
        snapshots.append((builder.snapshot(), builder.snapshot().rank(0).rows.copy()))
    for snapshot, rows in snapshots:
        assert np.array_equal(snapshot.rank(0).rows["seq"], rows["seq"])
    assert np.shares_memory(snapshots[-1][0].rank(0).rows, builder.snapshot().rank(0).rows)


def test_a_full_record_takes_little_more_memory_than_its_rows():
    trace = example_trace(num_ranks=1, steps=80)
    most = 1_500
    drains = drains_of(trace.rank(0), [slice(n, n + 20) for n in range(0, 4 * most, 20)])
    assert len(trace.rank(0).rows) > 4 * most
    builder, sizes = TraceBuilder(max_rows=most), []
    for rank, packed, key_frame in drains:
        builder.append(rank, packed, key_frame=key_frame)
        sizes.append(builder.snapshot().rank(0).rows.base.nbytes)
    assert max(sizes) < 1.3 * most * ROW_DTYPE.itemsize


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_while_ranks_move_to_new_buffers_the_last_snapshot_holds_few_old_ones(num_ranks):
    most, drain = 2_000 * num_ranks, 20
    rank = example_trace(num_ranks=1, steps=120).rank(0)
    assert len(rank.rows) > 4 * most / num_ranks
    drains = drains_of(rank, [slice(n, n + drain) for n in range(0, 4 * most // num_ranks, drain)])
    builder, before, sizes = TraceBuilder(max_rows=most), Trace.empty(), []
    for _, packed, key_frame in drains:
        for number in range(num_ranks):
            builder.append(number, packed, key_frame=key_frame)
        now = builder.snapshot()
        buffers = {id(r.rows.base): r.rows.base for r in (*before.ranks, *now.ranks)}
        sizes.append(sum(len(buffer) for buffer in buffers.values()))
        before = now
    spare = most / 4 + drain * num_ranks
    assert max(sizes) <= most + spare + (most + spare) / num_ranks


def test_packed_rows_may_come_in_any_buffer():
    rank = example_trace(num_ranks=1, steps=1).rank(0)
    builder, after = TraceBuilder(), advance(rank.start, rank.rows)
    builder.append(0, memoryview(bytearray(rank.rows.tobytes())), key_frame=after)
    builder.append(0, b"", key_frame=after)
    assert builder.snapshot().rank(0) == rank


@given(any_key_frames(), st.integers(1, 100), st.integers(1, 100))
def test_an_overrun_restarts_the_rank_and_is_counted(key_frame, lost, more):
    rank = example_trace(num_ranks=2, steps=1).rank(1)
    builder = TraceBuilder()
    builder.append(1, rank.rows.tobytes(), key_frame=advance(rank.start, rank.rows))
    builder.append(1, b"useless rows", lost=lost, key_frame=KeyFrame())
    builder.append(1, b"", lost=more, key_frame=key_frame)
    after = builder.snapshot().rank(1)
    assert (len(after.rows), after.start, after.lost) == (0, key_frame, lost + more)


def test_after_an_overrun_rows_continue_from_the_key_frame():
    rank = example_trace(num_ranks=1).rank(0)
    late = rank.cut(100, rank.end_seq)
    builder = TraceBuilder()
    builder.append(0, b"", lost=100, key_frame=late.start)
    builder.append(0, late.rows.tobytes(), key_frame=advance(late.start, late.rows))
    assert builder.snapshot().rank(0) == dataclasses.replace(late, lost=100)


@pytest.mark.parametrize(
    ("begin", "end", "seq_after", "sentence"),
    [
        (5, 9, 9, r"rank 0: expected rows 0 to 3, got \[5, 8\]"),
        (0, 4, 5, "rank 0: the rows end before row 4, but the key frame is at row 5"),
        (0, 0, 5, "rank 0: the rows end before row 0, but the key frame is at row 5"),
    ],
)
def test_rows_that_do_not_continue_are_refused(begin, end, seq_after, sentence):
    rank, builder = example_trace(num_ranks=1, steps=1).rank(0), TraceBuilder()
    with pytest.raises(TraceError, match=sentence):
        builder.append(0, rank.rows[begin:end].tobytes(), key_frame=KeyFrame(seq=seq_after))


def test_half_a_row_is_refused():
    with pytest.raises(TraceError, match="rank 3: 60 bytes are not a whole number of 52-byte rows"):
        TraceBuilder().append(3, bytes(60), key_frame=KeyFrame(seq=1))


def test_no_room_at_all_is_refused():
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        TraceBuilder(max_rows=0)


def test_ranks_may_number_their_strings_each_in_its_own_order():
    rank = example_trace(num_ranks=1, steps=1).rank(0)
    builder = TraceBuilder()
    for number, strings in ((0, ("loss",)), (1, ("accuracy", "loss"))):
        rows = rank.rows.copy()
        rows["module"][rows["module"] == 0] = strings.index("loss")
        builder.update_header(
            Header(strings=strings, comm_groups=(GroupInfo(name="ranks 0-1", ranks=(0, 1)),)), rank=number
        )
        builder.append(number, rows.tobytes(), key_frame=advance(rank.start, rows))
    trace = builder.snapshot()
    assert trace.header.strings == ("loss", "accuracy")
    assert np.array_equal(trace.rank(0).rows["module"], trace.rank(1).rows["module"])


def test_threads_may_append_and_read_concurrently():
    trace = example_trace(num_ranks=4, steps=3)
    builder, failures = TraceBuilder(), []

    def feed(rank: RankTrace) -> None:
        for number, packed, key_frame in drains_of(rank, [slice(n, n + 7) for n in range(0, len(rank.rows), 7)]):
            builder.append(number, packed, key_frame=key_frame)
            seen = builder.snapshot().rank(number)
            if seen != rank.cut(0, seen.end_seq):
                failures.append(number)

    threads = [threading.Thread(target=feed, args=(r,)) for r in trace.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    builder.update_header(trace.header)
    assert failures == []
    assert builder.snapshot() == trace
