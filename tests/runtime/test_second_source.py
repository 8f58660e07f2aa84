"""What is recorded of a source that is not our engine: it calls a probe, and everything works on what it told."""

import subprocess
import sys
import threading

import pytest

from tests.runtime.plain_loop import NAME, PlainLoop
from tests.source import REPO
from tests.views.figures import title
from tests.waiting import wait_until
from workbench.engine import probe
from workbench.events import Category, Kind, UnitState
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue
from workbench.protocol.messages import SetBreakpoints
from workbench.replay import memory
from workbench.replay.states import spans
from workbench.runtime.gate import Gate
from workbench.runtime.recorder import Recorder
from workbench.trace import TraceBuilder, advance, check, load, save, to_perfetto
from workbench.trace.schema import Header, RankInfo
from workbench.views import VIEWS, compare, draw
from workbench.widgets.timeline import Timeline

NUM_RANKS, NUM_STEPS = 2, 3


def recorders():
    made = [Recorder(Header(world_size=NUM_RANKS)) for _ in range(NUM_RANKS)]
    for rank, recorder in enumerate(made):
        info = RankInfo(rank=rank, host="localhost", device="cpu", pid=1)
        recorder.set_run(info, mesh_shape=(NUM_RANKS,), mesh_axes=("shard",))
    return made


def trace_of(made):
    builder = TraceBuilder()
    for rank, recorder in enumerate(made):
        drained = recorder.drain()
        builder.update_header(recorder.header, rank=rank)
        builder.append(rank, drained.rows, lost=drained.lost, key_frame=drained.key_frame)
    return builder.snapshot()


def trained(**policy):
    made = recorders()
    loop = PlainLoop(made, **policy)
    for _ in range(NUM_STEPS):
        loop.step()
    return loop, trace_of(made)


@pytest.fixture(scope="module")
def recorded():
    return trained()


def test_it_keeps_the_rules_and_names_itself(recorded):
    _, trace = recorded
    assert check(trace) == []
    assert trace.header.producer == NAME
    assert [unit.name for unit in trace.header.units] == ["", "layers.0", "layers.1", "layers.2"]


def test_its_bytes_are_those_it_counts_itself(recorded):
    loop, trace = recorded
    for rank in trace.ranks:
        assert memory.peak(rank).num_bytes == loop.peak
        last = advance(rank.start, rank.rows).bytes_by_category
        assert last == tuple(loop.live[category] for category in Category)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws_it(recorded, view):
    fig = draw(view, recorded[1])
    assert len(fig.data) or fig.layout.shapes
    assert title(fig)


def test_views_say_what_it_did(recorded):
    loop, trace = recorded
    assert "as the closed form says" in title(draw("comms", trace))
    curves = [list(line.y) for line in draw("training", trace).data]
    assert loop.losses in curves
    assert loop.losses == sorted(loop.losses, reverse=True), "it learns"
    drawn = {bar.name for bar in draw("timeline", trace).data}
    assert {"forward", "backward", "optimizer", "all-gather", "reduce-scatter", "wait (exposed)"} <= drawn
    assert UnitState.UNSHARDED in spans(trace.ranks[0]).state.tolist()


def test_two_policies_of_it_are_compared(recorded):
    loop, kept = trained(reshard_after_forward=False)
    fig = compare.draw(recorded[1], kept, names=("resharded", "kept"))
    assert loop.losses == recorded[0].losses
    assert "3 fewer all-gathers a step (layers.0-2)" in title(fig)


def test_it_is_saved_exported_and_drawn_live(recorded, tmp_path):
    _, trace = recorded
    save(trace, tmp_path / "run.trace")
    assert load(tmp_path / "run.trace") == trace
    exported = to_perfetto(load(tmp_path / "run.trace"))
    assert exported["otherData"] == {"producer": NAME}
    names = {event["name"] for event in exported["traceEvents"]}
    assert {"forward (root)", "all-gather layers.2", "reshard layers.0", "live bytes", "loss"} <= names
    live = Timeline(trace)
    assert sum(len(part) for parts in live._told for part in parts) > 0
    live.close()


def test_it_stops_at_breakpoints():
    made = recorders()
    gate = Gate(made[0], 0)
    loop = PlainLoop([gate, made[1]])
    gate.request(SetBreakpoints(breakpoints=(Breakpoint(id=1, event="backward", unit="layers.1"),)))
    held = []

    def let_go():
        wait_until(lambda: gate.held)
        held.append(gate.held)
        gate.request(Continue())

    helper = threading.Thread(target=let_go)
    helper.start()
    loop.step()
    helper.join()
    assert [(h.kind, h.edge, h.unit, h.phase, h.breakpoint) for h in held] == [("backward", "begin", 2, "backward", 1)]
    rows = trace_of(made).ranks[0].rows
    assert (rows["kind"] == Kind.GATE).sum() == 2
    assert check(trace_of(made)) == []


def test_it_needs_nothing_but_the_words():
    program = "import sys, tests.runtime.plain_loop; print(*{m for m in sys.modules if m.startswith('workbench')})"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"workbench", "workbench.events"}


def test_two_sources_on_a_rank_are_both_named():
    recorder = Recorder(Header())
    for name in ("workbench.engine", NAME, "workbench.engine"):
        recorder.source(name)
    assert recorder.header.producer == f"workbench.engine, {NAME}"


def test_our_engine_names_itself_where_it_is_listened_to():
    recorder = Recorder(Header())
    Gate(recorder, 0).install()
    try:
        assert recorder.header.producer == probe.NAME
    finally:
        Gate.uninstall()
