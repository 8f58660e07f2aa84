"""Noticing that nothing is heard of a controller any more: its process has ended, or its host is gone.

A notebook is told of it within two seconds. An engine goes on for longer, since a network may come back, and then ends
itself: nobody else may be able to reach it.

Both listen on a connection of their own. What it carries is answered by ZeroMQ's threads, which need no interpreter,
so that a process which is merely busy is never taken for one that is gone.
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
"""How often a notebook asks the controller for a sign of life, and how long it may take to give it, in seconds."""

GRACE_S = 5.0
"""How long a process may take to end by itself, in seconds."""

_STDERR = 2


class CurveKeys(Protocol):
    """A key pair of one's own for CURVE, and the controller's public key, which is empty where nothing is encrypted."""

    curve_serverkey: bytes | None
    curve_publickey: bytes | None
    curve_secretkey: bytes | None


class HeartbeatMonitor:
    """Tells when the connection to a controller has ended, or nothing comes through it.

    Args:
        address: of one of its sockets to which subscribers connect, as ZeroMQ writes it.
        keys: to authenticate with.
        on_silence: called once, in a thread of its own.
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
        """Listen no more."""
        self._socket.disable_monitor()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._context.destroy(linger=0)


def monitor_of(socket: zmq.Socket[Any], period_s: float, silence_s: float) -> zmq.Socket[Any]:
    """Return a socket that tells when another one, not connected yet, is connected and is so no more.

    Args:
        socket: to be connected afterwards.
        period_s: how often the other end is asked for a sign of life, in seconds.
        silence_s: how long it may take to give one, in seconds; then the connection has ended.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * period_s))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * silence_s))
    return socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)


def end_when_alone(
    socket: zmq.Socket[Any], connect: Callable[[zmq.Socket[Any]], object], alone_s: float, may_end: Callable[[], bool]
) -> None:
    """End this process once nothing was heard of its controller for a long time; runs in a thread of its own.

    Args:
        socket: that nobody else uses.
        connect: connects it to the controller's own process.
        alone_s: how long nothing must be heard, in seconds.
        may_end: asked then; if not, it listens on.
    """
    monitor = monitor_of(socket, alone_s / 8, alone_s / 8)  # so a silence is noticed after a quarter of the time
    connect(socket)
    is_heard = False
    while is_heard or monitor.poll(round(750 * alone_s)) or not may_end():
        if is_heard or monitor.poll(0):
            is_heard = recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    os.write(_STDERR, f"nothing was heard of the controller for {alone_s:g} s: this process ends\n".encode())
    end_process(GRACE_S)


def end_process(grace_s: float) -> None:
    """End this process as SIGTERM does, and after ``grace_s`` seconds all the same.

    It may be inside a collective, where Python sees no signal, and where no other thread of Python gets on.
    """
    faulthandler.dump_traceback_later(grace_s, exit=True, file=_STDERR)
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_main_thread(grace_s: float) -> None:
    """End this process ``grace_s`` seconds after its main thread, whatever other threads run; in one of its own.

    A thread of the user's that is no daemon would keep it: a rank that serves nothing any more and looks alive.
    """
    main = threading.main_thread()
    main.join()
    until = time.monotonic() + grace_s
    for thread in threading.enumerate():
        if thread is not main and not thread.daemon:
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                os._exit(1)
