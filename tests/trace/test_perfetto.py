import json
import math
from dataclasses import replace

import numpy as np
from hypothesis import given

from tests.helpers.device_trace import hung, on_devices
from tests.helpers.trace_strategies import example_trace, traces
from workbench.events import COLLECTIVES, RANK_TRACKS, Category, Edge, Kind, Phase
from workbench.trace import RankTrace, Trace, advance, to_perfetto
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, GroupInfo, Header, KeyFrame


def events_of(trace: Trace, *types: str) -> list[dict]:
    return [event for event in to_perfetto(trace)["traceEvents"] if event["ph"] in types]


def test_facts_about_a_rank_are_next_to_its_name():
    trace = example_trace(num_ranks=2, steps=1)
    bare = Trace(Header(world_size=2, strings=trace.header.strings, units=trace.header.units), trace.ranks)
    for exported, place in ((trace, ["localhost, cpu, "] * 2), (bare, ["", ""])):
        events = to_perfetto(exported, {1: "roughly"})["traceEvents"]
        names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert names[1] == f"rank 1 ({place[1]}roughly)"
        assert "roughly" not in names[0]


def nanoseconds(event: dict) -> tuple[int, int]:
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def thread_names(trace: Trace) -> dict[tuple[int, int], str]:
    names = [e for e in events_of(trace, "M") if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in names}


@given(traces())
def test_the_export_is_valid_json_without_nan(trace):
    data = to_perfetto(trace)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert all(e.get("ts", 0) >= 0 for e in data["traceEvents"])


@given(traces())
def test_every_drawn_begin_is_one_span(trace):
    drawn = events_of(trace, "X")
    for rank in trace.ranks:
        begun = rank.rows[(rank.rows["edge"] == Edge.BEGIN) & (rank.rows["kind"] != Kind.UNSHARD)]["seq"]
        assert sorted(e["args"]["seq"] for e in drawn if e["pid"] == rank.rank) == begun.tolist()


@given(traces())
def test_spans_of_a_thread_nest_and_have_a_name_for_it(trace):
    names, open_ends = thread_names(trace), {}
    for event in sorted(events_of(trace, "X"), key=lambda e: (e["ts"], -e["dur"])):
        begin, end = nanoseconds(event)
        assert begin <= end
        stack = open_ends.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)
    assert open_ends.keys() == names.keys()


@given(traces())
def test_every_arrow_has_both_ends_on_a_span(trace):
    spans = {(e["pid"], e["tid"], e["ts"]) for e in events_of(trace, "X")}
    starts, ends = ({e["id"]: e for e in events_of(trace, ph)} for ph in ("s", "f"))
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert {(e["pid"], e["tid"], e["ts"]) for e in (start, end)} <= spans


@given(traces())
def test_the_last_counter_is_the_state_at_the_end(trace):
    for rank in trace.ranks:
        counters = [e for e in events_of(trace, "C") if e["pid"] == rank.rank and e["name"] == "live bytes"]
        live = advance(rank.start, rank.rows).bytes_by_category
        if counters:
            assert counters[-1]["args"] == {c.words: live[c] for c in Category if c.words in counters[-1]["args"]}
            assert sum(counters[-1]["args"].values()) == sum(live)


def test_the_example_has_an_arrow_per_collective_and_its_loss():
    trace = example_trace(num_ranks=2)
    begun = [(r.rows["edge"] == Edge.BEGIN) & np.isin(r.rows["kind"], COLLECTIVES) for r in trace.ranks]
    assert len(events_of(trace, "s")) == sum(int(b.sum()) for b in begun)
    assert len([e for e in events_of(trace, "C") if e["name"] == "loss"]) == 6
    processes = [e["args"]["name"] for e in events_of(trace, "M") if e["name"] == "process_name"]
    assert processes == ["rank 0 (localhost, cpu)", "rank 1 (localhost, cpu)"]
    assert {"forward blocks.0", "forward (root)", "all-gather blocks.1", "step"} <= {
        e["name"] for e in events_of(trace, "X")
    }


