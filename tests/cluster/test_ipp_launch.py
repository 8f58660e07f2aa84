"""Engines that ipyparallel's own launchers start, on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import RUNTIME, texts, wait_until_held
from tests.helpers.fake_rank import GetThreadState, Release
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import Cluster, ssh_launch
from workbench.cluster import ipp_launch as launched_module
from workbench.cluster.ipp_launch import IppLaunch, launchers
from workbench.cluster.processes import is_running
from workbench.errors import ClusterError, Interrupted, RankDied, UsageError

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True, scope="module")
def ipython_directory(tmp_path_factory):
    """The directory of the profiles for this module's tests."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        directory = tmp_path_factory.mktemp("ipython")
        monkeypatch.setenv("IPYTHONDIR", str(directory))
        yield directory


def write_profile(ipython_directory, name, config=""):
    """Make a profile with this ``ipcluster_config.py``."""
    directory = ipython_directory / f"profile_{name}"
    (directory / "startup").mkdir(parents=True, exist_ok=True)
    (directory / "ipcluster_config.py").write_text(f"c = get_config()\n{config}")
    return directory


def refuse_to_wait(sentence):
    """Fail a start that has begun to wait for its controller."""
    raise AssertionError(sentence)


def files_in(directory):
    return {path.relative_to(directory) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def launched(ipython_directory):
    write_profile(ipython_directory, "mine", "c.LocalEngineLauncher.environment = {'LENT_CONFIG': '1'}\n")
    with Cluster(2, "cpu", "mine", engines="local", runtime=RUNTIME) as started:
        yield started


def test_the_launchers_are_those_that_ipyparallel_has_registered():
    assert {"local", "mpi", "ssh", "slurm", "pbs", "lsf", "sge", "htcondor"} <= set(launchers())


def test_an_unknown_launcher_is_refused_with_the_list():
    with pytest.raises(UsageError, match=r"no engine launcher 'slrum', did you mean 'slurm'\? launchers: .*ssh"):
        Cluster(2, engines="slrum")


def test_ranks_work_as_usual(launched):
    assert [info.rank for info in launched.rank_info] == [0, 1]
    pending = launched.run_cell("import os; print(rank, os.environ['LENT_CONFIG'])")
    pending.results(PATIENCE_S)
    assert [texts(pending, rank) for rank in (0, 1)] == ["0 1\n", "1 1\n"]
    replies = launched.ask(GetThreadState(), timeout_s=PATIENCE_S)
    assert [reply.thread for reply in replies.values()] == ["Control", "Control"]


def test_an_interrupt_needs_no_process_of_ours(launched):
    pending = launched.apply(f"{RUNTIME}:spin")
    wait_until_held(launched)
    launched.interrupt([1])
    assert pending.error(1) is None or pending.wait(0)
    wait_until(lambda: pending.done(1))
    assert pending.error(1).ename == "KeyboardInterrupt"
    assert not pending.done(0)
    launched.ask(Release(), timeout_s=PATIENCE_S)
    assert pending.result(0, PATIENCE_S)


def test_connections_are_encrypted_and_on_loopback(launched):
    keys = Path(launched._provider._cluster.controller.connection_files["client"]).read_text()
    assert '"curve_serverkey": null' not in keys
    controller = psutil.Process(launched._provider._cluster.controller.pid)
    processes = [controller, *controller.children(recursive=True)]
    listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_a_stop_leaves_nothing(ipython_directory):
    directory = write_profile(ipython_directory, "left")
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    before = files_in(directory)
    with Cluster(2, "cpu", "left", engines="local", runtime=RUNTIME):
        started = set(psutil.Process().children(recursive=True)) - children
        assert len(started) >= 4
    wait_until(lambda: not any(map(is_running, started)))
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert {
        path for path in files_in(directory) - before if "ipcontroller" in str(path) or "log" in path.parts
    } == set()


def test_a_killed_rank_is_named_and_the_others_work_on(ipython_directory):
    write_profile(ipython_directory, "killed")
    with Cluster(2, "cpu", "killed", engines="local", runtime=RUNTIME) as cluster:
        pending = cluster.apply(f"{RUNTIME}:hold")
        wait_until_held(cluster)
        os.kill(cluster.rank_info[1].pid, signal.SIGKILL)
        with pytest.raises(RankDied, match=r"rank 1 died: the process on .* has ended"):
            pending.result(1, PATIENCE_S)
        assert cluster.alive() == (True, False)
        cluster.ask(Release(), timeout_s=PATIENCE_S)
        assert pending.result(0, PATIENCE_S)


def test_a_profile_may_choose_the_launcher(ipython_directory):
    config = (
        f"c.Cluster.engine_launcher_class = 'local'\nc.LocalEngineLauncher.engine_cmd = [{sys.executable!r}, '-c', '']"
    )
    write_profile(ipython_directory, "says", config)
    with pytest.raises(ClusterError, match="engines ended during the start: 0 of 2 engines are connected"):
        Cluster(2, "cpu", "says", runtime=RUNTIME).start()


def test_a_configuration_that_fails_is_reported(ipython_directory):
    write_profile(ipython_directory, "fails", "raise RuntimeError('no such queue')")
    with pytest.raises(UsageError, match=r"profile_fails/ipcluster_config.py fails: RuntimeError: no such queue"):
        Cluster(2, "cpu", "fails", engines="local").start()


def test_a_launcher_with_a_missing_program_is_reported(ipython_directory):
    write_profile(ipython_directory, "absent", "c.MPIEngineSetLauncher.mpi_cmd = ['no-such-mpiexec']")
    message = r"no-such-mpiexec is not installed here, or not on PATH: install it, or set its path in .*profile_absent/"
    with pytest.raises(UsageError, match=rf"{message}.*c\.MPIEngineSetLauncher\.mpi_cmd = "):
        Cluster(2, "cpu", "absent", engines="mpi", runtime=RUNTIME).start(refuse_to_wait)


def test_a_missing_queue_is_reported(ipython_directory, monkeypatch):
    write_profile(ipython_directory, "no_queue")
    monkeypatch.setenv("PATH", str(ipython_directory))
    with pytest.raises(UsageError, match=r"sbatch is not installed here.*on a machine that submits jobs"):
        Cluster(2, "cpu", "no_queue", engines="slurm", runtime=RUNTIME).start(refuse_to_wait)


def test_ssh_without_hosts_says_where_to_name_them(ipython_directory):
    write_profile(ipython_directory, "no_hosts")
    message = r"SSHEngineSetLauncher has no hosts: name them in .*profile_no_hosts/ipcluster_config\.py"
    with pytest.raises(UsageError, match=rf"{message}, c\.SSHEngineSetLauncher\.engines = .*--profile NAME"):
        Cluster(2, "cpu", "no_hosts", engines="ssh", runtime=RUNTIME).start(refuse_to_wait)


@pytest.mark.parametrize(
    ("hosts", "count", "helps"),
    [
        ("{'here': 0}", 0, r"as in \{'HOST': 2\}$"),
        ("{'here': 0, 'there': 1}", 1, r"as in \{'HOST': 2\}, or start fewer ranks: -n 1$"),
    ],
)
def test_ssh_with_too_few_engines_is_refused_before_anything_is_started(ipython_directory, hosts, count, helps):
    write_profile(ipython_directory, "few", f"c.SSHEngineSetLauncher.engines = {hosts}\n")
    message = (
        rf"c\.SSHEngineSetLauncher\.engines in .*profile_few/ipcluster_config\.py has {count} engines?, but 2 ranks "
    )
    with pytest.raises(UsageError, match=rf"{message}need one each: add hosts, or engines to a host, {helps}"):
        Cluster(2, "cpu", "few", engines="ssh", runtime=RUNTIME).start(refuse_to_wait)


def test_a_missing_interface_is_refused():
    with pytest.raises(UsageError, match=r"no address on 'ib7'; it has .*lo"):
        Cluster(2, "cpu", engines="local", interface="ib7").start()


def test_a_cancelled_start_leaves_nothing_behind(ipython_directory):
    sleeper = "import signal; signal.pause()"
    config = f"c.LocalEngineLauncher.engine_cmd = [{sys.executable!r}, '-c', {sleeper!r}]"
    write_profile(ipython_directory, "waits", config)
    children, reported = set(psutil.Process().children(recursive=True)), []

    def give_up(sentence):
        reported.append(sentence)
        if "0 of 2 engines are connected" in sentence:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="The start was cancelled: no ranks are running"):
        Cluster(2, "cpu", "waits", engines="local", runtime=RUNTIME).start(give_up)
    assert any(re.match(r"waiting for the controller, \d+ s", sentence) for sentence in reported)
    assert set(psutil.Process().children(recursive=True)) <= children


