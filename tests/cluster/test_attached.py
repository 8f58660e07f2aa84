"""Engines of a running cluster: attached, detached, viewed from a second notebook."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from tests.cluster.conftest import RUNTIME, texts, wait_until_held
from tests.helpers.fake_rank import GetThreadState, Release
from tests.helpers.ipp_engines import running_profile
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import Cluster
from workbench.cluster import cluster as cluster_module
from workbench.cluster import engine_provider as place_module
from workbench.cluster.attached import BOOT_S, AttachedEngines, AttachTarget, holder_here, is_gone
from workbench.cluster.channels import Channels
from workbench.errors import ClusterError, Interrupted, UsageError
from workbench.protocol.rank_messages import Locate

pytestmark = pytest.mark.cluster


profile = running_profile


def attached(num_ranks=None, **more):
    return Cluster.attached(AttachTarget(profile="running"), num_ranks, device="cpu", runtime=RUNTIME, **more)


def engines_of(cluster):
    return [psutil.Process(info.pid) for info in cluster.rank_info]


@pytest.mark.thorough
def test_engines_are_not_taken_for_busy_while_they_count_their_devices(profile, monkeypatch):
    begin = "def _devices() -> dict[str, int]:\n"
    slow = cluster_module.PROGRAM.replace(
        begin, f"{begin}    __import__('time').sleep(2 * {cluster_module._PATIENCE_S})\n"
    )
    assert slow != cluster_module.PROGRAM
    monkeypatch.setattr(cluster_module, "PROGRAM", slow)
    with Cluster.attached(AttachTarget(profile="running"), device="auto", runtime=RUNTIME) as cluster:
        assert cluster.num_ranks == 3


@pytest.fixture
def slow_engines(monkeypatch):
    """Engines that identify themselves late and have no control channel, as they were not ranks before."""
    hold = Channels.hold
    refuse = dict.fromkeys(range(3), ClusterError("has not answered"))
    monkeypatch.setattr(Channels, "hold", lambda self, data, *more: hold(self, data, *more) if data else refuse)
    monkeypatch.setattr(cluster_module, "_PATIENCE_S", 0.02)
    begin = "    interfaces = interfaces_here()\n"
    slow = cluster_module.PROGRAM.replace(begin, f"    __import__('time').sleep(0.5)\n{begin}")
    assert slow != cluster_module.PROGRAM
    monkeypatch.setattr(cluster_module, "PROGRAM", slow)


@pytest.mark.thorough
@pytest.mark.usefixtures("slow_engines")
def test_engines_of_a_busy_machine_are_waited_for(profile):
    with attached() as cluster:
        assert cluster.num_ranks == 3


@pytest.mark.usefixtures("slow_engines")
def test_engines_that_stay_busy_are_reported_as_unresponsive(profile, monkeypatch):
    monkeypatch.setattr(cluster_module, "_ANSWER_S", 0.0)
    with pytest.raises(ClusterError, match=r"3 of 3 engines do not answer; .* keeps its engines busy"):
        attached().start()


@pytest.fixture
def impatient(monkeypatch):
    """Makes the notices of a start appear at once."""
    monkeypatch.setattr(cluster_module, "_QUICK_S", 0.0)
    for module in (cluster_module, place_module):
        monkeypatch.setattr(module, "NOTICE_S", 0.01)


class CancelsStart:
    """Records the notices of a start, and raises KeyboardInterrupt at the first that contains ``at``."""

    def __init__(self, at):
        self.at, self.reported = at, []

    def __call__(self, sentence):
        self.reported.append(sentence)
        if self.at in sentence:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("slow_engines", "impatient")
@pytest.mark.parametrize("at", ["attaching 3 ranks, 0 s: 3 have not answered yet", "connecting the ranks"])
def test_an_attach_shows_what_it_waits_for_and_can_be_cancelled(profile, at):
    gives_up, cluster = CancelsStart(at), attached()
    with pytest.raises(Interrupted, match="The attach was cancelled: the cluster keeps running"):
        cluster.start(gives_up)
    assert at in gives_up.reported[-1]
    assert not cluster.is_started
    with attached() as again:
        assert (again.num_ranks, again.held_by) == (3, "")


@pytest.mark.usefixtures("impatient")
def test_an_unresponsive_controller_is_waited_for_until_cancelled(profile, tmp_path):
    file = json.loads((profile / "security" / "ipcontroller-one-client.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        file["registration"] = silent.getsockname()[1]
        (tmp_path / "silent.json").write_text(json.dumps(file))
        cluster = Cluster.attached(AttachTarget(file=str(tmp_path / "silent.json")), device="cpu", start_timeout_s=1.0)
        gives_up = CancelsStart("attaching all engines, 0 s: the controller has not answered yet")
        with pytest.raises(Interrupted, match="The attach was cancelled"):
            cluster.start(gives_up)
        assert not cluster.is_started
        late = Cluster.attached(AttachTarget(file=str(tmp_path / "silent.json")), device="cpu", start_timeout_s=0.1)
        with pytest.raises(ClusterError, match="the controller has not answered within 0 s"):
            late.start()
        connecting = "connect to the controller"  # ends once the controller has exceeded its time limit
        wait_until(lambda: connecting not in {thread.name for thread in threading.enumerate()})


def test_engines_become_ranks_and_keep_their_variables_when_they_are_left(profile):
    first = attached()
    first.start()
    processes = engines_of(first)
    first.run_cell("x = 10 + rank").results(PATIENCE_S)
    first.detach()
    assert not first.is_started
    assert all(process.is_running() for process in processes)
    with attached() as second:
        assert engines_of(second) == processes
        assert second.held_by == ""
        pending = second.run_cell("print(rank, x)")
        pending.results(PATIENCE_S)
        assert [texts(pending, rank) for rank in range(3)] == ["0 10\n", "1 11\n", "2 12\n"]
        replies = second.ask(GetThreadState(), timeout_s=PATIENCE_S).values()
        assert [reply.thread for reply in replies] == ["Control"] * 3
    assert all(process.is_running() for process in processes)


def test_after_a_stop_engines_are_plain_ones_and_may_become_other_ranks(profile):
    with attached(2) as cluster:
        assert [info.rank for info in cluster.rank_info] == [0, 1]
    with attached() as cluster:
        assert cluster.num_ranks == 3


def test_detached_ranks_are_attached_unchanged_or_refused(profile):
    with attached(2) as cluster:
        cluster.detach()
    with pytest.raises(UsageError, match="2 of its engines are already ranks and keep their variables"):
        attached(3).start()
    with attached() as cluster:
        assert cluster.num_ranks == 2


OTHER = f"""
import json, sys
from workbench.cluster import Cluster
from workbench.cluster.attached import AttachTarget
cluster = Cluster.attached(AttachTarget(profile="running"), device="cpu", runtime="{RUNTIME}")
cluster.start()
pending = cluster.apply("{RUNTIME}:hold")
print(json.dumps([info.pid for info in cluster.rank_info]), flush=True)
sys.stdin.readline()
"""


def test_a_second_notebook_views_ranks_and_takes_them_once_they_are_free(profile):
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        pids = json.loads(other.stdout.readline())
        with attached() as looking:  # although all ranks are busy
            assert [info.pid for info in looking.rank_info] == pids
            assert f"(process {other.pid})" in looking.held_by
            assert [reply.rank for reply in looking.ask(Locate(), timeout_s=PATIENCE_S).values()] == [0, 1, 2]
            for command in (
                lambda: looking.run_cell("x = 1"),
                lambda: looking.apply(f"{RUNTIME}:echo"),
                lambda: looking.ask(Release()),
                looking.interrupt,
            ):
                with pytest.raises(UsageError, match=r"controls these ranks; here you can only view.*attach --take"):
                    command()
            assert not looking.is_free
            other.kill()
            wait_until(lambda: looking.ask(Locate(), timeout_s=PATIENCE_S) and looking.is_free)  # as a view does
            assert f"(process {other.pid})" in looking.held_by  # nobody else controls them, nor does this one
    with attached() as taking:
        assert taking.held_by == ""
        assert not taking.is_free
        wait_until_held(taking)
        taking.ask(Release(), timeout_s=PATIENCE_S)


def test_a_look_changes_neither_free_ranks_nor_engines(profile):
    with attached() as first:
        first.apply(f"{RUNTIME}:echo").wait(PATIENCE_S)
        first.detach()
    with attached(look=True) as looking:
        assert [reply.rank for reply in looking.ask(Locate(), timeout_s=PATIENCE_S).values()] == [0, 1, 2]
        with pytest.raises(UsageError, match="no notebook controls these ranks; here you can only view them"):
            looking.run_cell("x = 1")
        with attached() as second:  # a viewer leaves them free
            assert second.held_by == ""
            looking.ask(Locate(), timeout_s=PATIENCE_S)
            looking.detach()
            with attached(look=True) as third:  # nobody has taken them from the second
                assert f"(process {os.getpid()})" in third.held_by
    with pytest.raises(UsageError, match="its engines are no ranks yet: there is nothing to view"):
        attached(look=True).start()


TAKER = f"""
import sys
from workbench.cluster import Cluster
from workbench.cluster.attached import AttachTarget
cluster = Cluster.attached(AttachTarget(profile="running"), device="cpu", runtime="{RUNTIME}", take=True)
cluster.start()
print("taken", flush=True)
sys.stdin.readline()
cluster.detach()
"""


@pytest.mark.thorough
def test_the_previous_holder_is_notified_when_another_notebook_takes_the_ranks(profile):
    first = attached()
    first.start()
    assert first.held_by == ""
    with subprocess.Popen(
        [sys.executable, "-c", TAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "taken\n"
        wait_until(lambda: first.ask(Locate(), timeout_s=PATIENCE_S) and first.held_by)  # as a view does
        assert f"(process {other.pid})" in first.held_by
        with pytest.raises(UsageError, match=rf"process {other.pid}\) controls these ranks; .* attach --take"):
            first.run_cell("x = 1")
        other.communicate("\n")
    wait_until(lambda: first.ask(Locate(), timeout_s=PATIENCE_S) and first.is_free)  # it has detached
    first.detach()
    with attached() as again:
        assert again.held_by == ""


def test_a_missing_cluster_is_reported(profile, tmp_path):
    security = profile / "security"
    for target, reported in (
        (
            AttachTarget(profile="running", cluster_id="two"),
            "no cluster with the id 'two' .*; running: one; choose one with --cluster-id ID",
        ),
        (AttachTarget(file=str(tmp_path / "none.json")), "none.json cannot be read: No such file"),
        (
            AttachTarget(file=str(security / "ipcontroller-one-engine.json")),
            "not ipyparallel's connection file for clients",
        ),
    ):
        with pytest.raises(UsageError, match=reported):
            Cluster.attached(target, device="cpu").start()
    for content, reported in (
        (b"{", "is not a connection file"),
        (b"\xff", "is not a connection file"),
        (b"", "is empty: .* again"),
    ):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(UsageError, match=reported):
            Cluster.attached(AttachTarget(file=str(tmp_path / "broken.json"))).start()
    with pytest.raises(UsageError, match="has 3 engines, not 4: start more with ipcluster engines -n N"):
        attached(4).start()
    file = security / "ipcontroller-one-client.json"
    with Cluster.attached(AttachTarget(file=str(file)), device="cpu", runtime=RUNTIME) as cluster:
        assert cluster.num_ranks == 3


def test_engines_may_import_for_longer_than_they_may_take_to_be_found(tmp_path):
    needed = ("interface", "registration", "notification", "control", "signature_scheme")
    (tmp_path / "client.json").write_text(json.dumps(dict.fromkeys(needed, "")))
    engines = AttachedEngines(AttachTarget(file=str(tmp_path / "client.json")), 1, timeout_s=0.0)
    before = engines.deadline
    assert engines.wait_for_engines(lambda: {"engine": 0}) == ("engine",)
    assert engines.deadline >= before + BOOT_S


def test_ranks_started_here_cannot_be_detached(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    with pytest.raises(UsageError, match="these ranks were started here and end with this notebook"):
        cluster.detach()
    assert cluster.is_started


def test_a_holder_is_gone_if_its_process_is():
    me = holder_here()
    assert me.pid == os.getpid()
    assert not is_gone(me)
    assert is_gone(type(me)(**{**vars(me), "created_s": 1.5}))
    assert not is_gone(type(me)(**{**vars(me), "created_s": 1.5, "identity": "another host"}))


SOON_S = 15.0
"""Much more than the moment that it takes, and less than ipyparallel's own time limit of 30 s."""


