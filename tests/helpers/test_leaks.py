"""The leak fixture detects every kind of leak."""

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers import leaks


def test_nothing_is_reported_when_nothing_was_left():
    before = leaks.census()
    subprocess.run([sys.executable, "-c", ""], check=True)
    assert leaks.left_over(before) == []


def test_a_process_is_reported():
    before = leaks.census()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert any(f"process {process.pid}:" in line for line in leaks.left_over(before, deadline_s=0))


def test_a_process_that_lost_its_parent_is_reported():
    before = leaks.census()
    script = "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:  # closes the pipe at the end, which ends the orphan
        pid = int(parent.stdout.readline())
        parent.wait()
        assert any(f"process {pid}:" in line for line in leaks.left_over(before, deadline_s=0))


def test_a_cached_zygote_is_not_reported_as_a_leak(monkeypatch):
    leaks.KEEPER.end()
    before, end = leaks.census(), threading.Event()
    thread = threading.Thread(target=end.wait, name="keeps it")
    thread.start()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        keeper = SimpleNamespace(processes=(psutil.Process(process.pid),), thread=thread)
        monkeypatch.setattr(leaks, "KEEPER", keeper)
        assert leaks.left_over(before, deadline_s=0) == []
        keeper.processes, keeper.thread = (), None
        assert len(leaks.left_over(before, deadline_s=0)) == 2
    end.set()
    thread.join()


def test_a_thread_is_reported():
    before, end = leaks.census(), threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    assert leaks.left_over(before, deadline_s=0) == ["thread forgotten"]
    end.set()
    thread.join()


def test_a_listening_port_is_reported():
    before = leaks.census()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert leaks.left_over(before, deadline_s=0) == [f"listening port {server.getsockname()[1]}"]


def test_the_guard_fails_with_the_names_of_what_was_left():
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")

    def leave_a_thread(monkeypatch):
        monkeypatch.setattr(leaks, "left_over", lambda before, **kwargs: leaks.census().describe_beyond(before))
        with leaks.guard():
            thread.start()

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(pytest.fail.Exception, match="thread forgotten"):
        leave_a_thread(monkeypatch)
    end.set()
    thread.join()
