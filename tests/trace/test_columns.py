import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.device_trace import on_devices
from tests.helpers.trace_strategies import any_traces, example_trace, traces
from workbench.errors import TraceError
from workbench.events import Kind
from workbench.trace import RankTrace, Trace, advance, columns, merge, steps
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame


def copy_of(trace: Trace) -> Trace:
    return Trace(trace.header, tuple(RankTrace(r.rank, r.rows.copy(), r.start, r.lost) for r in trace.ranks))


@given(any_traces())
def test_traces_are_equal_by_value_nan_included(trace):
    assert trace == copy_of(trace)


def test_traces_differ_in_rows_start_rank_or_lost():
    rank = example_trace(steps=1).rank(1)
    rows = rank.rows.copy()
    rows["t_ns"][3] += 1
    others = [
        RankTrace(1, rows, rank.start, 0),
        RankTrace(1, rank.rows[:-1], rank.start, 0),
        RankTrace(1, rank.rows, KeyFrame(seq=1), 0),
        RankTrace(2, rank.rows, rank.start, 0),
        RankTrace(1, rank.rows, rank.start, 7),
        "a trace",
    ]
    assert all(rank != other for other in others)


def test_rows_cannot_be_written_through_a_trace():
    rows = np.zeros(3, ROW_DTYPE)
    rank = RankTrace(0, rows)
    with pytest.raises(ValueError, match="read-only"):
        rank.rows["seq"] = 1
    rows["seq"] = 1  # its owner still may


@pytest.mark.parametrize("rows", [np.zeros(3), np.zeros((2, 2), ROW_DTYPE)])
def test_rows_of_another_type_are_refused(rows):
    with pytest.raises(TraceError, match="rank 5: rows must be a 1-D array of ROW_DTYPE"):
        RankTrace(5, rows)


def test_ranks_are_kept_in_order_and_found_by_number():
    trace = example_trace(num_ranks=3, steps=1)
    assert Trace(trace.header, trace.ranks[::-1]) == trace
    assert trace.rank(2).rank == 2
    assert trace.num_rows == sum(len(r.rows) for r in trace.ranks)
    with pytest.raises(TraceError, match=r"no rank 7; it has \[0, 1, 2\]"):
        trace.rank(7)
    with pytest.raises(TraceError, match="it has none"):
        Trace.empty().rank(0)


def test_a_rank_may_be_there_once_only():
    rank = example_trace(steps=1).rank(1)
    with pytest.raises(TraceError, match=r"ranks must be distinct, got \[1, 1\]"):
        Trace(Header(), (rank, rank))


def test_the_empty_trace_has_no_steps_and_can_be_sliced():
    assert steps(Trace.empty()) == []
    assert Trace.empty().slice(step=3) == Trace.empty()
    assert Trace.empty().num_rows == 0


@given(traces(), st.data())
def test_cut_keeps_the_exact_state_before_its_first_row(trace, data):
    rank = data.draw(st.sampled_from(trace.ranks))
    begin = data.draw(st.integers(0, rank.end_seq + 3))
    end = data.draw(st.integers(0, rank.end_seq + 3))
    part = rank.cut(begin, end)
    assert [s for s in rank.rows["seq"] if begin <= s < end] == part.rows["seq"].tolist()
    assert part.start == advance(rank.start, rank.rows[: part.start.seq - rank.start.seq])


@given(traces(), st.integers(-1, 3), st.integers(-1, 3))
def test_a_slice_of_steps_is_contiguous_and_starts_at_the_exact_state(trace, first, last):
    part = trace.slice(first=first, last=last)
    assert part.header == trace.header
    for rank, whole in zip(part.ranks, trace.ranks, strict=True):
        inside = [s for s in whole.rows["step"] if s >= 0 and first <= s <= last]
        assert [s for s in rank.rows["step"] if s >= 0] == inside
        assert rank.start == advance(whole.start, whole.rows[: rank.start.seq - whole.start.seq])


@given(traces(), st.data())
def test_parts_cut_anywhere_merge_to_the_whole(trace, data):
    cuts = [data.draw(st.integers(r.start.seq, r.end_seq)) for r in trace.ranks]
    left = Trace(trace.header, tuple(r.cut(0, c) for r, c in zip(trace.ranks, cuts, strict=True)))
    right = Trace(trace.header, tuple(r.cut(c, r.end_seq) for r, c in zip(trace.ranks, cuts, strict=True)))
    assert merge(left, right) == trace


def test_one_step_is_the_rows_from_its_begin_to_its_end():
    trace = example_trace()
    part = trace.slice(step=1)
    assert part == trace.slice(first=1, last=1)
    assert steps(trace) == [0, 1, 2]
    assert steps(part) == [1]
    assert part.rank(0).rows["kind"][[0, -1]].tolist() == [Kind.STEP, Kind.STEP]


