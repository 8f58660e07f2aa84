"""Recordings on disk: what the writer appends is what the reader returns, whatever happened to the files between."""

import errno
import json
import os
import random
import socket
import sys
import time
import zlib
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_key_frames, cuttings, example_trace, setups, simulate, traces
from workbench.base.clock import clock_here
from workbench.base.codec import encode
from workbench.errors import TraceError
from workbench.events import COLLECTIVES, Edge, Kind
from workbench.replay.run_positions import RunState, positions
from workbench.reports.run_where import where
from workbench.trace import read_recording, recording
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.earlier_steps import EarlierSteps
from workbench.trace.header import header_to_dict, key_frame_to_dict
from workbench.trace.keyframe import advance
from workbench.trace.process_state import processes_here
from workbench.trace.read_recording import RecordingReader, read
from workbench.trace.recording import (
    HEAD,
    MAGIC,
    FrameKind,
    Heartbeat,
    RecordingStop,
    RecordingWriter,
    RunEnd,
    RunStart,
    SilentStack,
)
from workbench.trace.row_compression import MAX_PACKED_BYTES, by_row, to_wire
from workbench.trace.schema import ROW_DTYPE, ClockReading, GroupInfo, HostClock, KeyFrame, RankInfo

PLENTY = 1 << 30
FIRST = "rank0.0000.rec"


def start_of(rank=0, world_size=1, **changes):
    return RunStart(rank=rank, world_size=world_size, **{"clock": "one", "t_ns": 5, "wall_ns": 10**18, **changes})


def without_clocks(trace):
    return Trace(replace(trace.header, clocks=()), trace.ranks)


def write(folder, trace, rank, *, slices=None, max_bytes=PLENTY, keep=0, **start):
    """Write a rank's rows, split as ``slices`` say; return the open writer."""
    part = trace.rank(rank)
    started = start_of(rank, trace.header.world_size, **start)
    writer = RecordingWriter(folder, started, trace.header, max_bytes, keep)
    state = part.start
    for each in slices or [slice(0, len(part.rows))]:
        rows = part.rows[each]
        state = advance(state, rows)
        writer.append(rows.tobytes(), state)
    return writer


def write_all(folder, trace, **options):
    for part in trace.ranks:
        write(folder, trace, part.rank, **options).close()


def one_rank():
    trace = example_trace(num_ranks=1, num_units=2, steps=1)
    return Trace(trace.header, (trace.rank(0).cut(0, 40),))


def frame(kind, content):
    return HEAD.pack(kind, len(content), zlib.crc32(content)) + content


def frames_of(path):
    """Return the frames of a file as (position, kind, content)."""
    data, at, found = path.read_bytes(), len(MAGIC), []
    while at < len(data):
        kind, length, _ = HEAD.unpack_from(data, at)
        found.append((at, kind, data[at + HEAD.size : at + HEAD.size + length]))
        at += HEAD.size + length
    return found


# ---- round trip


@given(st.data())
def test_what_is_written_is_what_is_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("recording")
    trace = without_clocks(data.draw(traces(whole=True)))
    for part in trace.ranks:
        write(folder, trace, part.rank, slices=data.draw(cuttings(len(part.rows)))).close()
    found = read(folder)
    assert found.trace == trace
    assert found.notes == ()
    assert found.ranks == {
        part.rank: read_recording.RecordedRank(start=start_of(part.rank, len(trace.ranks)), header=trace.header)
        for part in trace.ranks
    }


@given(st.data())
def test_the_last_of_several_headers_counts_and_tables_may_differ_by_rank(tmp_path_factory, data):
    """Each rank knows the strings and groups in the order in which it met them, and meets them as it goes."""
    folder = tmp_path_factory.mktemp("recording")
    trace = without_clocks(simulate(data.draw(setups(max_ranks=2))))
    for part in trace.ranks:
        order = data.draw(st.permutations(range(len(trace.header.comm_groups))))
        groups = tuple(trace.header.comm_groups[old] for old in order)
        own = replace(trace.header, strings=(f"of rank {part.rank}", "loss"), comm_groups=groups)
        rows = part.rows.copy()
        has_group = rows["comm_group"] >= 0
        rows["comm_group"][has_group] = np.argsort(order)[rows["comm_group"][has_group]]
        rows["module"][rows["module"] >= 0] += 1
        writer = RecordingWriter(folder, start_of(part.rank, len(trace.ranks)), replace(own, strings=()), PLENTY)
        state = part.start
        for each in data.draw(cuttings(len(rows), max_cuts=2)):
            writer.set_header(own)
            state = advance(state, rows[each])
            writer.append(rows[each].tobytes(), state)
        writer.close()
    found = read(folder).trace
    for part in trace.ranks:
        rows = found.rank(part.rank).rows
        for name in set(ROW_DTYPE.names) - {"module", "comm_group"}:
            np.testing.assert_array_equal(rows[name], part.rows[name])
        strings, groups = (*found.header.strings, ""), (*found.header.comm_groups, None)
        assert [strings[i] for i in rows["module"]] == [(*trace.header.strings, "")[i] for i in part.rows["module"]]
        assert [groups[i] for i in rows["comm_group"]] == [
            (*trace.header.comm_groups, None)[i] for i in part.rows["comm_group"]
        ]


def test_notes_about_the_process_come_back(tmp_path):
    trace = one_rank()
    writer = write(tmp_path, trace, 0, program=("train.py", "--lr", "1"))
    silences = [SilentStack(t_ns=9, seq=40, frames=("a", "b")), SilentStack(t_ns=10, seq=40, frames=("c",))]
    for quiet in silences:
        writer.write(FrameKind.SILENT_STACK, quiet)
    for t_ns in (11, 12):
        writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=t_ns, wall_ns=7, event_ns=3))
    writer.end(RunEnd(t_ns=13, reason="it raised"))
    writer.close()
    writer.close()
    (known,) = read(tmp_path).ranks.values()
    assert known.start.program == ("train.py", "--lr", "1")
    assert known.quiet == tuple(silences)
    assert known.last_beat == Heartbeat(t_ns=12, wall_ns=7, event_ns=3)
    assert known.end == RunEnd(t_ns=13, reason="it raised")


