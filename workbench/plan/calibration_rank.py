"""The process of a rank that measures its machine: operations, the host's time for them, and collectives.

All ranks measure at the same time, as in training: ranks on one host share its memory, and often its cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from workbench.base.codec import encode
from workbench.base.machines import CollectiveTime, OpTime
from workbench.engine.backends import backend_of
from workbench.events import Kind
from workbench.models._torch_private import DispatchMode
from workbench.plan.calibration_step import MEASURED, STEPS
from workbench.plan.op_times import work_of
from workbench.replay.collectives import ring_bytes
from workbench.runtime import piped_rank, rank

_STEPS = 5
_SIZES = (2**10, 2**16, 2**20, 2**22)  # elements of a collective's input on one rank
_REPEATS = 9
_COPIED = 2**24
_MATRIX = 1024
_PEAK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TimedOps(DispatchMode):
    """Within the block, each operation of this thread runs alone on the device, and is timed.

    Attributes:
        times: nanoseconds by name, dtype and size.
        num_ops: operations that do something on the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._synchronize = backend_of(device).synchronize
        self.times: dict[tuple[str, str, int], list[int]] = {}
        self.num_ops = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's OpOverload
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of the operation
        """Run an operation, and note its time."""
        given = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace != "aten":
            return func(*args, **given)
        self._synchronize()
        begin_ns = time.perf_counter_ns()
        result = func(*args, **given)
        self._synchronize()
        taken_ns = time.perf_counter_ns() - begin_ns
        if (work := work_of(func, args, given, result)) is not None:
            self.num_ops += 1
            key = (work.op, str(work.dtype).removeprefix("torch."), work.amount)
            self.times.setdefault(key, []).append(taken_ns)
        return result

    def op_times(self) -> list[OpTime]:
        """Return the median time of each."""
        return [
            OpTime(op=op, dtype=dtype, work=work, time_ns=float(median(times)))
            for (op, dtype, work), times in self.times.items()
        ]


def _times_ns(body: Callable[[], object], repeats: int) -> list[int]:
    """Return the nanoseconds of each repetition."""
    synchronize = backend_of(rank.this_rank().groups.device).synchronize
    found = []
    for _ in range(repeats):
        synchronize()
        begin_ns = time.perf_counter_ns()
        body()
        synchronize()
        found.append(time.perf_counter_ns() - begin_ns)
    return found


def _spread(times: Sequence[int]) -> float:
    lower, _, upper = quantiles(times, n=4)
    return 100 * (upper - lower) / median(times)


def measure(_given: object) -> Any:  # noqa: ANN401 - JSON data
    """Return the figures of this rank: fields of :class:`~workbench.base.machines.Calibration`."""
    device = rank.this_rank().groups.device
    ops: list[OpTime] = []
    host_ns, spreads = [], []
    for training in MEASURED.values():
        step = training.make(device)
        step()
        dist.barrier()
        whole = _times_ns(step, _STEPS)
        spreads.append(_spread(whole))
        with TimedOps(device) as timed:
            for _ in range(_STEPS):
                step()
        ops += timed.op_times()
        on_device_ns = sum(median(times) * len(times) for times in timed.times.values()) / _STEPS
        host_ns.append((median(whole) - on_device_ns) * _STEPS / timed.num_ops)
    op_ns = max(median(host_ns), 0.0)
    dtensor_ns = _dtensor_ns(device)
    collectives = list(_collectives(device))
    return {
        "ops": encode(ops),
        "collectives": encode(collectives),
        "flops_per_s": dict(_matrix_products(device)),
        "memory_bytes_per_s": 3 * 4 * _COPIED / min(_times_ns(_adding(device), _REPEATS)) * 1e9,
        "host_copy_bytes_per_s": 4 * _COPIED / min(_times_ns(_copying(device), _REPEATS)) * 1e9,
        "op_ns": op_ns,
        "dtensor_ns": dtensor_ns,
        "spread_percent": max(spreads),
        "processor": _processor(device),
        "memory_bytes": _memory_bytes(device),
    }


