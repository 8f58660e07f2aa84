"""Profiles of torch.profiler as traces; the samples are of real runs: 4 blocks and a root, 2 ranks, gloo."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.importers.nccl_profile import nccl_profile
from workbench.errors import TraceError
from workbench.events import Edge, Kind, Phase
from workbench.importers import kineto, kineto_profile
from workbench.replay.device import ClockSource, clock_of, on_device
from workbench.trace.begin_end import partners
from workbench.trace.invariants import check
from workbench.views import VIEWS, draw

SAMPLES = Path(__file__).parent / "samples"
FSDP = ("fsdp_2_11", "fsdp_2_13", "fsdp_2_14_shapes", "fsdp_2_13_schedule")


def opened(name):
    return kineto.read(sorted((SAMPLES / name).iterdir()))


def rows_of(trace, kind, edge=Edge.BEGIN, rank=0):
    rows = trace.rank(rank).rows
    return rows[(rows["kind"] == kind) & (rows["edge"] == edge)]


def written(path, events, **more):
    path.write_text(json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, **more, "traceEvents": events}))
    return path


def annotation(name, ts, dur, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}


@pytest.mark.parametrize("name", FSDP)
def test_every_step_has_the_collectives_of_fully_shard(name):
    trace, _ = opened(name)
    assert [unit.name for unit in trace.header.units] == ["", "0", "1", "2", "3"]
    assert [unit.reshard_after_forward for unit in trace.header.units] == [False, True, True, True, True]
    assert [unit.root for unit in trace.header.units] == [0] * 5
    for rank_trace in trace.ranks:
        assert len(rank_trace.steps) == (2 if name.endswith("schedule") else 3)
        for step in rank_trace.steps:
            mine = rank_trace.rows[(rank_trace.rows["step"] == step) & (rank_trace.rows["edge"] != Edge.END)]
            counts = {kind: int((mine["kind"] == kind).sum()) for kind in Kind}
            assert counts[Kind.ALL_GATHER] == counts[Kind.UNSHARD] == counts[Kind.COPY_OUT] == 9
            assert counts[Kind.REDUCE_SCATTER] == counts[Kind.FORWARD] == counts[Kind.BACKWARD] == 5
            assert counts[Kind.RESHARD] == 9
            assert counts[Kind.OPTIMIZER] == counts[Kind.STEP] == 1


@pytest.mark.parametrize("name", [*FSDP, "ddp_2_13"])
def test_spans_are_whole_and_ranks_pair(name):
    trace, _ = opened(name)
    assert check(trace) == []
    pairs = []
    for rank_trace in trace.ranks:
        rows = rank_trace.rows
        assert (partners(rows)[rows["edge"] != Edge.INSTANT] >= 0).all()
        begun = rows[(rows["edge"] == Edge.BEGIN) & (rows["comm_seq"] >= 0) & (rows["kind"] != Kind.WAIT)]
        pairs.append(begun[["comm_group", "comm_seq", "kind", "unit"]].tolist())
    assert pairs[0] == pairs[1]


def test_a_collective_ends_on_no_rank_before_all_have_begun_it():
    trace, _ = opened("fsdp_2_13")
    begins = [rows_of(trace, Kind.ALL_GATHER, rank=rank) for rank in (0, 1)]
    ends = [np.sort(rows_of(trace, Kind.ALL_GATHER, Edge.END, rank), order="comm_seq") for rank in (0, 1)]
    assert (np.maximum(*(rows["t_ns"] for rows in begins)) <= np.minimum(*(rows["t_ns"] for rows in ends))).all()


def test_shapes_give_the_payload():
    trace, notes = opened("fsdp_2_14_shapes")
    assert rows_of(trace, Kind.ALL_GATHER)["num_bytes"][:2].tolist() == [68 * 4, 1072 * 4]
    assert rows_of(trace, Kind.REDUCE_SCATTER)["num_bytes"][:1].tolist() == [1072 * 4]
    assert not any("record_shapes" in note for note in notes)
    assert any("record_shapes=True" in note for note in opened("fsdp_2_13")[1])


def test_phases_follow_the_labels():
    trace, _ = opened("fsdp_2_13")
    assert set(rows_of(trace, Kind.FORWARD)["phase"]) == {Phase.FORWARD}
    assert set(rows_of(trace, Kind.BACKWARD)["phase"]) <= {Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD}
    assert set(rows_of(trace, Kind.REDUCE_SCATTER)["phase"]) == {Phase.POST_BACKWARD}


def test_steps_of_the_profiler_keep_their_numbers():
    assert opened("fsdp_2_13_schedule")[0].rank(0).steps.tolist() == [1, 2]


def test_without_labels_the_collectives_are_shown_and_a_note_says_how_to_name_units():
    trace, notes = opened("ddp_2_13")
    assert trace.header.units == ()
    assert len(rows_of(trace, Kind.ALL_REDUCE)) == 6
    assert len(rows_of(trace, Kind.BROADCAST)) == 2
    assert trace.rank(0).steps.tolist() == [0, 1, 2]
    (note,) = [note for note in notes if "no unit is named" in note]
    assert "fully_shard" in note


@pytest.mark.parametrize("name", [*FSDP, "ddp_2_13", "nccl"])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_draws_an_imported_trace(view, name, tmp_path):
    trace, _ = kineto.read(nccl_profile(tmp_path)) if name == "nccl" else opened(name)
    assert draw(view, trace) is not None


def test_views_say_that_parameters_are_unknown_and_expect_nothing():
    trace, _ = opened("fsdp_2_14_shapes")
    assert "no parameters are known" in draw("comms", trace).layout.title.text
    assert "which parameters the units have" in str(draw("layout", trace).layout)


def test_nccl_kernels_give_the_times_of_the_device(tmp_path):
    trace, notes = kineto.read(nccl_profile(tmp_path))
    assert check(trace) == []
    assert clock_of(trace.header) is ClockSource.DEVICE
    assert [info.device for info in trace.header.ranks] == ["cuda:0", "cuda:1"]
    assert {group.ranks for group in trace.header.comm_groups} == {(0, 1)}
    (gather,) = rows_of(trace, Kind.ALL_GATHER)
    assert gather["num_bytes"] == 4096 * 2
    assert gather["comm_seq"] == 17
    rank = trace.rank(0)
    seen = on_device(rank, rank, trace.header)
    assert seen is not None
    assert seen.end_seq == rank.end_seq
    of = {(Kind(row["kind"]), Edge(row["edge"])): int(row["t_ns"]) for row in seen.part.rows}
    # microseconds in nccl_profile: the all-gather's kernel runs from 120 to 180, forward's from 190 to 290
    start = of[Kind.ALL_GATHER, Edge.BEGIN] - 120_000
    assert of[Kind.ALL_GATHER, Edge.END] - start == 180_000
    assert of[Kind.WAIT, Edge.END] - start == 180_000
    assert of[Kind.FORWARD, Edge.END] - start == 290_000
    assert of[Kind.COPY_OUT, Edge.BEGIN] == of[Kind.WAIT, Edge.END]
    assert any("device" in note for note in notes)


def test_missing_ranks_are_named(tmp_path):
    path = written(
        tmp_path / "a.json",
        [annotation("Optimizer.step#SGD.step", 1, 2)],
        distributedInfo={"rank": 5, "world_size": 8},
    )
    trace, notes = kineto.read([path])
    assert [rank.rank for rank in trace.ranks] == [5]
    assert "no readable profile of ranks 0, 1, 2, 3, 4, 6, 7, of 8 ranks" in notes
    assert check(trace) == []


@pytest.mark.parametrize(("name", "rank"), [("rank3.json", 3), ("node_12.5.pt.trace.json", 5), ("x.json", 0)])
def test_the_name_gives_the_rank_if_the_content_does_not(tmp_path, name, rank):
    path = written(tmp_path / name, [annotation("Optimizer.step#SGD.step", 1, 2)], distributedInfo={})
    trace, notes = kineto.read([path])
    assert trace.ranks[0].rank == rank
    assert any("shown as rank 0" in note for note in notes) == (name == "x.json")


def test_two_files_of_one_rank_are_not_mixed(tmp_path):
    events = [annotation("Optimizer.step#SGD.step", 1, 2)]
    paths = [written(tmp_path / name, events) for name in ("a.json", "b.json")]
    assert "b.json is left out: another file is of rank 0" in kineto.read(paths)[1]


def test_several_process_groups_of_gloo_are_not_told_apart(tmp_path):
    groups = [{"pg_name": name, "pg_desc": name, "ranks": [0, 1]} for name in ("0", "1")]
    info = {"rank": 0, "world_size": 2, "pg_config": groups}
    path = written(tmp_path / "a.json", [annotation("c10d::allreduce_", 1, 2, "cpu_op")], distributedInfo=info)
    trace, notes = kineto.read([path])
    assert trace.header.comm_groups[0].ranks == ()
    assert any("which process group" in note for note in notes)


def test_a_truncated_profile_shows_what_is_there(tmp_path):
    content = gzip.decompress((SAMPLES / "fsdp_2_13" / "rank0.json.gz").read_bytes())
    for number, data in enumerate((content[: len(content) // 2], gzip.compress(content)[: len(content) // 20])):
        path = tmp_path / f"rank{number}.json"
        path.write_bytes(data)
        trace, notes = kineto.read([path])
        assert check(trace) == []
        assert trace.num_rows > 10
        assert f"{path.name} ends before its end; the events before are shown" in notes


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "not a trace of torch.profiler"),
        ('{"a": 1}', "not a trace of torch.profiler"),
        ("[1, 2]", "does not begin with {"),
        ("", "ends before its end"),
        ('{"traceEvents": []}', "nothing to show"),
        ('{"otherData": {"producer": "torch"}, "traceEvents": []}', "Open the .trace file instead"),
    ],
)
def test_other_json_is_refused_in_a_sentence(tmp_path, content, said):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=said):
        kineto.read([path])


def test_too_many_labels_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "MAX_SPANS", 3)
    path = written(tmp_path / "a.json", [annotation("FSDP::pre_forward (a)", i, 1) for i in range(4)])
    with pytest.raises(TraceError, match="profile fewer steps"):
        kineto.read([path])
    assert kineto_profile.MAX_SPANS == 1_000_000


VALUES = st.one_of(
    st.none(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5), st.lists(st.integers(-3, 9), max_size=3)
)


@st.composite
def damaged_profiles(draw_from):
    """Return the content of a real profile with some fields of events replaced."""
    data = json.loads(gzip.decompress((SAMPLES / "fsdp_2_14_shapes" / "rank0.json.gz").read_bytes()))
    del data["traceEvents"][150:]
    events, info = data["traceEvents"], data["distributedInfo"]
    (group,) = info["pg_config"]
    arguments = [event["args"] for event in events if event.get("args")]
    for _ in range(draw_from(st.integers(1, 12))):
        target = draw_from(st.sampled_from([*events, *arguments, *[data] * 9, *[info] * 9, *[group] * 9]))
        key = draw_from(st.sampled_from([*target, "dur", "ts", "name", "Seq", "Process Group Name"]))
        target[key] = draw_from(VALUES)
    return json.dumps(data)


@given(content=damaged_profiles())
def test_damaged_profiles_give_a_valid_trace_or_a_sentence(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "rank0.json"
    path.write_text(content)
    try:
        trace, _ = kineto.read([path])
    except TraceError:
        return
    assert check(trace) == []