def test_the_controller_listens_as_configured_or_on_the_route(ipython_directory, monkeypatch):
    import workbench.cluster.ipp_launch as module

    routes = {"10.1.2.3": "10.1.0.1", module.ELSEWHERE: "192.168.0.9"}
    monkeypatch.setattr(module, "address_towards", lambda host: routes.get(host, ""))
    monkeypatch.setattr(module, "interfaces_here", lambda: {"lo": "127.0.0.1", "eth5": "172.16.0.5"})

    def ip_of(engines, config="", interface="", controller=""):
        directory = write_profile(ipython_directory, "ip", config)
        (directory / "ipcontroller_config.py").write_text(f"c = get_config()\n{controller}")
        place = object.__new__(IppLaunch)
        place._cluster = module._cluster("ip", engines)
        place._listen_on(interface)
        return place._cluster.controller_ip

    hosts = "c.SSHEngineSetLauncher.engines = {'me@10.1.2.3:22': 2}"
    assert ip_of("local") == ""
    assert ip_of("ssh", hosts) == "10.1.0.1"
    assert ip_of("slurm") == "192.168.0.9"
    assert ip_of("slurm", interface="ib0,eth5") == "172.16.0.5"
    assert ip_of("slurm", "c.Cluster.controller_ip = '1.2.3.4'") == "1.2.3.4"
    assert ip_of("slurm", controller="c.IPController.ip = '*'") == ""


