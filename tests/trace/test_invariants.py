"""At least one broken trace per rule, and valid ones that look suspicious."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.trace_strategies import any_traces, example_trace
from tests.replay.test_shards import make_flat, make_unit
from workbench.events import MOVES, Category, Edge, Kind, UnitState
from workbench.trace import RankTrace, Trace, check
from workbench.trace.invariants import MAX_RANKS
from workbench.trace.schema import ClockReading, GroupInfo, Header, HostClock, KeyFrame, RankInfo, Rows

EXAMPLE = example_trace(num_ranks=2, num_units=2, steps=1)


def first(rows: Rows, kind: Kind, edge: Edge = Edge.INSTANT) -> int:
    """Return the position of the first row of this kind and edge."""
    return int(np.flatnonzero((rows["kind"] == kind) & (rows["edge"] == edge))[0])


def put(column, value, *where):
    """Return a change of one column of the first row of a kind and edge."""

    def change(rows):
        rows[column][first(rows, *where)] = value
        return rows

    return change


def drop(*where):
    """Return a change that removes one row and closes the gap in seq."""

    def change(rows):
        rows = np.delete(rows, first(rows, *where))
        rows["seq"] = np.arange(len(rows))
        return rows

    return change


def end_before_begin(rows):
    rows["t_ns"][first(rows, Kind.FORWARD, Edge.END)] = rows["t_ns"][0]
    return rows


def free_too_much(rows):
    rows["num_bytes"][first(rows, Kind.FREE)] -= 10**9
    return rows


def tell_of(**columns):
    """Return a change that adds a device's time for row 0 at the end of the trace."""

    def change(rows):
        more = rows[-1:].copy()
        more["kind"], more["edge"], more["num_bytes"] = Kind.DEVICE, Edge.INSTANT, 0
        more["seq"] += 1
        for name, value in ({"value": 0, "module": 0, "unit": -1} | columns).items():
            more[name] = value
        return np.concatenate([rows, more])

    return change


NAMELESS = "7: a collective without comm_group and comm_seq"
TWICE = "comm_seq does not increase within its comm_group"
FORWARD_AT = first(EXAMPLE.rank(1).rows, Kind.FORWARD, Edge.BEGIN)
ALLOC_AT = first(EXAMPLE.rank(1).rows, Kind.ALLOC)


INSTANTS = "INSTANT belongs to RESHARD, ALLOC, FREE, METRIC, LOG, RESET, RESIDENT and DEVICE, BEGIN / END to the rest"


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (tell_of(value=10**6), ["88: DEVICE does not refer to an earlier row"]),
        (tell_of(value=88), ["88: DEVICE does not refer to an earlier row"]),
        (tell_of(value=-1), ["88: DEVICE does not refer to an earlier row"]),
        (tell_of(value=float("nan")), ["88: DEVICE does not refer to an earlier row"]),
        (tell_of(value=0.5), ["88: DEVICE does not refer to an earlier row"]),
        (tell_of(value=ALLOC_AT), ["88: DEVICE refers to a row that is not device work"]),
        (tell_of(value=FORWARD_AT, t_ns=0), ["88: DEVICE is earlier than the row it refers to"]),
        (tell_of(value=FORWARD_AT, module=-1), ["88: METRIC, LOG and DEVICE without a string"]),
        (
            lambda rows: tell_of(value=FORWARD_AT)(tell_of(value=FORWARD_AT)(rows)),
            ["89: two DEVICE rows refer to the same row"],
        ),
        (put("kind", 99, Kind.WAIT, Edge.BEGIN), ["13: unknown kind", "14: END without its BEGIN"]),
        (put("kind", len(Kind), Kind.METRIC), ["86: unknown kind", f"86: {INSTANTS}"]),
        (put("edge", 3, Kind.WAIT, Edge.BEGIN), ["13: unknown edge", "14: END without its BEGIN"]),
        (put("phase", 6, Kind.WAIT, Edge.BEGIN), ["13: unknown phase"]),
        (put("edge", Edge.INSTANT, Kind.WAIT, Edge.BEGIN), [f"13: {INSTANTS}", "14: END without its BEGIN"]),
        (put("edge", Edge.BEGIN, Kind.RESHARD), [f"32: {INSTANTS}"]),
        (put("unit", 2, Kind.RESHARD), ["32: unit is not in the header's table of 2"]),
        (put("unit", -2, Kind.RESHARD), ["32: unit is not in the header's table of 2"]),
        (put("module", 1, Kind.METRIC), ["86: module is not in the header's table of 1"]),
        (put("comm_group", 1, Kind.WAIT, Edge.BEGIN), ["13: comm_group is not in the header's table of 1"]),
        (put("step", -2, Kind.METRIC), ["86: step is less than -1"]),
        (put("category", 200, Kind.ALLOC), ["0: ALLOC / FREE without a known category"]),
        (put("category", len(Category), Kind.ALLOC), ["0: ALLOC / FREE without a known category"]),
        (put("category", 0, Kind.WAIT, Edge.BEGIN), ["13: a category on a row that is not ALLOC / FREE"]),
        (put("num_bytes", 0, Kind.ALLOC), ["0: ALLOC must have num_bytes > 0"]),
        (put("num_bytes", 0, Kind.FREE), ["19: FREE must have num_bytes < 0"]),
        (put("num_bytes", -1, Kind.WAIT, Edge.BEGIN), ["13: num_bytes is negative"]),
        (put("kind", Kind.RESIDENT, Kind.METRIC), ["86: RESIDENT must have num_bytes > 0"]),
        (put("comm_group", -1, Kind.ALL_GATHER, Edge.BEGIN), [NAMELESS, "15: END without its BEGIN"]),
        (put("comm_seq", -1, Kind.ALL_GATHER, Edge.BEGIN), [NAMELESS, "15: END without its BEGIN"]),
        (put("comm_seq", 99, Kind.ALL_GATHER, Edge.BEGIN), [f"12: {TWICE}", "15: END without its BEGIN"]),
        (put("comm_seq", 1, Kind.ALL_GATHER, Edge.BEGIN), [f"12: {TWICE}", "15: END without its BEGIN"]),
        (drop(Kind.FORWARD, Edge.BEGIN), ["33: END without its BEGIN"]),
        (end_before_begin, ["31: END is earlier than its BEGIN"]),
        (put("module", -1, Kind.METRIC), ["86: METRIC, LOG and DEVICE without a string"]),
    ],
)
def test_a_broken_row_is_reported_with_its_rank_and_rule(change, sentences):
    rows = change(EXAMPLE.rank(1).rows.copy())
    found = check(Trace(EXAMPLE.header, (EXAMPLE.rank(0), RankTrace(1, rows))))
    assert found == [f"rank 1: row {sentence} (1 such row)" for sentence in sentences]


