from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.held_ranks import stopped_before
from tests.helpers.trace_strategies import example_trace, traces
from workbench.events import Edge, Kind, Phase
from workbench.replay.paused_time import GrowingCuts, cuts, without_holds
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header

BEGIN, END = Edge.BEGIN, Edge.END
STEP, GATE, WAIT = Kind.STEP, Kind.GATE, Kind.WAIT


def rank_of(rank, *entries):
    """Return a rank's rows of (kind, edge, t_ns), all of step 0 except RESET."""
    rows = np.zeros(len(entries), ROW_DTYPE)
    rows["seq"], rows["unit"] = np.arange(len(entries)), -1
    rows["comm_group"] = rows["comm_seq"] = -1
    for row, (kind, edge, t_ns) in zip(rows, entries, strict=True):
        row["kind"], row["edge"], row["t_ns"] = kind, edge, t_ns
        row["step"] = -1 if kind == Kind.RESET else 0
    return RankTrace(rank, rows)


def trace_of(*ranks):
    return Trace(Header(world_size=len(ranks)), tuple(rank_of(rank, *rows) for rank, rows in enumerate(ranks)))


def pairs(found):
    return list(zip(found.begin_ns.tolist(), found.end_ns.tolist(), strict=True))


def test_the_cut_time_is_that_in_which_all_ranks_are_held():
    """The module's example: rank 0 arrives at the stop 4 before rank 1."""
    first = [(STEP, BEGIN, 0), (GATE, BEGIN, 10), (GATE, END, 50), (STEP, END, 60)]
    second = [(STEP, BEGIN, 0), (GATE, BEGIN, 14), (GATE, END, 52), (STEP, END, 60)]
    found = cuts(trace_of(first, second))
    assert pairs(found) == [(14, 50)]
    assert [found.shown_at(t) for t in (10, 14, 30, 50, 52, 60)] == [10, 14, 14, 14, 16, 24]


def test_time_in_which_others_wait_for_the_held_rank_is_cut_as_well():
    held = [(STEP, BEGIN, 0), (GATE, BEGIN, 10), (GATE, END, 90), (STEP, END, 100)]
    waits = [(STEP, BEGIN, 0), (WAIT, BEGIN, 30), (WAIT, END, 92), (STEP, END, 100)]
    assert pairs(cuts(trace_of(held, waits))) == [(30, 90)]


def test_time_in_which_another_rank_works_is_not_cut():
    held = [(STEP, BEGIN, 0), (GATE, BEGIN, 10), (GATE, END, 90), (STEP, END, 100)]
    works = [(STEP, BEGIN, 0), (WAIT, BEGIN, 30), (WAIT, END, 40), (STEP, END, 70)]
    assert pairs(cuts(trace_of(held, works))) == [(30, 40), (70, 90)]  # a rank whose step is over does not work


def test_a_rank_that_is_still_held_is_held_until_the_newest_row_of_any():
    held = [(STEP, BEGIN, 0), (GATE, BEGIN, 10)]
    waits = [(STEP, BEGIN, 0), (WAIT, BEGIN, 30), (WAIT, END, 50)]
    assert pairs(cuts(trace_of(held, waits))) == [(30, 50)]


def test_a_step_aborted_at_a_stop_ends_when_the_next_begins():
    rows = [(STEP, BEGIN, 0), (GATE, BEGIN, 10), (STEP, BEGIN, 40), (STEP, END, 60)]
    assert pairs(cuts(trace_of(rows))) == [(10, 40)]


def test_a_forward_outside_of_a_step_is_work():
    held = rank_of(0, (Kind.FORWARD, BEGIN, 0), (GATE, BEGIN, 10), (GATE, END, 90))
    works = rank_of(1, (Kind.FORWARD, BEGIN, 0), (WAIT, BEGIN, 30), (WAIT, END, 92))
    for rank_trace in (held, works):
        rows = rank_trace.rows.copy()
        rows["step"], rows["phase"] = -1, Phase.FORWARD
        object.__setattr__(rank_trace, "rows", rows)
    assert pairs(cuts(Trace(Header(world_size=2), (held, works)))) == [(30, 90)]


def test_a_trace_without_a_stop_is_left_as_it_is():
    trace = example_trace()
    shown, found = without_holds(trace)
    assert shown is trace
    assert not len(found)


