"""Failures between hosts: they are named, the other ranks are freed, and nothing is left."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from tests.engine.test_shared_memory import holders
from tests.helpers import network_hosts
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.ssh_hosts import ON_HOSTS, network_of_hosts, profile_of_hosts, start, told_by
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import ssh_launch
from workbench.cluster.processes import MARKER, is_running
from workbench.errors import ClusterError
from workbench.workbench import Workbench

pytestmark = [pytest.mark.exhaustive, *ON_HOSTS]

network, profile = network_of_hosts, profile_of_hosts

ONE_EACH = """
c.SSHEngineSetLauncher.engines = dict.fromkeys({addresses!r}, 1)
c.SSHEngineSetLauncher.engine_cmd = ["env", "-u", {marker!r}, {python!r}, "-m", "ipyparallel.engine"]
c.SSHEngineSetLauncher.engine_args = ["--IPEngine.max_heartbeat_misses={misses}"]
"""
"""As on separate hosts, the environment of remote processes cannot be searched from here."""

MISSES = 8
"""Engines end after this number of missed heartbeats, at about one per second."""

SOON_S = 15.0
"""Much more than the 2 s that it takes, and less than the 30 s that ipyparallel alone would take."""


@pytest.fixture
def one_each(network, profile):
    """Make the profile start one rank on each host."""
    config = profile / "ipcluster_config.py"
    before = config.read_text()
    more = ONE_EACH.format(addresses=network.addresses, marker=MARKER, python=sys.executable, misses=MISSES)
    config.write_text(before + more)
    yield
    config.write_text(before)


@pytest.fixture
def bench(network, one_each):
    """One rank on each host, in the middle of many steps."""
    bench = Workbench(len(network.names), device="cpu", profile="hosts", engines="ssh")
    start(bench)
    bench.run_cell(CELL + UNHURRIED)
    bench.shard("model", wrap="Block")
    bench.step(100_000, background=True)
    wait_until(lambda: bench.pulse().trace.num_rows > 1000)
    yield bench
    bench.stop()


def engines_of(bench):
    return {info.rank: psutil.Process(info.pid) for info in bench._session.cluster.rank_info}


def text_of_the_end(bench):
    wait_until(lambda: bench.pulse().under_way is None)
    return bench.pulse().ended.text


def files_in_memory():
    """Return the files in shared memory that no process has open: open ones belong to other tests."""
    return {name for name in os.listdir("/dev/shm") if not holders(f"/dev/shm/{name}")}


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_without_its_cable_is_named_and_the_others_are_freed(bench, network, lost):
    engines, others = engines_of(bench), {0, 1, 2} - {lost}
    in_memory = files_in_memory()
    with network.unplugged(network.names[lost]):
        wait_until(lambda: bench.losses, SOON_S)
        message = text_of_the_end(bench)
        assert f"rank {lost} died: the process on {network.names[lost]} has ended, or its host is gone" in message
        assert f"without rank {lost} no step is possible" in message
        assert set(bench.losses) == {lost}
        assert [told_by(bench, "rank", rank) for rank in sorted(others)] == list(map(str, sorted(others)))
        left = bench.stop()
        assert left.startswith(f"{network.addresses[lost]} was not reached: engines there exit after")
        wait_until(lambda: not any(engines[rank].is_running() for rank in others))
        wait_until(lambda: not engines[lost].is_running())  # although it waits for the others in a collective
    wait_until(lambda: files_in_memory() <= in_memory)  # other tests create files meanwhile


def test_a_controller_that_dies_is_named_and_no_rank_stays(bench):
    engines = engines_of(bench)
    os.kill(bench._session.cluster._provider._cluster.controller.pid, signal.SIGKILL)
    wait_until(lambda: len(bench.losses) == 3, SOON_S)
    message = text_of_the_end(bench)
    assert "cannot be reached: the cluster's controller has ended" in message
    wait_until(lambda: not any(engine.is_running() for engine in engines.values()))
    assert bench.stop() is None


def test_a_stop_ends_all_hosts_at_once_in_one_connection_each(bench, network, monkeypatch):
    cluster, engines = bench._session.cluster._provider._cluster, engines_of(bench)
    logs = [Path(launcher.remote_output_file) for launcher in cluster.engine_set.launchers.values()]
    assert [log.exists() for log in logs] == [True] * 3
    barrier, end_there = threading.Barrier(len(network.names)), ssh_launch.end_there
    connections, run = [], subprocess.Popen.__init__

    def end_with_the_others(launchers):
        barrier.wait(PATIENCE_S)
        return end_there(launchers)

    def counted(self, command, *more, **options):
        connections.extend(address for address in network.addresses if address in command)
        run(self, command, *more, **options)

    os.kill(cluster.controller.pid, signal.SIGKILL)  # it cannot tell the engines to end
    wait_until(lambda: len(bench.losses) == 3, SOON_S)
    monkeypatch.setattr(ssh_launch, "end_there", end_with_the_others)
    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    assert bench.stop() is None
    assert sorted(connections) == sorted(network.addresses)
    assert not barrier.broken
    wait_until(lambda: not any(map(is_running, engines.values())))
    assert not any(path.exists() for path in logs)


KERNEL = """
import sys
from tests.helpers.ssh_hosts import start
from tests.helpers.notebook_model import CELL
from workbench.workbench import Workbench
bench = Workbench(3, device="cpu", profile="hosts", engines="ssh")
start(bench)
bench.run_cell(CELL)
bench.shard("model", wrap="Block")
bench.step(100_000, background=True)
cluster = bench._session.cluster
print(cluster._provider._cluster.controller.pid, *[info.pid for info in cluster.rank_info], flush=True)
sys.stdin.read()
"""


@pytest.mark.usefixtures("one_each")
@pytest.mark.parametrize("is_reached", [True, False])
def test_a_killed_notebook_leaves_nothing_on_any_host(network, profile, is_reached):
    before, in_memory = files_in(profile), files_in_memory()
    there = pids_on_hosts(network)
    with subprocess.Popen(
        [sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as kernel:
        controller, *engines = [psutil.Process(int(pid)) for pid in kernel.stdout.readline().split()]
        with nullcontext() if is_reached else network.unplugged(network.names[1]):
            kernel.kill()
            wait_until(lambda: not any(map(is_running, (controller, *engines))))
    wait_until(lambda: pids_on_hosts(network) <= there)
    # the process that ends an engine removes the engine's output
    wait_until(lambda: not [path for path in files_in(profile) - before if is_reached or path.suffix != ".out"])
    wait_until(lambda: files_in_memory() <= in_memory)  # other tests create files meanwhile


def pids_on_hosts(network):
    return {pid for name in network.names for pid in network_hosts.pids_on(name)}


def files_in(profile):
    return {path for name in ("log", "pid", "security") for path in profile.glob(f"{name}/*")}


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", r"could not start 3 engines on no-such-host.invalid: .*Could not resolve hostname"),
        ("192.0.2.7", r"could not start 3 engines on 192.0.2.7: "),  # an unused address: like a filtered port
    ],
)
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_left(profile, host, message):
    config = profile / "ipcluster_config.py"
    before, children = config.read_text(), set(psutil.Process().children(recursive=True))
    files = set(profile.rglob("*"))
    config.write_text(f"{before}\nc.SSHEngineSetLauncher.engines = {{{host!r}: 3}}\n")
    try:
        with pytest.raises(ClusterError, match=message) as raised:
            Workbench(3, device="cpu", profile="hosts", engines="ssh").start()
        assert f"check that ssh {host} works from here without a password" in str(raised.value)
    finally:
        config.write_text(before)
    assert set(psutil.Process().children(recursive=True)) <= children
    assert {path for path in set(profile.rglob("*")) - files if path.parent.name in {"log", "security", "pid"}} == set()