def test_seq_counts_up_from_the_key_frame():
    rows = np.delete(EXAMPLE.rank(1).rows, 5)
    found = check(Trace(EXAMPLE.header, (RankTrace(1, rows),)))
    assert found[0] == "rank 1: row 5: seq does not increase by one from the key frame's (82 such rows)"


def test_each_row_with_less_than_no_live_bytes_is_reported_but_none_at_zero():
    rows = free_too_much(EXAMPLE.rank(1).rows.copy())
    moves = (rows["category"] == Category.ALL_GATHER_BUFFERS) & np.isin(rows["kind"], MOVES)
    negative = int((np.cumsum(rows["num_bytes"][moves]) < 0).sum())
    sentence = "rank 1: row 19: more bytes of ALL_GATHER_BUFFERS were freed than were live"
    assert check(Trace(EXAMPLE.header, (RankTrace(1, rows),))) == [f"{sentence} ({negative} such rows)"]
    rows["num_bytes"][first(rows, Kind.FREE)] += 10**9
    exact = rows["num_bytes"][moves]
    assert (np.cumsum(exact) == 0).any()
    rows["num_bytes"][np.flatnonzero(moves)[np.flatnonzero(np.cumsum(exact) == 0)[0]]] -= 1  # below it from here on
    (found,) = check(Trace(EXAMPLE.header, (RankTrace(1, rows),)))
    assert found.endswith(f"({int((np.cumsum(rows['num_bytes'][moves]) < 0).sum())} such rows)")


def test_a_report_names_the_first_row_and_how_many_there_are():
    rows = EXAMPLE.rank(1).rows.copy()
    rows["phase"][[7, 9]] = 77
    assert check(Trace(EXAMPLE.header, (RankTrace(1, rows),))) == ["rank 1: row 7: unknown phase (2 such rows)"]


def test_a_rank_outside_the_world_is_reported():
    far = RankTrace(2, EXAMPLE.rank(1).rows)
    assert check(Trace(EXAMPLE.header, (far,))) == ["rank 2: the world has 2 ranks"]


def test_a_trace_cut_on_the_left_may_end_earlier_spans():
    rank = EXAMPLE.rank(0)
    inside = rank.cut(first(rank.rows, Kind.FORWARD, Edge.BEGIN) + 1, rank.end_seq)
    assert check(Trace(EXAMPLE.header, (inside,))) == []
    assert check(Trace(EXAMPLE.header, (dataclasses.replace(inside, start=KeyFrame()),))) != []


