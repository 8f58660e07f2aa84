"""A switch in user space that joins network namespaces, over links that have a rate, a delay, and lose frames.

It needs of Linux no more than TAP devices: what the kernel can do of it, netem, is a module that many lack. A port is a
TAP device that the switch, a process of its own, makes in a namespace; what leaves the namespace by it the switch
reads, and writes to the port of whoever it is for. As long as nothing is to be lost, TCP hands over up to 64 kB in one
frame, so that a link of 1 Gbit/s takes some 2,000 frames a second.

The process runs this file alone, without the packages of the environment, and ends with the one that started it.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from math import inf
from pathlib import Path
from typing import Any

DEVICE = Path("/dev/net/tun")
_NEW_NET = 0x40000000  # CLONE_NEWNET of Linux; os.setns is there from Python 3.12 on
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

# of linux/if_tun.h
_SET_INTERFACE, _SET_OFFLOAD, _SET_CARRIER = 0x400454CA, 0x400454D0, 0x400454E2
_TAP, _NO_PROTOCOL, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02 | 0x04

HEADER = 10
"""Bytes before a frame: what its reader has still to do, such as to cut it into segments (struct virtio_net_hdr)."""
_LARGEST = HEADER + 14 + 2**16
_SOME = 16
"""Frames that are read from a port before the others have their turn."""

AHEAD_S = 0.002
"""So long before it can leave a frame is taken from a port: a switch that wakes up late loses nothing of the rate."""


@dataclass(frozen=True)
class Link:
    """What is between a host and another.

    Attributes:
        rate_mbit: Mbit/s out of each, and into each.
        delay_ms: on the way from one to another.
        loss: share of the frames that do not arrive; each has then one segment, of the MTU at most.
    """

    rate_mbit: float = inf
    delay_ms: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        """What it does."""
        lost = f", {self.loss:.3g} of the frames lost" if self.loss else ""
        return f"{self.rate_mbit:g} Mbit/s, {self.delay_ms:g} ms{lost}"


class Switch:
    """What is on its way between ports. It has neither devices nor a clock: times are told, in seconds.

    Attributes:
        taken: bytes of frames that were taken from each port.
        num_lost: frames that were lost.
    """

    def __init__(self, num_ports: int) -> None:
        self.taken = [0] * num_ports
        self.num_lost = 0
        self._unplugged: frozenset[int] = frozenset()
        self._is_free_s = [0.0] * num_ports  # when the last frame has left a port's host
        self._is_through_s = [0.0] * num_ports  # when the last one to it is through; how far that is comes on top
        self._under_way: list[deque[tuple[float, bytes]]] = [deque() for _ in range(num_ports)]
        self._ports: dict[bytes, int] = {}  # by the hardware address that was seen there
        self.become(Link())

    def become(self, link: Link, unplugged: Sequence[int] = ()) -> None:
        """Be such links from now on, but of the ports ``unplugged``; which frames are lost is the same each time."""
        self._link = link
        self._unplugged = frozenset(unplugged)
        self._draws = [random.Random(port) for port in range(len(self.taken))]

    def opens_s(self, port: int) -> float:
        """When the next frame may be taken from ``port``."""
        return self._is_free_s[port] - AHEAD_S

    def take(self, port: int, frame: bytes, now_s: float) -> None:
        """Take a frame, with its header, from ``port``."""
        num_bytes = len(frame) - HEADER
        self.taken[port] += num_bytes
        takes_s = num_bytes * 8e-6 / self._link.rate_mbit
        begin_s = max(now_s, self._is_free_s[port])
        self._is_free_s[port] = begin_s + takes_s
        if port in self._unplugged:
            return
        if self._draws[port].random() < self._link.loss:
            self.num_lost += 1
            return
        self._ports[frame[HEADER + 6 : HEADER + 12]] = port
        for target in self._targets(port, frame[HEADER : HEADER + 6]):
            # segments of a frame go on while others still come: it takes that long once, not for each end of the way
            self._is_through_s[target] = max(begin_s, self._is_through_s[target]) + takes_s
            self._under_way[target].append((self._is_through_s[target] + self._link.delay_ms / 1e3, frame))

    def _targets(self, port: int, address: bytes) -> list[int]:
        known = self._ports.get(address)
        found = range(len(self.taken)) if known is None else [known]
        return [target for target in found if target != port and target not in self._unplugged]

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Give port and frame of what arrives by now."""
        for port, frames in enumerate(self._under_way):
            while frames and frames[0][0] <= now_s:
                yield port, frames.popleft()[1]

    def next_s(self) -> float:
        """When the next frame arrives."""
        return min((frames[0][0] for frames in self._under_way if frames), default=inf)