def test_overlapping_collectives_are_on_additional_threads():
    assert "all-gather 2" in thread_names(example_trace(num_ranks=2)).values()


def test_an_empty_trace_has_no_events():
    assert to_perfetto(Trace.empty())["traceEvents"] == []


def rows_of(*entries: dict) -> np.ndarray:
    rows = np.zeros(len(entries), ROW_DTYPE)
    for place, entry in enumerate(entries):
        defaults = {"seq": place, "t_ns": 1000 * place, "value": math.nan, "category": NO_CATEGORY}
        defaults |= dict.fromkeys(("step", "module", "comm_seq", "unit", "comm_group"), -1)
        for name, value in (defaults | entry).items():
            rows[name][place] = value
    return rows


def test_an_unfinished_span_reaches_the_last_row_and_is_marked():
    rows = rows_of(
        {"kind": Kind.STEP, "edge": Edge.BEGIN, "phase": Phase.FORWARD},
        {"kind": Kind.GATE, "edge": Edge.BEGIN},
        {"kind": Kind.GATE, "edge": Edge.END},
    )
    step, gate = events_of(Trace(Header(), (RankTrace(0, rows),)), "X")
    assert (step["name"], step["dur"], step["args"]["unfinished"]) == ("step", 2.0, True)
    assert (gate["name"], gate["dur"], "unfinished" in gate["args"]) == ("held at a gate", 1.0, False)


def test_logged_texts_are_marks_and_nonfinite_numbers_are_left_out():
    rows = rows_of(
        {"kind": Kind.LOG, "edge": Edge.INSTANT, "module": 1},
        {"kind": Kind.METRIC, "edge": Edge.INSTANT, "module": 0, "value": math.inf},
        {"kind": Kind.METRIC, "edge": Edge.INSTANT, "module": 0, "value": 2.5},
    )
    trace = Trace(Header(strings=("loss", "</script>")), (RankTrace(0, rows),))
    assert [(e["name"], e["ts"]) for e in events_of(trace, "i")] == [("</script>", 0.0)]
    assert [e["args"] for e in events_of(trace, "C")] == [{"value": 2.5}]


def name_event(what, thread, name):
    return {"ph": "M", "name": what, "pid": 3, "tid": thread, "args": {"name": name}}


