"""The recording of one rank, in this process."""

import errno
import linecache
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.trace_strategies import example_trace
from tests.helpers.waiting import wait_until
from workbench.engine import probe
from workbench.events import GROUP_INDICES, Category, Comm, Edge, Kind, Phase
from workbench.record import rank_recording
from workbench.record.launch import Place
from workbench.record.rank_recording import RankRecording, stack_of
from workbench.record.reasons import reason_of
from workbench.trace import check, recording, steps
from workbench.trace.read_recording import read


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(rank_recording, "PERIOD_S", 0.01)
    monkeypatch.setattr(rank_recording, "_BEAT_S", 0.0)


@pytest.fixture
def begin(tmp_path):
    """Begin a recording in ``tmp_path``; it ends with the test."""
    begun = []

    def start(**options):
        said = []
        found = RankRecording(tmp_path, Place(), **{"max_bytes": 1 << 30, "complain": said.append, **options})
        begun.append(found)
        found.begin()
        return found, said

    yield start
    for each in begun:
        each.end()
    assert probe.active is None


def one_step(optimizer):
    """Announce a step as a source does, and take it."""
    probe.phase(Phase.FORWARD)
    probe.event(Kind.FORWARD, Edge.BEGIN, -1)
    probe.memory(Category.UNSHARDED_GRADS, -1, 100)
    probe.event(Kind.FORWARD, Edge.END, -1)
    probe.memory(Category.UNSHARDED_GRADS, -1, -100)
    optimizer.step()


def sgd():
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4)
    return torch.optim.SGD([weight], lr=1.0, momentum=0.5)


def test_a_collective_that_was_never_issued_before_is_written_before_it_is_issued(begin, tmp_path, monkeypatch):
    """What it does next may end the process."""
    monkeypatch.setattr(rank_recording, "PERIOD_S", 1000)
    monkeypatch.setattr(rank_recording, "FLUSH_S", 1000)
    monkeypatch.setattr(rank_recording, "_FLUSH_EVERY_S", 1000)
    monkeypatch.setattr(rank_recording, "_MAX_FLUSHES", 2)
    begin()
    group = next(GROUP_INDICES)
    probe.active.comm_group(group, (0,))
    # the second one is not new, and the last one is the third new one: both wait for the next write
    for number, (num_bytes, num_written) in enumerate([(8, 1), (8, 1), (16, 3), (32, 3)]):
        probe.event(Kind.ALL_REDUCE, Edge.BEGIN, -1, num_bytes, Comm(group=group, seq=number))
        written = read(tmp_path).trace.rank(0).rows["num_bytes"].tolist()
        assert written == [8, 8, 16][:num_written]


@pytest.mark.parametrize("has_known_group", [True, False])
def test_a_rank_that_is_killed_leaves_its_events_up_to_the_last_collective(tmp_path, monkeypatch, has_known_group):
    monkeypatch.setattr(rank_recording, "PERIOD_S", 1000)
    monkeypatch.setattr(rank_recording, "_MAX_FLUSHES", int(has_known_group))
    monkeypatch.setattr(rank_recording, "FLUSH_S", 1000)
    pid = os.fork()
    if pid == 0:
        RankRecording(tmp_path, Place(), max_bytes=1 << 30, complain=print).begin()
        group = next(GROUP_INDICES)
        probe.active.comm_group(group, (0,))
        for number, num_bytes in enumerate([8, 8, 16]):  # only the first waits for a write
            probe.event(Kind.FORWARD, Edge.BEGIN, -1)
            probe.event(Kind.ALL_REDUCE, Edge.BEGIN, -1, num_bytes, Comm(group=group, seq=number))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    found = read(tmp_path)
    rows = found.trace.rank(0).rows
    calls = rows[rows["kind"] == Kind.ALL_REDUCE]["num_bytes"].tolist()
    assert (found.notes, check(found.trace), found.ranks[0].process) == ((), [], "gone")
    assert calls == ([8, 8, 16] if has_known_group else []), "a group that was not written is unknown"


def test_a_collective_that_is_issued_after_an_error_is_written_with_its_stack(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_recording, "PERIOD_S", 1000)
    monkeypatch.setattr(rank_recording, "FLUSH_S", 1000)
    begin()
    group = next(GROUP_INDICES)
    probe.active.comm_group(group, (0,))

    def issue(number):
        probe.event(Kind.ALL_REDUCE, Edge.BEGIN, -1, 8, Comm(group=group, seq=number))

    issue(0)
    try:
        _ = {}["odd"]
    except KeyError:
        issue(1)
    found = read(tmp_path)
    (stack,) = found.ranks[0].quiet
    line = issue.__code__.co_firstlineno + 5
    place = f"{Path(__file__).name}:{line}"
    words = f", except {line + 1} `KeyError`, after {line} `KeyError: 'odd', raised in {place}`: issue(1)"
    assert stack.seq == len(found.trace.rank(0).rows) == 2
    assert any(frame.endswith(words) for frame in stack.frames)


