"""Start, stop, and what is left afterwards; impossible requests."""

import math
import os
import re
import signal
import stat
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from tests.cluster.conftest import FOREVER_S, RUNTIME, texts
from tests.helpers.pairwise import quick
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.base import ports
from workbench.cluster import Cluster, local_launch
from workbench.cluster.channels import Channels
from workbench.cluster.pending_replies import PendingReplies
from workbench.cluster.processes import is_running
from workbench.cluster.reaper import Reaper
from workbench.cluster.zygote import Zygote
from workbench.cluster.zygote_cache import KEEPER
from workbench.errors import ClusterError, Interrupted, UsageError

pytestmark = pytest.mark.cluster


@pytest.fixture
def private(tmp_path, monkeypatch):
    """The folder of the private files of this test's clusters."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def processes_now():
    return set(psutil.Process().children(recursive=True))


def test_a_stop_leaves_only_the_zygote(make_cluster, private):
    KEEPER.end()
    processes, threads = processes_now(), set(threading.enumerate())
    cluster = make_cluster()
    cluster.start()
    assert cluster.is_started
    assert cluster.alive() == (True, True)
    started = processes_now() - processes
    assert len(started) >= 6  # reaper, controller, two ranks, the zygote and its reaper
    cluster.stop()
    assert set(filter(is_running, started)) == set(KEEPER.processes)
    assert set(threading.enumerate()) == threads | {KEEPER.thread}
    KEEPER.end()
    assert not any(map(is_running, started))
    wait_until(lambda: set(threading.enumerate()) == threads)
    assert list(private.iterdir()) == []
    assert not cluster.is_started
    assert cluster.alive() == (False, False)
    cluster.stop()  # a second stop has no effect


@pytest.mark.parametrize(
    "what",
    quick([(Channels, "call"), (Channels, "close"), (Zygote, "join"), (Reaper, "close")], [(Channels, "call")]),
)
def test_an_error_during_the_start_leaves_nothing_behind(make_cluster, private, monkeypatch, what):
    processes = processes_now()
    cluster = make_cluster()
    cluster.start()
    started = processes_now() - processes
    owner, name = what
    real = getattr(owner, name)

    def fail(self, *args):
        if name != "call":
            real(self, *args)
        raise RuntimeError("on purpose")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        cluster.stop()
    monkeypatch.undo()
    KEEPER.end()
    wait_until(lambda: not any(map(is_running, started)))
    assert list(private.iterdir()) == []
    assert not cluster.is_started


def test_idle_ranks_leave_their_groups_before_they_end(make_cluster, monkeypatch, tmp_path):
    monkeypatch.setattr("workbench.cluster.cluster._SHUTDOWN_S", PATIENCE_S)
    monkeypatch.setenv("WORKBENCH_FAKE_RANK_SHUTDOWN", str(tmp_path / "left"))
    with make_cluster():
        pass
    assert sorted((tmp_path / "left").read_text().split()) == ["0", "1"]


def test_a_stop_does_not_wait_for_a_rank_that_is_busy(make_cluster, monkeypatch):
    monkeypatch.setattr("workbench.cluster.cluster._SHUTDOWN_S", FOREVER_S)
    cluster = make_cluster()
    cluster.start()
    pending = cluster.run_cell("while True: pass", ranks=[1])
    cluster.stop()
    with pytest.raises(ClusterError, match="rank 1 was stopped"):
        pending.result(1, timeout_s=0)


def test_ctrl_c_in_a_stop_is_answered_when_all_has_ended(make_cluster, monkeypatch, private):
    cluster, before = make_cluster(), processes_now() - {*KEEPER.processes}
    cluster.start()
    started = processes_now() - before
    monkeypatch.setattr(cluster, "_shut_down", lambda channels: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match=r"^Interrupted, but the ranks are stopped$"):
        cluster.stop()
    assert not cluster.is_started
    assert set(filter(is_running, started)) <= set(KEEPER.processes)
    assert list(private.iterdir()) == []


@pytest.mark.thorough
def test_the_controllers_advice_counts_its_heartbeat_process(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    assert cluster._provider._num_listening() == local_launch._PORTS


def test_a_cluster_can_be_started_again_but_not_twice(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    with pytest.raises(UsageError, match="already started"):
        cluster.start()
    assert cluster.apply(f"{RUNTIME}:echo", 1).result(0, PATIENCE_S) == (1,)
    cluster.stop()
    cluster.start()
    assert cluster.apply(f"{RUNTIME}:echo", 2).result(0, PATIENCE_S) == (2,)


def test_sockets_are_on_the_loopback_interface_and_files_are_private(make_cluster, private):
    processes = processes_now()
    with make_cluster():
        (root,) = private.iterdir()
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        keys = (root / "profile" / "security" / "ipcontroller-client.json").read_text()
        # the controller changes its mode after writing that file
        its_own = root / "profile" / "security" / "ipcontroller-engine.json"
        assert its_own.read_text() == (root / "engine.json").read_text()
        assert stat.S_IMODE((root / "engine.json").stat().st_mode) == 0o600
        assert '"curve_serverkey": null' not in keys
        assert '"key": ""' not in keys
        assert {ip for ip, _ in listening(processes_now() - processes)} == {"127.0.0.1"}


def listening(processes):
    """Return the addresses on which some processes listen."""
    return {
        connection.laddr
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    }


def test_the_controller_listens_on_reserved_ports_alone(make_cluster, monkeypatch):
    reserved, processes = [], processes_now()
    monkeypatch.setattr(local_launch, "reserved_port", lambda: reserved.append(ports.reserved_port()) or reserved[-1])
    with make_cluster(1):
        controller = [p for p in processes_now() - processes if p.name() == "fsdp-controller"]
        found = {port for _, port in listening(controller)}
    assert found <= set(reserved)
    assert len(found) > 10


@pytest.mark.parametrize("num_ranks", [0, -1, 1000, 2.0, True, "4"])
def test_a_number_of_ranks_that_cannot_be_is_refused(num_ranks):
    with pytest.raises(UsageError, match="the number of ranks is 1 to 64, not"):
        Cluster(num_ranks)


def test_an_unknown_device_is_refused():
    with pytest.raises(UsageError, match="one of auto, cpu, cuda, not 'tpu'"):
        Cluster(2, "tpu")


@pytest.mark.parametrize(
    "use",
    [
        lambda cluster: cluster.apply("a:b"),
        lambda cluster: cluster.run_cell("pass"),
        lambda cluster: cluster.ask({}),
        lambda cluster: cluster.interrupt(),
        lambda cluster: cluster.rank_info,
    ],
)
def test_requests_before_the_start_are_refused(use):
    with pytest.raises(UsageError, match="first %fsdp start"):
        use(Cluster(2))


def test_a_refusal_of_a_rank_at_boot_is_shown_verbatim(make_cluster, monkeypatch, private):
    monkeypatch.setenv("WORKBENCH_FAKE_RANK_REFUSES_AT_BOOT", "1")
    cluster = make_cluster()
    with pytest.raises(UsageError, match=r"^not on a Sunday: use another day$"):
        cluster.start()
    assert list(private.iterdir()) == []
    assert not cluster.is_started


def test_a_device_whose_driver_is_missing_is_refused_before_anything_starts(make_cluster, monkeypatch, private):
    monkeypatch.setattr(local_launch, "Reaper", None)
    monkeypatch.setattr("workbench.base.devices.Device.may_be_here", lambda self: not self.driver)
    with pytest.raises(UsageError, match=r"^2 ranks need 2 cuda devices, but \S+ has 0: use --device cpu$"):
        make_cluster(device="cuda").start()
    assert list(private.iterdir()) == []


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs for two ranks")
def test_fewer_gpus_than_ranks_are_refused(make_cluster, private):
    cluster = make_cluster(device="cuda")
    with pytest.raises(UsageError, match=r"^2 ranks need 2 cuda devices, but \S+ has \d: use --device cpu"):
        cluster.start()
    assert list(private.iterdir()) == []
    assert not cluster.is_started


@pytest.mark.thorough
def test_a_rank_side_that_fails_at_boot_is_named(private):
    cluster = Cluster(2, runtime="no.such.runtime")
    with pytest.raises(ClusterError, match=r"rank [01] did not start: ModuleNotFoundError: No module named 'no'"):
        cluster.start()
    assert list(private.iterdir()) == []


def replace_rank_1(monkeypatch, code):
    """Run ``code`` in place of the engine of rank 1, in a process that is not forked."""
    monkeypatch.setattr(local_launch, "can_fork", lambda device: False)
    real = local_launch.command

    def command(program):
        return [sys.executable, "-c", code] if program.log.name == "rank-1.log" else real(program)

    monkeypatch.setattr(local_launch, "command", command)


def test_a_rank_that_does_not_start_is_named_with_its_log(make_cluster, monkeypatch, private):
    replace_rank_1(monkeypatch, "import signal; print('I sleep instead', flush=True); signal.pause()")
    wait_for_engines = local_launch.LocalLaunch.wait_for_engines

    def until_only_rank_1_is_missing(self, registered):
        wait_until(lambda: self.engines[0] in registered() and "I sleep" in self.log_tail(1))
        self.deadline = 0.0
        return wait_for_engines(self, registered)

    monkeypatch.setattr(local_launch, "PROGRESS_S", math.inf)
    monkeypatch.setattr(local_launch.LocalLaunch, "wait_for_engines", until_only_rank_1_is_missing)
    with pytest.raises(
        ClusterError, match=r"(?s)rank 1 did not start in time.*the process of rank 1:\nI sleep instead"
    ):
        make_cluster().start()
    assert list(private.iterdir()) == []


def test_many_ranks_that_do_not_start_are_listed_after_the_advice(make_cluster, monkeypatch, private):
    monkeypatch.setattr(local_launch, "can_fork", lambda device: False)
    real, silent = local_launch.command, [sys.executable, "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(
        local_launch, "command", lambda program: silent if program.log.name.startswith("rank") else real(program)
    )
    wait_for_engines = local_launch.LocalLaunch.wait_for_engines

    def without_patience(self, registered):
        self.deadline = 0.0
        return wait_for_engines(self, registered)

    monkeypatch.setattr(local_launch.LocalLaunch, "wait_for_engines", without_patience)
    with pytest.raises(ClusterError) as caught:
        make_cluster(5).start()
    late, advice, facts = str(caught.value).splitlines()
    assert late == "ranks 0-4 did not start in time (their logs are empty)"
    assert advice.startswith("start fewer ranks (%fsdp start -n 2), give it more time (%fsdp start -n 5 --timeout ")
    assert facts.startswith("memory: ")


def test_a_start_has_no_deadline_while_a_process_works(monkeypatch):
    place, used_s = object.__new__(local_launch.LocalLaunch), iter([2.5, 5.0, 5.1])
    place._watched, place._zygote = {None: None, 0: types.SimpleNamespace(process=psutil.Process())}, None
    place._timeout_s, place._used_s = FOREVER_S, {}
    monkeypatch.setattr(local_launch, "_cpu_s", lambda process: next(used_s))
    found = []
    for _ in range(3):
        place.deadline = 0.0
        found.append((place.is_overdue(), place.deadline > time.monotonic()))
    assert found == [(False, True), (False, True), (True, False)]


def test_a_local_start_shows_what_it_waits_for_and_can_be_cancelled(make_cluster, monkeypatch, private):
    replace_rank_1(monkeypatch, "import signal; signal.pause()")
    monkeypatch.setattr("workbench.cluster.cluster._QUICK_S", 0.0)
    reported = []

    def give_up(sentence):
        reported.append(sentence)
        if "1 of 2 processes have connected" in sentence:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="The start was cancelled: no ranks are running"):
        make_cluster().start(give_up)
    assert re.fullmatch(r"starting 2 ranks, \d+ s: waiting for the controller", reported[0])
    assert list(private.iterdir()) == []


def test_a_rank_that_ends_while_it_starts_is_named_with_its_log(make_cluster, monkeypatch):
    replace_rank_1(monkeypatch, "raise SystemExit('no libzmq here')")
    with pytest.raises(ClusterError, match=r"(?s)process of rank 1 ended during the start.*no libzmq here"):
        make_cluster(start_timeout_s=FOREVER_S).start()


def test_a_controller_that_ends_while_it_starts_is_named(make_cluster, monkeypatch):
    monkeypatch.setattr(local_launch, "controller_arguments", lambda root: ["--IPController.ports=none"])
    with pytest.raises(ClusterError, match=r"(?s)the controller ended during the start; the end of its log:.*ports"):
        make_cluster().start()


def test_an_unresponsive_controller_comes_with_advice(make_cluster, monkeypatch, private):
    def be_silent(_, timeout_s, on_gone, on_silence):
        raise TimeoutError

    monkeypatch.setattr("workbench.cluster.cluster.Wire", be_silent)
    monkeypatch.setattr(local_launch.LocalLaunch, "_log_lines", lambda self, rank: [f"{rank} is too hot"])
    with pytest.raises(ClusterError) as caught:
        make_cluster(start_timeout_s=60).start()
    late, advice, facts, whose, log = str(caught.value).splitlines()
    assert late == "the controller has not answered within 60 s"
    assert (whose, log) == ("the end of the log of the controller:", "None is too hot")
    assert re.fullmatch(
        r"memory: [\d.]+ of [\d.]+ GiB free; load: [\d.]+ on \d+ cores; "
        r"ports on 127.0.0.1: the controller listens on \d+ of 15",
        facts,
    )
    assert "start fewer ranks (%fsdp start -n 1), give it more time (%fsdp start -n 2 --timeout 120)" in advice
    assert list(private.iterdir()) == []


@pytest.mark.thorough
def test_a_rank_that_hangs_at_boot_is_named(make_cluster, monkeypatch):
    monkeypatch.setenv("WORKBENCH_FAKE_RANK_HANGS_AT_BOOT", "1")
    wait, boot = PendingReplies.wait, Cluster._boot

    def without_patience(self, place, requested):
        def until_rank_0_has_booted(self, timeout_s, *, or_error):
            wait_until(lambda: self.done(0))
            place.deadline = 0.0
            return wait(self, 0, or_error=or_error)

        monkeypatch.setattr(PendingReplies, "wait", until_rank_0_has_booted)
        return boot(self, place, requested)

    monkeypatch.setattr(Cluster, "_boot", without_patience)
    with pytest.raises(ClusterError, match=r"rank 1 did not finish .*:boot in time"):
        make_cluster().start()


def test_a_rank_that_answers_with_something_else_is_named(make_cluster, monkeypatch):
    monkeypatch.setenv("WORKBENCH_FAKE_RANK_SURPRISES_AT_BOOT", "1")
    with pytest.raises(ClusterError, match=r"invalid reply to 'boot': reply of rank 1 lacks"):
        make_cluster().start()


def test_a_profile_that_does_not_exist_is_refused(make_cluster, monkeypatch, tmp_path, private):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with pytest.raises(UsageError, match=r"'mine' does not exist in .*; there are no profiles"):
        make_cluster(profile="mine").start()
    (tmp_path / "ipython" / "profile_other").mkdir(parents=True)
    with pytest.raises(UsageError, match="profiles: other"):
        make_cluster(profile="mine").start()


@pytest.mark.thorough
def test_a_profile_lends_its_configuration_and_startup_files(make_cluster, monkeypatch, tmp_path):
    profile = tmp_path / "profile_mine"
    (profile / "startup").mkdir(parents=True)
    (profile / "startup" / "00_mine.py").write_text("from_startup = 'lent'")
    (profile / "ipengine_config.py").write_text("import os\nos.environ['LENT_CONFIG'] = '1'\n")
    (profile / "ipcontroller_config.py").write_text("c.IPController.client_ip = '0.0.0.0'\n")
    before = sorted(path.name for path in profile.rglob("*"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with make_cluster(1, profile="mine") as cluster:
        pending = cluster.run_cell("import os; print(from_startup, os.environ['LENT_CONFIG'])")
        pending.results(PATIENCE_S)
        assert texts(pending, 0) == "lent 1\n"
    assert sorted(path.name for path in profile.rglob("*")) == before


@pytest.mark.thorough
def test_a_forked_child_does_not_stop_its_parents_ranks(make_cluster):
    cluster = make_cluster(1)
    cluster.start()
    cluster._stop_at_exit(os.getpid() + 1)
    assert cluster.apply(f"{RUNTIME}:echo").result(0, PATIENCE_S) == ()


def test_the_private_files_are_removed_even_if_a_log_is_read_later(make_cluster, private):
    started = local_launch.LocalLaunch(1, None, 60, lambda rank: None)
    assert Path(started.wait_for_controller()).exists()
    started.end()
    wait_until(lambda: started.exit_code(0) is not None)
    assert started.log_tail(0) == "; its log is empty"
    started.end()


def test_a_partial_start_is_ended(make_cluster, monkeypatch, private):
    def refuse(self, process):
        raise ClusterError(f"process {process.pid} cannot be adopted")

    monkeypatch.setattr(local_launch.Reaper, "adopt", refuse)
    with pytest.raises(ClusterError, match="cannot be adopted"):
        make_cluster().start()
    assert list(private.iterdir()) == []


def test_a_kill_for_lack_of_memory_is_told_from_another_kill(make_cluster, monkeypatch):
    counts = iter([0, 1, 1])  # at the start, and at each death
    monkeypatch.setattr("workbench.cluster.processes.num_oom_kills", lambda: next(counts))
    cluster = make_cluster()
    cluster.start()
    for rank in range(2):
        os.kill(cluster.rank_info[rank].pid, signal.SIGKILL)
        wait_until(lambda rank=rank: rank in cluster.losses())
    assert [how.partition("SIGKILL ")[2] for how in cluster.losses().values()] == [
        "(memory ran out: the kernel has counted a process that it killed for it)",
        "(as when memory runs out)",
    ]