def _adding(device: torch.device) -> Callable[[], object]:
    x, y, z = (torch.ones(_COPIED, device=device) for _ in range(3))
    return lambda: torch.add(x, y, out=z)


def _copying(device: torch.device) -> Callable[[], object]:
    here, there = torch.ones(_COPIED), torch.ones(_COPIED, device=device)
    return lambda: there.copy_(here)


def _matrix_products(device: torch.device) -> Iterator[tuple[str, float]]:
    for dtype in _PEAK_DTYPES:
        matrix = torch.randn(_MATRIX, _MATRIX, device=device).to(dtype)
        multiply = partial(torch.mm, matrix, matrix)
        multiply()
        yield str(dtype).removeprefix("torch."), 2 * _MATRIX**3 / min(_times_ns(multiply, 3)) * 1e9


def _dtensor_ns(device: torch.device) -> float:
    """Return the host's time for a DTensor among the arguments of an operation."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    local = torch.ones(8, device=device)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    def per_call(x: torch.Tensor) -> float:
        return min(_times_ns(lambda: [x.add_(x) for _ in range(50)], _REPEATS)) / 50

    return max(per_call(sharded) - per_call(local), 0.0) / 2


def _collectives(device: torch.device) -> Iterator[CollectiveTime]:
    """Yield the times of c10d's collectives over the first 2 ranks, 4, and so on, and over all."""
    here, world = dist.get_rank(), dist.get_world_size()
    sizes = [2**power for power in range(1, world.bit_length()) if 2**power < world] + [world] * (world > 1)
    for size in sizes:
        group = cast("dist.ProcessGroup", dist.new_group(list(range(size))))
        if here < size:
            yield from _collectives_of(group, size, device)
    dist.barrier()


def _collectives_of(group: dist.ProcessGroup, size: int, device: torch.device) -> Iterator[CollectiveTime]:
    calls: dict[Kind, Callable[[torch.Tensor, torch.Tensor], object]] = {
        Kind.ALL_GATHER: lambda whole, own: dist.all_gather_single(whole, own, group=group),
        Kind.REDUCE_SCATTER: lambda whole, own: dist.reduce_scatter_single(own, whole, group=group),
        Kind.ALL_REDUCE: lambda whole, _: dist.all_reduce(whole, group=group),
    }
    for kind, call in calls.items():
        points = []
        for numel in _SIZES:
            own, whole = torch.ones(numel, device=device), torch.ones(numel * size, device=device)
            call(whole, own)
            times = _times_ns(partial(call, whole, own), _REPEATS)
            points.append((ring_bytes(kind, whole.nbytes, size), median(times)))
        yield _line(kind, size, points)


def _line(kind: Kind, size: int, points: Sequence[tuple[float, float]]) -> CollectiveTime:
    """Return the line through the smallest and the largest collective."""
    (small, small_ns), *_, (large, large_ns) = points
    ns_per_byte = max(large_ns - small_ns, 1.0) / (large - small)
    latency_ns = max(small_ns - small * ns_per_byte, 0.0)
    return CollectiveTime(kind=kind.key, num_ranks=size, latency_ns=latency_ns, bytes_per_s=1e9 / ns_per_byte)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(torch.cpu.get_capabilities().get("architecture", "")) or os.uname().machine


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // dist.get_world_size()


def train(name: str) -> float:
    """Return the nanoseconds of a step of a training of :data:`STEPS`, the median."""
    step = STEPS[name].make(rank.this_rank().groups.device)
    step()
    dist.barrier()
    return median(_times_ns(step, 3 * _STEPS))


def main(requests: int, answers: int) -> None:
    """Serve :func:`measure` and :func:`train` as :func:`workbench.runtime.piped_rank.main` does."""
    os.environ["WORKBENCH_COMM"] = "default"  # c10d's own collectives, as on other machines
    functions: dict[str, Callable[[Any], Any]] = {
        "boot": rank.boot,
        "connect": rank.connect,
        "measure": measure,
        "train": train,
    }
    piped_rank.main(requests, answers, functions)