@given(trace=traces(whole=True), number=st.integers(0, 3), hold_ns=st.integers(0, 10**12))
def test_a_stopped_run_is_shown_without_its_stops(trace, number, hold_ns):
    """Except for the time between the first and the last arrival at the stop."""
    backwards = [(r.rows["kind"] == Kind.BACKWARD) & (r.rows["edge"] == BEGIN) for r in trace.ranks]
    if min((int(b.sum()) for b in backwards), default=0) <= number:
        return
    held = stopped_before(trace, Kind.BACKWARD, number=number, hold_ns=hold_ns)
    arrivals = [int(r.rows["t_ns"][r.rows["kind"] == GATE][0]) for r in held.ranks]
    spread = max(arrivals) - min(arrivals)
    shown, found = without_holds(held)
    assert hold_ns <= found.lengths_ns.sum() <= hold_ns + spread
    for before, after in zip(trace.ranks, shown.ranks, strict=True):
        kept, t_ns = after.rows[after.rows["kind"] != GATE], before.rows["t_ns"]
        in_order = t_ns == np.maximum.accumulate(t_ns)  # a row with an earlier true time may be within the stop itself
        assert np.abs(kept["t_ns"] - t_ns)[in_order].max() <= spread


_steps = st.lists(st.tuples(st.sampled_from([WAIT, GATE]), st.integers(0, 5), st.integers(0, 30)), max_size=6)


@st.composite
def jobs(draw):
    """Draw ranks that wait, are held, and work, for any durations, in one step each."""
    ranks = []
    for _ in range(draw(st.integers(1, 4))):
        t_ns = draw(st.integers(0, 10))
        entries = [(STEP, BEGIN, t_ns)]
        for kind, works, lasts in draw(_steps):
            entries += [(kind, BEGIN, t_ns + works), (kind, END, t_ns + works + lasts)]
            t_ns += works + lasts
        entries.append((STEP, END, t_ns + draw(st.integers(0, 5))))
        ranks.append(entries[: draw(st.integers(1, len(entries)))])
    return trace_of(*ranks)


def by_hand(trace):
    """Return every nanosecond that must be cut, one by one."""
    last = max(int(r.rows["t_ns"][-1]) for r in trace.ranks)
    return {t for t in range(last) if _stands(trace, t)}


def _stands(trace, t_ns):
    stances = set()
    for rank_trace in trace.ranks:
        stance = "away"
        for row in rank_trace.rows[rank_trace.rows["t_ns"] <= t_ns]:
            began = row["edge"] == BEGIN
            stance = {STEP: "works" if began else "away", GATE: "held" if began else "works",
                      WAIT: "waits" if began else "works"}[Kind(row["kind"])]  # fmt: skip
        stances.add(stance)
    return "held" in stances and "works" not in stances


@settings(max_examples=200)
@given(trace=jobs())
def test_exactly_the_time_without_a_working_rank_is_removed(trace):
    found = cuts(trace)
    assert {t for begin, end in pairs(found) for t in range(begin, end)} == by_hand(trace)
    assert (found.begin_ns[1:] > found.end_ns[:-1]).all()


@given(trace=jobs(), times=st.lists(st.integers(-10, 400), min_size=2))
def test_the_mapping_is_monotone_never_stretches_and_finds_back(trace, times):
    found = cuts(trace)
    true_ns = np.sort(np.array(times, np.int64))
    shown_ns = found.shown(true_ns)
    assert (np.diff(shown_ns) >= 0).all()
    assert (np.diff(shown_ns) <= np.diff(true_ns)).all()
    for true, shown in zip(true_ns.tolist(), shown_ns.tolist(), strict=True):
        assert found.true_at(shown) >= true
        assert found.shown_at(found.true_at(shown)) == shown


@given(trace=jobs(), times=st.lists(st.integers(0, 200), max_size=5))
def test_a_growing_trace_keeps_its_cuts(trace, times):
    growing = GrowingCuts()
    grows(growing, trace, times)
    assert pairs(growing.cuts.joined()) == pairs(cuts(trace))


