"""What a plan knows of a machine: memory, peak rates and links of its devices.

The figures of :data:`MACHINES` are peaks that vendors publish for one device, dense (without sparsity): NVIDIA's data
sheets of A100, H100, H200 and B200. No program reaches them, so times that follow from them are the least possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

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
        latency_ns: time of one message between two devices.
        launch_ns: time of the host for one kernel.
        devices_per_host: devices of one host.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_rate: float
    link_rate: float
    network_rate: float
    latency_ns: int = 5_000
    launch_ns: int = 5_000
    devices_per_host: int = 8

    def peak(self, dtype: str) -> float:
        """Return the operations a second of matrix products in a dtype; that of float32 if there is no figure."""
        return self.flops.get(dtype, self.flops["float32"])


def _nvidia(name: str, memory: int, *, flops: tuple[float, float, float], rates: Sequence[float]) -> Machine:
    """Return a device by its data sheet.

    Args:
        name: of the device.
        memory: GiB.
        flops: TFLOP/s in 16 bits, in TF32 and in float32.
        rates: of its memory in TB/s; of links in its host and to other hosts in GB/s.
    """
    half, tf32, single = (each * _T for each in flops)
    memory_rate, link, network = rates
    return Machine(
        name=name,
        memory_bytes=memory * _GIB,
        flops=MappingProxyType({"bfloat16": half, "float16": half, TF32: tf32, "float32": single}),
        memory_rate=memory_rate * _T,
        link_rate=link * _GB,
        network_rate=network * _GB,
    )


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        _nvidia("a100-40gb", 40, flops=(312, 156, 19.5), rates=(1.555, 300, 25)),
        _nvidia("a100-80gb", 80, flops=(312, 156, 19.5), rates=(2.039, 300, 25)),
        _nvidia("h100-80gb", 80, flops=(989, 494.5, 67), rates=(3.35, 450, 50)),
        _nvidia("h200-141gb", 141, flops=(989, 494.5, 67), rates=(4.8, 450, 50)),
        _nvidia("b200-180gb", 180, flops=(2250, 1125, 80), rates=(8.0, 900, 50)),
    )
}
"""By the name that ``--device`` takes."""

DEFAULT = "h100-80gb"


def machine(name: str) -> Machine:
    """Return the machine called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in MACHINES:
        hint = did_you_mean(name, MACHINES)
        raise UsageError(f"no figures of a device {name!r}{hint}; known are {', '.join(MACHINES)}")
    return MACHINES[name]