def test_a_frame_of_a_newer_version_is_passed_over(tmp_path):
    trace = one_rank()
    writer = write(tmp_path, trace, 0, slices=[slice(0, 10)])
    with (tmp_path / FIRST).open("ab") as file:
        file.write(frame(99, b"anything"))
    writer.append(trace.rank(0).rows[10:].tobytes(), KeyFrame(seq=40))
    writer.close()
    assert read(tmp_path).trace == trace
    assert read(tmp_path).notes == ()


def test_rows_that_the_ring_has_lost_are_counted_and_those_after_them_are_kept(tmp_path):
    trace = one_rank()
    part = trace.rank(0)
    state = advance(part.start, part.rows[:30])
    writer = write(tmp_path, trace, 0, slices=[slice(0, 10)])
    writer.append(part.rows[20:30].tobytes(), state, lost=10)
    writer.append(part.rows[30:].tobytes(), advance(part.start, part.rows))
    writer.close()
    assert read(tmp_path).trace == Trace(trace.header, (replace(part.cut(30, 40), lost=20),))


# ---- limits


def long_trace(num_steps=24):
    return without_clocks(example_trace(num_ranks=1, num_units=3, steps=num_steps))


def files_of(folder):
    return sorted(folder.glob("*.rec"))


def complete_steps(part):
    """Return the steps of which a rank's trace has both ends."""
    own = part.rows[part.rows["kind"] == Kind.STEP]
    return sorted(set(own["step"][own["edge"] == Edge.BEGIN]) & set(own["step"][own["edge"] == Edge.END]))


@pytest.mark.parametrize("keep", [1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(3))
def test_the_newest_steps_are_kept_at_every_moment_and_the_oldest_are_not(tmp_path, keep, seed):
    trace = long_trace()
    part, state, at = trace.rank(0), KeyFrame(), 0
    random_ = random.Random(seed)
    longest = 1
    writer = RecordingWriter(tmp_path, start_of(), trace.header, PLENTY, keep)
    while at < len(part.rows):
        rows = part.rows[at : at + random_.randint(1, 300)]
        longest = max(longest, 1 + int(rows["step"].max()) - int(rows["step"].min()))
        state, at = advance(state, rows), at + len(rows)
        writer.append(rows.tobytes(), state)
        found = read(tmp_path).trace.rank(0)
        newest = int(part.rows["step"][:at].max())
        begun = range(max(newest - keep + 1, 0), newest)
        assert set(begun) <= set(complete_steps(found))
        assert found == part.cut(found.start.seq, at)
        assert len(found.steps) <= 2 * keep + 2 * longest + 1
    writer.close()
    assert (len(files_of(tmp_path)) == 1) == (keep == 100)


def test_a_run_that_is_always_between_two_steps_when_it_is_written_is_bounded_too(tmp_path):
    """Short steps: every drain ends outside of any step."""
    trace = long_trace()
    part, writer = trace.rank(0), RecordingWriter(tmp_path, start_of(), trace.header, PLENTY, 2)
    ends = np.flatnonzero((part.rows["kind"] == Kind.STEP) & (part.rows["edge"] == Edge.END)) + 1
    begin, state = 0, KeyFrame()
    for end in ends:
        state = advance(state, part.rows[begin:end])
        writer.append(part.rows[begin:end].tobytes(), state)
        begin = end
    writer.close()
    assert steps(read(tmp_path).trace)[-2:] == [22, 23]
    assert len(steps(read(tmp_path).trace)) <= 6


@pytest.mark.parametrize("num_rows", [20, 200])
def test_the_files_never_take_much_more_than_the_limit(tmp_path, num_rows):
    trace = long_trace()
    part = trace.rank(0)
    limit = 4 * len(frame(0, to_wire(part.rows[:400].tobytes())))
    writer = RecordingWriter(tmp_path, start_of(), trace.header, limit)
    begin_bytes = files_of(tmp_path)[0].stat().st_size
    largest, state = 0, KeyFrame()
    for at in range(0, len(part.rows), num_rows):
        rows = part.rows[at : at + num_rows]
        largest = max(largest, len(frame(0, to_wire(rows.tobytes()))))
        state = advance(state, rows)
        writer.append(rows.tobytes(), state)
        taken = sum(path.stat().st_size for path in files_of(tmp_path))
        assert taken <= limit + 2 * (begin_bytes + largest)
    writer.close()
    found = read(tmp_path).trace.rank(0)
    assert found == part.cut(found.start.seq, part.end_seq)
    assert 0 < len(found.rows) < len(part.rows)
    assert files_of(tmp_path)[0].name > FIRST


def test_a_header_larger_than_the_limit_does_not_make_a_file_of_each_write(tmp_path):
    trace = long_trace(4)
    write(tmp_path, trace, 0, slices=[slice(at, at + 10) for at in range(0, 200, 10)], max_bytes=40_000).close()
    assert len(header_to_dict(trace.header)["units"]) == 3
    assert len(files_of(tmp_path)) == 1


def test_a_long_silence_deletes_no_rows(tmp_path):
    """Beats alone may exceed the limit: the rows say what the run waits for."""
    trace = one_rank()
    writer = write(tmp_path, trace, 0, max_bytes=4000)
    for t_ns in range(300):
        writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=t_ns, wall_ns=t_ns, event_ns=0))
    writer.close()
    assert files_of(tmp_path)[0].stat().st_size > 4000
    assert read(tmp_path).trace == trace


def test_only_as_many_rows_as_a_trace_may_have_are_kept_in_memory(tmp_path, monkeypatch):
    trace = without_clocks(example_trace(num_ranks=2, num_units=3, steps=4))
    write_all(tmp_path, trace, slices=[slice(at, at + 37) for at in range(0, 2000, 37)])
    monkeypatch.setattr(read_recording, "MAX_ROWS", 301)
    recording = read(tmp_path)
    found = recording.trace
    newest = tuple(part.cut(part.end_seq - 150, part.end_seq) for part in trace.ranks)
    earlier = tuple(EarlierSteps().then(part.rows[: part.end_seq - 150]) for part in trace.ranks)
    assert found.ranks == tuple(replace(part, earlier=e) for part, e in zip(newest, earlier, strict=True))
    first = found.ranks[0].rows["step"][0]
    note = f"at most 301 events are read: the newest 150 of each rank are shown, from step {first} on"
    assert recording.notes == (f"{note}; of earlier steps, times and logged values are kept",)
    recording = read(tmp_path, newest_only=True)
    assert (recording.trace.ranks, recording.notes) == (newest, (note,))


