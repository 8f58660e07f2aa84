"""Machines as plans know them: memory, peak rates and links of their devices.

The figures of :data:`MACHINES` are peaks that vendors publish for one device, dense (without sparsity): NVIDIA's data
sheets of A100, H100, H200 and B200. No program reaches them, so times that follow from them are the least possible.
``workbench calibrate`` measures the ranks at hand instead, and writes a :class:`Calibration`.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from types import MappingProxyType

from workbench.base.codec import decode, encode
from workbench.errors import UsageError, did_you_mean

_GIB, _GB = 2**30, 10**9
_T = 10**12

TF32 = "tf32"
"""Matrix products of float32 in lower precision, which :func:`torch.set_float32_matmul_precision` allows."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device of a cluster, and its links.

    Attributes:
        name: of the device.
        memory_bytes: memory of one device.
        flops: operations a second of matrix products, by dtype; that of float32 without lower precision.
        memory_rate: bytes a second that kernels read and write.
        link_rate: bytes a second, in one direction, from one device to others of its host.
        network_rate: likewise, to other hosts.
        host_rate: likewise, to and from the memory of its host.
        latency_ns: time of one message between two devices.
        launch_ns: time of the host for one kernel.
        devices_per_host: devices of one host.
        calibration: what was measured; None: the figures are published peaks.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_rate: float
    link_rate: float
    network_rate: float
    host_rate: float
    latency_ns: int = 5_000
    launch_ns: int = 5_000
    devices_per_host: int = 8
    calibration: Calibration | None = None

    def peak(self, dtype: str) -> float:
        """Return the operations a second of matrix products in a dtype; that of float32 if there is no figure."""
        return self.flops.get(dtype, self.flops["float32"])


def _nvidia(name: str, memory: int, *, flops: tuple[float, float, float], rates: Sequence[float]) -> Machine:
    """Return a device by its data sheet.

    Args:
        name: of the device.
        memory: GiB.
        flops: TFLOP/s in 16 bits, in TF32 and in float32.
        rates: of its memory in TB/s; of links in its host, to other hosts, and to the host's memory in GB/s.
    """
    half, tf32, single = (each * _T for each in flops)
    memory_rate, link, network, to_host = rates
    return Machine(
        name=name,
        memory_bytes=memory * _GIB,
        flops=MappingProxyType({"bfloat16": half, "float16": half, TF32: tf32, "float32": single}),
        memory_rate=memory_rate * _T,
        link_rate=link * _GB,
        network_rate=network * _GB,
        host_rate=to_host * _GB,
    )


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _nvidia("a100-40gb", 40, flops=(312, 156, 19.5), rates=(1.555, 300, 25, 32)),
        _nvidia("a100-80gb", 80, flops=(312, 156, 19.5), rates=(2.039, 300, 25, 32)),
        _nvidia("h100-80gb", 80, flops=(989, 494.5, 67), rates=(3.35, 450, 50, 64)),
        _nvidia("h200-141gb", 141, flops=(989, 494.5, 67), rates=(4.8, 450, 50, 64)),
        _nvidia("b200-180gb", 180, flops=(2250, 1125, 80), rates=(8.0, 900, 50, 64)),
    )
}
"""By the name that ``--device`` takes."""

DEFAULT = "h100-80gb"


FILE_SUFFIX = ".json"
VERSION = 1


def machine(name: str) -> Machine:
    """Return the machine called ``name``, or of the calibration in the file ``name``, which ends with ``.json``.

    Raises:
        UsageError: there is none, or the file cannot be read.
    """
    if name.endswith(FILE_SUFFIX):
        return read_calibration(name).machine(Path(name).name)
    if name not in MACHINES:
        hint = did_you_mean(name, MACHINES)
        raise UsageError(
            f"no figures of a device {name!r}{hint}; known are {', '.join(MACHINES)}, and a file of workbench calibrate"
        )
    return MACHINES[name]


