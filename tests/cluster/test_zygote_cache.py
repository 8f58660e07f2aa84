"""What is kept of a stopped cluster: the next start is faster, and finds nothing of the previous one."""

import contextlib
import json
import os
import subprocess
import sys

import psutil
import pytest

from tests.cluster.conftest import ROOT, RUNTIME, texts
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import Cluster, zygote_cache
from workbench.cluster.processes import MARKER, is_running, usable_cores
from workbench.cluster.zygote_cache import KEEPER

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")]


@pytest.fixture(autouse=True)
def nothing_is_kept():
    KEEPER.end()
    yield
    KEEPER.end()


def zygote_of(cluster):
    return cluster._provider._zygote.process


def reported(cluster, code):
    """Return the output of each rank for a cell."""
    cell = cluster.run_cell(code)
    cell.results(PATIENCE_S)
    return [texts(cell, rank) for rank in range(cluster.num_ranks)]


def test_the_next_start_forks_from_the_cached_zygote(make_cluster):
    first, second = make_cluster(), make_cluster()
    first.start()
    zygote, before = zygote_of(first), {info.pid for info in first.rank_info}
    first.stop()
    assert KEEPER.processes[0] == zygote
    second.start()
    assert KEEPER.processes == ()  # it is in use
    assert zygote_of(second) == zygote
    ranks = [psutil.Process(info.pid) for info in second.rank_info]
    assert {rank.ppid() for rank in ranks} == {zygote.pid}
    assert not before & {rank.pid for rank in ranks}
    assert second.apply(f"{RUNTIME}:echo", 3).results(PATIENCE_S) == {0: (3,), 1: (3,)}


CHANGES = """
import os, random, signal, sys
import numpy
os.environ["OF_THE_FIRST"] = os.environ["WORKBENCH_CLUSTER_ID"] = "1"
os.chdir("/")
os.umask(0o077)
os.nice(3)
sys.path.insert(0, "/of/the/first")
sys.modules["of_the_first"] = sys
"""
FINDS = """
import json, os, random, sys
import numpy
same = [
    os.getcwd(), os.umask(0o022), os.nice(0), "OF_THE_FIRST" in os.environ,
    "/of/the/first" in sys.path, "of_the_first" in sys.modules,
]
names = "WORKBENCH_CLUSTER_ID", "WORKBENCH_COMM", "PYTEST_CURRENT_TEST"
own = [*(os.environ[name] for name in names), random.random(), numpy.random.rand()]
print(json.dumps([same, own]))
"""


