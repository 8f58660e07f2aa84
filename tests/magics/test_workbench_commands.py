"""Commands from cells and the panel: what the notebook's workbench remembers and refuses."""

import sys
import threading
from itertools import groupby
from pathlib import Path

import pytest

import workbench
from tests.helpers.fake_cluster import FakeCluster, inside, text_reply
from workbench.errors import UsageError
from workbench.protocol.commands import Abort, Attach, Help, Shard, Start, Status, Stop
from workbench.workbench import MAX_PAST, Workbench


@pytest.fixture
def one():
    made = Workbench(cluster_factory=FakeCluster)
    yield made
    made.close()


def test_every_command_is_in_the_history_with_its_source(notebook):
    notebook.run("%fsdp   shard  modl --wrap 'Block'")  # which is refused
    notebook.shell.magics_manager.registry["FsdpMagics"].workbench.note(Status(), "panel")
    (shown,) = notebook.ok("%fsdp history").shown
    headline, *lines = shown["text/plain"].splitlines()
    assert headline == "4 commands"
    assert [line[line.index("%fsdp") :] for line in lines] == [
        *("%fsdp start", "%fsdp shard modl --wrap Block", "%fsdp status", "%fsdp history")
    ]
    assert [" panel " in line for line in lines] == [False, False, True, False]
    assert [" failed " in line for line in lines] == [False, True, False, False]
    (shown,) = notebook.ok("%fsdp history 1").shown
    assert shown["text/plain"].splitlines()[0] == "1 command"


def test_the_history_keeps_the_newest_commands(one):
    for _ in range(MAX_PAST + 1):
        one.note(Help("shard"), "cell")
    one.note(Status(), "cell")
    commands = one.history().commands
    assert (len(commands), commands[-1].line) == (MAX_PAST, "%fsdp status")


def test_only_one_thread_at_a_time_starts_ranks(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FakeCluster):
        def start(self, on_wait):
            begun.set()
            assert go_on.wait(60)
            super().start()

    one = Workbench(cluster_factory=Slow)
    thread = threading.Thread(target=one.do, args=(Start(),))
    thread.start()
    assert begun.wait(60)
    for command in (Stop(), Start(), Attach()):
        with pytest.raises(UsageError, match="being started or stopped"):
            one.do(command)
    assert one.exchange == "start"
    go_on.set()
    thread.join()
    assert (one.exchange, one.running) == ("", True)
    one.stop()


def test_an_abort_cancels_a_start_that_waits(monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    class Waits(FakeCluster):
        def start(self, on_wait):
            on_wait("4 ranks, 3 s: importing torch")
            begun.set()
            assert go_on.wait(60)
            on_wait("4 ranks, 4 s: importing torch")
            super().start()

    def abort():
        assert begun.wait(60)
        reported.append(one.do(Abort()).headline)
        go_on.set()

    reported, shown = [], []
    one = Workbench(cluster_factory=Waits)
    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        one.do(Start(), on_wait=shown.append)
    thread.join()
    assert shown == ["4 ranks, 3 s: importing torch"]
    assert reported == ["Cancelled: no ranks are started or attached"]
    assert (one.exchange, one.running) == ("", False)
    one.do(Start())  # the next one is not cancelled
    one.close()


def test_an_abort_cancels_an_attach_that_waits(one, monkeypatch):
    class Attached(FakeCluster):
        def start(self, on_wait):
            one.abort()
            on_wait("2 ranks, 3 s: no engine yet")

    monkeypatch.setattr("workbench.workbench.Cluster.attached", lambda *args, **settings: Attached())
    with pytest.raises(KeyboardInterrupt):
        one.do(Attach())
    assert not one.running


def test_a_start_warns_of_more_ranks_than_the_cores_can_serve(one):
    one.cores, reported = 2, []
    one.do(Start(num_ranks=8), on_notice=reported.append)
    one.do(Stop())
    assert reported == []
    one.do(Start(num_ranks=9), on_notice=reported.append)
    assert reported == ["9 ranks share 2 cores here: the start may take minutes or fail"]


def test_before_a_start_the_message_says_to_start(one):
    with pytest.raises(UsageError, match=r"running yet\. Start them with %fsdp start"):
        one.do(Shard("model"))


def rooms():
    """Return the files of the package on the stack of this thread, outermost first, each run of a file once."""
    package, frame, found = Path(workbench.__file__).parent, sys._getframe(), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        found += [path.relative_to(package).as_posix()] if path.is_relative_to(package) else []
        frame = frame.f_back
    return [file for file, _ in groupby(reversed(found))]


def test_a_command_passes_each_layer_once(notebook):
    seen = []

    def step(cluster, rank, answer):
        seen.append(rooms())
        inside(cluster, rank, answer)

    def evaluate(rank, job):
        seen.append(rooms())
        return text_reply("1")

    notebook.fake.sharded()
    notebook.fake.script["step"] = step
    notebook.ok("%fsdp step --until backward")
    assert seen == [["magics/shell.py", "workbench.py", "session/session.py"]] * 4
    seen.clear()
    for gate in notebook.fake.gates:
        gate.jobs = evaluate
    notebook.ok("%fsdp eval 1")
    assert seen == [["magics/shell.py", "workbench.py", "session/session.py", "session/remote_eval.py"]] * 4
    notebook.ok("%fsdp abort")
