"""The first collective at which ranks part, against a slow search, and how they part."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import example_trace, traces
from workbench.events import COLLECTIVES, ROOTED, Edge, Kind
from workbench.replay.divergence import Divergence, IssuedCall, Parting, first_divergence, is_usual
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, GroupInfo, Header

GATHER, OTHER, REDUCE = IssuedCall(Kind.ALL_GATHER, 0, 8), IssuedCall(Kind.ALL_GATHER, 1, 8), (Kind.ALL_REDUCE, -1, 4)
REDUCE = IssuedCall(*REDUCE)


def rank_of(number, calls, *, first=0, at_ns=0, group=0):
    rows = np.zeros(len(calls), ROW_DTYPE)
    rows["seq"], rows["comm_seq"] = np.arange(len(calls)), first + np.arange(len(calls))
    rows["module"], rows["category"], rows["step"], rows["comm_group"] = -1, NO_CATEGORY, 3, group
    rows["t_ns"] = at_ns + rows["seq"]
    for row, call in zip(rows, calls, strict=True):
        row["kind"], row["edge"], row["unit"] = call.kind, Edge.BEGIN, call.unit
        row["num_bytes"], row["module"] = max(call.num_bytes, 0), call.dtype
        row["value"] = np.nan if call.root < 0 else call.root
    return RankTrace(number, rows)


def job(*ranks, groups=((0, 1, 2),)):
    infos = tuple(GroupInfo(name=f"group {i}", ranks=group) for i, group in enumerate(groups))
    return Trace(Header(world_size=3, comm_groups=infos), ranks)


@given(traces())
def test_ranks_of_a_job_do_not_part(trace):
    assert first_divergence(trace) is None


@pytest.mark.parametrize(
    ("most", "other", "number", "issued", "parting"),
    [
        ([GATHER, OTHER], [OTHER, GATHER], 0, (GATHER, OTHER), Parting.ORDER),
        ([GATHER, OTHER], [GATHER, REDUCE, OTHER], 1, (OTHER, REDUCE), Parting.EXTRA),
        ([GATHER, REDUCE, OTHER], [GATHER, OTHER], 1, (REDUCE, OTHER), Parting.LEFT_OUT),
        ([GATHER, OTHER], [GATHER, REDUCE], 1, (OTHER, REDUCE), Parting.UNKNOWN),
        (
            [GATHER],
            [IssuedCall(Kind.ALL_GATHER, 0, 16)],
            0,
            (GATHER, IssuedCall(Kind.ALL_GATHER, 0, 16)),
            Parting.PAYLOAD,
        ),
    ],
)
def test_how_one_rank_parts_from_two(most, other, number, issued, parting):
    found = first_divergence(job(rank_of(0, most), rank_of(1, other), rank_of(2, most)))
    assert found == Divergence(
        group=0,
        number=number,
        step=3,
        most=issued[0],
        most_ranks=(0, 2),
        other=issued[1],
        other_ranks=(1,),
        parting=parting,
    )


def test_of_two_equal_parties_that_of_the_lowest_rank_counts_as_most():
    found = first_divergence(job(rank_of(1, [OTHER]), rank_of(0, [GATHER])))
    assert (found.most_ranks, found.other_ranks) == ((0,), (1,))


def test_payloads_that_may_differ_between_ranks_are_not_compared():
    large, small = (IssuedCall(Kind.ALL_TO_ALL, -1, num_bytes) for num_bytes in (8, 16))
    assert first_divergence(job(rank_of(0, [large]), rank_of(1, [small]))) is None


def rooted(root, num_bytes=8, dtype=0, kind=Kind.BROADCAST):
    return IssuedCall(kind, -1, num_bytes, dtype, root)


SUM, COPY = IssuedCall(Kind.ALL_REDUCE, -1, 4), IssuedCall(Kind.ALL_GATHER, -1, 4)
CALLS = {
    "another source": ([rooted(0)], [rooted(1)], Parting.ROOT),
    "another source of the first of two": ([rooted(0), rooted(0)], [rooted(1), rooted(1)], Parting.ROOT),
    "a source left out": ([rooted(0), rooted(1)], [rooted(1), rooted(2)], Parting.LEFT_OUT),
    "two sources the other way round": ([rooted(0), rooted(1)], [rooted(1), rooted(0)], Parting.ORDER),
    "other bytes of the same source": ([rooted(0, 8)], [rooted(0, 16)], Parting.PAYLOAD),
    "a sum of another dtype, as many bytes": ([replace(SUM, dtype=0)], [replace(SUM, dtype=1)], Parting.PAYLOAD),
    "a copy of as many bytes": ([replace(COPY, dtype=0)], [replace(COPY, dtype=1)], None),
    "a copy of other bytes": ([replace(COPY, dtype=0)], [replace(COPY, dtype=1, num_bytes=2)], Parting.PAYLOAD),
    "a source that is not recorded": ([rooted(-1, dtype=-1)], [rooted(1)], None),
    "a dtype that is not recorded": ([SUM], [replace(SUM, dtype=1)], None),
    **{
        f"another root of {kind.words}": ([rooted(0, kind=kind)], [rooted(2, kind=kind)], Parting.ROOT)
        for kind in ROOTED
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_sources_and_dtypes_are_compared_where_they_must_be_the_same(name):
    most, other, parting = CALLS[name]
    found = first_divergence(job(rank_of(0, most), rank_of(1, other), rank_of(2, most)))
    assert (None if found is None else found.parting) is parting
    assert found is None or (found.number, found.other_ranks, found.other) == (0, (1,), other[0])


def test_calls_that_only_one_rank_has_are_not_compared():
    assert first_divergence(job(rank_of(0, [GATHER, OTHER]), rank_of(1, [OTHER], first=1))) is None
    late = job(rank_of(0, [GATHER]), rank_of(1, [OTHER, OTHER], first=5), rank_of(2, [REDUCE], first=6))
    assert first_divergence(late).number == 6


def test_the_earliest_of_several_groups_is_told():
    groups = ((0, 1), (0, 2))
    first, second = rank_of(0, [GATHER]), rank_of(0, [GATHER], group=1)
    both = RankTrace(0, np.concatenate([first.rows, second.rows]))
    trace = job(both, rank_of(1, [OTHER], at_ns=9), rank_of(2, [OTHER], at_ns=5, group=1), groups=groups)
    assert first_divergence(trace).group == 1


@pytest.mark.parametrize(
    ("names", "expected"),
    [("ABCABCABC", True), ("ABCABCABD", False), ("ABCABDABC", None), ("ABC", None), ("A", None), ("ABCDEFG", None)],
)
def test_whether_a_call_is_usual_after_those_before(names, expected):
    calls = [IssuedCall(Kind.ALL_GATHER, ord(name), 8) for name in names]
    assert is_usual(rank_of(0, calls, first=5), 0, 5 + len(calls) - 1) is expected


def test_a_source_that_changes_does_not_tell_what_is_usual():
    calls = [GATHER, rooted(0), GATHER, rooted(0), GATHER, rooted(1)]
    assert is_usual(rank_of(0, calls), 0, 5) is True


def test_of_two_equal_parties_the_one_that_did_so_before_counts_as_most():
    usual = [GATHER, OTHER, REDUCE, GATHER, OTHER]
    found = first_divergence(job(rank_of(0, [*usual, GATHER]), rank_of(1, [*usual, REDUCE])))
    assert (found.most_ranks, found.other_ranks, found.most) == ((1,), (0,), REDUCE)


def all_alike(calls):
    """Whether calls may be of one collective: those of units are of one."""
    units = {call.unit for call in calls} - {-1}
    return len(units) <= 1 and len({replace(call, unit=0) for call in calls}) == 1


def test_a_call_without_a_unit_may_take_the_place_of_a_unit_s():
    assert first_divergence(job(rank_of(0, [GATHER]), rank_of(1, [replace(GATHER, unit=-1)]))) is None


@given(st.data())
def test_it_is_the_first_difference_that_a_slow_search_finds(data):
    calls = st.lists(st.sampled_from([GATHER, OTHER, REDUCE]), max_size=5)
    firsts = [data.draw(st.integers(0, 3)) for _ in range(3)]
    ranks = [data.draw(calls) for _ in range(3)]
    drawn = zip(range(3), ranks, firsts, strict=True)
    found = first_divergence(job(*(rank_of(number, own, first=first) for number, own, first in drawn)))
    known = [dict(enumerate(own, first)) for own, first in zip(ranks, firsts, strict=True)]
    numbers = sorted({number for own in known for number in own})
    differ = [number for number in numbers if not all_alike([own[number] for own in known if number in own])]
    assert (None if found is None else found.number) == (differ[0] if differ else None)


def test_a_changed_row_of_a_job_is_found():
    trace = example_trace(num_ranks=4, num_units=3, steps=2)
    part = trace.rank(2)
    rows = part.rows.copy()
    place = np.flatnonzero(np.isin(rows["kind"], COLLECTIVES) & (rows["edge"] == Edge.BEGIN))[5]
    rows["unit"][place] = (rows["unit"][place] + 1) % 3
    others = [each for each in trace.ranks if each.rank != 2]
    found = first_divergence(Trace(trace.header, (*others, RankTrace(2, rows, part.start))))
    assert (found.other_ranks, found.number) == ((2,), rows["comm_seq"][place])