@dataclass(frozen=True)
class Port:
    """Where a cable ends.

    Attributes:
        namespace: the network namespace; empty: this process's own.
        interface: name of the device.
    """

    namespace: str
    interface: str


class Cables:
    """The switch as those see it who started it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._link = Link()
        self._answer()  # its devices are there

    def become(self, link: Link) -> None:
        """Let all links be so from now on."""
        self._link = link
        self._ask({"link": asdict(link), "unplugged": []})

    @contextmanager
    def over(self, link: Link) -> Iterator[None]:
        """Let all links be so for a while."""
        before = self._link
        self.become(link)
        try:
            yield
        finally:
            self.become(before)

    @contextmanager
    def unplugged(self, port: int) -> Iterator[None]:
        """Take away the cable of a port: it has no carrier."""
        self._ask({"link": asdict(self._link), "unplugged": [port]})
        try:
            yield
        finally:
            self.become(self._link)

    def sent(self) -> list[int]:
        """Return the bytes that each port has sent so far, headers of frames included."""
        return self._ask({})["sent"]

    def num_lost(self) -> int:
        """Return how many frames have been lost so far."""
        return self._ask({})["lost"]

    def _ask(self, what: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the switch has ended")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def joined(ports: Sequence[Port]) -> Iterator[Cables]:
    """Let a switch join network namespaces; its devices go with it."""
    words = [json.dumps([astuple(port) for port in ports])]
    command = [sys.executable, "-I", "-S", __file__, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Cables(process)
        finally:
            process.kill()


def enter(namespace: str) -> None:
    """Be in a network namespace from now on, this thread and those it starts.

    Raises:
        OSError: there is no such namespace.
    """
    with Path("/run/netns", namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def main(ports: Sequence[Port]) -> None:
    """Be the switch, until standard input ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # cables take no turns with what computes on the hosts
    switch = Switch(len(ports))
    devices = [_device(port) for port in ports]
    _obey(switch, devices, {"link": asdict(Link()), "unplugged": []})
    while True:
        closed_s = {port: switch.opens_s(port) for port in range(len(devices))}
        now_s = time.monotonic()
        waits = {device: port for port, device in enumerate(devices) if closed_s[port] <= now_s}
        wake_s = min([switch.next_s(), *(at_s for at_s in closed_s.values() if at_s > now_s)])
        # select alone counts in microseconds
        ready, _, _ = select.select([0, *waits], [], [], None if wake_s == inf else max(0.0, wake_s - now_s))
        for device in ready:
            if device in waits:
                _read(switch, waits[device], device)
            elif not (line := os.read(0, 2**16)):
                return
            else:
                _obey(switch, devices, json.loads(line))
        for port, frame in switch.due(time.monotonic()):
            _write(devices[port], frame)


def _device(port: Port) -> int:
    """Make the device of a port; returns its file descriptor."""
    enter(port.namespace or f"/proc/{os.getppid()}/ns/net")
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PROTOCOL | _WITH_HEADER
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", port.interface.encode(), flags))
    return device


def _obey(switch: Switch, devices: Sequence[int], order: dict[str, Any]) -> None:
    """Do what the process that started this one says, and answer what was sent and lost so far."""
    if order:
        link, unplugged = Link(**order["link"]), order["unplugged"]
        switch.become(link, unplugged)
        for port, device in enumerate(devices):
            fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUMS | (0 if link.loss else _SEGMENTS))
            fcntl.ioctl(device, _SET_CARRIER, struct.pack("i", port not in unplugged))
    os.write(1, json.dumps({"sent": switch.taken, "lost": switch.num_lost}).encode() + b"\n")


def _read(switch: Switch, port: int, device: int) -> None:
    with contextlib.suppress(BlockingIOError):
        for _ in range(_SOME):
            if switch.opens_s(port) > (now_s := time.monotonic()):
                break
            switch.take(port, os.read(device, _LARGEST), now_s)


def _write(device: int, frame: bytes) -> None:
    try:
        os.write(device, frame)
    except OSError as error:
        if error.errno != errno.EIO:  # the interface is not up: nobody hears it
            raise


if __name__ == "__main__":
    main([Port(*words) for words in json.loads(sys.argv[1])])
