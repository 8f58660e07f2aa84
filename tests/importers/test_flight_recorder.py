"""Dumps of the Flight Recorder; the samples are of real runs on gloo, torch 2.13."""

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cli import main as cli
from workbench.errors import TraceError
from workbench.events import Edge, Kind
from workbench.importers import flight_recorder
from workbench.reports.run_where import where
from workbench.trace.invariants import check
from workbench.views import VIEWS, draw

SAMPLES = Path(__file__).parent / "samples"
HUNG = SAMPLES / "flight_recorder"
MINUTE_NS = 60 * 10**9


@pytest.fixture
def hung(tmp_path):
    """Two dumps that were written a minute after rank 1 failed to begin an all-reduce."""
    paths = [Path(shutil.copy(path, tmp_path)) for path in sorted(HUNG.iterdir())]
    newest = max(entry["time_created_ns"] for path in paths for entry in pickle.loads(path.read_bytes())["entries"])
    for path in paths:
        os.utime(path, ns=(newest + MINUTE_NS, newest + MINUTE_NS))
    return paths


def collectives(trace, rank, edge):
    rows = trace.rank(rank).rows
    return rows[(rows["kind"] != Kind.WAIT) & (rows["edge"] == edge)]


def test_a_dump_gives_the_collectives_of_each_group(hung):
    recording = flight_recorder.read(hung)
    assert check(recording.trace) == []
    assert recording.trace.header.comm_groups[0].ranks == (0, 1)
    assert [len(collectives(recording.trace, rank, Edge.BEGIN)) for rank in (0, 1)] == [4, 3]
    assert [len(collectives(recording.trace, rank, Edge.END)) for rank in (0, 1)] == [3, 3]
    assert set(collectives(recording.trace, 0, Edge.BEGIN)["num_bytes"]) == {32}


def test_where_says_which_rank_has_not_begun_what_the_other_waits_for(hung):
    recording = flight_recorder.read(hung)
    report = where(recording, recording.ranks[0].last_beat.wall_ns)
    assert report.is_stalled
    assert "rank 0 has waited 1 min for all-reduce number 3 of default_pg: rank 1 has not started it" in str(report)
    assert "tttt.py:6 in <module>" in str(report)


def test_the_last_line_of_a_rank_that_has_not_begun_a_collective_is_shown(hung):
    recording = flight_recorder.read(hung)
    found = where(recording, recording.ranks[0].last_beat.wall_ns)
    assert found.cause.verdict.endswith("outside of collectives, after tttt.py:5")
    assert found.cause.evidence == (
        "rank 1 has recorded no event for 1 min, since its last collective, in /home/me/tttt.py:5 in <module>",
    )
    assert "rank 1 issued its last collective in" in str(found)


def test_a_damaged_dump_is_left_out_with_a_note(hung, capsys):
    hung[1].write_bytes(hung[1].read_bytes()[:99])
    found = flight_recorder.read(hung)
    assert [part.rank for part in found.trace.ranks] == [0]
    assert any(note.startswith(f"{hung[1].name} is left out: ") for note in found.notes)
    assert cli.main(["where", str(hung[0].parent)]) == 1
    assert f"note: {hung[1].name} is left out: " in capsys.readouterr().out


def test_the_command_where_reads_a_folder_of_dumps(hung, capsys):
    assert cli.main(["where", str(hung[0].parent)]) == 1
    assert "rank 1 has not started it" in capsys.readouterr().out


def test_json_says_the_same_as_a_pickle(hung, tmp_path):
    data = pickle.loads(hung[0].read_bytes())
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    assert flight_recorder.read([path]).trace == flight_recorder.read(hung[:1]).trace


def test_times_of_ends_are_used_where_there_are_some(tmp_path):
    entry = {
        "record_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "profiling_name": "nccl:_all_gather_base",
        "time_created_ns": 1000,
        "time_discovered_started_ns": 1500,
        "time_discovered_completed_ns": 4000,
        "state": "completed",
        "output_sizes": [[8]],
        "output_dtypes": ["BFloat16"],
    }
    path = tmp_path / "nccl_trace_rank_1"
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    path.write_text(json.dumps({"version": "2.10", "pg_config": groups, "entries": [entry]}))
    recording = flight_recorder.read([path])
    assert recording.trace.rank(1).rows["t_ns"].tolist() == [0, 3000]
    assert recording.trace.rank(1).rows["num_bytes"].tolist() == [16, 16]
    assert "no readable dump of ranks 0, 2, of 3 ranks" in recording.notes
    assert not any("without length" in note for note in recording.notes)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["flight_recorder", "flight_recorder_json"])
def test_every_view_draws_a_dump(view, name):
    recording = flight_recorder.read(sorted((SAMPLES / name).iterdir()))
    assert check(recording.trace) == []
    assert draw(view, recording.trace) is not None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rank0", b"{}", "would have entries"),
        ("dump", b'{"entries": []}', "the name of a dump says its rank"),
        ("rank0", b'{"entries": []}', "no collective"),
        ("rank0", pickle.dumps([1], 4), "would be a dict"),
        ("rank0", b"\x80\x04", "nothing of it was executed"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        flight_recorder.read([path])


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from(["completed", "nccl:broadcast", "5"]),
    st.lists(st.lists(st.integers(-3, 2**40), max_size=3), max_size=3),
)


@given(data=st.data())
def test_damaged_dumps_give_a_valid_trace_or_a_sentence(data, tmp_path_factory):
    dump = json.loads(gzip.decompress((SAMPLES / "flight_recorder_json" / "rank0.json.gz").read_bytes()))
    targets = [dump, dump["pg_config"], dump["pg_config"][""], dump["pg_status"]["0"], *dump["entries"]]
    for _ in range(data.draw(st.integers(1, 12))):
        target = data.draw(st.sampled_from(targets))
        target[data.draw(st.sampled_from(sorted(target)))] = data.draw(VALUES)
    path = tmp_path_factory.mktemp("damaged") / "rank0.json"
    path.write_text(json.dumps(dump))
    try:
        recording = flight_recorder.read([path])
    except TraceError:
        return
    assert check(recording.trace) == []
