import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.held_ranks import aborted
from tests.helpers.trace_strategies import example_trace
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.export import export
from workbench.session.trace_selectors import Opened, opened, opened_with_notes, policies, side, sides, some_steps
from workbench.trace import save, steps
from workbench.trace.columns import Trace
from workbench.trace.perfetto import to_perfetto
from workbench.trace.recording import RecordingWriter, RunStart
from workbench.trace.schema import Header

PROFILES = Path(__file__).parents[1] / "importers" / "samples" / "fsdp_2_13"


@pytest.fixture
def file(tmp_path):
    save(example_trace(steps=8), tmp_path / "run.trace")
    return tmp_path / "run.trace"


def recorded():
    return example_trace(steps=6)


@pytest.mark.parametrize(
    ("text", "name", "found"),
    [
        ("last", "this run", [0, 1, 2, 3, 4, 5]),
        ("last:3..5", "this run, steps 3-5", [3, 4, 5]),
        ("3..5", "this run, steps 3-5", [3, 4, 5]),
        ("4", "this run, step 4", [4]),
        ("last:4..4", "this run, step 4", [4]),
        ("..1", "this run, steps 0-1", [0, 1]),
        ("last:4..", "this run, steps 4-5", [4, 5]),
        ("last:-3..", "this run, steps 3-5", [3, 4, 5]),
        ("last:-3..-2", "this run, steps 3-4", [3, 4]),
        ("last:1..-2", "this run, steps 1-4", [1, 2, 3, 4]),
        ("last:-6", "this run, step 0", [0]),
        ("-1", "this run, step 5", [5]),
    ],
)
def test_steps_of_the_current_trace(text, name, found):
    called, trace = side(text, recorded)
    assert (called, steps(trace)) == (name, found)


@pytest.mark.parametrize(
    ("step", "text", "name", "found"),
    [
        (5, "-1", "this run, step 4", [4]),
        (5, "-2..", "this run, steps 3-5 (5 aborted)", [3, 4, 5]),
        (5, "5", "this run, step 5 (aborted)", [5]),
        (2, "2", "this run, step 2 (aborted)", [2]),
        (2, "1..4", "this run, steps 1-4 (2 aborted)", [1, 2, 3, 4]),
        (2, "-4", "this run, step 1", [1]),
    ],
)
def test_steps_without_an_end(step, text, name, found):
    called, trace = side(text, lambda: aborted(recorded(), step, 0.5))
    assert (called, steps(trace)) == (name, found)


def test_a_file_whole_and_in_part(file):
    assert side(str(file), Trace.empty) == ("run.trace", example_trace(steps=8))
    name, trace = side(f"{file}:6..7", Trace.empty)
    assert (name, steps(trace)) == ("run.trace, steps 6-7", [6, 7])
    assert side(file, Trace.empty)[1] == example_trace(steps=8)


def after(row):
    """Return an event outside steps that follows ``row``."""
    row = later_by(row, 1)
    row["seq"] += 1
    row["step"], row["kind"] = -1, Kind.ALLOC
    return row


def later_by(rows, t_ns):
    rows = rows.copy()
    rows["t_ns"] += t_ns
    return rows


def test_what_a_run_began_with_is_compared_with_what_came_later():
    before, run = recorded().slice(last=2), recorded()
    (_, first), (name, later) = sides(before, "last", lambda: run)
    assert (steps(first), name, steps(later)) == ([0, 1, 2], "this run, steps 3-5", [3, 4, 5])
    assert sides(before, before, Trace.empty)[1][1] is before
    assert sides(run, before, Trace.empty)[1][1] is before
    moved = tuple(replace(each, rows=later_by(each.rows, 1)) for each in run.ranks)
    other = Trace(run.header, moved)
    assert sides(before, other, Trace.empty)[1][1] is other
    begun = tuple(replace(each, rows=np.append(each.rows, after(each.rows[-1:]))) for each in before.ranks)
    more = Trace(run.header, begun)
    with pytest.raises(UsageError, match="has no step after those of"):
        sides(before, more, Trace.empty)


