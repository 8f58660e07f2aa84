import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.collective_counts import counts
from tests.helpers.simulated_job import ITEMSIZE, padded_bytes, padded_elements
from tests.helpers.trace_strategies import Setup, cuttings, example_trace, setups, simulate, traces
from tests.replay.test_shards import make_flat
from workbench.events import C10D, COLLECTIVES, ENGINES, GLOO, PER_HOST, Edge, Engine, Kind, Param, Unit
from workbench.replay import collectives
from workbench.replay.collectives import (
    Pass,
    closed_form,
    compare,
    crossing_bytes,
    passes,
    ring_bytes,
    table,
)
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views.tracks import tracks


def make_unit(*params: Param, **changes: object) -> Unit:
    defaults = {"index": 0, "name": "", "root": 0, "reshard_after_forward": False, "shard_size": 4}
    dtypes = {"compute_dtype": "bfloat16", "reduce_dtype": "float32", "compute_itemsize": 2, "reduce_itemsize": 4}
    return Unit(params=params, **(defaults | dtypes | changes))


def make_param(shape: tuple[int, ...], padded_rows: int, **changes: object) -> Param:
    return Param(
        **(
            {"fqn": "w", "shape": shape, "global_shape": shape, "dtype": "float32", "itemsize": 4, "shard_dim": 0}
            | {"rows_per_rank": ()}
            | changes
        ),
        padded_rows=padded_rows,
    )


# -- the table


@given(traces())
def test_the_table_has_one_entry_per_collective_issued(trace: Trace):
    for rank in trace.ranks:
        found = table(rank)
        begins = np.isin(rank.rows["kind"], COLLECTIVES) & (rank.rows["edge"] == Edge.BEGIN)
        for column, name in ((found.seq, "seq"), (found.issue_ns, "t_ns"), (found.num_bytes, "num_bytes")):
            assert column.tolist() == rank.rows[name][begins].tolist()
        assert len(found) == begins.sum()
        assert (found.wait_ns >= 0).all()
        assert (found.time_ns >= 0).all()


@given(setups())
def test_a_wait_is_exposed_time_of_its_collective(setup: Setup):
    for rank in simulate(setup).ranks:
        found, rows = table(rank), rank.rows
        waits = rows["kind"] == Kind.WAIT
        t_ns = rows["t_ns"][waits].reshape(-1, 2)  # a wait contains no other rows: its ends are neighbours
        assert found.wait_ns.sum() == (t_ns[:, 1] - t_ns[:, 0]).sum()
        by_identity = dict(zip(rows["comm_seq"][waits][::2].tolist(), t_ns.tolist(), strict=True))
        for comm_seq, begin, end in zip(found.comm_seq, found.wait_begin_ns, found.wait_end_ns, strict=True):
            assert by_identity[comm_seq] == [begin, end]
        assert (found.time_ns == found.end_ns - found.issue_ns).all()


@given(st.data())
def test_any_interleaving_of_drains_gives_each_rank_the_same_table(data):
    trace = data.draw(traces(whole=True))
    builder = TraceBuilder()
    builder.update_header(trace.header)
    drains = [(rank, cut) for rank in trace.ranks for cut in data.draw(cuttings(len(rank.rows))) if len(rank.rows[cut])]
    waiting = {rank.rank: [cut for r, cut in drains if r is rank] for rank in trace.ranks}
    order = data.draw(st.permutations([rank.rank for rank, _ in drains]))
    for number in order:
        rank, cut = trace.rank(number), waiting[number].pop(0)
        builder.append(number, rank.rows[cut].tobytes(), key_frame=rank.cut(cut.stop, cut.stop).start)
    for rank in builder.snapshot().ranks:
        expected = table(trace.rank(rank.rank))
        for field in dataclasses.fields(expected):
            assert getattr(table(rank), field.name).tolist() == getattr(expected, field.name).tolist()


