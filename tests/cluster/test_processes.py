"""Cores, environments, and ending the processes of a cluster."""

import os
import subprocess
import sys
import threading
import uuid

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import processes
from workbench.cluster.processes import MARKER, THREAD_VARIABLES, ChildProcess

WAIT = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@given(ranks=st.integers(1, 64), cores=st.integers(1, 256))
def test_ranks_together_use_no_more_threads_than_there_are_cores(ranks, cores):
    limits = processes.thread_limits(ranks, cores, {})
    assert set(limits) == set(THREAD_VARIABLES)
    for value in limits.values():
        assert int(value) >= 1
        assert int(value) * ranks <= max(cores, ranks)


def test_a_lower_limit_of_the_user_is_kept_a_higher_or_strange_one_is_not():
    requested = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "64",
        "OPENBLAS_NUM_THREADS": "many",
        "NUMEXPR_NUM_THREADS": "0",
    }
    limits = processes.thread_limits(2, 8, requested)
    assert limits["OMP_NUM_THREADS"] == "1"
    assert {limits[name] for name in THREAD_VARIABLES if name != "OMP_NUM_THREADS"} == {"4"}


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_a_containers_quota_limits_the_cores(tmp_path, files, cores):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    unlimited = processes.usable_cores(tmp_path / "missing")
    assert processes.usable_cores(tmp_path) == (cores or unlimited)


def test_another_clusters_settings_are_not_handed_on(monkeypatch):
    monkeypatch.setenv("IPP_CONNECTION_INFO", "{}")
    monkeypatch.setenv("HOME_OF_THE_USER", "kept")
    environment = processes.environment("abc", 2)
    assert "IPP_CONNECTION_INFO" not in environment
    assert environment["HOME_OF_THE_USER"] == "kept"
    assert environment[MARKER] == "abc"


def start(code, **environment):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | environment)
    assert process.stdout.readline() == b"up\n"
    return process


def test_exactly_the_owned_processes_are_ended():
    cluster_id = uuid.uuid4().hex
    other = start(WAIT, **{MARKER: "of another"})
    marked = start(STUBBORN, **{MARKER: cluster_id})
    adopted = start(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); import signal; signal.pause()"
    )
    with other, marked, adopted:
        known = [psutil.Process(adopted.pid)]
        found = processes.belonging(cluster_id, known)
        assert {marked.pid, adopted.pid} < {process.pid for process in found}
        assert len(found) == 3  # including a child of the adopted one
        assert processes.end(cluster_id, known, grace_s=0.1)
        assert not any(map(processes.is_running, found))
        assert (marked.wait(), adopted.wait()) == (-9, -15)
        assert other.poll() is None
        other.kill()


def test_a_process_that_has_ended_does_not_run():
    with start("print('up', flush=True)") as process:
        known = psutil.Process(process.pid)
        wait_until(lambda: not processes.is_running(known))  # before its parent has waited for it
        assert processes.has_ended(known)
        process.wait()
        assert not processes.is_running(known)
        assert processes.has_ended(known)
        assert processes.belonging("nobody", [known]) == set()


def test_the_exit_code_of_a_watched_process_is_reported_once():
    codes, reported = [], threading.Event()
    with start("print('up', flush=True); raise SystemExit(3)") as process:
        watched = ChildProcess(process, lambda code: (codes.append(code), reported.set()))
        assert reported.wait(PATIENCE_S)
        watched.join(PATIENCE_S)
    assert codes == [3]
    assert watched.returncode == 3