@pytest.mark.parametrize(
    ("first_steps", "found"),
    [
        ([0, 3], ([1, 2], [4, 5])),
        ([0, 1], ([0], [2, 3, 4, 5])),
        ([0, 2, 5, 6], ([3, 4], [5])),
        ([0, 0, 4], ([1, 2, 3], [5])),
    ],
)
def test_the_last_two_policies_are_compared_without_their_first_steps(first_steps, found):
    assert tuple(steps(trace) for _, trace in policies(first_steps, recorded)) == found


@pytest.mark.parametrize(("first_steps", "number"), [([], "none"), ([0], "one"), ([0, 6], "one"), ([9], "none")])
def test_two_policies_are_needed(first_steps, number):
    with pytest.raises(UsageError, match=f"steps ran under {number}"):
        policies(first_steps, recorded)


@pytest.mark.parametrize(("first_steps", "words"), [([], "that of no step is recorded"), ([0], "steps ran under one")])
def test_without_ranks_none_are_to_train_under_another_policy(first_steps, words):
    with pytest.raises(UsageError, match=rf"{words}: name two sides"):
        policies(first_steps, recorded, is_live=False)


def test_a_trace_object_is_accepted():
    trace = recorded()
    assert side(trace, Trace.empty) == ("a trace", trace)


def test_a_file_named_like_steps_is_found_by_its_path(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    file.rename(file.parent / "5")
    assert side("./5", Trace.empty)[0] == "5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nowhere.trace",
            "there is no file 'nowhere.trace'; compare takes a trace file, 'last', or steps such as 3..5",
        ),
        ("lost", "there is no file 'lost'; compare takes a trace file, 'last', or steps such as 3..5"),
        ("last:7", "the trace has no step 7; its steps are: 0-5"),
        ("2..9", "the trace has no step 9; its steps are: 0-5"),
        ("last:-7", "the trace has no step -7; its steps are: 0-5"),
        ("last:-2..-4", "steps 4..2 run backwards; write 2..4"),
        ("5..3", "steps 5..3 run backwards; write 3..5"),
        ("", "compare takes a trace file, 'last', or steps such as 3..5; got an empty string"),
    ],
)
def test_missing_files_and_steps_are_reported(text, message):
    with pytest.raises(UsageError) as caught:
        side(text, recorded)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "x", "3...5", "3-5", "5..x"])
def test_what_names_no_steps_is_told_how_they_are_written(text):
    with pytest.raises(UsageError) as caught:
        some_steps(recorded(), text)
    assert str(caught.value) == f"steps are written 5, 3..5, 3.., ..5 or -3.. (the newest three), not {text!r}"


def test_a_file_that_is_no_trace(tmp_path):
    (tmp_path / "x.trace").write_text("no")
    with pytest.raises(UsageError, match="it is not a trace"):
        side(tmp_path / "x.trace", recorded)
    with pytest.raises(UsageError, match="is a folder without the recording of a rank"):
        side(tmp_path, recorded)


@pytest.mark.parametrize("text", ["last", "3..5", "last:1"])
def test_nothing_is_recorded_yet(text):
    with pytest.raises(
        UsageError,
        match=r"^nothing is recorded yet: 'last' is the trace so far; first %fsdp shard MODEL, %fsdp step 3$",
    ):
        side(text, Trace.empty)


def test_a_trace_without_steps_has_none_to_choose():
    with pytest.raises(UsageError, match=r"no step 3; its steps are: none yet"):
        side("..3", lambda: example_trace(steps=0))


@pytest.mark.parametrize("name", ["", "a\0b.trace", "~nobody-of-this-name/a.trace"])
def test_invalid_file_names_are_refused(name):
    trace = Trace(Header(world_size=1), ())
    for use in (opened, lambda path: export(trace, path)):
        with pytest.raises(UsageError, match="is not a file name"):
            use(name)