@pytest.mark.thorough
def test_changes_made_by_ranks_are_not_seen_by_later_ranks(make_cluster, monkeypatch):
    cluster, found, zygotes = make_cluster(), [], set()
    for test in ("one", "another"):
        for name in ("PYTEST_CURRENT_TEST", "WORKBENCH_COMM"):
            monkeypatch.setenv(name, test)
        cluster.start()
        zygotes.add(zygote_of(cluster))
        found += map(json.loads, reported(cluster, FINDS))
        reported(cluster, CHANGES)
        cluster.stop()
    assert len(zygotes) == 1
    umask = os.umask(0o022)
    os.umask(umask)
    assert [same for same, _ in found] == [[os.getcwd(), umask, os.nice(0), False, False, False]] * 4
    clusters, choices, tests, *drawn = zip(*(own for _, own in found), strict=True)
    assert (len(set(clusters)), choices, tests) == (2, *[("one", "one", "another", "another")] * 2)
    assert [len(set(numbers)) for numbers in drawn] == [4, 4]


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextlib.contextmanager
def on_core(number):
    """Restrict this process to one core, by index among its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def variable(name):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(name, "1")
        yield


@pytest.fixture
def take(tmp_path):
    """Takes a zygote, and requests nothing from it."""
    taken = []

    def take_one(*preload):
        taken.append(KEEPER.take(dict(os.environ), preload, tmp_path / "log"))
        return taken[-1]

    yield take_one
    for zygote in taken:
        zygote.end(PATIENCE_S)


def test_an_unchanged_environment_reuses_the_zygote(take):
    zygote = take()
    KEEPER.keep(zygote, PATIENCE_S)
    assert take() is zygote


@pytest.mark.parametrize(
    "change",
    [
        lambda path: variable("OF_THE_SECOND"),
        contextlib.chdir,
        lambda path: umask(0o077),
        pytest.param(
            lambda path: on_core(-1),
            marks=pytest.mark.skipif(usable_cores() < 2, reason="there is one core only"),
        ),
    ],
    ids=["variable", "directory", "umask", "cores"],
)
def test_where_something_is_otherwise_a_new_one_is(take, tmp_path, change):
    zygote = take()
    KEEPER.keep(zygote, PATIENCE_S)
    with change(tmp_path):
        assert take() is not zygote
    assert not is_running(zygote.process)


def test_for_another_rank_side_a_new_one_is(take):
    zygote = take(RUNTIME)
    KEEPER.keep(zygote, PATIENCE_S)
    assert take("another.runtime") is not zygote
    assert not is_running(zygote.process)


def test_of_two_zygotes_used_concurrently_one_is_kept(take):
    zygotes = take(), take()
    assert zygotes[0] is not zygotes[1]
    for zygote in zygotes:
        KEEPER.keep(zygote, PATIENCE_S)
    assert [is_running(zygote.process) for zygote in zygotes] == [False, True]
    assert KEEPER.processes == zygotes[1].processes


def test_one_that_died_meanwhile_is_replaced(take):
    zygote = take()
    KEEPER.keep(zygote, PATIENCE_S)
    both = zygote.processes
    zygote.process.kill()
    wait_until(lambda: not is_running(zygote.process))
    assert take() is not zygote
    assert not any(map(is_running, both))


def test_an_unused_zygote_is_ended(take, monkeypatch):
    monkeypatch.setattr(zygote_cache, "IDLE_S", 0)
    zygote = take()
    KEEPER.keep(zygote, PATIENCE_S)
    wait_until(lambda: not is_running(zygote.process))
    assert KEEPER.processes == ()


def test_without_a_thread_for_the_timer_nothing_is_kept(take, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    zygote = take()
    monkeypatch.setattr("threading.Timer.start", refuse)
    KEEPER.keep(zygote, PATIENCE_S)
    assert KEEPER.processes == ()
    assert not is_running(zygote.process)


def test_a_zygote_that_failed_to_fork_is_not_kept(monkeypatch, tmp_path):
    (tmp_path / "never_imported.py").write_text("import signal\nwhile True: signal.pause()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cluster = Cluster(1, "cpu", runtime="never_imported")

    def give_up(launch):
        zygotes.append(launch._zygote.process)
        raise KeyboardInterrupt

    zygotes = []
    monkeypatch.setattr("workbench.cluster.local_launch.LocalLaunch.wait_for_controller", give_up)
    with pytest.raises(KeyboardInterrupt):
        cluster.start()
    assert KEEPER.processes == ()
    assert not any(map(is_running, zygotes))


LOST = """
import os, signal
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        signal.pause()
"""


@pytest.mark.thorough
def test_children_left_by_a_rank_end_with_its_cluster(make_cluster):
    for _ in range(2):  # with a new zygote, and with a kept one
        cluster = make_cluster(1)
        cluster.start()
        reported(cluster, LOST)
        rank = psutil.Process(cluster.rank_info[0].pid)
        (orphan,) = rank.children()
        rank.kill()
        wait_until(lambda rank=rank: not is_running(rank))
        assert orphan.environ()[MARKER] == cluster._provider._id
        cluster.stop()
        assert not is_running(orphan)


KERNEL = """
import json, os, signal, sys
from pathlib import Path
from workbench.cluster.zygote_cache import KEEPER
KEEPER.keep(KEEPER.take(dict(os.environ), [], Path(os.devnull)), 0)
print(json.dumps([[process.pid, process.create_time()] for process in KEEPER.processes]), flush=True)
exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "raise SystemExit(3)",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "KEEPER.processes[1].kill(); os._exit(3)",  # its reaper is gone
        "KEEPER.processes[0].suspend(); os._exit(3)",  # it is suspended
    ],
)
def test_a_cached_zygote_does_not_outlive_the_kernel(ending):
    kernel = subprocess.run(
        [sys.executable, "-c", KERNEL, ending],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE_S,
        check=False,
    )
    assert kernel.stderr == ""
    kept = json.loads(kernel.stdout)
    assert len(kept) == 2
    wait_until(lambda: not any(runs(*process) for process in kept))


def runs(pid, created_s):
    try:
        process = psutil.Process(pid)
        return process.create_time() == created_s and is_running(process)
    except psutil.NoSuchProcess:
        return False


def test_a_cached_zygote_does_not_outlive_a_kernel_whose_child_keeps_the_pipe():
    script = "if os.fork(): os._exit(0)\nprint(os.getpid(), flush=True); signal.pause()"
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL, script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with kernel:
        kept, child = json.loads(kernel.stdout.readline()), psutil.Process(int(kernel.stdout.readline()))
        wait_until(lambda: not any(runs(*process) for process in kept))
        assert is_running(child)
        child.kill()


def test_a_forked_child_does_not_inherit_the_cache(take):
    KEEPER.keep(take(), PATIENCE_S)
    kept = KEEPER.processes
    child = os.fork()
    if child == 0:
        has = KEEPER.processes
        KEEPER.end()
        os._exit(len(has))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert KEEPER.processes == kept
    assert all(map(is_running, kept))
