"""What is to be seen at a glance, in words and numbers."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.on_device import on_devices
from tests.trace.simulation import Setup, example_trace, simulate
from tests.trace.strategies import traces
from tests.widgets.test_dashboard import HELD, RUNNING, prefix
from workbench.events import Edge, Kind
from workbench.protocol.messages import Position
from workbench.reports.follow import Progress
from workbench.session.pulse import Pulse, UnderWay, pulse
from workbench.trace.columns import Trace
from workbench.widgets.answers import Answers
from workbench.widgets.steps import LATE, Steps
from workbench.widgets.summary import STUCK_S, knobs, slowest, status, turned, whose

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
            "nothing has happened for 12 s: rank 0 still in code of its own, ranks 1-3 waiting for others",
        ),
        (dict.fromkeys(range(4), RUNNING), 60.0, "training", ""),  # a long computation
        (dict.fromkeys(range(4), HELD), 60.0, "stopped", "ranks 0-3 before all-gather of blocks.1, step 1"),
        (dict.fromkeys(range(4), Position()), 60.0, "idle", "step 2 was the last"),
    ],
)
def test_the_word_for_what_ranks_do(positions, quiet_s, word, why):
    found = status(pulse(TRACE, [True] * 4, positions), quiet_s)
    assert (found.word, found.why) == (word, why)


def test_a_dead_rank_is_said_in_words_before_all_else():
    alive = pulse(TRACE, [True, False, True, True], dict.fromkeys(range(4), HELD))
    assert status(alive, 0.0).word == "dead"
    assert status(alive, 0.0).why == "rank 1 is gone"
    how = replace(alive, losses={1: "died: the process was killed by SIGKILL"})
    assert status(how, 0.0).why == "rank 1 died: the process was killed by SIGKILL"


def test_without_ranks_it_is_over_or_was_never():
    assert status(Pulse(trace=TRACE), 0.0).word == "over"
    assert status(Pulse(trace=Trace.empty()), 0.0).word == "empty"
    nothing = pulse(Trace.empty(), [True], {0: Position()})
    assert (status(nothing, 0.0).word, status(nothing, 0.0).why) == ("empty", "no step was trained yet")


def test_whose_ranks_they_are():
    assert ", cuda, of" in whose(on_devices(TRACE).header, 12)
    assert whose(TRACE.header, 12).startswith("4 ranks on ")
    assert whose(TRACE.header, 12).endswith(", of the kernel with process 12")
    assert whose(Trace.empty().header, 12) == ""


@given(traces(whole=True))
def test_the_exposed_share_is_that_of_the_waits(trace):
    told = Steps().take(trace)
    for step in told:
        waits = [r.rows[(r.rows["kind"] == Kind.WAIT) & (r.rows["step"] == step["step"])] for r in trace.ranks]
        ns = [int(np.where(rows["edge"] == Edge.END, rows["t_ns"], -rows["t_ns"]).sum()) for rows in waits]
        assert step["exposed"] == pytest.approx(min(np.mean(ns) / max(step["step_ns"], 1), 1), abs=1e-5)
        assert step["spread_ns"] == max(ns) - min(ns)
        late = max(ns) - min(ns) > LATE * step["step_ns"]
        assert step["straggler"] == (trace.ranks[int(np.argmin(ns))].rank if late else -1)
        assert bool(slowest(step)) == late


@given(traces(whole=True), st.data())
def test_who_is_late_does_not_depend_on_what_clocks_show(trace, data):
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["t_ns"] += data.draw(st.integers(-(10**12), 10**12))
        ranks.append(replace(rank, rows=rows))
    told, moved = (Steps().take(shown) for shown in (trace, Trace(trace.header, tuple(ranks))))
    for name in ("step", "step_ns", "exposed", "straggler", "spread_ns"):
        assert moved[name].tolist() == told[name].tolist()


def test_in_pieces_steps_cost_what_they_cost_at_once():
    trace, reader = simulate(Setup(num_ranks=2, steps=4)), Steps()
    rows = len(trace.rank(0).rows)
    parts = [reader.take(prefix(trace, end)) for end in range(7, rows + 7, 7)]
    parts.append(reader.take(trace))
    assert np.concatenate(parts).tolist() == Steps().take(trace).tolist()


def resharded(trace, **changes):
    units = tuple(replace(unit, **changes) for unit in trace.header.units)
    return Trace(replace(trace.header, units=units), trace.ranks)


def test_what_was_turned_is_named():
    before = knobs(TRACE.header)
    assert turned(before, before) == ""
    changed = resharded(TRACE, reshard_after_forward=False, offload=True)  # the root's was false before
    said = "reshard after forward: true → false (blocks.0, blocks.1, blocks.2); offloaded: false → true"
    assert turned(before, knobs(changed.header)) == said
    fewer = Trace(replace(TRACE.header, units=TRACE.header.units[:2]), TRACE.ranks)
    assert turned(before, knobs(fewer.header)) == "4 units → 2"


def test_a_turn_of_a_knob_is_told_with_what_it_costs_before_and_after():
    trace, answers = simulate(Setup(num_ranks=2, steps=8)), Answers()
    steps = trace.rank(0).rows["step"]
    half = int(np.flatnonzero(steps == 4)[0])
    first, _ = answers.answer({"ask": "feed"}, Pulse(trace=prefix(trace, half)), time.monotonic)
    assert first["change"] is None
    told, _ = answers.answer({"ask": "feed"}, Pulse(trace=resharded(trace, offload=True)), time.monotonic)
    change = told["change"]
    assert change["what"] == "offloaded: false → true"
    assert change["at_step"] in (3, 4)
    for costs in (change["before"], change["after"]):
        assert costs["num_steps"] >= 2
        assert costs["ms"] > 0
        assert 0 <= costs["exposed"] <= 1
        assert costs["peak_bytes"] > 0


def test_how_far_a_command_is_and_why_ranks_stopped():
    progress = Progress(done=12, total=40, step_ns=2e8, tokens_per_s=12_400.0)
    going = pulse(TRACE, [True] * 4, dict.fromkeys(range(4), RUNNING))
    under_way = replace(going, under_way=UnderWay(words="%fsdp step 40", progress=progress))
    assert status(under_way, 0.0).why == "12 of 40 steps done, 5.60 s to go, 12,400 tokens/s"
    assert status(replace(going, under_way=UnderWay(words="a cell")), 0.0).why == "a cell"
    held = pulse(TRACE, [True] * 4, dict.fromkeys(range(4), HELD))
    stopped = replace(held, under_way=UnderWay(words="%fsdp step 40", reasons=("breakpoint 1: all_gather",)))
    assert status(stopped, 0.0).why.endswith("before all-gather of blocks.1, step 1 (breakpoint 1: all_gather)")
    assert not status(held, 0.0).can_go_on
    assert not status(stopped, 0.0).can_go_on  # the notebook does not know yet that they stand
    assert status(replace(stopped, under_way=replace(stopped.under_way, is_stopped=True)), 0.0).can_go_on