def test_live_bytes_count_from_the_key_frame():
    rank = EXAMPLE.rank(0)
    late = rank.cut(20, rank.end_seq)
    nothing = KeyFrame(seq=20, bytes_by_category=(0,) * len(Category))
    assert check(Trace(EXAMPLE.header, (late,))) == []
    assert "were freed than were live" in check(Trace(EXAMPLE.header, (dataclasses.replace(late, start=nothing),)))[0]


def header_with(*, unit: dict | None = None, param: dict | None = None) -> Header:
    """Return the example's header with fields of its first unit and of that unit's first parameter replaced."""
    root, *more = EXAMPLE.header.units
    params = (dataclasses.replace(root.params[0], **(param or {})), *root.params[1:])
    return dataclasses.replace(EXAMPLE.header, units=(dataclasses.replace(root, params=params, **(unit or {})), *more))


ZEROS = (0,) * (len(Category) - 1)
HUGE = 2**54  # 2**56 bytes of float32
ROWS = "parameter 'blocks.0.norm1.weight' has 64 rows on 2 ranks, its shards have"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"unit": {"index": 1}}, "unit 'blocks.0' has index 1 but is at position 0"),
        ({"unit": {"root": 2}}, "unit 'blocks.0' has root 2, out of range for 2 units"),
        ({"unit": {"root": -2}}, "unit 'blocks.0' has root -2, out of range for 2 units"),
        (
            {"unit": {"replicate_size": 0}},
            "unit 'blocks.0' has 0 copies on 2 ranks each, in a world of 2",
        ),
        (
            {"unit": {"replicate_size": 3}},
            "unit 'blocks.0' has 3 copies on 2 ranks each, in a world of 2",
        ),
        ({"unit": {"compute_itemsize": -1}}, "unit 'blocks.0' has elements of -1 and 4 bytes"),
        ({"unit": {"reduce_itemsize": 65}}, "unit 'blocks.0' has elements of 4 and 65 bytes"),
        ({"param": {"shard_dim": 1}}, "parameter 'blocks.0.norm1.weight' of shape (64,) is sharded on dimension 1"),
        ({"param": {"shard_dim": -1}}, "parameter 'blocks.0.norm1.weight' of shape (64,) is sharded on dimension -1"),
        ({"param": {"rows_per_rank": (64,)}}, f"{ROWS} (64,) of 32 padded"),
        ({"param": {"rows_per_rank": (32, 31)}}, f"{ROWS} (32, 31) of 32 padded"),
        ({"param": {"padded_rows": 31}}, f"{ROWS} (32, 32) of 31 padded"),
        ({"param": {"padded_rows": 65}}, f"{ROWS} (32, 32) of 65 padded"),
        (
            {"param": {"global_shape": (HUGE,)}},
            f"parameter 'blocks.0.norm1.weight' has the shape (64,) of ({HUGE},), 4 bytes an element, "
            "and shards of (32, 32) rows, 32 padded",
        ),
        (
            {"param": {"itemsize": -1}},
            "parameter 'blocks.0.norm1.weight' has the shape (64,) of (64,), -1 bytes an element, "
            "and shards of (32, 32) rows, 32 padded",
        ),
    ],
)
def test_a_header_that_does_not_add_up_is_reported(changes, sentence):
    assert check(Trace(header_with(**changes))) == [sentence]


