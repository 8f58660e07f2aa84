"""Ranks forked from one process: each is a separate process, and none is left behind."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import RUNTIME, texts
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.base.devices import DEVICES
from workbench.cluster import Cluster, local_launch
from workbench.cluster.processes import is_running
from workbench.cluster.zygote import ClusterProgram, can_fork
from workbench.cluster.zygote_cache import KEEPER
from workbench.errors import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")]


def processes_of(cluster):
    """Return the zygote and the ranks as psutil processes."""
    return cluster._provider._zygote.process, [psutil.Process(info.pid) for info in cluster.rank_info]


def test_only_ranks_on_the_cpu_are_forked(monkeypatch, tmp_path):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setitem(DEVICES, "cuda", replace(DEVICES["cuda"], driver=str(driver)))
    assert [can_fork(device) for device in ("cpu", "auto", "cuda")] == [True, True, False]
    driver.touch()
    assert [can_fork(device) for device in ("cpu", "auto", "cuda")] == [True, False, False]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not can_fork("cpu")


def test_each_rank_is_a_process_with_its_own_session_and_log(cluster):
    parent, ranks = processes_of(cluster)
    assert {rank.ppid() for rank in ranks} == {parent.pid}
    assert all(os.getsid(process.pid) == process.pid for process in (parent, *ranks))
    logs = [os.readlink(f"/proc/{rank.pid}/fd/2") for rank in ranks]
    assert [Path(log).name for log in logs] == ["rank-0.log", "rank-1.log", "rank-2.log"]
    assert {os.readlink(f"/proc/{rank.pid}/fd/0") for rank in ranks} == {os.devnull}


def test_the_runtime_was_imported_once_and_random_numbers_differ(cluster):
    imported = "import sys\nprint(*(name in sys.modules for name in ('numpy.random', 'tests.helpers.fake_rank')))"
    cells = cluster.run_cell(f"{imported}\nimport numpy, random\nprint(random.random(), numpy.random.rand())")
    assert cells.wait(PATIENCE_S)
    reported = [texts(cells, rank).split() for rank in range(3)]
    assert [words[:2] for words in reported] == [["True"] * 2] * 3
    assert len({number for words in reported for number in words[2:]}) == 6


def test_a_forked_rank_has_the_environment_of_a_started_one(cluster):
    cells = cluster.run_cell("import os\nprint(os.environ['OPENBLAS_NUM_THREADS'] == os.environ['OMP_NUM_THREADS'])")
    assert cells.wait(PATIENCE_S)
    assert [texts(cells, rank) for rank in range(3)] == ["True\n"] * 3


@pytest.mark.parametrize("who", ["a rank", "the zygote"])
def test_nothing_is_left_after_one_of_them_is_killed(make_cluster, who, tmp_path):
    cluster = make_cluster(2)
    cluster.start()
    parent, ranks = processes_of(cluster)
    victim = ranks[1] if who == "a rank" else parent
    victim.send_signal(signal.SIGKILL)
    wait_until(lambda: cluster.alive() == ((True, False) if who == "a rank" else (False, False)))
    assert is_running(parent) == (who == "a rank")
    assert not is_running(ranks[1])
    wait_until(lambda: cluster._provider.exit_code(1) == -signal.SIGKILL)
    if who == "the zygote":
        with pytest.raises(ClusterError, match="forked from has ended: no process for rank 1"):
            cluster._provider._zygote.replace(1, ClusterProgram("this", [], tmp_path / "log", []))
    cluster.stop()
    KEEPER.end()
    assert not any(map(is_running, (parent, *ranks)))


def test_ranks_that_are_not_forked_work_too(make_cluster, monkeypatch):
    monkeypatch.setattr("workbench.cluster.local_launch.can_fork", lambda device: False)
    cluster = make_cluster(2)
    cluster.start()
    assert cluster._provider._zygote is None
    assert cluster.apply(f"{RUNTIME}:echo", 3).wait(PATIENCE_S)


def with_arguments(monkeypatch, *more):
    """Add arguments to the engine of rank 1."""
    real = local_launch.engine_arguments
    monkeypatch.setattr(
        local_launch,
        "engine_arguments",
        lambda root, engine, timeout_s: real(root, engine, timeout_s) + list(more) * engine.endswith("-rank-1"),
    )


def test_a_rank_that_ends_while_it_starts_is_named_with_its_log(make_cluster, monkeypatch):
    with_arguments(monkeypatch, "--IPEngine.timeout=never")
    with pytest.raises(ClusterError, match=r"(?s)process of rank 1 ended during the start; the end of its log:.*never"):
        make_cluster().start()


def test_a_zygote_that_cannot_import_reports_why(make_cluster, monkeypatch, tmp_path):
    (tmp_path / "broken_runtime.py").write_text("raise RuntimeError('broken as can be')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cluster = Cluster(2, "cpu", runtime="broken_runtime")
    with pytest.raises(ClusterError, match=r"(?s)rank 0 .* broken as can be"):
        cluster.start()
