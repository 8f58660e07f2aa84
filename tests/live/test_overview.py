"""The overview: status, reason and key numbers."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.device_trace import on_devices
from tests.helpers.live_view import DashboardView
from tests.helpers.simulated_job import Setup, example_trace, simulate
from tests.helpers.trace_strategies import traces
from tests.replay.test_shards import make_flat
from tests.widgets.test_dashboard import HELD, RUNNING, prefix
from workbench.events import Edge, Kind
from workbench.live.live_steps import Steps
from workbench.live.messages import AskFeed
from workbench.live.overview import STUCK_S, knobs, slowest, status, turned, whose
from workbench.protocol.rank_messages import Position
from workbench.replay.arrivals import LATE
from workbench.reports.step_progress import Progress
from workbench.session.snapshot import ActivePolicy, ActiveRequest, ClusterSnapshot, pulse
from workbench.trace.columns import Trace

TRACE = example_trace(num_ranks=4)
WAITING = Position(doing="step", waiting=True)


@pytest.mark.parametrize(
    ("positions", "quiet_s", "word", "why"),
    [
        (dict.fromkeys(range(4), RUNNING), 0.0, "training", ""),
        ({0: RUNNING, 1: WAITING, 2: WAITING, 3: WAITING}, STUCK_S - 1, "training", ""),
        (
            {0: RUNNING, 1: WAITING, 2: WAITING, 3: WAITING},
            12.0,
            "stuck",
            "no event for 12 s: rank 0 still running user code, ranks 1-3 waiting for others",
        ),
        (dict.fromkeys(range(4), RUNNING), 60.0, "training", ""),  # a long computation
        (dict.fromkeys(range(4), HELD), 60.0, "stopped", "ranks 0-3 before all-gather of blocks.1, step 1"),
        (dict.fromkeys(range(4), Position()), 60.0, "idle", "step 2 was the last"),
    ],
)
def test_the_status_word(positions, quiet_s, word, why):
    found = status(pulse(TRACE, [True] * 4, positions), quiet_s)
    assert (found.word, found.why) == (word, why)


def test_an_aborted_step_is_reported_as_unfinished():
    rows = TRACE.rank(2).rows
    (end,) = np.flatnonzero((rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END) & (rows["step"] == 2))
    ranks = tuple(replace(r, rows=r.rows[:end]) if r.rank == 2 else r for r in TRACE.ranks)
    idle = pulse(Trace(TRACE.header, ranks), [True] * 4, dict.fromkeys(range(4), Position()))
    assert (status(idle, 0.0).word, status(idle, 0.0).why) == ("idle", "step 2 did not finish")


def test_a_dead_rank_is_reported_first():
    alive = pulse(TRACE, [True, False, True, True], dict.fromkeys(range(4), HELD))
    assert status(alive, 0.0).word == "dead"
    assert status(alive, 0.0).why == "rank 1 is gone"
    how = replace(alive, losses={1: "died: the process was killed by SIGKILL"})
    assert status(how, 0.0).why == "rank 1 died: the process was killed by SIGKILL"


def test_without_ranks_it_is_over_or_was_never():
    assert status(ClusterSnapshot(trace=TRACE), 0.0).word == "over"
    assert status(ClusterSnapshot(trace=TRACE, record="out", is_live=True), 0.0).word == "recorded"
    assert status(ClusterSnapshot(trace=Trace.empty()), 0.0).word == "empty"
    nothing = pulse(Trace.empty(), [True], {0: Position()})
    assert (status(nothing, 0.0).word, status(nothing, 0.0).why) == ("empty", "")


def test_the_holder_of_the_ranks():
    assert ", cuda, kernel" in whose(on_devices(TRACE).header, 12)
    assert whose(TRACE.header, 12).startswith("4 ranks on ")
    assert whose(TRACE.header, 12).endswith(", kernel pid 12")
    assert whose(Trace.empty().header, 12) == ""


@given(traces(whole=True))
def test_the_exposed_share_is_that_of_the_waits(trace):
    steps = Steps().take(trace)
    for step in steps:
        waits = [r.rows[(r.rows["kind"] == Kind.WAIT) & (r.rows["step"] == step["step"])] for r in trace.ranks]
        ns = [int(np.where(rows["edge"] == Edge.END, rows["t_ns"], -rows["t_ns"]).sum()) for rows in waits]
        assert step["exposed"] == pytest.approx(min(np.mean(ns) / max(step["step_ns"], 1), 1), abs=1e-5)
        assert step["spread_ns"] == max(ns) - min(ns)
        late = max(ns) - min(ns) > LATE * step["step_ns"]
        assert step["waits_least"] == (trace.ranks[int(np.argmin(ns))].rank if late else -1)
        assert bool(slowest(step)) == late


@given(traces(whole=True), st.data())
def test_the_rank_that_waits_least_does_not_depend_on_the_clocks(trace, data):
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"] += data.draw(st.integers(-(10**12), 10**12))
        ranks.append(replace(rank, rows=rows))
    steps, moved = (Steps().take(shown) for shown in (trace, Trace(trace.header, tuple(ranks))))
    for name in ("step", "step_ns", "exposed", "waits_least", "spread_ns"):
        assert moved[name].tolist() == steps[name].tolist()


def test_steps_in_pieces_cost_the_same_as_at_once():
    trace, reader = simulate(Setup(num_ranks=2, steps=4)), Steps()
    rows = len(trace.rank(0).rows)
    parts = [reader.take(prefix(trace, end)) for end in range(7, rows + 7, 7)]
    parts.append(reader.take(trace))
    assert np.concatenate(parts).tolist() == Steps().take(trace).tolist()


def resharded(trace, **changes):
    units = tuple(replace(unit, **changes) for unit in trace.header.units)
    return Trace(replace(trace.header, units=units), trace.ranks)


def test_changed_settings_are_named():
    before = knobs(TRACE.header.units)
    assert turned(before, before) == ""
    changed = resharded(TRACE, reshard_after_forward=False, offload=True)  # the root's was already false
    changes = "reshard after forward: true → false (blocks.0, blocks.1, blocks.2); offloaded: false → true"
    assert turned(before, knobs(changed.header.units)) == changes
    assert turned(before, knobs(TRACE.header.units[:2])) == "4 units → 2"
    flat = knobs([replace(unit, params=(make_flat((3, 4), 2),)) for unit in TRACE.header.units])
    assert turned(before, flat) == "api: fully_shard → classic"


LONG = simulate(Setup(num_ranks=2, steps=12))
PLAIN, OFFLOADED, KEPT = (
    resharded(LONG, **changes).header.units for changes in ({}, {"offload": True}, {"reshard_after_forward": False})
)


def change_told(parts):
    """Return the last policy change that a view shows; each part is a step number and the policies known then."""
    answers, change = DashboardView(), None
    steps = LONG.rank(0).rows["step"]
    for until, policies in parts:
        trace = prefix(LONG, int(np.flatnonzero(steps == until)[0]) if until < 12 else len(steps))
        known = tuple(ActivePolicy(from_step=step, units=units) for step, units in policies)
        answer, _ = answers.answer(AskFeed(), ClusterSnapshot(trace=trace, policies=known), time.monotonic)
        change = answer["change"] or change
    return change


def cost_of(first, last):
    """Return the median time of some steps in ms."""
    steps = Steps().take(LONG)
    return float(np.median(steps["step_ns"][(steps["step"] >= first) & (steps["step"] <= last)])) / 1e6


@pytest.mark.parametrize("looks", [(12,), (4, 12), (6, 8, 12), tuple(range(1, 13))])
def test_a_policy_change_is_reported_with_its_step_at_any_poll(looks):
    """The last of two changes, after steps 4 and 8; no average mixes steps of two policies."""
    known = [(0, PLAIN), (5, OFFLOADED), (9, KEPT)]
    change = change_told([(until, [policy for policy in known if policy[0] < max(until, 1)]) for until in looks])
    offload = "offloaded: true → false"
    assert change["what"] == f"reshard after forward: true → false (blocks.0, blocks.1, blocks.2); {offload}"
    assert change["at_step"] == 9
    before, after = change["before"], change["after"]
    assert (before["num_steps"], before["ms"]) == (3, pytest.approx(cost_of(6, 8)))
    assert (after["num_steps"], after["ms"]) == (2, pytest.approx(cost_of(10, 11)))
    for costs in (before, after):
        assert 0 <= costs["exposed"] <= 1
        assert costs["peak_bytes"] > 0


def test_a_reshard_without_changes_is_not_reported():
    renamed = tuple(replace(unit, comm="gloo") for unit in PLAIN)
    assert change_told([(12, [(0, PLAIN), (5, renamed)])]) is None


def test_how_far_a_command_is_and_why_ranks_stopped():
    progress = Progress(done=12, total=40, step_ns=2e8, tokens_per_s=12_400.0)
    going = pulse(TRACE, [True] * 4, dict.fromkeys(range(4), RUNNING))
    under_way = replace(going, under_way=ActiveRequest(words="%fsdp step 40", progress=progress))
    assert status(under_way, 0.0).why == "12 of 40 steps done, 5.60 s to go, 12,400 tokens/s"
    long = replace(
        under_way, under_way=ActiveRequest(words="%fsdp step 100000", progress=replace(progress, total=100_012))
    )
    assert status(long, 0.0).why == "12 of 100,012 steps done, 5 h 33 min to go, 12,400 tokens/s"
    assert status(replace(going, under_way=ActiveRequest(words="a cell")), 0.0).why == "a cell"
    held = pulse(TRACE, [True] * 4, dict.fromkeys(range(4), HELD))
    stopped = replace(held, under_way=ActiveRequest(words="%fsdp step 40", reasons=("breakpoint 1: all_gather",)))
    assert status(stopped, 0.0).why.endswith("before all-gather of blocks.1, step 1 (breakpoint 1: all_gather)")
    assert not status(held, 0.0).can_go_on
    assert not status(stopped, 0.0).can_go_on  # the notebook does not know yet that the ranks are stopped
    assert status(replace(stopped, under_way=replace(stopped.under_way, is_stopped=True)), 0.0).can_go_on
