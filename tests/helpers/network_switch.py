"""A switch in user space that joins network namespaces over links with a rate, a delay and loss.

It needs only TAP devices from Linux: the kernel's own means, netem, is a module that many machines lack. A port is a
TAP device that the switch, a separate process, creates in a namespace. The switch reads the frames that leave the
namespace through it and writes each to the port of its receiver. Without loss, TCP passes up to 64 kB in one frame, so
a link of 1 Gbit/s has some 2,000 frames a second.

The process runs this file alone, without the packages of the environment, and ends with its parent.
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
_NEW_NET = 0x40000000  # CLONE_NEWNET of Linux; os.setns exists only from Python 3.12 on
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

# from linux/if_tun.h
_SET_INTERFACE, _SET_OFFLOAD, _SET_CARRIER = 0x400454CA, 0x400454D0, 0x400454E2
_TAP, _NO_PROTOCOL, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS = 0x01, 0x02 | 0x04

HEADER = 10
"""Bytes before a frame: work left to its reader, such as segmentation (struct virtio_net_hdr)."""
_LARGEST = HEADER + 14 + 2**16
_SOME = 16
"""Frames that are read from a port before the other ports have their turn."""

AHEAD_S = 0.002
"""The switch takes a frame this long before it can leave: waking up late then costs no throughput."""


@dataclass(frozen=True)
class Link:
    """The connection between two hosts.

    Attributes:
        rate_mbit: Mbit/s, out of each and into each.
        delay_ms: one way.
        loss: share of the frames that are lost; each frame is then one segment, of the MTU at most.
    """

    rate_mbit: float = inf
    delay_ms: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        """Return the link's properties."""
        lost = f", {self.loss:.3g} of the frames lost" if self.loss else ""
        return f"{self.rate_mbit:g} Mbit/s, {self.delay_ms:g} ms{lost}"


class Switch:
    """The frames on their way between ports. It has neither devices nor a clock: the caller passes times, in seconds.

    Attributes:
        taken: bytes of the frames taken from each port.
        num_lost: number of lost frames.
    """

    def __init__(self, num_ports: int) -> None:
        self.taken = [0] * num_ports
        self.num_lost = 0
        self._unplugged: frozenset[int] = frozenset()
        self._is_free_s = [0.0] * num_ports  # when the last frame has left a port's host
        self._is_through_s = [0.0] * num_ports  # when the last frame to a port is through; without the delay
        self._under_way: list[deque[tuple[float, bytes]]] = [deque() for _ in range(num_ports)]
        self._ports: dict[bytes, int] = {}  # by source hardware address
        self.become(Link())

    def become(self, link: Link, unplugged: Sequence[int] = ()) -> None:
        """Use such links from now on, except for the ports ``unplugged``; the same frames are lost each time."""
        self._link = link
        self._unplugged = frozenset(unplugged)
        self._draws = [random.Random(port) for port in range(len(self.taken))]

    def opens_s(self, port: int) -> float:
        """Return when the next frame may be taken from ``port``."""
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
            # segments of a frame are sent on while others still arrive: the frame's time counts once, not at both ends
            self._is_through_s[target] = max(begin_s, self._is_through_s[target]) + takes_s
            self._under_way[target].append((self._is_through_s[target] + self._link.delay_ms / 1e3, frame))

    def _targets(self, port: int, address: bytes) -> list[int]:
        known = self._ports.get(address)
        found = range(len(self.taken)) if known is None else [known]
        return [target for target in found if target != port and target not in self._unplugged]

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Yield the port and frame of each arrival up to now."""
        for port, frames in enumerate(self._under_way):
            while frames and frames[0][0] <= now_s:
                yield port, frames.popleft()[1]

    def next_s(self) -> float:
        """Return when the next frame arrives."""
        return min((frames[0][0] for frames in self._under_way if frames), default=inf)


@dataclass(frozen=True)
class Port:
    """The end of a cable.

    Attributes:
        namespace: the network namespace; empty for this process's own.
        interface: name of the device.
    """

    namespace: str
    interface: str


class Cables:
    """The interface of the parent process to the switch."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._link = Link()
        self._answer()  # its devices exist

    def become(self, link: Link) -> None:
        """Give all links these properties from now on."""
        self._link = link
        self._request({"link": asdict(link), "unplugged": []})

    @contextmanager
    def over(self, link: Link) -> Iterator[None]:
        """Give all links these properties temporarily."""
        before = self._link
        self.become(link)
        try:
            yield
        finally:
            self.become(before)

    @contextmanager
    def unplugged(self, port: int) -> Iterator[None]:
        """Unplug the cable of a port, so that it has no carrier."""
        self._request({"link": asdict(self._link), "unplugged": [port]})
        try:
            yield
        finally:
            self.become(self._link)

    def sent(self) -> list[int]:
        """Return the bytes that each port has sent so far, including frame headers."""
        return self._request({})["sent"]

    def num_lost(self) -> int:
        """Return the number of frames lost so far."""
        return self._request({})["lost"]

    def _request(self, what: dict[str, object]) -> dict[str, Any]:
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
    """Join network namespaces with a switch; its devices are removed with it."""
    arguments = [json.dumps([astuple(port) for port in ports])]
    command = [sys.executable, "-I", "-S", __file__, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Cables(process)
        finally:
            process.kill()


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts, to a network namespace.

    Raises:
        OSError: there is no such namespace.
    """
    with Path("/run/netns", namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def main(ports: Sequence[Port]) -> None:
    """Run the switch until standard input ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # cables must not wait for the computation on the hosts
    switch = Switch(len(ports))
    devices = [_device(port) for port in ports]
    _obey(switch, devices, {"link": asdict(Link()), "unplugged": []})
    while True:
        closed_s = {port: switch.opens_s(port) for port in range(len(devices))}
        now_s = time.monotonic()
        waits = {device: port for port, device in enumerate(devices) if closed_s[port] <= now_s}
        wake_s = min([switch.next_s(), *(at_s for at_s in closed_s.values() if at_s > now_s)])
        # select alone has microsecond resolution
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
    """Create the device of a port and return its file descriptor."""
    enter(port.namespace or f"/proc/{os.getppid()}/ns/net")
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PROTOCOL | _WITH_HEADER
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH22x", port.interface.encode(), flags))
    return device


def _obey(switch: Switch, devices: Sequence[int], order: dict[str, Any]) -> None:
    """Carry out an order of the parent process, and answer with the bytes sent and the frames lost so far."""
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
        if error.errno != errno.EIO:  # the interface is not up: drop the frame
            raise


if __name__ == "__main__":
    main([Port(*words) for words in json.loads(sys.argv[1])])