def test_rows_of_a_unit_that_is_not_described_yet_are_read(begin, tmp_path):
    started, _ = begin()
    probe.memory(Category.SHARDED_PARAMS, 0, 100)
    started._write()
    found = read(tmp_path)
    assert (found.notes, check(found.trace), len(found.trace.rank(0).rows)) == ((), [], 1)
    probe.active.unit(replace(example_trace().header.units[0], root=0, shard_size=1, params=()))
    started.end()
    assert [unit.gone for unit in read(tmp_path).trace.header.units] == [False]


def test_what_is_announced_is_read_back(begin, tmp_path):
    started, said = begin(program=("train.py", "--fast"))
    optimizer = sgd()
    for _ in range(3):
        one_step(optimizer)
    started.end()
    one_step(optimizer)  # of this nothing is recorded
    found = read(tmp_path)
    (known,) = found.ranks.values()
    assert (found.notes, said, check(found.trace)) == ((), [], [])
    assert steps(found.trace) == [0, 1, 2]
    kinds = [Kind(kind) for kind in found.trace.rank(0).rows["kind"]]
    assert kinds.count(Kind.OPTIMIZER) == kinds.count(Kind.FORWARD) == kinds.count(Kind.STEP) == 6
    assert found.trace.rank(0).rows["num_bytes"][kinds.index(Kind.ALLOC)] == 100
    state = found.trace.rank(0).state_before(len(kinds)).bytes_by_category[Category.OPTIMIZER_STATE]
    assert state == 16
    assert (known.end.reason, known.start.program, known.is_cut) == ("", ("train.py", "--fast"), False)
    (info,) = found.trace.header.ranks
    assert (info.rank, info.pid, found.trace.header.world_size) == (0, os.getpid(), 1)
    assert "torch.fully_shard" in found.trace.header.producer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_error_that_ends_a_thread_is_noted(begin, tmp_path):
    started, said = begin()
    hook = threading.excepthook
    for ends in (lambda: {}["odd"], lambda: sys.exit(3)):
        thread = threading.Thread(target=ends, name="fill")
        thread.start()
        thread.join()
    started.end()
    (note,) = read(tmp_path).ranks[0].notes
    assert note.startswith(f"its thread fill ended with KeyError: 'odd', in {__file__}:")
    assert (said, threading.excepthook is hook) == ([], False)


def test_its_thread_ends_before_events_are_no_longer_announced(begin):
    """It may have taken the end of a collective to announce, which would be lost."""
    started, _ = begin()
    ended = []
    started.at_end(lambda: ended.append("workbench recording" not in {each.name for each in threading.enumerate()}))
    started.end()
    assert ended == [True]


def test_it_is_written_while_the_program_goes_on(begin, tmp_path):
    begin()
    one_step(sgd())
    wait_until(lambda: read(tmp_path).trace.num_rows and steps(read(tmp_path).trace) == [0])
    assert read(tmp_path).ranks[0].end is None


def test_the_stack_of_a_silent_program_is_written_with_the_number_of_the_next_event(begin, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_recording, "QUIET_S", (0.0, 0.02))
    begin()
    wait_until(lambda: len(read(tmp_path).ranks[0].quiet) == 2)  # before any event, as in init_process_group
    assert {quiet.seq for quiet in read(tmp_path).ranks[0].quiet} == {0}
    one_step(sgd())
    wait_until(lambda: len(read(tmp_path).ranks[0].quiet) >= 4)
    found = read(tmp_path)
    assert found.ranks[0].quiet[-1].seq == found.trace.rank(0).end_seq
    (frame,) = (frame for frame in found.ranks[0].quiet[-1].frames if "in test_the_stack_of_a_silent" in frame)
    assert frame.startswith(f"{__file__}:")


def test_a_beat_says_when_the_newest_event_was_seen_also_of_a_step_off_the_record(begin, tmp_path):
    started, _ = begin(every=2)
    optimizer = sgd()

    def beat():
        return read(tmp_path).ranks[0].last_beat

    one_step(optimizer)
    wait_until(lambda: steps(read(tmp_path).trace) == [0])
    seen = wait_until(beat)
    probe.phase(Phase.FORWARD)
    probe.event(Kind.FORWARD, Edge.BEGIN, -1)
    wait_until(lambda: beat().event_ns > seen.event_ns)
    assert steps(read(tmp_path).trace) == [0]
    optimizer.step()
    started.end()
    assert steps(read(tmp_path).trace) == [0]


def test_only_every_nth_step_is_recorded_under_its_own_number(begin, tmp_path):
    started, said = begin(every=3)
    optimizer = sgd()
    for _ in range(8):
        one_step(optimizer)
    started.end()
    found = read(tmp_path)
    assert steps(found.trace) == [0, 3, 6]
    assert (check(found.trace), said) == ([], [])


# ---- what goes wrong