def test_a_folder_that_does_not_exist_is_named_before_a_file_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"cannot write .*/nodir/a.trace: there is no folder .*/nodir$"):
        export(Trace(Header(world_size=1), ()), tmp_path / "nodir" / "a.trace")


def test_a_similar_file_name_is_suggested_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("seven.trace").touch()
    reported = r"^there is no file 'sevn\.trace', did you mean 'seven\.trace'\? compare takes a trace file, 'last'"
    with pytest.raises(UsageError, match=reported):
        side("sevn.trace", Trace.empty)


@pytest.mark.parametrize("name", [".", "rank*.json.gz"])
def test_files_of_a_profiler_are_opened_by_folder_or_pattern(name):
    found = opened_with_notes(PROFILES / name)
    trace, notes = found.trace, found.notes
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert len(trace.header.units) == 5
    assert notes


def test_one_file_of_a_profiler_is_opened_with_a_note_on_the_other_ranks():
    found = opened_with_notes(PROFILES / "rank1.json.gz")
    trace, notes = found.trace, found.notes
    assert [rank.rank for rank in trace.ranks] == [1]
    assert "no readable profile of rank 0, of 2 ranks" in notes


def test_profiles_are_read_from_a_folder_that_also_has_dumps(tmp_path):
    for folder in (PROFILES, PROFILES.parent / "flight_recorder"):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text("{}")
    found = opened_with_notes(tmp_path)
    trace, notes = found.trace, found.notes
    assert trace.header.producer == "torch.profiler"
    assert any(note.startswith("2 dumps of the Flight Recorder are beside the profiles") for note in notes)
    assert opened_with_notes(tmp_path / "nccl_trace_rank_*").trace.header.producer == "Flight Recorder"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{}", "not a trace of torch.profiler"),
        ("a.json.gz", b"\x1f\x8b\x08", "ends before its end"),
        ("rank0.json", b'{"entries": []}', "no collective"),
        ("rank*.json", b"x", "there is no file"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, name, content, said):
    path = tmp_path / name
    if "*" not in name:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=said):
        opened_with_notes(path)


def test_our_own_export_for_perfetto_is_refused(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(to_perfetto(opened(PROFILES))))
    with pytest.raises(UsageError, match=r"Open the \.trace file instead"):
        opened_with_notes(path)


def record(folder, trace, rank):
    start = RunStart(rank=rank, world_size=2, clock="one", t_ns=0, wall_ns=0)
    writer = RecordingWriter(folder, start, trace.header, 1 << 30)
    rows = trace.rank(rank).rows
    writer.append(rows.tobytes(), trace.rank(rank).state_before(len(rows)))
    writer.close()


def test_the_folder_of_a_recording_is_a_side_as_a_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = example_trace(num_ranks=2, steps=6)
    record(Path("out"), trace, 0)
    found = opened_with_notes("out")
    assert (found.trace.ranks, found.notes) == ((trace.rank(0),), ("no readable recording of rank 1, of 2 ranks",))
    record(Path("out"), trace, 1)
    whole = opened_with_notes(Path("out"))
    assert (whole.trace, whole.notes) == (opened("out"), ())
    assert whole.recording.read().trace == whole.trace
    assert opened("out").ranks == trace.ranks
    name, part = side("out:3..5", Trace.empty)
    assert (name, steps(part)) == ("out, steps 3-5", [3, 4, 5])


def test_a_folder_without_a_recording_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"is a folder without the recording of a rank, such as rank0.0000.rec$"):
        opened(tmp_path)
    (tmp_path / "rank0.0000.rec").write_bytes(b"something else")
    with pytest.raises(UsageError, match=r"rank0.0000.rec is left out: it does not start like a recording"):
        opened_with_notes(tmp_path)


def test_a_file_has_no_notes(file):
    assert opened_with_notes(file) == Opened(trace=opened(file))