def what_is_read(folder, **options):
    """Return the recording in a folder and the report on it; the error if there is none."""
    try:
        found = read(folder, **options)
    except TraceError as error:
        return str(error)
    return found, str(where(found, 10**18))


def carefully(reader, parts, _):
    found = reader(is_careful=True)
    found.read_files(parts)
    return found, found.take_trace()


@given(st.data())
def test_unpacking_only_the_newest_parts_gives_what_unpacking_all_gives(tmp_path_factory, data):
    """The same trace, notes and verdict, also of files that were cut, changed or written wrongly."""
    folder = tmp_path_factory.mktemp("recording")
    trace = without_clocks(data.draw(traces(whole=True, max_ranks=2)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recording, "MARK_EVERY", data.draw(st.integers(1, 60)))
        patched.setattr(read_recording, "MAX_ROWS", data.draw(st.integers(2, 500)))
        patched.setattr(read_recording, "_PART_BYTES", data.draw(st.sampled_from([1, 500, 1 << 18])))
        keep = data.draw(st.sampled_from([0, 2]))
        for part in trace.ranks:
            write(folder, trace, part.rank, slices=data.draw(cuttings(len(part.rows), max_cuts=30)), keep=keep).close()
        damaged = files_of(folder)[-1]
        whole = damaged.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        match data.draw(st.sampled_from(["whole", "cut", "changed", "wrong rows"])):
            case "cut":
                damaged.write_bytes(whole[:at])
            case "changed":
                damaged.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            case "wrong rows":
                with damaged.open("ab") as file:
                    file.write(frame(FrameKind.ROWS, data.draw(st.sampled_from([b"x", to_wire(bytes(52 * 3))]))))
        options = {"newest_only": data.draw(st.booleans())}
        found = what_is_read(folder, **options)
        patched.setattr(read_recording, "_read_rank", carefully)
        assert found == what_is_read(folder, **options)


def test_rows_before_the_newest_parts_are_not_unpacked(tmp_path, monkeypatch):
    trace = without_clocks(example_trace(num_ranks=1, num_units=3, steps=12))
    monkeypatch.setattr(recording, "MARK_EVERY", 100)
    write_all(tmp_path, trace, slices=[slice(at, at + 50) for at in range(0, 2000, 50)])
    monkeypatch.setattr(read_recording, "MAX_ROWS", 150)
    unpacked = []
    monkeypatch.setattr(read_recording, "by_row", lambda sent: unpacked.append(len(sent)) or by_row(sent))
    newest = trace.rank(0).cut(trace.rank(0).end_seq - 150, trace.rank(0).end_seq)
    assert read(tmp_path, newest_only=True).trace.rank(0) == newest
    assert len([size for size in unpacked if size]) <= 6  # 150 rows, and those before them since the last mark
    assert trace.num_rows > 10 * 50


# ---- what cannot be written


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path):
    trace = one_rank()
    write(tmp_path, trace, 0).close()
    before = (tmp_path / FIRST).read_bytes()
    with pytest.raises(FileExistsError, match=FIRST):
        RecordingWriter(tmp_path, start_of(), trace.header, PLENTY)
    assert [path.read_bytes() for path in files_of(tmp_path)] == [before]
    RecordingWriter(tmp_path, start_of(10, 11), trace.header, PLENTY).close()  # rank 10 is another one