def test_a_folder_that_is_used_or_cannot_be_one_is_refused(begin, tmp_path):
    started, _ = begin()
    started.end()
    with pytest.raises(FileExistsError, match=r"rank0\.0000\.rec"):
        begin()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none/below"):
        with pytest.raises(OSError, match=r"File exists|Not a directory|No such file"):
            RankRecording(rank_recording.Path(folder), Place(), max_bytes=1, complain=print)


def test_a_disk_that_fills_up_stops_the_recording_and_not_the_program(begin, tmp_path, monkeypatch):
    started, said = begin()
    optimizer = sgd()
    one_step(optimizer)
    wait_until(lambda: steps(read(tmp_path).trace) == [0])

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(recording.os, "write", full)
        one_step(optimizer)
        wait_until(lambda: said)
        assert said == [
            f"recording stopped: cannot write to {tmp_path}: No space left on device; the program continues"
        ]
        assert probe.active is None
        one_step(optimizer)
    started.end("later")  # there is room again
    assert len(said) == 1
    found = read(tmp_path)
    assert steps(found.trace) == [0]
    assert (found.ranks[0].end.reason, found.ranks[0].stop.step) == ("later", 0)
    assert found.notes == ("rank 0: stopped recording at step 0: No space left on device",)


def test_a_reason_has_no_colours():
    assert reason_of(ValueError("\x1b[1mdo not\x1b[0m do that")) == "ValueError: do not do that"


def test_a_program_that_calls_os_exit_has_an_end(begin, tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    begin()
    one_step(sgd())
    os._exit(3)
    assert left == [3]
    end = read(tmp_path).ranks[0].end
    assert (end.reason, end.frames[-1].partition(" in ")[2]) == (
        "exit status 3",
        "test_a_program_that_calls_os_exit_has_an_end: os._exit(3)",
    )
    assert os._exit == left.append


def test_a_disk_that_is_full_at_the_end_is_said_and_raises_nothing(begin, monkeypatch):
    monkeypatch.setattr(rank_recording, "PERIOD_S", 3600)
    started, said = begin()
    one_step(sgd())

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(recording.os, "write", full)
        started.end()
    assert [each.split(":")[0] for each in said] == ["recording stopped"]


def test_any_other_fault_of_the_recording_stops_it_too(begin, monkeypatch):
    _, said = begin()

    def fail(*_args, **_options):
        raise ZeroDivisionError("of our own")

    monkeypatch.setattr(recording.RecordingWriter, "append", fail)
    wait_until(lambda: said)
    assert said == ["recording stopped: ZeroDivisionError('of our own'); the program continues"]
    wait_until(lambda: probe.active is None)


def test_a_torch_that_is_not_known_leaves_the_program_as_it_was(tmp_path, monkeypatch):
    def unknown(note):
        raise AttributeError("type object 'FSDPParamGroup' has no attribute 'unshard'")

    monkeypatch.setattr(rank_recording, "Watch", unknown)
    started = RankRecording(tmp_path, Place(), max_bytes=1 << 20, complain=print)
    with pytest.raises(AttributeError, match="unshard"):
        started.begin()
    assert probe.active is None


def test_a_forked_process_records_nothing(begin, tmp_path):
    """As a worker of a data loader, or one that leaves the program as the program itself would."""
    started, said = begin()
    optimizer = sgd()
    one_step(optimizer)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 2 if probe.active is not None else 3
            one_step(optimizer)
            started.end("in the child")
            code = 0 if code == 3 else code
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    one_step(optimizer)
    started.end("in the parent")
    found = read(tmp_path)
    assert found.ranks[0].end.reason == "in the parent"
    assert (steps(found.trace), found.notes, said) == ([0, 1], (), [])


# ---- stacks


def test_a_stack_has_the_innermost_call_last_and_none_of_the_recordings_own():
    def inner():
        return stack_of(sys._getframe())

    *_, caller, innermost = inner()
    assert innermost.startswith(f"{__file__}:")
    assert innermost.endswith(" in inner: return stack_of(sys._getframe())")
    assert " in test_a_stack_has_the_innermost_call" in caller
    source = "import sys\ndef f(): return g(sys._getframe())\n"
    own, names = f"{rank_recording._OWN[0]}x.py", {}
    exec(compile(source, own, "exec"), names)
    names["g"] = stack_of
    assert not any(own in frame for frame in names["f"]())


def test_a_long_line_or_a_deep_stack_is_cut():
    def deep(levels):
        return stack_of(sys._getframe()) if not levels else deep(levels - 1)

    assert len(deep(300)) == 200
    name, line = "<long>", f"found = stack_of(sys._getframe())  # {'x' * 5000}"
    linecache.cache[name] = (len(line), None, [line], name)
    names = {"stack_of": stack_of, "sys": sys}
    exec(compile(line, name, "exec"), names)
    assert len(names["found"][-1]) < 250
    del linecache.cache[name]
