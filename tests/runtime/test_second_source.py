"""Recording a source other than our engine: it calls a probe, and everything works on its events."""

import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.figure_checks import title
from tests.helpers.live_view import DashboardView
from tests.helpers.package_source import REPO
from tests.helpers.plain_loop import ITEMSIZE, NAME, OnRank, PlainLoop
from tests.helpers.waiting import wait_until
from workbench.engine import probe
from workbench.engine.event_source import SOURCE
from workbench.events import Category, Edge, Kind, Phase, UnitState
from workbench.live.messages import AskFeed
from workbench.models.engines import Watch
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Inspect
from workbench.protocol.rank_messages import Job, SetBreakpoints
from workbench.replay import memory
from workbench.replay.states import spans
from workbench.runtime.gate import Gate
from workbench.runtime.recorder import Recorder
from workbench.session.snapshot import ClusterSnapshot
from workbench.trace import TraceBuilder, advance, check, load, save, to_perfetto
from workbench.trace.schema import Header, RankInfo
from workbench.views import VIEWS, compare, draw

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


def test_views_show_its_events(recorded):
    loop, trace = recorded
    assert "as expected" in title(draw("comms", trace))
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
    reported, _ = DashboardView().answer(AskFeed(), ClusterSnapshot(trace=trace), time.monotonic)
    assert all(reported["counts"][table] > 0 for table in ("spans", "memory", "states", "steps"))


def stopped_before(event, unit, look=lambda gate: None):
    """Train a step; at rank 0's first stop, call ``look`` and continue. Return its result, and the recorders."""
    made = recorders()
    gate = Gate(made[0], 0)
    loop = PlainLoop([gate, made[1]])
    gate.request(SetBreakpoints(breakpoints=(Breakpoint(id=1, event=event, unit=unit, once=True),)))
    seen = []

    def let_go():
        wait_until(lambda: gate.held)
        seen.append((gate.held, look(gate)))
        gate.request(Continue())

    helper = threading.Thread(target=let_go)
    helper.start()
    loop.step()
    helper.join()
    return seen[0], made


def test_it_stops_at_breakpoints():
    (held, _), made = stopped_before("backward", "layers.1")
    found = held.kind, held.edge, held.unit, held.phase, held.breakpoint
    assert found == (Kind.BACKWARD, Edge.BEGIN, 2, Phase.BACKWARD, 1)
    rows = trace_of(made).ranks[0].rows
    assert (rows["kind"] == Kind.GATE).sum() == 2
    assert check(trace_of(made)) == []


def inspected(gate, *names):
    for name in names:
        assert gate.request(Job(ticket=name, work=Inspect(name)))
    wait_until(lambda: set(names) <= gate.tickets.keys())
    return [gate.tickets[name] for name in names]


def test_its_parameters_are_inspected_like_the_engines():
    def look(gate):
        return inspected(gate, "layers.1.weight", "layers.0.weight", "weight", "layer")

    (_, (running, earlier, root, unknown)), _ = stopped_before("backward.end", "layers.1", look)
    mine = running.inspected
    assert (mine.unit, mine.model, mine.global_shape) == ("layers.1", "", (8,))
    assert (mine.shard.first_row, mine.shard.num_rows, mine.shard.of_rows) == (0, 4, 8)
    assert mine.shard.values.dtype == "float64"
    assert mine.shard.values.mean == pytest.approx(0.9)
    assert mine.full.state is UnitState.UNSHARDED
    assert mine.full.why == "its backward runs (requested in pre-backward of step 0)"
    assert mine.full.values.num_bytes == 8 * ITEMSIZE
    assert mine.full_grad.shape == (8,)
    assert mine.sharded_grad is None
    assert (earlier.inspected.full.state, earlier.inspected.full.values) == (UnitState.SHARDED, None)
    assert root.inspected.sharded_grad.shape == (4,)
    assert "nearest: layers.2.weight, layers.1.weight" in unknown.error.evalue


def test_the_reason_of_a_parameter_comes_from_its_events():
    cases = {
        ("forward", "layers.1"): "its forward is about to run (requested in forward of step 0)",
        ("forward.end", "layers.1"): "its forward runs (requested in forward of step 0)",
        ("all_gather", "layers.1"): "about to be all-gathered (requested in forward of step 0)",
        (
            "all_gather.end",
            "layers.1",
        ): "its all-gather was issued (requested in forward of step 0); compute has not waited",
        ("reshard", "layers.1"): "not resharded yet (requested in forward of step 0)",
        ("reduce_scatter", "layers.1"): "not needed now: only this rank's rows are in memory",
    }
    for event, why in cases.items():
        (_, (done,)), _ = stopped_before(*event, lambda gate: inspected(gate, "layers.1.weight"))
        assert done.inspected.full.why.startswith(why), event


def test_it_imports_only_events():
    program = "import sys, tests.helpers.plain_loop; print(*{m for m in sys.modules if m.startswith('workbench')})"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"workbench", "workbench.events"}


def test_two_sources_on_a_rank_are_both_named():
    recorder = Recorder(Header())
    mine = OnRank(PlainLoop(recorders()), 0)
    for source in (SOURCE, mine, SOURCE):
        recorder.source(source)
    assert recorder.header.producer == f"{SOURCE.name}, {NAME}"


def test_our_engine_names_itself_where_it_is_listened_to():
    recorder = Recorder(Header())
    probe.active, watch = recorder, Watch()
    try:
        watch.begin()
        assert recorder.header.producer.startswith(f"{SOURCE.name}, ")
    finally:
        watch.end()
        probe.active = None