@pytest.mark.parametrize(
    ("fields", "sentences"),
    [
        ({"world_size": MAX_RANKS}, []),
        ({"world_size": MAX_RANKS + 1}, [f"the world has {MAX_RANKS + 1} ranks, expected 0 to {MAX_RANKS}"]),
        ({"world_size": -1}, [f"the world has -1 ranks, expected 0 to {MAX_RANKS}"]),
        ({"world_size": 2, "comm_groups": (GroupInfo(name="g", ranks=(0, 1)),)}, []),
        (
            {"world_size": 2, "comm_groups": (GroupInfo(name="g", ranks=(3, -1)),)},
            ["rank -1 is out of range for 2 ranks"],
        ),
        (
            {"world_size": 2, "ranks": (RankInfo(rank=2, host="a", device="cpu", pid=1),)},
            ["rank 2 is out of range for 2 ranks"],
        ),
        ({"mesh_shape": (1, 2), "mesh_axes": ("r", "s")}, []),
        ({"mesh_shape": (0,), "mesh_axes": ("s",)}, ["the mesh has the shape (0,) and the axes ('s',)"]),
        ({"mesh_shape": (2,)}, ["the mesh has the shape (2,) and the axes ()"]),
    ],
)
def test_the_world_has_all_ranks_that_are_named(fields, sentences):
    assert check(Trace(Header(**fields))) == sentences


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({"seq": 2**62 - 1}, []),
        ({"seq": 2**62}, [f"the rows begin at {2**62}, with 0 lost before"]),
        ({"seq": -1}, ["the rows begin at -1, with 0 lost before"]),
        ({"lost": -1}, ["the rows begin at 0, with -1 lost before"]),
        ({"bytes_by_category": (2**56 - 1, *ZEROS)}, []),
        ({"bytes_by_category": (2**56, *ZEROS)}, [f"the key frame has {(2**56, *ZEROS)} live bytes"]),
        ({"bytes_by_category": (-1, *ZEROS)}, [f"the key frame has {(-1, *ZEROS)} live bytes"]),
        ({"unit_states": {1: UnitState.UNSHARDED}}, []),
        ({"unit_states": {2: UnitState.UNSHARDED}}, ["the key frame has unit 2, out of range for 2 units"]),
        ({"reducing": {3: 1, -1: 1}}, ["the key frame has unit -1, out of range for 2 units"]),
    ],
)
def test_a_key_frame_that_cannot_be_is_reported(changes, sentences):
    start = dict(changes)
    rank = RankTrace(1, EXAMPLE.rank(1).rows[:0], lost=start.pop("lost", 0), start=KeyFrame(**start))
    assert check(Trace(EXAMPLE.header, (rank,))) == [f"rank 1: {sentence}" for sentence in sentences]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"first": 4}, "'p1' has the shape (6,) of (6,), from element 4 on, in the flat parameter '_flat_param' of 9"),
        ({"shape": (-1,)}, "'p1' has the shape (-1,) of (6,), from element 3 on"),
        ({"global_shape": (2**60,)}, f"'p1' has the shape (6,) of ({2**60},), from element 3 on"),
    ],
)
def test_a_part_outside_of_its_flat_parameter_is_reported(changes, sentence):
    flat = make_flat((3, 6), 2)
    wrong = replace(flat, parts=(flat.parts[0], replace(flat.parts[1], **changes)))
    found = check(Trace(Header(world_size=2, units=(make_unit(wrong),))))
    assert len(found) == 1
    assert sentence in found[0]
    assert check(Trace(Header(world_size=2, units=(make_unit(flat),)))) == []


READING = ClockReading(t_ns=5, offset_ns=-3, error_ns=1)


@pytest.mark.parametrize(
    ("clocks", "sentence"),
    [
        ([HostClock(ranks=(0,), readings=(READING,))], "rank 0, whose clock is the reference"),
        ([HostClock(ranks=(1, 1), readings=(READING,))], "the other clocks list a rank twice"),
        ([HostClock(ranks=(1,), readings=())], "the clock of ranks (1,) has no readings"),
        ([HostClock(ranks=(1,), readings=(READING, replace(READING, t_ns=4)))], "they are not sorted by time"),
        ([HostClock(ranks=(1,), readings=(replace(READING, error_ns=-1),))], "clock error of ranks (1,) is negative"),
        ([HostClock(ranks=(2,), readings=(READING,))], "rank 2 is out of range for 2 ranks"),
    ],
)
def test_clocks_that_cannot_be_are_reported(clocks, sentence):
    found = check(Trace(replace(EXAMPLE.header, clocks=tuple(clocks))))
    assert len(found) == 1
    assert sentence in found[0]
    assert check(Trace(replace(EXAMPLE.header, clocks=(HostClock(ranks=(1,), readings=(READING,)),)))) == []


def test_a_device_may_end_a_collective_before_the_host_waits_for_it():
    at = first(EXAMPLE.rank(1).rows, Kind.ALL_GATHER, Edge.END)
    rank = EXAMPLE.rank(1)
    rows = tell_of(value=at, t_ns=rank.rows["t_ns"][at] - 1)(rank.rows)
    assert check(Trace(EXAMPLE.header, (dataclasses.replace(rank, rows=rows),))) == []


def test_an_empty_trace_is_valid():
    assert check(Trace.empty()) == []


@given(any_traces())
def test_rows_of_any_content_are_judged_without_an_exception(trace):
    assert all(isinstance(sentence, str) for sentence in check(trace))


def test_a_parameter_without_shards_is_judged_too():
    found = check(
        Trace(header_with(param={"shape": (0,), "rows_per_rank": (), "padded_rows": 0}, unit={"shard_size": 0}))
    )
    assert all(isinstance(sentence, str) for sentence in found)
