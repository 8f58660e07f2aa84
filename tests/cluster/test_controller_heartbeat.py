"""A controller that stops answering: the notebook gets a notice, and an engine ends."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.cluster.controller_heartbeat import HeartbeatMonitor

PLAIN = SimpleNamespace(curve_serverkey=b"", curve_publickey=b"", curve_secretkey=b"")

CONTROLLER = """
import sys, zmq
socket = zmq.Context().socket(getattr(zmq, sys.argv[1]))
print(socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
sys.stdin.read()
"""

ENGINE = """
import signal, sys, threading, zmq
from workbench.cluster import controller_heartbeat
controller_heartbeat.GRACE_S = 0.1
may_end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
connect = lambda socket: socket.connect("tcp://127.0.0.1:" + sys.argv[1])
args = (zmq.Context().socket(zmq.DEALER), connect, 0.8, lambda: print("polled", flush=True) or may_end.is_set())
threading.Thread(target=controller_heartbeat.end_when_alone, args=args, daemon=True).start()
sys.stdin.read()
may_end.set()
while True:  # it does not listen to signals, as in a collective
    threading.Event().wait()
"""


@pytest.fixture
def run():
    """Starts programs, and ends them."""
    begun = []

    def start(program, *words):
        command = [sys.executable, "-c", program, *map(str, words)]
        begun.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return begun[-1]

    yield start
    for process in begun:
        with process:
            process.kill()


def controller(run, kind):
    started = run(CONTROLLER, kind)
    return started, int(started.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])  # gone, or its host does not answer
def test_a_notebook_is_notified_once(run, number):
    process, port = controller(run, "PUB")
    reported, is_told = [], threading.Event()
    listener = HeartbeatMonitor(f"tcp://127.0.0.1:{port}", PLAIN, lambda: (reported.append(1), is_told.set()))
    wait_until(lambda: is_connected(port))
    assert not reported
    os.kill(process.pid, number)
    assert is_told.wait(PATIENCE_S)
    listener.close()
    assert reported == [1]


def is_connected(port):
    here = psutil.Process().net_connections("tcp")
    return any(c.raddr and c.raddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in here)


def test_a_connection_closed_here_notifies_no_one(run):
    reported = []
    for _ in range(3):
        HeartbeatMonitor(f"tcp://127.0.0.1:{controller(run, 'PUB')[1]}", PLAIN, lambda: reported.append(1)).close()
    assert reported == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_without_a_controller_ends_although_it_blocks_signals(run, number):
    process, port = controller(run, "ROUTER")
    engine = run(ENGINE, port)
    os.kill(process.pid, number)
    assert engine.stdout.readline() == b"polled\n"
    assert engine.poll() is None  # it may not end yet
    engine.stdin.close()
    assert engine.wait(PATIENCE_S) == 1
    texts = engine.stderr.read().decode()
    assert "no heartbeat from the controller for 0.8 s: this process exits" in texts
    assert "Timeout" in texts
