"""Three hosts on a network, two ranks on each, started over SSH: the same training as on one machine."""

import psutil
import pytest

from tests.helpers import network_hosts
from tests.helpers.clock_checks import late_ends
from tests.helpers.figure_checks import subtitle
from tests.helpers.notebook_model import CELL
from tests.helpers.ranks_on_hosts import LOSSY
from tests.helpers.ssh_hosts import ON_HOSTS, network_of_hosts, profile_of_hosts, start, told_by
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.errors import UsageError
from workbench.events import REDUCTIONS, Kind
from workbench.replay.clock_error import error_ns
from workbench.replay.collectives import compare
from workbench.trace import steps
from workbench.workbench import Workbench

pytestmark = [pytest.mark.thorough, *ON_HOSTS]

network, profile = network_of_hosts, profile_of_hosts


@pytest.fixture(scope="module")
def bench(profile):
    bench = Workbench(6, device="cpu", profile="hosts", engines="ssh")
    start(bench)
    yield bench
    bench.stop()


def test_ranks_of_a_host_are_neighbours_and_status_says_which(bench, network):
    status = bench.status()
    assert [rank.host for rank in status.ranks] == [name for name in network.names for _ in range(2)]
    lines = [name for name, _ in status.facts()]
    a, b, c = network.names
    assert lines[:9] == [a, "  rank 0", "  rank 1", b, "  rank 2", "  rank 3", c, "  rank 4", "  rank 5"]


def test_ranks_have_the_environment_that_torchrun_would_set(bench, network):
    bench.run_cell("import os\nenvironment = lambda *names: ' '.join(os.environ.get(name, '-') for name in names)")
    names = "'RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME'"
    for rank in range(6):
        expected = f"{rank} {rank % 2} 6 2 {network.addresses[0]} eth0"
        assert told_by(bench, f"environment({names})", rank) == expected


LISTENING = """
import psutil
listening = lambda: sorted({c.laddr.ip for c in psutil.Process().net_connections('inet') if c.status == 'LISTEN'})
"""


def test_no_rank_listens_on_all_interfaces(bench, network):
    bench.run_cell(LISTENING)
    for rank in range(6):
        assert set(told_by(bench, "*listening()", rank).split()) <= {network.addresses[rank // 2], "127.0.0.1"}


def losses_of(bench, **mesh):
    bench.run_cell(CELL)
    bench.shard("model", wrap="Block", **mesh)
    return bench.step(3).losses


@pytest.fixture(scope="module")
def on_one_machine():
    with Workbench(6, device="cpu") as bench:
        return {"": losses_of(bench), "hosts": losses_of(bench, mesh="3x2")}


@pytest.mark.parametrize("mesh", ["", "hosts"])
def test_it_trains_as_on_one_machine(bench, on_one_machine, mesh):
    assert losses_of(bench, **({"mesh": mesh} if mesh else {})) == pytest.approx(on_one_machine[mesh], rel=1e-5)


@pytest.mark.parametrize("mesh", ["", "hosts"])
def test_links_that_are_slow_and_lose_frames_change_no_loss(bench, network, mesh):
    options = {"mesh": mesh} if mesh else {}
    expected, lost = losses_of(bench, **options), network.cables.num_lost()
    with network.cables.over(LOSSY):
        assert losses_of(bench, **options) == expected
    assert network.cables.num_lost() > lost


def test_collectives_of_hosts_whose_clocks_are_hours_apart_are_at_the_same_time(bench, network):
    losses_of(bench)
    trace = bench.trace
    assert [clock.ranks for clock in trace.header.clocks] == [(2, 3), (4, 5)]
    assert late_ends(trace, REDUCTIONS) == []
    assert 0 < error_ns(trace) < 3600 * 10**9
    facts = dict(bench.status().facts())
    assert facts[network.names[0]] == "ranks 0-1"
    for name, hours in zip(network.names[1:], network_hosts.HOURS[1:], strict=True):
        apart_s = 3600 * (hours - network_hosts.HOURS[0])
        assert f"its clock is {abs(apart_s)} s {'ahead of' if apart_s > 0 else 'behind'} rank 0's" in facts[name]


def test_copies_are_across_hosts_and_shards_within(bench):
    losses_of(bench, mesh="hosts")
    newest = bench.trace.header.units[-4:]  # units of earlier tests come first
    assert {(unit.replicate_size, unit.shard_size) for unit in newest} == {(3, 2)}


def test_comms_says_what_crosses_between_hosts(bench, network):
    losses_of(bench)
    text = subtitle(bench.comms())
    assert "transport: shared memory, gloo between hosts" in text
    assert "each of 3 hosts sends " in text
    last = steps(bench.trace)[-1]
    row = next(row for row in compare(bench.trace, last) if row.kind == Kind.REDUCE_SCATTER)
    assert row.crossing == pytest.approx(dict.fromkeys(network.names, 2 / 3 * row.num_bytes))


SHARED = """
from workbench.engine import process_groups
from workbench.engine.backends.shared.shared_memory import SharedMemory
first = rank - rank % 2
within = SharedMemory.connect(process_groups.group_of((first, first + 1))) is not None
across = SharedMemory.connect(process_groups.group_of(tuple(range(6)))) is not None
"""


def test_memory_is_shared_within_a_host_and_not_between_hosts(bench):
    bench.run_cell(SHARED)
    assert [told_by(bench, "within, across", rank) for rank in range(6)] == ["True False"] * 6


def test_an_interface_that_hosts_lack_is_refused_with_what_they_have(profile, network):
    with pytest.raises(UsageError, match=rf"this machine has no address on 'ib0'; it has .*{network.interface}"):
        Workbench(6, device="cpu", profile="hosts", engines="ssh", interface="ib0").start()


def test_an_interrupt_reaches_a_rank_of_another_host(bench):
    cluster = bench._session.cluster
    pending = cluster.run_cell("import time\nwhile True: time.sleep(0.01)", [5])
    cluster.interrupt([5])
    while not pending.wait(1.0):
        cluster.interrupt([5])  # the first may have come before the cell began
    assert pending.error(5).ename == "KeyboardInterrupt"


def replace(bench, rank):
    """Kill a rank, and heal; return the host of the new one."""
    before = bench.status().ranks[rank].pid
    psutil.Process(before).kill()
    wait_until(lambda: rank in bench.losses, PATIENCE_S)
    healed = bench.heal()
    assert (healed.ranks, healed.steps_redone, healed.steps_lost, healed.failed) == ((rank,), 0, 0, ())
    new = bench.status().ranks[rank]
    assert (new.alive, new.pid == before) == (True, False)
    return new.host


def test_ranks_that_died_are_replaced_on_their_hosts_and_a_stop_leaves_nothing_on_any(bench, profile, network):
    losses_of(bench, mesh="hosts")
    expected = bench.step(3).losses
    losses_of(bench, mesh="hosts")
    hosts = []
    for rank in (3, 0, 3):
        hosts.append(replace(bench, rank))
        assert bench.step(1).losses == expected[len(hosts) - 1 : len(hosts)]
    assert hosts == [network.names[1], network.names[0], network.names[1]]
    pids = {info.pid for info in bench._session.cluster.rank_info}
    assert all(map(psutil.pid_exists, pids))
    bench.stop()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), PATIENCE_S)
    assert [path for path in profile.glob("security/*") if path.is_file()] == []