def test_every_field_of_every_kind_of_event():
    collective = {"unit": 0, "comm_group": 0, "comm_seq": 7, "num_bytes": 64}
    rows = rows_of(
        {"kind": Kind.STEP, "edge": Edge.BEGIN, "phase": Phase.FORWARD, "step": 5, "t_ns": 2500},
        {
            "kind": Kind.ALLOC,
            "edge": Edge.INSTANT,
            "num_bytes": 40,
            "category": Category.UNSHARDED_PARAMS,
            "t_ns": 3500,
        },
        {"kind": Kind.ALL_GATHER, "edge": Edge.BEGIN, "phase": Phase.FORWARD, "step": 5, "t_ns": 4000, **collective},
        {"kind": Kind.WAIT, "edge": Edge.BEGIN, "phase": Phase.FORWARD, "step": 5, "t_ns": 5000, **collective},
        {"kind": Kind.WAIT, "edge": Edge.END, "phase": Phase.FORWARD, "step": 5, "t_ns": 6000, **collective},
        {"kind": Kind.ALL_GATHER, "edge": Edge.END, "phase": Phase.FORWARD, "step": 5, "t_ns": 6000, **collective},
        {"kind": Kind.RESHARD, "edge": Edge.INSTANT, "unit": 0, "t_ns": 7000},
        {"kind": Kind.LOG, "edge": Edge.INSTANT, "module": 0, "t_ns": 8000},
        {"kind": Kind.METRIC, "edge": Edge.INSTANT, "module": 1, "value": 0.5, "t_ns": 8500},
        {"kind": Kind.RESIDENT, "edge": Edge.INSTANT, "num_bytes": 99, "t_ns": 9500},
    )
    rows["seq"] += 10
    unit = replace(example_trace(num_units=2).header.units[0], name="blocks.0")
    header = Header(
        producer="me", world_size=4, units=(unit,), strings=("note", "loss"), comm_groups=(GroupInfo(name="g"),)
    )
    start = KeyFrame(seq=10, bytes_by_category=(8, *[0] * (len(Category) - 1)))
    found = to_perfetto(Trace(header, (RankTrace(3, rows, start),)))
    assert {key: value for key, value in found.items() if key != "traceEvents"} == {
        "displayTimeUnit": "ms",
        "otherData": {"producer": "me"},
    }
    tracks = {track: number * 1000 for number, track in enumerate(RANK_TRACKS)}
    compute, gather, wait = (tracks[kind.info.track] for kind in (Kind.STEP, Kind.ALL_GATHER, Kind.WAIT))
    common = {"step": 5, "phase": Phase.FORWARD.words}
    arrow = {"name": "issued", "pid": 3, "cat": "collective", "id": (3 << 32) + 13}
    expected = [
        name_event("process_name", 0, "rank 3"),
        {
            "ph": "X",
            "name": "step",
            "pid": 3,
            "ts": 0.0,
            "tid": compute,
            "dur": 7.0,
            "args": {**common, "seq": 10, "unfinished": True},
        },
        {
            "ph": "X",
            "name": "all-gather blocks.0",
            "pid": 3,
            "ts": 1.5,
            "tid": gather,
            "dur": 2.0,
            "args": {**common, "seq": 12, "bytes": 64},
        },
        {
            "ph": "X",
            "name": "wait blocks.0",
            "pid": 3,
            "ts": 2.5,
            "tid": wait,
            "dur": 1.0,
            "args": {**common, "seq": 13, "bytes": 64},
        },
        {"ph": "s", "ts": 1.5, "tid": gather, **arrow},
        {"ph": "f", "ts": 2.5, "tid": wait, "bp": "e", **arrow},
        {"ph": "C", "name": "live bytes", "pid": 3, "ts": 1.0, "args": {"sharded params": 8, "unsharded params": 40}},
        {"ph": "i", "name": "reshard blocks.0", "pid": 3, "ts": 4.5, "tid": compute, "s": "t"},
        {"ph": "i", "name": "note", "pid": 3, "ts": 5.5, "tid": compute, "s": "p"},
        {"ph": "C", "name": "loss", "pid": 3, "ts": 6.0, "args": {"value": 0.5}},
        {"ph": "C", "name": "resident bytes", "pid": 3, "ts": 7.0, "args": {"value": 99}},
    ]
    assert [e for e in found["traceEvents"] if not e["name"].startswith("thread_")] == expected


def spans_by_track(events, rank=0):
    """Return ``(name, ts, dur)`` of each span of a rank, by track name."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    found: dict[str, list] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == rank:
            found.setdefault(names[event["tid"]].rstrip(" 23"), []).append((event["name"], event["ts"], event["dur"]))
    return found


def test_device_spans_are_next_to_the_hosts():
    true = example_trace(steps=2)
    trace = on_devices(true)
    found, expected = (spans_by_track(to_perfetto(t)["traceEvents"]) for t in (trace, true))
    assert {name for name in found if name.startswith("host: ")} == {f"host: {name}" for name in expected}
    names = {"compute", "copy-in", "reduce", "all-gather", "reduce-scatter"}
    assert {name for name in found if name.startswith("device: ")} == {f"device: {name}" for name in names}
    for kind in ("all-gather", "reduce-scatter"):
        assert sorted(found[f"device: {kind}"]) == sorted(expected[kind])
    assert found["device: compute"] != found["host: compute"]


def test_unreached_device_work_has_no_span_and_current_work_is_unfinished():
    trace = on_devices(example_trace(steps=2))
    rows = trace.rank(0).rows
    waits = (rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.END) & (rows["step"] == 1)
    stuck = hung(trace, 0, int(np.flatnonzero(waits)[2]))
    events = [e for e in to_perfetto(stuck)["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    unfinished = [e["name"] for e in events if e["args"].get("unfinished")]
    assert sum(name.startswith("wait") for name in unfinished) == 1
