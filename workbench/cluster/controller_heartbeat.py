"""Detection of a lost controller: its process has ended, or its host is gone.

A notebook detects it within two seconds. An engine waits longer, since a network may recover, and then ends itself, as
nothing else may be able to reach it.

Both use a separate connection. Its heartbeats are answered by ZeroMQ's threads, which do not need the interpreter, so a
busy process is never taken for a lost one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

PERIOD_S, SILENCE_S = 0.5, 1.5
"""Heartbeat period and timeout of a notebook, in seconds."""

GRACE_S = 5.0
"""Time in seconds that a process may take to end after SIGTERM or after its main thread."""

_STDERR = 2


class CurveKeys(Protocol):
    """The client's CURVE key pair and the controller's public key; the latter is empty without encryption."""

    curve_serverkey: bytes | None
    curve_publickey: bytes | None
    curve_secretkey: bytes | None


class HeartbeatMonitor:
    """Calls back when the connection to a controller ends or its heartbeats time out.

    Args:
        address: ZeroMQ address of one of the controller's publisher sockets.
        keys: keys for authentication.
        on_silence: called once, in a separate thread.
    """

    def __init__(self, address: str, keys: CurveKeys, on_silence: Callable[[], None]) -> None:
        self._on_silence = on_silence
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        if keys.curve_serverkey:
            self._socket.curve_serverkey = keys.curve_serverkey
            self._socket.curve_publickey = keys.curve_publickey
            self._socket.curve_secretkey = keys.curve_secretkey
        self._monitor = monitor_of(self._socket, PERIOD_S, SILENCE_S)
        self._thread = threading.Thread(target=self._listen, name=f"listener({address})", daemon=True)
        self._thread.start()
        self._socket.connect(address)

    def _listen(self) -> None:
        while (event := recv_monitor_message(self._monitor)["event"]) == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            pass
        if event == zmq.EVENT_DISCONNECTED:
            self._on_silence()

    def close(self) -> None:
        """Stop listening and close the connection."""
        self._socket.disable_monitor()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._context.destroy(linger=0)


def monitor_of(socket: zmq.Socket[Any], period_s: float, silence_s: float) -> zmq.Socket[Any]:
    """Return a monitor socket that reports when ``socket`` is connected and disconnected.

    Args:
        socket: socket that is not connected yet.
        period_s: heartbeat period, in seconds.
        silence_s: heartbeat timeout, in seconds, after which the connection counts as ended.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * period_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * silence_s))
    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)


def end_when_alone(
    socket: zmq.Socket[Any], connect: Callable[[zmq.Socket[Any]], object], alone_s: float, may_end: Callable[[], bool]
) -> None:
    """End this process once its controller was silent for ``alone_s`` seconds; runs in a separate thread.

    Args:
        socket: socket for this function alone.
        connect: connects it to the controller's own process.
        alone_s: length of the silence, in seconds.
        may_end: returns whether the process may end now; if not, the wait continues.
    """
    monitor = monitor_of(socket, alone_s / 8, alone_s / 8)  # detects a silence after a quarter of alone_s
    connect(socket)
    is_heard = False
    while is_heard or monitor.poll(round(750 * alone_s)) or not may_end():
        if is_heard or monitor.poll(0):
            is_heard = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    os.write(_STDERR, f"no heartbeat from the controller for {alone_s:g} s: this process exits\n".encode())
    end_process(GRACE_S)


def end_process(grace_s: float) -> None:
    """End this process with SIGTERM, and forcibly after ``grace_s`` seconds.

    It may be inside a collective, where Python handles no signal and runs no other Python thread.
    """
    faulthandler.dump_traceback_later(grace_s, exit=True, file=_STDERR)
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_main_thread(grace_s: float) -> None:
    """End this process ``grace_s`` seconds after its main thread, even if other threads run; runs in a separate thread.

    A non-daemon thread of the user's would keep the process alive as a rank that serves no requests.
    """
    main = threading.main_thread()
    main.join()
    until = time.monotonic() + grace_s
    for thread in threading.enumerate():
        if thread is not main and not thread.daemon:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                os._exit(1)