def test_a_collective_that_has_not_ended_lasts_to_the_last_row():
    rank = example_trace(steps=1).ranks[0]
    place = int(np.flatnonzero((rank.rows["kind"] == Kind.WAIT) & (rank.rows["edge"] == Edge.BEGIN))[0])
    hung = rank.cut(0, place + 1)
    found = table(hung)
    last = hung.rows["t_ns"][-1]
    assert found.end_ns[0] == found.wait_end_ns[0] == -1
    assert found.wait_begin_ns[0] == last
    assert found.time_ns[0] == last - found.issue_ns[0]


def test_of_several_waits_for_a_collective_the_first_is_its_wait():
    rank = example_trace(steps=1).ranks[0]
    first = table(rank)
    wait = rank.rows[(rank.rows["kind"] == Kind.WAIT) & (rank.rows["comm_seq"] == first.comm_seq[0])][:2]
    again = np.concatenate([rank.rows, wait])
    again["seq"] = np.arange(len(again)) + rank.start.seq
    again["t_ns"][-2:] += 10**9
    found = table(RankTrace(rank.rank, again, rank.start))
    assert (found.wait_begin_ns[0], found.wait_end_ns[0]) == tuple(wait["t_ns"])
    assert found.wait_begin_ns.tolist() == first.wait_begin_ns.tolist()


def test_a_wait_for_a_collective_issued_before_the_trace_belongs_to_none():
    rank = example_trace(steps=1).ranks[0]
    issued = int(np.flatnonzero(rank.rows["kind"] == Kind.ALL_GATHER)[0])
    found = table(rank.cut(issued + 1, rank.end_seq))
    assert len(found) == len(table(rank)) - 1
    assert found.wait_begin_ns.tolist() == table(rank).wait_begin_ns[1:].tolist()
    only_waits = rank.cut(int(table(rank).seq[-1]) + 1, rank.end_seq)
    assert (only_waits.rows["kind"] == Kind.WAIT).any()
    assert len(table(only_waits)) == 0


def test_time_held_at_a_gate_is_neither_time_nor_exposed():
    rank = example_trace(steps=1).ranks[0]
    rows = rank.rows
    place = int(np.flatnonzero((rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END))[0])
    gate = rows[[place, place]].copy()
    gate["kind"], gate["edge"] = Kind.GATE, (Edge.BEGIN, Edge.END)
    gate["comm_seq"] = gate["comm_group"] = gate["unit"] = -1
    held = np.concatenate([rows[:place], gate, rows[place:]])
    held["seq"] = np.arange(len(held))
    held["t_ns"][place + 1 :] += 1_000_000 * (held["t_ns"][place + 1 :] >= gate["t_ns"][0])  # not earlier true ends
    assert table(RankTrace(0, held)).wait_ns.tolist() == table(rank).wait_ns.tolist()
    assert table(RankTrace(0, held)).time_ns.tolist() == table(rank).time_ns.tolist()


# -- counts, the closed form, and their comparison


@given(setups())
def test_number_and_bytes_are_the_closed_forms(setup: Setup):
    trace = simulate(setup)
    expected = {(e.unit, e.kind, e.num_ranks, e.calls, e.num_bytes) for e in closed_form(trace.header) if e.calls}
    for step in range(setup.steps):
        for rank in range(setup.num_ranks):
            mine = [c for c in counts(trace, step) if c.rank == rank]
            found = {(c.unit, c.kind, c.num_ranks, c.calls, c.num_bytes) for c in mine}
            assert found == expected
        assert not any(row.differs or row.expected is None for row in compare(trace, step))


@given(setups(), st.integers(1, 3), st.booleans())
def test_passes_of_a_step_are_counted_and_expected(setup: Setup, num_passes: int, reduces: bool):
    several = dataclasses.replace(setup, steps=1, passes=num_passes, reduces=reduces)
    trace, plain = simulate(several), closed_form(simulate(dataclasses.replace(setup, steps=0)).header)
    ran = passes(trace.header, trace.ranks[0], 0)
    assert [len(each) for each in ran.values()] == [num_passes]
    times = {Kind.ALL_GATHER: num_passes, Kind.REDUCE_SCATTER: num_passes if reduces else 1}
    times[Kind.ALL_REDUCE] = times[Kind.REDUCE_SCATTER]
    expected = {(e.unit, e.kind, e.num_ranks): (e.calls, e.num_bytes) for e in plain}
    found = {(e.unit, e.kind, e.num_ranks): (e.calls, e.num_bytes) for e in closed_form(trace.header, (), ran)}
    assert found == {key: tuple(n * times[key[1]] for n in amounts) for key, amounts in expected.items()}
    assert not any(row.differs or row.expected is None for row in compare(trace, 0))


