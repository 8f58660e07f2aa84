"""Engines of other hosts, ended over one connection; a local shell replaces ssh."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster import ssh_launch
from workbench.cluster.processes import is_running

ENGINE = """
import signal, subprocess, sys
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


def launcher(pid, file="nowhere", location="node1", system="linux-gnu", arguments=(), shell=("sh", "-c")):
    sender = SimpleNamespace(shell=list(shell), args=[], get_shell_info=lambda: (system, "/bin/sh"))
    return SimpleNamespace(
        pid=pid, remote_output_file=str(file), location=location, ssh_args=list(arguments), ssh_sender=sender
    )


def test_launchers_of_a_host_are_together_and_those_of_windows_are_left_out():
    one, two, three = launcher(1), launcher(2, location="node2"), launcher(3)
    port, windows = launcher(4, arguments=["-p", "2222"]), launcher(5, system="Windows_NT")
    assert ssh_launch.by_host([one, two, three, port, windows]) == [[one, three], [two], [port]]


@pytest.fixture
def engines():
    """Two processes, each with a child; one ignores SIGTERM."""
    made = [
        subprocess.Popen([sys.executable, "-c", ENGINE, how], stdout=subprocess.PIPE, start_new_session=True)
        for how in ("ends", "deaf")
    ]
    yield made
    for each in made:
        with each:
            each.kill()


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_engines_end_with_their_children_and_their_files_are_removed(engines, tmp_path, shell):
    children = [psutil.Process(int(engine.stdout.readline())) for engine in engines]
    files = [tmp_path / "it's one.out", tmp_path / "-two.out"]
    for file in files:
        file.touch()
    of_host = [launcher(e.pid, file, shell=(shell, "-c")) for e, file in zip(engines, files, strict=True)]
    assert ssh_launch.end_there(of_host)
    assert [engine.wait(PATIENCE_S) for engine in engines] == [-15, -9]
    wait_until(lambda: not any(map(is_running, children)))
    assert not any(file.exists() for file in files)
    assert ssh_launch.end_there(of_host)  # there is nothing left to do


@pytest.mark.parametrize("shell", [("sh", "-c", "exit 255"), ("no-such-ssh",)])
def test_an_unresponsive_host_is_reported(shell):
    assert not ssh_launch.end_there([launcher(2**22 + 1, shell=shell)])


def test_a_host_that_never_answers_is_abandoned(monkeypatch):
    monkeypatch.setattr(ssh_launch, "REACH_S", -ssh_launch.GRACE_S)
    assert not ssh_launch.end_there([launcher(2**22 + 1, shell=("sh", "-c", "exec sleep 1000"))])