def test_open_sides_reach_to_the_edges():
    trace = example_trace()
    assert trace.slice() == trace
    assert trace.slice(last=1).rank(0).start.seq == 0
    assert trace.slice(first=1).rank(0).end_seq == trace.rank(0).end_seq
    assert trace.slice(first=9).rank(0).start.seq == trace.rank(0).end_seq


def test_a_missing_step_is_an_empty_slice_at_its_place():
    trace = example_trace()
    after, before = trace.slice(last=0).slice(step=2), trace.slice(first=2).slice(step=1)
    assert (after.num_rows, before.num_rows) == (0, 0)
    assert after.rank(0).start.seq == trace.slice(last=0).rank(0).end_seq
    assert before.rank(0).start.seq == trace.slice(step=2).rank(0).start.seq


def test_step_excludes_first_and_last():
    for more in ({"first": 0}, {"last": 0}):
        with pytest.raises(ValueError, match="either step or first/last"):
            example_trace(steps=1).slice(step=0, **more)


def test_merge_joins_ranks_that_numbered_their_strings_differently():
    trace = example_trace(num_ranks=2, steps=1)
    other = dataclasses.replace(trace.header, strings=("accuracy", "loss"))
    rows = trace.rank(1).rows.copy()
    rows["module"][rows["module"] == 0] = 1
    merged = merge(Trace(trace.header, trace.ranks[:1]), Trace(other, (RankTrace(1, rows, lost=3),)))
    assert merged.header.strings == ("loss", "accuracy")
    assert np.array_equal(merged.rank(1).rows["module"], trace.rank(1).rows["module"])
    assert merged.rank(1).lost == 3


def test_merge_refuses_a_gap():
    trace = example_trace()
    with pytest.raises(TraceError, match=r"rank 0: rows from \d+ on do not follow rows up to \d+"):
        merge(trace.slice(step=0), trace.slice(step=2))


def test_merge_of_nothing_is_empty():
    assert merge() == Trace.empty()


@given(traces(), st.integers(0, 3), st.integers(0, 3))
def test_rows_of_steps_are_where_their_numbers_are(trace, first, last):
    for rank in trace.ranks:
        inside = np.flatnonzero((rank.rows["step"] >= first) & (rank.rows["step"] <= last))
        expected = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
        assert rank.places_of(first, last) == expected
        later = np.flatnonzero(rank.rows["step"] > last)
        assert rank.place_after(last) == (later[0] if len(later) else len(rank.rows))
        assert set(rank.steps.tolist()) == {step for step in rank.rows["step"].tolist() if step >= 0}


@given(traces(), st.data())
def test_cached_properties_of_a_rank_are_correct(trace, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "KEPT_EVERY", 16)
        for rank in trace.ranks:
            place = data.draw(st.integers(0, len(rank.rows)))
            state = rank.state_before(place)
            assert state == advance(rank.start, rank.rows[:place])
            assert rank.bytes_before(place) == state.bytes_by_category
            assert rank.unit_states_before(place) == state.unit_states
            begin = data.draw(st.integers(0, place))
            assert rank.kinds.tolist() == rank.rows["kind"].tolist()
            known, anew = rank.part(begin, place, state), RankTrace(rank.rank, rank.rows[begin:place], state)
            assert rank.places_of(0, 9) is not None
            again = rank.part(begin, place, state)  # now the steps of the rows are cached
            for part in (known, again):
                assert part.kinds.tolist() == anew.kinds.tolist()
                assert part.steps.tolist() == anew.steps.tolist()
                assert [part.places_of(step, step) for step in range(3)] == [
                    anew.places_of(step, step) for step in range(3)
                ]


def test_a_prepared_rank_has_its_steps_and_the_states_between_its_rows():
    rank = example_trace().rank(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "KEPT_EVERY", 16)
        rank.prepare()
        patch.setattr(columns, "advance", None)  # nothing more is computed
        kept = [rank.state_before(place) for place in range(0, len(rank.rows), 16)]
    assert kept == [advance(rank.start, rank.rows[:place]) for place in range(0, len(rank.rows), 16)]
    assert "_runs" in vars(rank)


def test_a_slice_takes_what_devices_tell_of_it_with_it_outside_any_step():
    whole = on_devices(example_trace(steps=3)).rank(0)
    bare = RankTrace(0, whole.rows[: np.flatnonzero(whole.rows["step"] == 1)[-1] + 1])
    part, without = (Trace(Header(), (rank,)).slice(step=1).rank(0) for rank in (whole, bare))
    later = whole.rows[without.end_seq :]
    told = later[
        (later["kind"] == Kind.DEVICE) & (later["value"] >= part.start.seq) & (later["value"] < without.end_seq)
    ]
    added = part.rows[len(without.rows) :]
    assert len(told) > 10
    assert added["value"].tolist() == told["value"].tolist()
    assert added["seq"].tolist() == list(range(without.end_seq, part.end_seq))
    assert set(added["step"].tolist()) == {-1}
