"""Ranks with different clocks, like those of different machines: in time namespaces, hours apart."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.helpers.clock_checks import late_ends
from tests.helpers.ipp_engines import ipyparallel_ids
from tests.helpers.network_hosts import ahead_by
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import wait_until
from workbench.cluster.local_launch import is_complete
from workbench.events import REDUCTIONS, Kind
from workbench.replay.clock_error import error_ns
from workbench.session import clock_sync
from workbench.trace import load
from workbench.workbench import Workbench

HOURS = (5, 0, 26)
"""Hours that the clock of each rank is ahead of this process's."""

S = 10**9


pytestmark = [pytest.mark.thorough, pytest.mark.cluster, pytest.mark.needs("clocks")]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """Ranks on engines that were started one after the other, each with its own clock."""
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as last:
        directory = tmp_path_factory.mktemp("ipython")
        monkeypatch.setenv("IPYTHONDIR", str(directory))
        (directory / "profile_clocks" / "startup").mkdir(parents=True)
        file = directory / "profile_clocks" / "security" / "ipcontroller-client.json"
        last.callback(start(last, [], "controller").terminate)  # it starts further processes
        wait_until(lambda: is_complete(file))
        for number, hours in enumerate(HOURS):
            last.callback(start(last, ahead_by(hours) if hours else [], "engine").kill)  # unshare ignores SIGTERM
            wait_until(lambda number=number: len(ipyparallel_ids(file)) == number + 1)
        with Workbench.attach(profile="clocks", device="cpu") as attached:
            attached.run_cell(CELL)
            attached.shard("model", wrap="Block")
            attached.step(3)
            yield attached


def start(last: ExitStack, before: list[str], module: str) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, "-m", f"ipyparallel.{module}", "--profile=clocks"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last.callback(process.wait)
    return process


def test_each_clock_offset_is_within_its_error(bench):
    found = bench.trace.header.clocks
    assert [clock.ranks for clock in found] == [(1,), (2,)]
    for clock in found:
        true_ns = 3600 * S * (HOURS[clock.ranks[0]] - HOURS[0])
        for reading in clock.readings:
            assert abs(reading.offset_ns - true_ns) <= reading.error_ns < 3600 * S


def test_rows_of_all_ranks_are_on_one_clock(bench):
    trace = bench.trace
    assert late_ends(trace, REDUCTIONS) == []  # shared memory is gathered without waiting
    begins = [int(rank.rows["t_ns"][rank.rows["kind"] == Kind.STEP][0]) for rank in trace.ranks]
    assert max(begins) - min(begins) < 3600 * S


def test_a_file_has_the_clocks_of_the_live_trace(bench, tmp_path):
    bench.export(tmp_path / "hosts.trace")
    loaded, live = load(tmp_path / "hosts.trace"), bench.trace
    for known, later in zip(loaded.header.clocks, live.header.clocks, strict=True):
        assert known.ranks == later.ranks
        assert known.readings == later.readings[: len(known.readings)]
    assert late_ends(loaded, REDUCTIONS) == []
    assert 0 < error_ns(loaded) < 3600 * S


def test_clocks_are_compared_again_while_ranks_are_in_a_step(bench, monkeypatch):
    before = [len(clock.readings) for clock in bench.trace.header.clocks]
    monkeypatch.setattr(clock_sync, "EVERY_S", 0.0)
    bench.step(1, until="forward")

    def were_all_compared():  # in turn, at each collection whose replies are as quick as before
        return all(len(clock.readings) > count for clock, count in zip(bench.trace.header.clocks, before, strict=True))

    try:
        wait_until(were_all_compared)
    finally:
        bench.abort()


def test_the_time_since_a_stop_is_measured_by_the_ranks_clock(bench):
    bench.step(1, until="forward")
    try:
        waited_ns = [row.for_ns for row in bench.where().ranks]
    finally:
        bench.abort()
    assert all(0 <= each < 3600 * 10**9 for each in waited_ns)