def grows(growing, trace, times):
    """Pass ever more of a trace to ``growing``; no time that was shown moves."""
    seen = []
    for until in [*sorted(times), 10**6]:
        part = Trace(trace.header, tuple(_until(r, until) for r in trace.ranks))
        known = [t for r in part.ranks for t in r.rows["t_ns"].tolist()]
        found = growing.update(part)
        for before, times_ns in seen:
            assert found.shown(times_ns).tolist() == before
        if known:
            seen.append((found.shown(np.array(known)).tolist(), np.array(known)))


def _until(rank_trace, t_ns):
    return replace(rank_trace, rows=rank_trace.rows[rank_trace.rows["t_ns"] <= t_ns])


IDLE = 10


def idle_by_hand(trace):
    """Return every nanosecond of idle time in runs of at least IDLE, one by one."""
    first, last = (edge(t for r in trace.ranks for t in r.rows["t_ns"].tolist()) for edge in (min, max))
    idle = [t for t in range(first, last) if all(_is_away(r, t) for r in trace.ranks)]
    runs = np.split(idle, np.flatnonzero(np.diff(idle) > 1) + 1) if idle else []
    return {int(t) for run in runs if len(run) >= IDLE for t in run}


def _is_away(rank_trace, t_ns):
    before = rank_trace.rows[rank_trace.rows["t_ns"] <= t_ns]
    after = rank_trace.rows[len(before) :]
    is_reset = len(after) and after["kind"][0] == Kind.RESET
    return is_reset or not len(before) or (before["kind"][-1], before["edge"][-1]) in {(STEP, END), (Kind.RESET, 2)}


@st.composite
def runs(draw):
    """Draw ranks that take steps, pause between them for any duration, and abort some."""
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        entries, t_ns = [], draw(st.integers(0, 20))
        for rests, works, waits, is_aborted in draw(
            st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 20), st.booleans()), max_size=4)
        ):
            times = np.cumsum([t_ns + rests, works, waits, works]).tolist()
            end = (Kind.RESET, Edge.INSTANT) if is_aborted else (STEP, END)
            edges = [(STEP, BEGIN), (WAIT, BEGIN), (WAIT, END), end]
            entries += [(*edge, when) for edge, when in zip(edges, times, strict=True)]
            t_ns = times[-1]
        ranks.append(entries or [(STEP, BEGIN, t_ns), (STEP, END, t_ns + 1)])
    return trace_of(*ranks)


@settings(max_examples=200)
@given(trace=runs())
def test_exactly_the_long_idle_time_is_removed(trace):
    found = GrowingCuts(IDLE).update(trace).joined()
    assert {t for begin, end in pairs(found) for t in range(begin, end)} == idle_by_hand(trace)


@given(trace=runs(), times=st.lists(st.integers(0, 200), max_size=5))
def test_idle_time_of_a_growing_trace_keeps_earlier_cuts(trace, times):
    """For each prefix shown, less than IDLE of its idle time remains."""
    growing = GrowingCuts(IDLE)
    grows(growing, trace, times)
    cut = {t for begin, end in pairs(growing.cuts.joined()) for t in range(begin, end)}
    whole = idle_by_hand(trace)
    assert cut <= whole
    assert len(whole - cut) < IDLE * (len(times) + 1)


def test_a_late_abort_does_not_make_working_time_idle():
    """Rank 0 works until 11. Rank 1 is silent from 10 and aborts at 20. So both are idle for 9, which is too short."""
    works = [(STEP, BEGIN, 0), (WAIT, BEGIN, 1), (WAIT, END, 10), (STEP, END, 11)]
    aborts = [(STEP, BEGIN, 0), (WAIT, BEGIN, 10), (WAIT, END, 10), (Kind.RESET, Edge.INSTANT, 20)]
    growing = GrowingCuts(IDLE)
    grows(growing, trace_of(works, aborts), [11])
    assert not len(growing.cuts)


def test_of_a_run_with_pauses_between_its_steps_the_axis_shows_the_steps():
    minutes_ns = 420 * 10**9
    rows = [(STEP, BEGIN, 0), (STEP, END, 60), (STEP, BEGIN, minutes_ns), (STEP, END, minutes_ns + 50)]
    found = GrowingCuts(10**9).update(trace_of(rows, rows))
    assert pairs(found) == [(60, minutes_ns)]
    assert found.shown_at(minutes_ns + 50) == 110
    assert pairs(cuts(trace_of(rows, rows))) == []