def test_heartbeat_settings_are_the_configured_ones_or_ours(ipython_directory):
    def arguments(cluster="", controller="", engine=""):
        directory = write_profile(ipython_directory, "heart", cluster)
        (directory / "ipcontroller_config.py").write_text(f"c = get_config()\n{controller}")
        (directory / "ipengine_config.py").write_text(f"c = get_config()\n{engine}")
        place = object.__new__(IppLaunch)
        place._cluster = launched_module._cluster("heart", "ssh")
        given = place._settings(place._launcher_class).engine_args
        return place._controller_arguments(), place._engine_arguments(given)

    period, misses = "--HeartMonitor.period=450", "--HeartMonitor.max_heartmonitor_misses=2"
    assert arguments() == ([period, misses], ["--IPEngine.max_heartbeat_misses=63"])
    own = arguments(controller="c.HeartMonitor.period = 2500", engine="c.IPEngine.timeout = 3")
    assert own == ([misses], ["--IPEngine.max_heartbeat_misses=20"])
    given = "c.Cluster.controller_args = ['--HeartMonitor.max_heartmonitor_misses=9']"
    assert arguments(given)[0] == [period]
    assert arguments(engine="c.IPEngine.max_heartbeat_misses = 7")[1] == []
    given = "c.SSHEngineSetLauncher.engine_args = ['--IPEngine.max_heartbeat_misses=7']"
    assert arguments(given)[1] == []


def test_a_connection_that_breaks_ends_no_wait_for_an_engine():
    is_over, tries = threading.Event(), []

    class One:
        location = "node3"

        def wait_one(self, timeout):
            tries.append(timeout)
            is_over.set()
            raise subprocess.CalledProcessError(255, "ssh")

    class Several(One):
        launcher_class = One

    patient = ssh_launch.patient(Several, is_over)
    with pytest.raises(TimeoutError, match="node3 could not be queried"):
        patient.launcher_class().wait_one(60)
    assert tries == [60]


KERNEL = f"""
import json, os, sys
import psutil
from workbench.cluster import Cluster
cluster = Cluster(2, "cpu", "killed kernel", engines="local", runtime="{RUNTIME}")
cluster.start()
cluster.apply("{RUNTIME}:hold")
print(json.dumps([process.pid for process in psutil.Process().children(recursive=True)]), flush=True)
sys.stdin.readline()
"""


@pytest.mark.thorough
def test_a_killed_notebook_leaves_nothing(ipython_directory):
    directory = write_profile(ipython_directory, "killed kernel")
    command = [sys.executable, "-c", KERNEL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as kernel:
        started = [psutil.Process(pid) for pid in json.loads(kernel.stdout.readline())]
        assert len(started) >= 4
        kernel.kill()
    wait_until(lambda: not any(map(is_running, started)))
    wait_until(lambda: not [path for path in files_in(directory) if path.parts[0] in {"security", "pid"}])


@pytest.mark.thorough
def test_a_killed_controller_is_named_at_once(ipython_directory):
    write_profile(ipython_directory, "controller")
    with Cluster(2, "cpu", "controller", engines="local", runtime=RUNTIME) as cluster:
        pending = cluster.apply(f"{RUNTIME}:hold")
        wait_until_held(cluster)
        os.kill(cluster._provider._cluster.controller.pid, signal.SIGKILL)
        with pytest.raises(RankDied, match=r"rank [01] cannot be reached: the cluster's controller has ended"):
            pending.results(PATIENCE_S)
        assert cluster.alive() == (False, False)