# --------------------------------------------------------------------- measured


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """The time of an operation on the device.

    Attributes:
        op: torch's name of it, such as ``aten.addmm``.
        dtype: of its first floating-point tensor.
        work: operations of its arithmetic; bytes that it reads and writes if those are not counted, as of ``aten.add``.
        time_ns: nanoseconds, the median of all ranks.
    """

    op: str
    dtype: str
    work: int
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """The time of a collective: ``latency_ns + sent bytes / bytes_per_s``, with the bytes that a ring sends.

    Attributes:
        kind: such as ``all_gather``.
        num_ranks: ranks of the group.
        latency_ns: time of one without bytes.
        bytes_per_s: what each rank sends.
    """

    kind: str
    num_ranks: int
    latency_ns: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class HeldOutStep:
    """A training step that no figure was fitted to: planned, and measured.

    Attributes:
        what: the model that it trains.
        planned_ns: the planned time.
        measured_ns: the measured time.
    """

    what: str
    planned_ns: float
    measured_ns: float

    @property
    def error_percent(self) -> float:
        """How far the planned time is from the measured one; negative: below."""
        return 100 * (self.planned_ns / self.measured_ns - 1)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The contents of a file of ``workbench calibrate``: what was measured, on what.

    Attributes:
        version: of this format.
        host: name of the host.
        device: kind of the device: ``cpu`` or ``cuda``.
        processor: name of the device.
        torch: its version.
        backend: c10d's backend, whose own collectives were measured.
        num_ranks: ranks that were at work at the same time.
        cores: processor cores that they had.
        memory_bytes: memory of one device; on CPUs, of the host, divided by the ranks.
        flops_per_s: operations a second of matrix products, by dtype.
        memory_bytes_per_s: what elementwise kernels read and write.
        host_copy_bytes_per_s: copies between the device's and the host's memory.
        op_ns: the host's time for an operation, besides the device's.
        dtensor_ns: the host's time for each DTensor among the arguments of an operation.
        unit_ns: the host's time for a collective of a unit, with its hooks.
        spread_percent: quartile range of repeated steps, relative to their median: the most of any model.
        ops: operations, each at several sizes.
        collectives: for each number of ranks.
        held_out: steps that the figures were not fitted to.
    """

    version: int
    host: str
    device: str
    processor: str
    torch: str
    backend: str
    num_ranks: int
    cores: int
    memory_bytes: int
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    host_copy_bytes_per_s: float
    op_ns: float
    dtensor_ns: float
    unit_ns: float
    spread_percent: float
    ops: tuple[OpTime, ...]
    collectives: tuple[CollectiveTime, ...]
    held_out: tuple[HeldOutStep, ...] = ()

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the format is unknown; this workbench reads {VERSION}")
        if "float32" not in self.flops_per_s:
            raise ValueError("flops_per_s lacks float32")
        rates = (*self.flops_per_s.values(), self.memory_bytes_per_s, self.host_copy_bytes_per_s)
        positive = (*rates, *(each.time_ns for each in self.ops), *(each.bytes_per_s for each in self.collectives))
        if not all(0 < each < math.inf for each in (*positive, self.num_ranks, self.memory_bytes)):
            raise ValueError("a rate, a time or a number that must be positive is not")

    @property
    def runs_at_once(self) -> bool:
        """Whether the host itself runs the operations, so that it cannot go on meanwhile."""
        return self.device == "cpu"

    @property
    def error_percent(self) -> float | None:
        """The largest error of a held-out step; None if there is none."""
        return max((abs(each.error_percent) for each in self.held_out), default=None)

    def machine(self, name: str) -> Machine:
        """Return it as a machine called ``name``, of one host."""
        return Machine(
            name=name,
            memory_bytes=self.memory_bytes,
            flops=self.flops_per_s,
            memory_rate=self.memory_bytes_per_s,
            link_rate=self.host_copy_bytes_per_s,
            network_rate=self.host_copy_bytes_per_s,
            host_rate=self.host_copy_bytes_per_s,
            launch_ns=round(self.op_ns),
            devices_per_host=self.num_ranks,
            calibration=self,
        )

    @cached_property
    def _curves(self) -> Mapping[tuple[str, str], list[tuple[int, float]]]:
        times: dict[tuple[str, str], dict[int, list[float]]] = {}
        for each in self.ops:
            if each.work > 0:
                times.setdefault((each.op, each.dtype), {}).setdefault(each.work, []).append(each.time_ns)
        return {key: sorted((work, median(found)) for work, found in sizes.items()) for key, sizes in times.items()}

    def op_ns_of(self, op: str, dtype: str, work: int) -> float | None:
        """Return the time of an operation, interpolated between the sizes that were measured; None if there are none.

        Beyond the largest size it grows with the work; below the smallest it stays.
        """
        points = self._curves.get((op, dtype))
        if not points:
            return None
        place = bisect_left(points, (work, 0.0))
        if place == len(points):
            most, ns = points[-1]
            return ns * work / most
        if place == 0 or points[place][0] == work:
            return points[place][1]
        (low, low_ns), (high, high_ns) = points[place - 1 : place + 1]
        share = math.log(work / low) / math.log(high / low)
        return low_ns * math.pow(high_ns / low_ns, share)

    def collective_ns(self, kind: str, sent_bytes: float, num_ranks: int) -> float:
        """Return the time of a collective, by the nearest number of ranks; its latency grows with the ring."""
        known = [each for each in self.collectives if each.kind == kind] or list(self.collectives)
        if not known or num_ranks < 2:
            return 0.0
        nearest = min(known, key=lambda each: abs(each.num_ranks - num_ranks))
        latency_ns = nearest.latency_ns * (num_ranks - 1) / (nearest.num_ranks - 1)
        return latency_ns + sent_bytes / nearest.bytes_per_s * 1e9


@cache
def _read(path: str, _changed_ns: int) -> Calibration:
    found: Calibration = decode(Calibration, json.loads(Path(path).read_text("utf-8")), path)
    return found


def read_calibration(path: str) -> Calibration:
    """Return the calibration in a file.

    Raises:
        UsageError: there is no such file, or it is none.
    """
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; workbench calibrate --out {path} writes it") from error
    except ValueError as error:
        raise UsageError(f"{path} is no file of workbench calibrate: {error}") from error


def write_calibration(calibration: Calibration, path: str) -> None:
    """Write a calibration.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        Path(path).write_text(f"{json.dumps(encode(calibration), indent=1)}\n", "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
