"""The one place where commands are carried out, and its history."""

import threading

import pytest

from tests.helpers.fake_cluster import FakeCluster
from workbench.errors import UsageError
from workbench.magics.notebook import Notebook
from workbench.protocol.commands import Abort, Attach, Help, History, Shard, Start, Status, Stop
from workbench.workbench import MAX_PAST, Workbench


@pytest.fixture
def one():
    made = Notebook(lambda **more: Workbench(cluster_factory=FakeCluster, **more), lambda name: False)
    yield made
    made.close()


def run(workbench, command):
    return workbench.do(command)


def test_whoever_asks_for_a_command_its_line_is_in_the_history(notebook):
    notebook.run("%fsdp   shard  model --wrap 'Block'")  # the ranks refuse it, but it is in the history
    magics = notebook.shell.magics_manager.registry["FsdpMagics"]
    magics.notebook.do(Status(), "panel", run, lambda said: None)
    (shown,) = notebook.ok("%fsdp history").shown
    headline, *lines = shown["text/plain"].splitlines()
    assert headline == "4 commands"
    assert [line.split(maxsplit=1)[1].removeprefix("panel").strip() for line in lines] == [
        *("%fsdp start", "%fsdp shard model --wrap Block", "%fsdp status", "%fsdp history")
    ]
    assert [" panel " in line for line in lines] == [False, False, True, False]
    (shown,) = notebook.ok("%fsdp history 1").shown
    assert shown["text/plain"].splitlines()[0] == "1 command"


def test_execution_counts_are_those_of_cells_alone(notebook):
    before = notebook.shell.execution_count
    notebook.shell.magics_manager.registry["FsdpMagics"].notebook.do(Status(), "panel", run, lambda said: None)
    assert notebook.shell.execution_count == before


def test_only_so_many_are_kept(one):
    for _ in range(MAX_PAST + 1):
        one.do(Help("shard"), "cell", run, lambda said: None)
    assert len(one.do(History(), "cell", run, lambda said: None).commands) == MAX_PAST


def test_ranks_are_started_by_one_at_a_time(one, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def start(self, on_wait, **settings):
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(Workbench, "start", start)
    thread = threading.Thread(target=one.do, args=(Start(), "panel", run, lambda said: None))
    thread.start()
    assert begun.wait(60)
    with pytest.raises(UsageError, match="being started or stopped"):
        one.do(Stop(), "cell", run, lambda said: None)
    go_on.set()
    thread.join()


@pytest.mark.parametrize(("command", "method"), [(Start(), "start"), (Attach(), "join")])
def test_a_start_or_attach_is_given_up_by_abort_and_says_meanwhile_what_it_waits_for(one, monkeypatch, command, method):
    begun, go_on = threading.Event(), threading.Event()

    def start(self, *, on_wait, **settings):
        on_wait("4 ranks, 3 s: importing torch")
        begun.set()
        assert go_on.wait(60)
        on_wait("4 ranks, 4 s: importing torch")

    def give_up():
        assert begun.wait(60)
        one.do(Abort(), "panel", run, said.append)
        go_on.set()

    said, shown = [], []
    monkeypatch.setattr(Workbench, method, start)
    thread = threading.Thread(target=give_up)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        one.do(command, "cell", run, said.append, shown.append)
    thread.join()
    assert shown == ["4 ranks, 3 s: importing torch"]
    assert said == ["Cancelled: no ranks are started or attached"]
    assert one.exchange == ""
    monkeypatch.setattr(Workbench, method, lambda self, *, on_wait, **settings: on_wait("again"))
    one.do(command, "cell", run, said.append)  # the next one is not cancelled


def test_more_ranks_than_cores_can_serve_are_warned_of_before_they_start(one):
    one.cores, said = 2, []
    one.do(Start(num_ranks=8), "cell", run, said.append)
    one.do(Stop(), "cell", run, lambda _: None)
    assert said == []
    one.do(Start(num_ranks=9), "cell", run, said.append)
    assert said == ["9 ranks share 2 cores here: the start may take minutes or fail"]


def test_before_there_are_ranks_it_says_what_to_do_first(one):
    with pytest.raises(UsageError, match="Start them with %fsdp start"):
        one.do(Shard("model"), "panel", run, lambda said: None)