@pytest.mark.thorough
def test_an_attached_engine_that_is_killed_is_named_at_once_though_its_controller_beats_slowly(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    directory = tmp_path / "profile_slow"
    (directory / "startup").mkdir(parents=True)
    slow = "c = get_config()\nc.HeartMonitor.period = 3000\nc.HeartMonitor.max_heartmonitor_misses = 10\n"
    (directory / "ipcontroller_config.py").write_text(slow)
    with Cluster(2, "cpu", "slow", engines="local", runtime=RUNTIME) as started:
        file = started._provider._cluster.controller.connection_files["client"]
        looking = Cluster.attached(AttachTarget(file=file), device="cpu", runtime=RUNTIME)
        looking.start()
        engine = looking.rank_info[1]
        os.kill(engine.pid, signal.SIGKILL)
        wait_until(looking.losses, SOON_S)
        assert looking.losses() == {1: f"died: the process on {engine.host} has ended, or its host is gone"}
        looking.stop()


@pytest.mark.thorough
def test_an_attached_cluster_whose_controller_is_killed_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (tmp_path / "profile_mine" / "startup").mkdir(parents=True)
    with Cluster(1, "cpu", "mine", engines="local", runtime=RUNTIME) as started:
        file = started._provider._cluster.controller.connection_files["client"]
        looking = Cluster.attached(AttachTarget(file=file), device="cpu", runtime=RUNTIME)
        looking.start()
        os.kill(started._provider._cluster.controller.pid, signal.SIGKILL)
        wait_until(looking.losses)
        how = "cannot be reached: the cluster's controller has ended, or its host is gone"
        assert looking.losses() == {0: how}
        looking.stop()