def test_what_a_full_disk_took_of_a_frame_is_taken_back(tmp_path, monkeypatch):
    trace = one_rank()
    writer = write(tmp_path, trace, 0, slices=[slice(0, 10)])
    left, os_write = [7], os.write

    def until_full(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = os_write(fd, bytes(data)[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(recording.os, "write", until_full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(trace.rank(0).rows[10:].tobytes(), KeyFrame(seq=40))
    assert left == [0]
    monkeypatch.undo()
    writer.end(RunEnd(t_ns=1, reason="later"))
    writer.close()
    found = read(tmp_path)
    assert (found.trace.rank(0).end_seq, found.ranks[0].end, found.notes) == (10, RunEnd(t_ns=1, reason="later"), ())


def test_a_file_that_cannot_be_begun_leaves_the_one_before_it(tmp_path, monkeypatch):
    trace = long_trace(3)
    rows = trace.rank(0).rows
    writer = RecordingWriter(tmp_path, start_of(), trace.header, 400)
    os_write, calls = os.write, []

    def only_once(fd, data):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os_write(fd, data)

    monkeypatch.setattr(recording.os, "write", only_once)
    with pytest.raises(OSError, match="No space left"):
        writer.append(rows[:100].tobytes(), advance(KeyFrame(), rows[:100]))
    writer.end(RunEnd(t_ns=1))
    writer.close()
    assert [path.name for path in files_of(tmp_path)] == [FIRST]
    assert read(tmp_path).trace.rank(0).end_seq == 100
    assert read(tmp_path).ranks[0].end == RunEnd(t_ns=1)


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_how_a_run_ended_is_written_where_space_was_reserved_also_at_a_full_disk(tmp_path, monkeypatch):
    trace = one_rank()
    writer, reader = write(tmp_path, trace, 0), RecordingReader(tmp_path)
    size, at = files_of(tmp_path)[0].stat().st_size, frames_of(tmp_path / FIRST)[3][0]
    assert (reader.read().ranks[0].end, reader.read().ranks[0].stop) == (None, None)
    monkeypatch.setattr(recording.os, "write", full)
    stop = RecordingStop(t_ns=8, step=int(trace.rank(0).rows["step"].max()), reason="No space left on device")
    writer.stop(8, stop.reason)
    found = reader.read()  # which had read beyond that place
    assert (found.ranks[0].end, found.ranks[0].stop, found.has_ended) == (None, stop, False)
    assert found.notes == (f"rank 0: stopped recording at step {stop.step}: No space left on device",)
    writer.end(RunEnd(t_ns=9, reason="é" * 5000))
    writer.close()
    found = reader.read()
    assert (found.ranks[0].stop, found.has_ended) == (stop, True)
    assert 50 < len(found.ranks[0].end.reason) < 5000
    assert files_of(tmp_path)[0].stat().st_size == size
    with (tmp_path / FIRST).open("r+b") as file:  # killed while it wrote there: nothing else is lost
        file.seek(at + HEAD.size + 5)
        file.write(b"#")
    found = read(tmp_path)
    assert (found.trace, found.ranks[0].end, found.notes) == (trace, None, ())


def test_what_a_rank_wrote_for_the_reader_is_in_every_file(tmp_path):
    trace = long_trace(3)
    for rank in (0, 1):
        rows = trace.rank(0).rows
        header = replace(trace.header, world_size=2)
        writer = RecordingWriter(tmp_path, start_of(rank, 2), header, 400, keep=1)
        writer.note("DDP is not seen")
        writer.append(rows[:100].tobytes(), advance(KeyFrame(), rows[:100]))
        writer.append(rows[100:].tobytes(), advance(KeyFrame(), rows))
        writer.close()
    kinds = [[kind for _, kind, _ in frames_of(path)] for path in files_of(tmp_path)]
    assert len(kinds) > 2
    assert all(FrameKind.NOTE in each for each in kinds)
    assert read(tmp_path).notes == ("ranks 0, 1: DDP is not seen",)


def test_a_frame_that_no_reader_accepts_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "MAX_FRAME_BYTES", 5000)
    trace = one_rank()
    writer = write(tmp_path, trace, 0)
    with pytest.raises(OSError, match=r"a HEADER of [\d,]+ bytes is longer than 5,000"):
        writer.set_header(replace(trace.header, strings=("x" * 6000,)))
    writer.close()
    assert read(tmp_path).trace == trace


# ---- damaged files


def test_a_file_cut_anywhere_gives_all_whole_frames_before_the_cut(tmp_path):
    trace = one_rank()
    part = trace.rank(0)
    writer = write(tmp_path / "whole", trace, 0, slices=[slice(at, at + 10) for at in range(0, 40, 10)])
    writer.end(RunEnd(t_ns=1))
    writer.close()
    path = tmp_path / "whole" / FIRST
    data, frames = path.read_bytes(), frames_of(path)
    ends = [at + HEAD.size + len(content) for at, _, content in frames]
    header_bytes = ends[1] - ends[0]
    folder = tmp_path / "cut"
    folder.mkdir()
    # every offset, but only some of those within the long header and the padded outcome
    within = (range(ends[0] + 20, ends[1], header_bytes // 20), range(ends[2] + 20, ends[3], 100))
    for length in sorted(
        {*range(ends[0] + 20), *within[0], *range(ends[1], ends[2] + 20), *within[1], *range(ends[3], len(data))}
    ):
        (folder / FIRST).write_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        if whole < 2:
            with pytest.raises(TraceError, match="is a folder without the recording of a rank: "):
                read(folder)
            continue
        found = read(folder)
        num_rows = 10 * sum(kind == FrameKind.ROWS for _, kind, _ in frames[:whole])
        assert found.trace == Trace(trace.header, (part.cut(0, num_rows),))
        is_whole = length in ends
        at = max((end for end in ends if end <= length), default=len(MAGIC))
        said = f"{FIRST} ends within a frame, at byte {at:,}: its rank was about to write it"
        assert found.notes == (() if is_whole else (said,))
        assert found.ranks[0].is_cut is not is_whole
        assert (found.ranks[0].end is None) == (length < ends[3])


def test_a_flipped_byte_ends_what_is_read_of_a_file_and_the_next_file_is_read(tmp_path):
    trace = long_trace(4)
    part = trace.rank(0)
    slices = [slice(at, at + 50) for at in range(0, len(part.rows), 50)]
    write(tmp_path, trace, 0, slices=slices, max_bytes=9_000).close()
    first, second = files_of(tmp_path)
    data = bytearray(first.read_bytes())
    _, (at, _, content), *_ = (each for each in frames_of(first) if each[1] == FrameKind.ROWS)
    data[at + HEAD.size + len(content) // 2] ^= 1
    first.write_bytes(data)
    found = read(tmp_path)
    begin = found.trace.rank(0).start.seq
    key_frame = next(content for _, kind, content in frames_of(second) if kind == FrameKind.KEY_FRAME)
    assert f'"seq":{begin},'.encode() in key_frame
    assert 100 <= begin < part.end_seq
    assert found.trace == Trace(trace.header, (replace(part.cut(begin, part.end_seq), lost=begin - 50),))
    assert found.notes == (f"{first.name} is damaged at byte {at:,}; what follows is left out",)
    assert not found.ranks[0].is_cut


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it ends before its first frame"),
        (MAGIC[:5], "it ends before its first frame"),
        (MAGIC, "none of its files can be read"),
        (b"PK\x03\x04 a trace file", "it does not start like a recording"),
        (MAGIC + frame(FrameKind.HEADER, b"{}"), "it does not say how the recording began"),
        (MAGIC + frame(FrameKind.START, b"\xff"), "a frame is not JSON"),
        (MAGIC + frame(FrameKind.START, b"[" * 100_000), "a frame is not JSON"),
        (MAGIC + frame(FrameKind.START, b"[]"), "a frame holds a list, not an object"),
        (MAGIC + frame(FrameKind.START, b'{"rank": 0}'), "RunStart"),
    ],
)
def test_a_foreign_file_is_named_and_why_it_is_left_out(tmp_path, content, why):
    (tmp_path / FIRST).write_bytes(content)
    with pytest.raises(TraceError) as refused:
        read(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} is a folder without the recording of a rank: ")
    assert why in str(refused.value)


def test_a_folder_without_files_of_ranks_says_how_they_are_called(tmp_path):
    (tmp_path / "rank0.rec").touch()
    with pytest.raises(TraceError, match=r"is a folder without the recording of a rank, such as rank0\.0000\.rec$"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_folders_pipes_and_files_of_other_names_beside_a_recording_are_no_files_of_it(tmp_path):
    trace = without_clocks(example_trace(num_ranks=1, num_units=2, steps=1))
    trace = Trace(replace(trace.header, world_size=3), trace.ranks)
    write(tmp_path, trace, 0).close()
    (tmp_path / "rank1.0000.rec").mkdir()
    os.mkfifo(tmp_path / "rank2.0000.rec")
    with closing(socket.socket(socket.AF_UNIX)) as door:
        door.bind(str(tmp_path / "rank2.0001.rec"))
        (tmp_path / "notes.txt").write_text("mine")
        found = read(tmp_path)
    assert found.trace == trace
    assert found.notes == (
        "rank1.0000.rec is left out: it is not a file",
        "rank 1 is left out: none of its files can be read",
        "rank2.0000.rec is left out: it is not a file",
        "rank2.0001.rec is left out: it is not a file",
        "rank 2 is left out: none of its files can be read",
        "no readable recording of ranks 1, 2, of 3 ranks",
    )


def test_missing_ranks_are_counted(tmp_path):
    trace = one_rank()
    trace = Trace(replace(trace.header, world_size=65536), trace.ranks)
    write(tmp_path, trace, 0).close()
    assert read(tmp_path).notes == (
        "no readable recording of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 65527 more, of 65536 ranks",
    )
    assert read(tmp_path).trace == trace


def test_ranks_whose_units_are_others_are_named(tmp_path):
    trace = without_clocks(example_trace(num_ranks=3, num_units=2, steps=1))
    first, root = trace.header.units
    renamed = replace(first, params=tuple(replace(param, fqn=f"later.{param.fqn}") for param in first.params))
    other = Trace(replace(trace.header, units=(renamed, root)), trace.ranks)
    for rank, shown in ((0, trace), (1, other), (2, trace)):
        write(tmp_path, shown, rank).close()
    assert read(tmp_path).notes == (
        "rank 1 has units of other parameters than the rest, as stages of a pipeline do: events of rank 1 are shown"
        " under the names of the units that other ranks have in their place",
    )


def test_a_file_of_another_run_or_rank_is_left_out(tmp_path):
    trace = one_rank()
    trace = Trace(replace(trace.header, world_size=2), trace.ranks)
    write(tmp_path, trace, 0).close()
    write(tmp_path / "other", trace, 0, t_ns=6).close()
    (tmp_path / "other" / FIRST).rename(tmp_path / "rank0.0001.rec")
    (tmp_path / "rank1.0000.rec").write_bytes((tmp_path / FIRST).read_bytes())
    found = read(tmp_path)
    assert found.trace == trace
    assert found.notes == (
        "rank0.0001.rec is left out: it is of another run than the files before it",
        "rank1.0000.rec is left out: its name says rank 1, its content rank 0",
        "rank 1 is left out: none of its files can be read",
        "no readable recording of rank 1, of 2 ranks",
    )


def test_ranks_of_runs_of_other_sizes_are_left_out(tmp_path):
    small, large = (without_clocks(example_trace(num_ranks=n, num_units=2, steps=1)) for n in (2, 4))
    write_all(tmp_path, small)
    write(tmp_path, large, 3).close()
    found = read(tmp_path)
    assert found.trace == small
    assert found.notes == ("rank 3 is left out: it is of a run of 4 ranks, rank 0 of 2",)


def test_a_restart_s_folder_is_named(tmp_path):
    write(tmp_path, one_rank(), 0).close()
    (tmp_path / "restart1").mkdir()
    assert read(tmp_path).notes == (f"the run was restarted: its later part is in {tmp_path}/restart1",)


# ---- hostile files


def with_frames(folder, trace, *frames):
    """Write a recording of rank 0 whose rows are replaced by ``frames``."""
    folder.mkdir()
    writer = RecordingWriter(folder, start_of(0, trace.header.world_size), trace.header, PLENTY)
    writer.close()
    with (folder / FIRST).open("ab") as file:
        file.write(b"".join(frames))
    return folder


def test_a_length_beyond_the_limit_is_not_read(tmp_path):
    trace = one_rank()
    folder = with_frames(tmp_path / "long", trace, HEAD.pack(FrameKind.ROWS, 2**32 - 1, 0))
    with (folder / FIRST).open("ab") as file:
        at = file.tell() - HEAD.size
        file.truncate(5 << 30)  # sparse: 5 GB that take no room
    found = read(folder)
    assert found.trace.num_rows == 0
    assert found.notes == (f"{FIRST} is damaged at byte {at:,}; what follows is left out",)


def test_a_frame_that_unpacks_to_gigabytes_is_refused_within_bounded_memory(tmp_path):
    bomb, zeros = zlib.compressobj(9), bytes(16 << 20)
    content = b"".join([*(bomb.compress(zeros) for _ in range(130)), bomb.flush()])
    assert len(content) < 3 << 20
    trace = one_rank()
    folder = with_frames(tmp_path / "bomb", trace, frame(FrameKind.ROWS, content))
    before = peak_bytes()
    found = read(folder)
    assert peak_bytes() - before < 6 * MAX_PACKED_BYTES  # of the 2 GB that it holds
    assert found.trace.num_rows == 0
    (note,) = found.notes
    assert note.startswith(f"{FIRST} is left out from byte ")
    assert note.endswith(f"incomplete, or unpack to more than {MAX_PACKED_BYTES:,} bytes")


def peak_bytes():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": 200}, "row 3: unknown kind (1 such row)"),
        ({"unit": 99}, "row 3: unit is not in the header's table of 2 (1 such row)"),
        ({"comm_group": -7}, "row 3: comm_group is not in the header's table of 1 (1 such row)"),
        ({"t_ns": -1}, "its times are out of range: -1 to "),
        ({"t_ns": 2**62}, "its times are out of range: "),
        ({"seq": 17}, "its rows do not continue at row 0"),
    ],
)
def test_rows_that_break_a_rule_are_refused_and_other_ranks_are_shown(tmp_path, change, why):
    trace = without_clocks(example_trace(num_ranks=2, num_units=2, steps=1))
    rows = trace.rank(1).rows.copy()
    for name, value in change.items():
        rows[name][3] = value
    bad = Trace(trace.header, (trace.rank(0), RankTrace(1, rows)))
    write(tmp_path, trace, 0).close()
    write(tmp_path, bad, 1).close()
    found = read(tmp_path)
    assert found.trace.rank(0) == trace.rank(0)
    assert why in found.notes[0]
    if "seq" in change:
        assert found.trace.rank(1).end_seq == 0
    else:
        assert found.notes[0].startswith("rank 1 is left out: ")
        assert [part.rank for part in found.trace.ranks] == [0]
        assert found.notes[1:] == ("no readable recording of rank 1, of 2 ranks",)
        (tmp_path / FIRST).unlink()
        with pytest.raises(TraceError, match="without the recording of a rank: rank 1 is left out: "):
            read(tmp_path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"world_size": 3}, "its header is of a run of 3 ranks, its start of 1"),
        (
            {"clocks": (HostClock(ranks=(0,), readings=(ClockReading(t_ns=0, offset_ns=0, error_ns=0),)),)},
            "its header has clocks of several hosts",
        ),
        ({"comm_groups": (GroupInfo(name="x", ranks=(7,)),)}, "rank 7 is out of range for 1 ranks"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(tmp_path, header, why):
    trace = one_rank()
    writer = write(tmp_path, trace, 0)
    writer.set_header(replace(trace.header, **header))
    writer.close()
    with pytest.raises(TraceError, match=why):
        read(tmp_path)


@pytest.mark.parametrize("start", [{"world_size": 0}, {"world_size": 2**40}, {"world_size": -1}])
def test_a_world_of_any_size_is_refused_within_bounded_memory(tmp_path, start):
    content = recording._json_frame(FrameKind.START, encode(start_of(0, **start)))
    (tmp_path / FIRST).write_bytes(MAGIC + content)
    with pytest.raises(TraceError, match=f"it is of rank 0 of {start['world_size']}"):
        read(tmp_path)


@given(any_key_frames(), st.data())
def test_a_key_frame_of_any_content_is_taken_or_refused(tmp_path_factory, key_frame, data):
    trace = one_rank()
    folder = tmp_path_factory.mktemp("recording") / "here"
    content = recording._json_frame(FrameKind.KEY_FRAME, key_frame_to_dict(key_frame))
    rows = trace.rank(0).rows.copy()
    rows["seq"] += key_frame.seq
    with_frames(folder, trace, content, frame(FrameKind.ROWS, to_wire(rows[:20].tobytes())), content)
    found = read(folder)
    part = found.trace.rank(0)
    if key_frame.seq and not found.notes:
        assert (part.start, part.lost) == (key_frame, 0)
    assert len(part.rows) in (0, 20)


@given(st.binary(max_size=200), st.sampled_from(list(FrameKind)))
def test_a_frame_of_any_content_never_raises_anything_else(tmp_path_factory, content, kind):
    folder = with_frames(tmp_path_factory.mktemp("recording") / "here", one_rank(), frame(kind, content))
    found = read(folder)
    assert found.trace.num_rows == 0
    assert len(found.notes) == 1 or content == b""


def whole_recording(folder):
    """Record two ranks with two clocks and every kind of frame, and return the files."""
    trace = without_clocks(example_trace(num_ranks=2, num_units=2, steps=1))
    for rank in (0, 1):
        writer = write(folder, trace, rank, clock=str(rank))
        writer.write(FrameKind.SILENT_STACK, SilentStack(t_ns=9, seq=40, frames=("a",)))
        writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=12, wall_ns=7, event_ns=3))
        writer.end(RunEnd(t_ns=13))
        writer.close()
    return trace


def spots(data, path=()):
    """Yield the path of every value within JSON data."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from spots(value, (*path, key))


def put(data, path, value):
    if not path:
        return value
    data[path[0]] = put(data[path[0]], path[1:], value)
    return data


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.sampled_from([0, -1, 2, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**70, 1e300, [], {}, [0], {"0": 1}]),
)


@given(st.data())
def test_any_value_in_any_place_is_shown_or_refused_and_where_has_a_sentence(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("recording")
    whole_recording(folder)
    path = folder / FIRST
    frames = frames_of(path)
    chosen = data.draw(st.sampled_from([each for each in frames if each[1] != FrameKind.ROWS]))
    content = json.loads(chosen[2])
    spot = data.draw(st.sampled_from(list(spots(content))))
    mutated = json.dumps(put(content, spot, data.draw(anything))).encode()
    path.write_bytes(MAGIC + b"".join(frame(kind, mutated if at == chosen[0] else old) for at, kind, old in frames))
    assert str(where(read(folder), 10**18))


@given(st.data())
def test_any_row_is_shown_or_refused_and_where_has_a_sentence(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("recording")
    trace = whole_recording(folder)
    path = folder / FIRST
    rows = trace.rank(0).rows.copy()
    name = data.draw(st.sampled_from(ROW_DTYPE.names))
    place = data.draw(st.integers(0, len(rows) - 1))
    if name != "value":
        limits = np.iinfo(ROW_DTYPE[name])
        rows[name][place] = data.draw(st.integers(int(limits.min), int(limits.max)))
    rows = rows[: data.draw(st.integers(0, len(rows)))]
    packed = to_wire(rows.tobytes())
    path.write_bytes(
        MAGIC + b"".join(frame(kind, packed if kind == FrameKind.ROWS else old) for _, kind, old in frames_of(path))
    )
    assert str(where(read(folder), 10**18))


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_flipped_byte_is_survived(tmp_path_factory, place, change):
    folder = tmp_path_factory.mktemp("recording")
    whole_recording(folder)
    path = folder / FIRST
    flipped = bytearray(path.read_bytes())
    flipped[place % len(flipped)] ^= change
    path.write_bytes(flipped)
    found = read(folder)
    assert found.notes or found.trace.num_rows
    assert str(where(found, 10**18))


# ---- clocks of several hosts


def two_clocks(tmp_path, offset_ns, *, day_error_ns=0, device="cpu"):
    """Record two ranks, the second with a clock that is ahead; return the trace, in rank 0's times."""
    trace = without_clocks(example_trace(num_ranks=2, num_units=3, steps=2))
    ranks = tuple(replace(info, device=device) for info in trace.header.ranks)
    trace = Trace(replace(trace.header, ranks=ranks), trace.ranks)
    rows = trace.rank(1).rows.copy()
    rows["t_ns"] += offset_ns
    moved = Trace(trace.header, (trace.rank(0), RankTrace(1, rows)))
    write(tmp_path, moved, 0).close()
    write(tmp_path, moved, 1, clock="two", t_ns=5 + offset_ns, wall_ns=10**18 + day_error_ns).close()
    return trace


def bounds(trace):
    """Return the least and largest offset that collectives allow, for a trace in rank 0's times: about 0."""
    times = [{}, {}]
    for rank in (0, 1):
        rows = trace.rank(rank).rows
        for row in rows[np.isin(rows["kind"], COLLECTIVES)]:
            key = int(row["comm_group"]), int(row["comm_seq"]), int(row["edge"])
            times[rank][key] = int(row["t_ns"])
    base, other = times
    least = max(other[g, n, Edge.BEGIN] - base[g, n, Edge.END] for g, n, edge in other if edge == Edge.BEGIN)
    most = min(other[g, n, Edge.END] - base[g, n, Edge.BEGIN] for g, n, edge in base if edge == Edge.BEGIN)
    return least, most


@pytest.mark.parametrize("offset_ns", [0, 1_234_567_890_123, -(10**6)])
@pytest.mark.parametrize("day_error_ns", [0, 10**12, -(10**12)])
def test_the_offset_of_two_clocks_is_found_within_the_bounds_of_their_collectives(tmp_path, offset_ns, day_error_ns):
    trace = two_clocks(tmp_path, offset_ns, day_error_ns=day_error_ns)
    least, most = bounds(trace)
    assert least < 0 < most
    found = read(tmp_path)
    (clock,) = found.trace.header.clocks
    (reading,) = clock.readings
    assert clock.ranks == (1,)
    expected = {0: 0, 10**12: least, -(10**12): most}[day_error_ns]
    assert reading.offset_ns - offset_ns == expected
    assert reading.error_ns == max(most - expected, expected - least)
    assert found.ranks[1].offset_ns == reading.offset_ns
    assert found.trace.rank(0) == trace.rank(0)
    np.testing.assert_array_equal(found.trace.rank(1).rows["t_ns"], trace.rank(1).rows["t_ns"] - expected)


def test_without_collectives_the_time_of_day_counts(tmp_path):
    trace = two_clocks(tmp_path, 10**9, day_error_ns=777, device="cuda:0")  # a host's rows say nothing of a device
    (clock,) = read(tmp_path).trace.header.clocks
    assert clock.readings == (ClockReading(t_ns=5, offset_ns=10**9 - 777, error_ns=10**9),)
    assert trace.num_rows


def test_one_bound_alone_leaves_the_error_of_the_time_of_day(tmp_path):
    """The second rank was killed within its first collective."""
    trace = without_clocks(example_trace(num_ranks=2, num_units=2, steps=1))
    rows = trace.rank(1).rows
    begin = int(np.flatnonzero(np.isin(rows["kind"], COLLECTIVES))[0])
    write(tmp_path, trace, 0).close()
    write(tmp_path, Trace(trace.header, (trace.rank(1).cut(0, begin + 1),)), 1, clock="two").close()
    (clock,) = read(tmp_path).trace.header.clocks
    (reading,) = clock.readings
    assert reading.error_ns == 10**9
    assert abs(reading.offset_ns) < 10**9


def test_collectives_that_contradict_each_other_give_the_middle_and_its_error(tmp_path):
    """The clocks drift apart while the run continues."""
    trace = without_clocks(example_trace(num_ranks=2, num_units=3, steps=2))
    rows = trace.rank(1).rows.copy()
    rows["t_ns"] += np.linspace(0, 10**12, len(rows)).astype(np.int64)
    moved = Trace(trace.header, (trace.rank(0), RankTrace(1, rows)))
    write(tmp_path, moved, 0).close()
    write(tmp_path, moved, 1, clock="two").close()
    (reading,) = read(tmp_path).trace.header.clocks[0].readings
    least, most = bounds(moved)
    assert least > most
    assert reading.offset_ns == (least + most) // 2
    assert reading.error_ns == max(abs(most - reading.offset_ns), abs(least - reading.offset_ns))


def test_ranks_of_one_clock_have_no_offset(tmp_path):
    trace = without_clocks(example_trace(num_ranks=2, num_units=2, steps=1))
    write_all(tmp_path, trace)
    assert read(tmp_path).trace.header.clocks == ()


# ---- a run that still writes


@given(st.data())
def test_a_recording_read_while_it_is_written_is_the_one_read_at_its_end(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("recording")
    trace = without_clocks(data.draw(traces(whole=True)))
    max_bytes = data.draw(st.sampled_from([PLENTY, 4096]))  # with and without a next file
    reader, written = RecordingReader(folder), {part.rank: part.start.seq for part in trace.ranks}
    pieces = {part.rank: data.draw(cuttings(len(part.rows))) for part in trace.ranks}
    writers = {rank: write(folder, trace, rank, slices=[slice(0, 0)], max_bytes=max_bytes) for rank in pieces}
    order = data.draw(st.permutations([rank for rank, slices in pieces.items() for _ in slices]))
    for rank in order:
        part, rows = trace.rank(rank), pieces[rank].pop(0)
        writers[rank].append(part.rows[rows].tobytes(), part.state_before(rows.stop))
        written[rank] += rows.stop - rows.start
        if max_bytes < PLENTY or data.draw(st.booleans()):  # with small files, the next append may delete unread ones
            so_far = tuple(part.cut(part.start.seq, written[part.rank]) for part in trace.ranks)
            assert reader.read().trace == Trace(trace.header, so_far)
    assert reader.read().trace == trace
    for writer in writers.values():
        writer.end(RunEnd(t_ns=9))
        writer.close()
    assert reader.read().has_ended
    assert reader.read().trace == trace


def test_of_files_that_are_deleted_while_they_are_followed_nothing_is_read_twice_or_lost(tmp_path):
    trace = long_trace()
    part, reader = trace.rank(0), RecordingReader(tmp_path)
    writer = write(tmp_path, trace, 0, slices=[slice(0, 0)], max_bytes=1 << 16, keep=2)
    for at in range(0, len(part.rows), 10):
        rows = part.rows[at : at + 10]
        writer.append(rows.tobytes(), part.state_before(at + len(rows)))
        assert reader.read().trace == Trace(trace.header, (part.cut(0, at + len(rows)),))
    writer.close()
    assert not (tmp_path / FIRST).exists()


def test_half_a_frame_is_read_once_it_is_whole(tmp_path):
    trace = one_rank()
    write(tmp_path, trace, 0, slices=[slice(0, 10), slice(10, 40)]).close()
    data, (at, _, _) = (tmp_path / FIRST).read_bytes(), frames_of(tmp_path / FIRST)[-1]
    (tmp_path / FIRST).write_bytes(data[: at + 20])
    reader = RecordingReader(tmp_path)
    assert reader.read().trace.num_rows == 10
    assert "ends within a frame" in reader.read().notes[0]
    with (tmp_path / FIRST).open("ab") as file:
        file.write(data[at + 20 :])
    found = reader.read()
    assert (found.trace, found.notes, found.ranks[0].is_cut) == (trace, (), False)


def test_a_rank_that_appears_later_is_shown_with_the_others_and_its_clock_is_compared(tmp_path):
    trace = two_clocks(tmp_path, 10**9)
    (tmp_path / "rank0.0000.rec").rename(tmp_path / "later")
    reader = RecordingReader(tmp_path)
    assert [part.rank for part in reader.read().trace.ranks] == [1]
    (tmp_path / "later").rename(tmp_path / FIRST)
    found = reader.read()
    assert found == read(tmp_path)
    assert [part.rank for part in found.trace.ranks] == [0, 1]
    assert found.trace.rank(0) == trace.rank(0)
    assert found.ranks[1].offset_ns


def test_later_rows_of_a_host_are_on_the_same_clock_as_its_earlier_ones(tmp_path):
    offset_ns = 10**9
    trace = without_clocks(example_trace(num_ranks=2, num_units=3, steps=2))
    part = trace.rank(1)
    rows = part.rows.copy()
    rows["t_ns"] += offset_ns
    write(tmp_path, trace, 0).close()
    writer = write(
        tmp_path,
        Trace(trace.header, (trace.rank(0), RankTrace(1, rows))),
        1,
        slices=[slice(0, 200)],
        clock="two",
        t_ns=5 + offset_ns,
    )
    reader = RecordingReader(tmp_path)
    first = reader.read()
    writer.append(rows[200:].tobytes(), part.state_before(len(rows)))
    writer.close()
    found = reader.read()
    assert found.ranks[1].offset_ns == first.ranks[1].offset_ns != 0
    np.testing.assert_array_equal(found.trace.rank(1).rows["t_ns"], rows["t_ns"] - first.ranks[1].offset_ns)


def test_another_run_in_the_same_folder_replaces_the_one_that_was_followed(tmp_path):
    trace, other = one_rank(), without_clocks(example_trace(num_ranks=1, num_units=3, steps=1))
    write(tmp_path, trace, 0).close()
    reader = RecordingReader(tmp_path)
    assert reader.read().trace == trace
    write(tmp_path / "other", other, 0, t_ns=6).close()
    (tmp_path / "other" / FIRST).replace(tmp_path / FIRST)
    assert reader.read().trace == other


def test_a_rank_that_breaks_a_rule_is_not_followed_any_further(tmp_path):
    trace = without_clocks(example_trace(num_ranks=2, num_units=2, steps=1))
    write(tmp_path, trace, 1).close()
    part = trace.rank(0)
    writer = write(tmp_path, trace, 0, slices=[slice(0, 40)])
    reader = RecordingReader(tmp_path)
    assert reader.read().notes == ()
    rows = part.rows[40:].copy()
    rows["kind"][3] = 250
    writer.append(rows.tobytes(), part.state_before(40))
    writer.close()
    found = reader.read()
    assert found.trace == Trace(trace.header, (part.cut(0, 40), trace.rank(1)))
    (note,) = found.notes
    assert note.startswith("rank 0 is not followed any further: row 43: ")
    assert reader.read() == found


def test_a_folder_that_is_gone_is_an_error_and_what_was_read_stays_with_the_caller(tmp_path):
    trace = one_rank()
    write(tmp_path / "out", trace, 0).close()
    reader = RecordingReader(tmp_path / "out")
    found = reader.read()
    (tmp_path / "out" / FIRST).unlink()
    assert reader.read() == found
    (tmp_path / "out").rmdir()
    with pytest.raises(FileNotFoundError):
        reader.read()
    assert found.trace == trace


@pytest.mark.parametrize(
    ("end", "now_s", "is_alive"), [(None, 9.9, True), (None, 10.1, False), (RunEnd(t_ns=6), 9.9, False)]
)
def test_a_run_is_alive_while_a_rank_that_has_not_ended_writes(tmp_path, end, now_s, is_alive):
    writer = write(tmp_path, one_rank(), 0)
    writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=6, wall_ns=10**18 + 10**9, event_ns=5))
    if end is not None:
        writer.end(end)
    writer.close()
    assert read(tmp_path).is_alive(10**18 + 10**9 + int(now_s * 1e9)) is is_alive


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("ends", [False, True])
def test_a_process_that_is_gone_was_killed_unless_its_end_was_written_meanwhile(tmp_path, monkeypatch, ends):
    """It writes its end after its file was read, and before the kernel is asked."""
    trace = one_rank()
    info = RankInfo(rank=0, host=socket.gethostname(), device="cpu", pid=os.getpid())
    trace = Trace(replace(trace.header, ranks=(info,)), trace.ranks)
    now = {"t_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
    writer = write(tmp_path, trace, 0, clock=clock_here(), processes=processes_here(), **now)

    def state(*_):
        if ends:
            writer.end(RunEnd(t_ns=time.monotonic_ns()))
        return "gone"

    monkeypatch.setattr(read_recording, "process_state", state)
    found = read(tmp_path)
    writer.close()
    (position,) = positions(found, time.time_ns())
    assert position.state is (RunState.ENDED if ends else RunState.LOST)
    assert not found.is_alive(time.time_ns())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere clocks have no identity of a boot")
@pytest.mark.parametrize(("ago_s", "set_by_s"), [(0, 3600), (0, -3600), (60, 3600), (60, -3600)])
def test_a_clock_of_this_machine_that_was_set_ends_and_revives_no_rank(tmp_path, ago_s, set_by_s):
    t_ns = time.monotonic_ns() - ago_s * 10**9
    wall_ns = time.time_ns() - (ago_s + set_by_s) * 10**9
    writer = write(tmp_path, one_rank(), 0, clock=clock_here(), t_ns=t_ns, wall_ns=wall_ns)
    writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=t_ns, wall_ns=wall_ns, event_ns=t_ns))
    writer.close()
    found, now_ns = read(tmp_path), time.time_ns()
    (position,) = positions(found, now_ns)
    assert (found.is_alive(now_ns), position.state is RunState.LOST) == (not ago_s, bool(ago_s))