@given(traces(whole=True), st.integers(0, 10**9))
def test_a_part_is_never_more_than_its_whole(trace: Trace, late_ns: int):
    """Exposed time is at most the collective's time, however late compute resumes, and that is at most its step's."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        wakes = (rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END)
        ends = np.isin(rows["kind"], COLLECTIVES) & (rows["edge"] == Edge.END)  # right after its wait, at its true time
        rows["t_ns"] += late_ns * (np.cumsum(wakes) - ends)
        ranks.append(RankTrace(rank.rank, rows))
    late = Trace(trace.header, tuple(ranks))
    for step in {step for rank in late.ranks for step in rank.steps.tolist() if step >= 0}:
        for count in counts(late, step):
            rows = late.rank(count.rank).rows
            mine = rows[rows["step"] == step]["t_ns"]
            assert 0 <= count.exposed_ns <= count.time_ns <= count.calls * (mine.max() - mine.min())
        assert all(0 <= row.exposed_ns <= row.time_ns for row in compare(late, step))
    for rank in late.ranks if late.num_rows else ():
        bars = tracks(rank, int(rank.rows["t_ns"].max(initial=0))).bars if len(rank.rows) else None
        assert bars is None or (bars.exposed_ns <= bars.duration_ns).all()


def test_units_kept_unsharded_are_not_gathered_in_the_next_pass():
    unit = make_unit(make_param((5, 3), 2))
    kept, last = Pass(reshards=False, reduces=False, all_reduces=False), Pass(all_reduces=False)
    looks = Pass(has_backward=False, reshards=False, reduces=False, all_reduces=False)
    for policy, seen, calls in [
        (True, (kept, kept, last), (2 + 1 + 1, 1)),
        (False, (kept, kept, last), (1, 1)),
        (True, (looks, last), (1 + 2, 1)),
        (False, (looks, last), (1, 1)),
        (False, (looks,), (1, 0)),
        (True, (kept,), (2, 1)),  # gradients that are not reduced make a difference
    ]:
        header = Header(units=(dataclasses.replace(unit, reshard_after_forward=policy),))
        assert tuple(e.calls for e in closed_form(header, (), {0: seen})) == calls
    (whole,) = (e for e in closed_form(header, (0,), {0: (kept,)}) if e.kind == Kind.ALL_GATHER)
    assert whole.calls == 1  # unsharded as the step begins


@given(setups())
def test_the_closed_form_is_the_formula_of_whole_models(setup: Setup):
    header = simulate(dataclasses.replace(setup, steps=0)).header
    gathers, reduces, averages = (
        [e for e in closed_form(header) if e.kind == kind]
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
    )
    whole = sum(map(padded_bytes, header.units)) // ITEMSIZE
    fewer = setup.reshard_after_forward if type(setup.reshard_after_forward) is int else setup.shard_size
    later = sum(padded_elements(unit, fewer) for unit in header.units)
    later_root = padded_elements(header.units[-1], fewer)
    f, r, g = setup.shard_size, setup.copies, setup.num_units
    b_c, b_r = setup.compute_itemsize, setup.reduce_itemsize
    if setup.reshard_after_forward and setup.reshard_root:
        calls, num_bytes = 2 * g, (whole + later) * b_c
    elif setup.reshard_after_forward:
        calls, num_bytes = 2 * g - 1, (whole + later - later_root) * b_c
    else:
        calls, num_bytes = g, whole * b_c
    many = f > 1
    assert (sum(e.calls for e in gathers), sum(e.num_bytes for e in gathers)) == (calls * many, num_bytes * many)
    assert (sum(e.calls for e in reduces), sum(e.num_bytes for e in reduces)) == (g * many, whole * b_r * many)
    assert sum(e.calls for e in averages) == g * (r > 1)
    sent = sum(ring_bytes(e.kind, e.num_bytes, e.num_ranks) for e in (*gathers, *reduces, *averages))
    if type(setup.reshard_after_forward) is bool:
        shards = (f - 1) / f * (num_bytes + whole * b_r)
        assert sent == pytest.approx(shards + 2 * (r - 1) / r * whole / f * b_r)


def form(unit: Unit) -> list[tuple[Kind, int, int, int]]:
    return [(e.kind, e.num_ranks, e.calls, e.num_bytes) for e in closed_form(Header(units=(unit,))) if e.calls]


PADDED = 2 * 4 * 3  # elements of a parameter of 5 rows of 3 over 4 ranks


def test_copies_are_averaged_over_each_ranks_part():
    unit = make_unit(make_param((5, 3), 2), reshard_after_forward=True, replicate_size=3)
    assert form(unit) == [
        (Kind.ALL_GATHER, 4, 2, 2 * 2 * PADDED),
        (Kind.REDUCE_SCATTER, 4, 1, 4 * PADDED),
        (Kind.ALL_REDUCE, 3, 1, 4 * PADDED // 4),
    ]


def test_whole_copies_are_only_averaged():
    unit = make_unit(make_param((5, 3), 5), shard_size=1, replicate_size=4, reshard_after_forward=True)
    assert form(unit) == [(Kind.ALL_REDUCE, 4, 1, 4 * 5 * 3)]


@pytest.mark.parametrize(
    ("policy", "gathers"),
    [
        (True, [(4, 2, 2 * 2 * PADDED)]),
        (False, [(4, 1, 2 * PADDED)]),
        (2, [(4, 1, 2 * PADDED), (2, 1, 2 * 6 * 3)]),  # 5 rows are 3 + 3 on two ranks
        (4, [(4, 2, 2 * 2 * PADDED)]),
        (1, [(4, 1, 2 * PADDED)]),
    ],
)
def test_a_number_gathers_among_that_many_ranks_in_backward(policy, gathers):
    unit = make_unit(make_param((5, 3), 2), reshard_after_forward=policy)
    assert [entry[1:] for entry in form(unit) if entry[0] == Kind.ALL_GATHER] == gathers


def test_groups_with_unknown_ranks_count_as_the_units_group():
    trace = simulate(Setup(num_ranks=4, copies=2, steps=1))
    nameless = tuple(dataclasses.replace(group, ranks=()) for group in trace.header.comm_groups)
    assert counts(Trace(dataclasses.replace(trace.header, comm_groups=nameless), trace.ranks), 0) == counts(trace, 0)
    unitless = dataclasses.replace(trace.header, comm_groups=(), units=())
    assert {count.num_ranks for count in counts(Trace(unitless, trace.ranks), 0)} == {4}


def test_padding_counts_and_frozen_parameters_are_gathered_but_not_reduced():
    unit = make_unit(make_param((5, 3), 2), make_param((3, 7), 2, trainable=False, shard_dim=1))
    gather, reduce = closed_form(Header(units=(unit,)))
    assert (gather.calls, gather.num_bytes) == (1, 2 * (2 * 4 * 3 + 2 * 4 * 3))
    assert (reduce.calls, reduce.num_bytes) == (1, 4 * (2 * 4 * 3))


def test_an_engine_may_gather_and_reduce_each_parameter_by_itself(monkeypatch):
    monkeypatch.setitem(ENGINES, "apart", Engine(name="apart", gathers_params=True))
    params = make_param((5, 3), 2), make_param((3, 7), 2, trainable=False, shard_dim=1)
    whole, apart = (form(make_unit(*params, engine=name)) for name in ("", "apart"))
    assert [calls for _, _, calls, _ in apart] == [2, 1]
    assert [num_bytes for *_, num_bytes in apart] == [num_bytes for *_, num_bytes in whole]


@pytest.mark.parametrize(
    ("changes", "calls"),
    [({"shard_size": 1}, (0, 0)), ({"reshard_after_forward": True}, (2, 1))],
)
def test_calls_of_a_unit(changes, calls):
    found = closed_form(Header(units=(make_unit(make_param((4,), 1), **changes),)))
    assert tuple(e.calls for e in found) == calls


def test_a_unit_of_frozen_parameters_reduces_nothing():
    found = closed_form(Header(units=(make_unit(make_param((4,), 1, trainable=False)),)))
    assert [(e.calls, e.num_bytes) for e in found] == [(1, 8), (0, 0)]


def without(rank: RankTrace, drop: np.ndarray) -> RankTrace:
    rows = rank.rows[~drop].copy()
    rows["seq"] = np.arange(len(rows))
    return RankTrace(rank.rank, rows)


def is_reduction_of(rank: RankTrace, unit: int) -> np.ndarray:
    return np.isin(rank.rows["kind"], (Kind.REDUCE_SCATTER,)) & (rank.rows["unit"] == unit)


def test_a_rank_with_fewer_collectives_is_separate():
    trace = example_trace(steps=1)
    lazy = Trace(trace.header, tuple(without(r, is_reduction_of(r, 1)) if r.rank == 2 else r for r in trace.ranks))
    alike, different = (row for row in compare(lazy, 0) if row.unit == 1 and row.kind == Kind.REDUCE_SCATTER)
    assert (alike.ranks, alike.calls, alike.differs) == ((0, 1, 3), 1, False)
    assert (different.ranks, different.calls, different.num_bytes, different.differs) == ((2,), 0, 0, True)
    assert different.time_ns == different.exposed_ns == 0
    assert different.expected == alike.expected
    assert sum(row.differs for row in compare(lazy, 0)) == 1


def test_parameters_unsharded_before_a_step_are_not_gathered_in_forward():
    def kept(rank: RankTrace) -> RankTrace:
        rows = rank.rows
        unit, gathers = rows["unit"] == 0, np.isin(rows["kind"], (Kind.ALL_GATHER, Kind.UNSHARD))
        freed = np.flatnonzero(unit & (rows["step"] == 0) & (rows["kind"] == Kind.RESHARD))[-1:]
        kinds = np.where(unit & gathers & (rows["step"] == 1), rows["kind"] * 2 + (rows["edge"] == Edge.END), -1)
        gathered = [np.flatnonzero(kinds == kind)[0] for kind in np.unique(kinds) if kind >= 0]
        return without(rank, np.isin(np.arange(len(rows)), [*freed, *gathered]))

    trace = example_trace(steps=2)
    full = Trace(trace.header, tuple(map(kept, trace.ranks)))
    before, after = (sum(row.calls for row in compare(t, 1)) for t in (trace, full))
    assert after == before - 1
    assert not any(row.differs for step in (0, 1) for row in compare(full, step))


def resharded_at(step):
    """Return a trace whose units have kept their parameters after forward since a step."""
    trace = example_trace(steps=2)
    before = [unit.following(None, 0) for unit in trace.header.units]
    units = tuple(dataclasses.replace(u, reshard_after_forward=False).following(u, step) for u in before)
    return Trace(dataclasses.replace(trace.header, units=units), trace.ranks)


def test_an_incomplete_step_is_not_compared():
    trace = example_trace(steps=2)
    cut = Trace(trace.header, tuple(r.cut(0, r.end_seq - 5) for r in trace.ranks))
    assert all(row.expected is None and not row.differs for row in compare(cut, 1))
    assert all(row.expected is not None for row in compare(cut, 0))


@pytest.mark.parametrize("ended", ["retired", "gone"])
def test_a_unit_that_ended_later_is_compared(ended):
    trace = example_trace(steps=1)
    units = tuple(dataclasses.replace(u, **{ended: u.index == 0}) for u in trace.header.units)
    rows = compare(Trace(dataclasses.replace(trace.header, units=units), trace.ranks), 0)
    assert not any(row.expected is None or row.differs for row in rows)


def test_each_step_is_compared_with_its_own_policy():
    """As after ``%fsdp reshard``: two steps of one trace have the units of either policy."""
    trace = resharded_at(1)
    assert not any(row.differs for row in compare(trace, 0))
    assert {row.kind for row in compare(trace, 1) if row.differs} == {Kind.ALL_GATHER}  # which did not reshard


def test_a_unit_without_events_is_not_compared():
    trace = example_trace(steps=1)
    idle = Trace(trace.header, tuple(without(r, r.rows["unit"] == 1) for r in trace.ranks))
    assert {row.unit for row in compare(idle, 0)} == {0, 2, 3}


def test_times_are_means_over_the_ranks():
    trace = example_trace(steps=1)
    row = compare(trace, 0)[0]
    mine = [c for c in counts(trace, 0) if (c.unit, c.kind) == (row.unit, row.kind)]
    assert row.ranks == (0, 1, 2, 3)
    assert row.time_ns == pytest.approx(np.mean([c.time_ns for c in mine]))
    assert row.exposed_ns == pytest.approx(np.mean([c.exposed_ns for c in mine]))


def test_a_missing_step_has_no_rows():
    assert compare(example_trace(steps=1), 9) == counts(example_trace(steps=1), 9) == ()
    assert compare(Trace.empty(), 0) == ()


def test_bytes_on_a_ring():
    assert ring_bytes(Kind.ALL_GATHER, 400, 4) == 300
    assert ring_bytes(Kind.ALL_REDUCE, 400, 4) == 600
    assert ring_bytes(Kind.REDUCE_SCATTER, 400, 1) == 0


def test_collectives_are_the_schemas():
    assert {e.kind for e in closed_form(example_trace().header)} <= set(collectives.COLLECTIVES)


@pytest.mark.parametrize(("numels", "padded"), [((10, 3), 16), ((7, 1), 8), ((1,), 4)])
def test_a_flat_parameter_is_padded_once(numels: tuple[int, ...], padded: int):
    flat = make_flat(numels, 4)
    gather, reduce = closed_form(Header(units=(make_unit(flat, reshard_after_forward=True),)))
    assert (gather.calls, gather.num_bytes) == (2, 2 * padded * 2)
    assert (reduce.calls, reduce.num_bytes) == (1, padded * 4)


# -- bytes between hosts

CARRIERS = (GLOO, PER_HOST, C10D, "")


@pytest.mark.parametrize(
    ("carrier", "hosts", "kind", "expected"),
    [
        (PER_HOST, "aabbcc", Kind.ALL_GATHER, {"a": 400, "b": 400, "c": 400}),
        (PER_HOST, "aabbcc", Kind.REDUCE_SCATTER, {"a": 400, "b": 400, "c": 400}),
        (GLOO, "aabbcc", Kind.ALL_GATHER, {"a": 800, "b": 800, "c": 800}),
        (GLOO, "aaab", Kind.REDUCE_SCATTER, {"a": 450, "b": 450}),
        (C10D, "aabbcc", Kind.ALL_GATHER, {"a": 500, "b": 500, "c": 500}),
        (C10D, "aabbcc", Kind.REDUCE_SCATTER, {"a": 1000, "b": 1000, "c": 1000}),
        ("", "aabbcc", Kind.REDUCE_SCATTER, {"a": 500, "b": 500, "c": 500}),
        (PER_HOST, "abc", Kind.ALL_REDUCE, {"a": 800, "b": 800, "c": 800}),
        (GLOO, "abab", Kind.ALL_REDUCE, {"a": 1800, "b": 1800}),
    ],
)
def test_bytes_that_cross_between_hosts(carrier, hosts, kind, expected):
    assert crossing_bytes(kind, 600, hosts, carrier) == expected


@given(
    hosts=st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(sorted),
    kind=st.sampled_from([Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE]),
    carrier=st.sampled_from(CARRIERS),
)
def test_bytes_between_hosts_have_a_lower_bound_and_are_zero_within_one(hosts, kind, carrier):
    found = crossing_bytes(kind, 5040, hosts, carrier)
    assert set(found) == set(hosts)
    several = len(set(hosts)) > 1
    assert all(bool(sent) == several for sent in found.values())
    assert sum(found.values()) >= (len(set(hosts)) - 1) * 5040 - 1e-6


def on_hosts(trace: Trace, hosts: str, comm: str) -> Trace:
    """Return the trace with rank r on host ``hosts[r]``, and units that communicate over ``comm``."""
    ranks = tuple(dataclasses.replace(info, host=hosts[info.rank]) for info in trace.header.ranks)
    units = tuple(dataclasses.replace(unit, comm=comm) for unit in trace.header.units)
    return Trace(dataclasses.replace(trace.header, ranks=ranks, units=units), trace.ranks)


@pytest.mark.parametrize("comm", CARRIERS)
@pytest.mark.parametrize(("copies", "hosts"), [(1, "aaaabbbb"), (1, "aabbbbcc"), (2, "aaaabbbb"), (2, "aabbaabb")])
def test_every_group_s_collectives_cross_once(copies, hosts, comm):
    trace = on_hosts(simulate(Setup(num_ranks=8, copies=copies, num_units=2, steps=1)), hosts, comm)
    for row in compare(trace, 0):
        expected: Counter[str] = Counter()
        for group in trace.header.comm_groups:
            if len(group.ranks) == row.num_ranks and (row.kind == Kind.ALL_REDUCE) == ("replicate" in group.name):
                expected.update(crossing_bytes(row.kind, row.num_bytes, [hosts[r] for r in group.ranks], comm))
        within = {host: sent for host, sent in expected.items() if sent}
        assert row.crossing == pytest.approx(within)


def test_gathers_among_fewer_ranks_use_gloo_in_place_of_a_transport_per_host():
    simulated = simulate(Setup(num_ranks=8, reshard_after_forward=4, num_units=2, steps=1))
    for comm, used in ((PER_HOST, GLOO), (C10D, C10D)):
        among_four = next(row for row in compare(on_hosts(simulated, "aabbaabb", comm), 0) if row.num_ranks == 4)
        assert among_four.crossing == crossing_bytes(Kind.ALL_GATHER, 2 * among_four.num_bytes, "aabb", used)
        assert among_four.crossing != crossing_bytes(Kind.ALL_GATHER, 2 * among_four.num_bytes, "aabb", PER_HOST)


def test_a_group_with_differing_ranks_is_one_row():
    trace = on_hosts(example_trace(steps=1), "aabb", GLOO)
    lazy = Trace(trace.header, tuple(without(r, is_reduction_of(r, 1)) if r.rank == 2 else r for r in trace.ranks))
    alike, different = (row for row in compare(lazy, 0) if row.unit == 1 and row.kind == Kind.REDUCE_SCATTER)
    assert sum(alike.crossing.values()) == 2 * alike.num_bytes
    assert sum(different.crossing.values()) == 0


def test_on_one_host_or_on_unknown_hosts_no_bytes_between_hosts():
    assert {row.crossing for row in compare(example_trace(steps=1), 0)} == {None}
    trace = on_hosts(example_trace(steps=1), "aabb", GLOO)
    for header in (
        dataclasses.replace(trace.header, ranks=trace.header.ranks[1:]),
        dataclasses.replace(trace.header, comm_groups=()),
    ):
        assert {row.crossing for row in compare(Trace(header, trace.ranks), 0)} == {None}


def test_nccl_s_reduce_scatters_are_on_a_ring():
    trace = on_hosts(example_trace(steps=1), "aabb", C10D)
    ranks = tuple(dataclasses.replace(info, device="cuda:0") for info in trace.header.ranks)
    on_gpus = Trace(dataclasses.replace(trace.header, ranks=ranks), trace.ranks)
    sent = [
        {row.crossing["a"] for row in compare(each, 0) if (row.unit, row.kind) == (1, Kind.REDUCE_SCATTER)}
        for each in (trace, on_gpus)
    ]
    assert sent[0] == {2 * bytes_ for bytes_ in sent[1]}


def test_time_to_wake_up_after_the_last_byte_is_not_exposed():
    trace = simulate(Setup(steps=1))
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"][(rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END)] += 50_000_000
        ranks.append(RankTrace(rank.rank, rows))
    for count in counts(Trace(trace.header, tuple(ranks)), 0):
        assert 0 <= count.exposed_ns <= count.time_ns
    for row in compare(Trace(trace.header, tuple(ranks)), 0):
        assert row.exposed_ns <= row.time_ns
