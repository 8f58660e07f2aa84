"""Add two kinds of events to the workbench, one row each, and check every part that treats kinds.

Run as ``python -m tests.helpers.added_kinds``. It inserts the rows in the text of ``workbench/events.py`` before
anything else imports it, and changes nothing else.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROWS = """
    COLLECTIVE_PERMUTE = {0}, _span("collective-permute", Colour.ALL_GATHER, Track.OTHER, is_collective=True)
    EVICT = {1}, _instant(
        "evict", Colour.GIVEN_UP, is_event=True, is_stop=True, states=((Edge.INSTANT, UnitState.SHARDED),)
    )
"""


def with_rows(text: str) -> str:
    """Return the text of ``workbench/events.py`` with the rows added to its kinds."""
    before, rest = text.split("\nclass Kind(Word):", 1)
    kinds, after = rest.split("\n\n\n", 1)
    known: dict = {"__name__": "known"}
    sys.modules["known"] = ModuleType("known")
    exec(compile(text, "known", "exec"), known)
    number = len(known["Kind"])
    return f"{before}\nclass Kind(Word):{kinds}{ROWS.format(number, number + 1)}\n\n{after}"


def install() -> None:
    """Make ``workbench.events`` the module with the added rows."""
    path = Path(find_spec("workbench").submodule_search_locations[0]) / "events.py"
    module = ModuleType("workbench.events")
    sys.modules["workbench.events"] = module
    exec(compile(with_rows(path.read_text(encoding="utf-8")), str(path), "exec"), module.__dict__)


def record():
    """Return the trace of one rank with a step in which both kinds occur."""
    from workbench.events import Category, Comm, Edge, Kind, Phase, Unit
    from workbench.runtime.recorder import Recorder
    from workbench.trace.builder import TraceBuilder
    from workbench.trace.schema import Header, RankInfo

    recorder = Recorder(Header(world_size=1))
    info = RankInfo(rank=0, host="localhost", device="cpu", pid=1)
    recorder.set_run(info, mesh_shape=(1,), mesh_axes=("shard",))
    dtypes = {"compute_dtype": "float32", "reduce_dtype": "float32", "compute_itemsize": 4, "reduce_itemsize": 4}
    unit = Unit(index=0, name="blocks.0", root=0, params=(), reshard_after_forward=True, shard_size=1, **dtypes)
    recorder.unit(unit)
    recorder.comm_group(0, (0,))
    recorder.begin_step()
    recorder.phase(Phase.FORWARD)
    recorder.event(Kind.FORWARD, Edge.BEGIN, 0, 0, None, None)
    recorder.memory(Category.UNSHARDED_PARAMS, 0, 4096)
    recorder.event(Kind.UNSHARD, Edge.BEGIN, 0, 0, None, None)
    recorder.event(Kind.UNSHARD, Edge.END, 0, 0, None, None)
    recorder.event(Kind.COLLECTIVE_PERMUTE, Edge.BEGIN, 0, 4096, Comm(group=0, seq=0), None)
    recorder.event(Kind.WAIT, Edge.BEGIN, 0, 0, Comm(group=0, seq=0), None)
    recorder.event(Kind.WAIT, Edge.END, 0, 0, Comm(group=0, seq=0), None)
    recorder.event(Kind.COLLECTIVE_PERMUTE, Edge.END, 0, 4096, Comm(group=0, seq=0), None)
    recorder.event(Kind.EVICT, Edge.INSTANT, 0, 0, None, None)
    last = recorder.last_event()
    recorder.memory(Category.UNSHARDED_PARAMS, 0, -4096)
    assert last["kind"] == recorder.last_event()["kind"] == Kind.EVICT, "what says where a rank is"
    recorder.event(Kind.FORWARD, Edge.END, 0, 0, None, None)
    recorder.end_step()
    drained = recorder.drain()
    builder = TraceBuilder()
    builder.update_header(recorder.header, rank=0)
    builder.append(0, drained.rows, key_frame=drained.key_frame)
    assert drained.key_frame.unit_states == {}, "the state of its unit after EVICT"
    return builder.snapshot()


def check_trace(trace) -> None:
    """Check invariants, the file, begin/end pairs, states and the alignment with another trace."""
    from workbench.events import Kind
    from workbench.replay.alignment import align
    from workbench.replay.collectives import table
    from workbench.trace import check, load, save, to_perfetto

    assert check(trace) == []
    with tempfile.TemporaryDirectory() as folder:
        save(trace, Path(folder) / "run.trace")
        assert load(Path(folder) / "run.trace") == trace
    drawn = to_perfetto(trace)["traceEvents"]
    assert {("X", "collective-permute blocks.0"), ("i", "evict blocks.0")} <= {(e["ph"], e["name"]) for e in drawn}
    assert len([e for e in drawn if e["ph"] == "s"]) == 1, "the arrow from a collective to its wait"
    assert table(trace.ranks[0]).kind.tolist() == [Kind.COLLECTIVE_PERMUTE]
    side = align((trace.header, trace.ranks[0]), (trace.header, trace.ranks[0])).a
    assert {Kind.COLLECTIVE_PERMUTE, Kind.EVICT} <= set(side.rows["kind"][side.place].tolist())


def check_stops() -> None:
    """Check breakpoints, completion, and the text of a stop position."""
    from workbench.events import Edge, Kind
    from workbench.magics.shell import EVENTS
    from workbench.protocol.breakpoints import parse_event, split_event
    from workbench.reports.event_text import event_words

    assert parse_event("collective-permute.end:blocks.0", ["blocks.0"]) == ("collective_permute.end", "blocks.0")
    assert split_event("collective_permute.end") == (Kind.COLLECTIVE_PERMUTE, Edge.END)
    assert split_event("evict") == (Kind.EVICT, Edge.INSTANT)
    assert {"collective_permute", "evict"} <= set(EVENTS)
    assert event_words(Kind.COLLECTIVE_PERMUTE, Edge.END, "blocks.0") == "the end of collective-permute of blocks.0"


def check_pictures(trace) -> None:
    """Check the views and the live timeline."""
    from workbench.cli.generate_front_end import EVENTS, programs
    from workbench.events import Kind
    from workbench.live.live_spans import RankSpans
    from workbench.live.state_at import describe
    from workbench.views import VIEWS, draw, theme

    for view in VIEWS:
        draw(view, trace)
    bars = {bar.name: bar for bar in draw("timeline", trace).data}
    assert bars["collective-permute"].marker.color == theme.KIND_COLOURS[Kind.COLLECTIVE_PERMUTE]
    assert "collective-permute" in {bar.name for bar in draw("comms", trace).data}
    found = RankSpans().take(trace.ranks[0])
    assert Kind.COLLECTIVE_PERMUTE in found["kind"].tolist()
    assert '{"words": "collective-permute", "colour": ' in programs()[EVENTS]
    assert f"  EVICT: {int(Kind.EVICT)},\n" in programs()[EVENTS]
    rows = trace.ranks[0].rows
    assert describe(trace.header, rows[rows["kind"] == Kind.EVICT][0]) == "evict of blocks.0"


if __name__ == "__main__":
    install()
    recorded = record()
    check_trace(recorded)
    check_stops()
    check_pictures(recorded)
