"""What goes wrong between hosts: it is named, the other ranks are freed, and nothing is left."""

import os
import signal
import sys

import psutil
import pytest

from tests.integration import test_hosts
from tests.integration.model import CELL
from tests.waiting import wait_until
from workbench.cluster.processes import MARKER
from workbench.errors import ClusterError
from workbench.workbench import Workbench

pytestmark = test_hosts.pytestmark

network, profile = test_hosts.network, test_hosts.profile

ONE_EACH = """
c.SSHEngineSetLauncher.engines = dict.fromkeys({addresses!r}, 1)
c.SSHEngineSetLauncher.engine_cmd = ["env", "-u", {marker!r}, {python!r}, "-m", "ipyparallel.engine"]
c.SSHEngineSetLauncher.engine_args = ["--IPEngine.max_heartbeat_misses={misses}"]
"""
"""As on hosts of their own, what runs there cannot be found from here by its environment."""

MISSES = 8
"""After so many heartbeats, of about a second each, engines end by themselves here."""

SOON_S = 15.0
"""Much more than the 2 s that it takes, and less than the 30 s that ipyparallel would take by itself."""


@pytest.fixture
def bench(network, profile):
    """A rank on each host, in the middle of many steps."""
    config = profile / "ipcluster_config.py"
    before = config.read_text()
    more = ONE_EACH.format(addresses=network.addresses, marker=MARKER, python=sys.executable, misses=MISSES)
    config.write_text(before + more)
    bench = Workbench(len(network.names), device="cpu", profile="hosts", engines="ssh")
    test_hosts.start(bench)
    bench.run_cell(CELL)
    bench.shard("model", wrap="Block")
    bench.step(100_000, background=True)
    wait_until(lambda: bench.pulse().trace.num_rows > 1000)
    yield bench
    bench.stop()
    config.write_text(before)


def engines_of(bench):
    return {info.rank: psutil.Process(info.pid) for info in bench._session.cluster.rank_info}


def text_of_the_end(bench):
    wait_until(lambda: bench.pulse().under_way is None)
    return bench.pulse().ended.text


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_without_its_cable_is_named_and_the_others_are_freed(bench, network, lost):
    engines, others = engines_of(bench), {0, 1, 2} - {lost}
    in_memory = set(os.listdir("/dev/shm"))
    with network.unplugged(network.names[lost]):
        wait_until(lambda: bench.losses, SOON_S)
        said = text_of_the_end(bench)
        assert f"rank {lost} died: its process on {network.names[lost]} has ended, or its host is gone" in said
        assert f"without rank {lost} no step is possible" in said
        assert set(bench.losses) == {lost}
        assert [test_hosts.told_by(bench, "rank", rank) for rank in sorted(others)] == list(map(str, sorted(others)))
        assert engines[lost].is_running()
        left = bench.stop()
        assert left.startswith(f"{network.addresses[lost]} was not reached: what runs there ends by itself once")
        wait_until(lambda: not any(engines[rank].is_running() for rank in others))
        wait_until(lambda: not engines[lost].is_running())  # though it waits for the others in a collective
    assert set(os.listdir("/dev/shm")) <= in_memory


def test_a_controller_that_dies_is_named_and_no_rank_stays(bench):
    engines = engines_of(bench)
    os.kill(bench._session.cluster._place._cluster.controller.pid, signal.SIGKILL)
    wait_until(lambda: len(bench.losses) == 3, SOON_S)
    said = text_of_the_end(bench)
    assert "cannot be reached: the cluster's controller has ended" in said
    wait_until(lambda: not any(engine.is_running() for engine in engines.values()))
    assert bench.stop() is None


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no-such-host.invalid", r"could not start 3 engines on no-such-host.invalid: .*Could not resolve hostname"),
        ("192.0.2.7", r"could not start 3 engines on 192.0.2.7: "),  # nobody has it: as if a port were filtered
    ],
)
def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_left(profile, host, said):
    config = profile / "ipcluster_config.py"
    before, children = config.read_text(), set(psutil.Process().children(recursive=True))
    files = set(profile.rglob("*"))
    config.write_text(f"{before}\nc.SSHEngineSetLauncher.engines = {{{host!r}: 3}}\n")
    try:
        with pytest.raises(ClusterError, match=said) as raised:
            Workbench(3, device="cpu", profile="hosts", engines="ssh").start()
        assert f"look whether ssh {host} works from here without a password" in str(raised.value)
    finally:
        config.write_text(before)
    assert set(psutil.Process().children(recursive=True)) <= children
    assert {path for path in set(profile.rglob("*")) - files if path.parent.name in {"log", "security", "pid"}} == set()
