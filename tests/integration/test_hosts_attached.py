"""Lost hosts of a cluster started elsewhere, whose controller would notice them only after half a minute."""

import psutil
import pytest

from tests.helpers.ipp_engines import engines_on
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.ssh_hosts import ON_HOSTS, network_of_hosts, told_by
from tests.helpers.waiting import wait_until
from tests.helpers.warm_python import WARM
from workbench.cluster import Cluster
from workbench.cluster.host_liveness import SILENCE_S
from workbench.workbench import Workbench

pytestmark = [pytest.mark.exhaustive, *ON_HOSTS]

SOON_S = 15.0
"""Much more than the 2 s that it takes, and less than the 30 s that ipyparallel alone would take."""

network = network_of_hosts


@pytest.fixture(scope="module")
def running(network):
    """The cluster, with its controller here and two engines on each host."""
    with engines_on([name for name in network.names for _ in range(2)], network.here, WARM.executable()) as target:
        yield target


@pytest.fixture
def bench(running):
    """Six ranks in the middle of many steps."""
    with Workbench.attach(file=running.file, device="cpu") as bench:
        bench.run_cell(CELL + UNHURRIED)
        bench.shard("model", wrap="Block")
        bench.step(100_000, background=True)
        wait_until(lambda: bench.pulse().trace.num_rows > 1000)
        yield bench


def goes_on(bench):
    """Wait until the ranks have trained further."""
    num_rows = bench.pulse().trace.num_rows
    wait_until(lambda: bench.pulse().trace.num_rows > num_rows + 1000 or bench.losses)
    assert bench.losses == {}


def long(wait):
    """Return a cell that waits for much longer than a host may be silent."""
    return wait.format(round(3 * SILENCE_S))


def test_hosts_with_busy_or_stopped_ranks_are_not_lost(bench):
    bench.abort()
    standing = psutil.Process(bench.status().ranks[2].pid)
    standing.suspend()
    try:
        bench.run_cell(long("import time; time.sleep({})"), [0])
    finally:
        standing.resume()
    bench.run_cell(long("import ctypes; ctypes.PyDLL(None).sleep({})"))  # with the GIL held
    assert bench.losses == {}


def test_a_moment_without_a_cable_loses_nothing(bench, network):
    with network.unplugged(network.names[1]):
        pass
    goes_on(bench)


@pytest.mark.parametrize("lost", [2, 0])
def test_a_host_without_its_cable_is_named_and_the_others_are_freed(bench, running, network, lost):
    host, gone = network.names[lost], {2 * lost, 2 * lost + 1}
    looking = Cluster.attached(running, device="cpu")
    looking.start()
    with network.unplugged(host):
        wait_until(lambda: set(bench.losses) == gone, SOON_S)
        assert {rank: how.partition(",")[0] for rank, how in bench.losses.items()} == dict.fromkeys(
            gone, f"died: the process on {host} has ended"
        )
        wait_until(lambda: set(looking.losses()) == gone)  # although it asks the ranks nothing
        wait_until(lambda: bench.pulse().under_way is None)
        assert f"without ranks {min(gone)}-{max(gone)} no step is possible" in bench.pulse().ended.text
        left = sorted({*range(6)} - gone)
        assert [told_by(bench, "rank", rank) for rank in left] == list(map(str, left))
    looking.detach()


def test_engines_of_a_restored_host_become_ranks_again(bench, running, network):
    with network.unplugged(network.names[1]):
        wait_until(lambda: bench.losses, SOON_S)
    bench.stop()
    with Workbench.attach(file=running.file, device="cpu") as again:
        assert len(again.status().ranks) == 6
        again.run_cell(CELL)
        again.shard("model", wrap="Block")
        again.step(2)
        assert again.losses == {}
