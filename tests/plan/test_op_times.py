"""How long operations take on a planned device: arithmetic, bytes, and collectives, by hand."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.helpers.calibrations import CALIBRATION
from tests.helpers.forked_ranks import on_one_rank
from workbench.engine._torch import fakes
from workbench.engine.backends.simulated import SimulatedDevice
from workbench.models.c10d import CollectiveWatch
from workbench.plan.op_times import OpTimes, local_args
from workbench.protocol.planning import PlannedRanks, planned_ranks

RANKS = planned_ranks("a100-80gb", 8, 1)
MACHINE = RANKS.machine
N = 4096


def times(operation, *shapes, dtype=torch.bfloat16, ranks=RANKS):
    device = SimulatedDevice(torch.device("cpu"))
    device.runs_at_once = ranks.machine.calibration is not None
    with fakes():
        tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
        device.synchronize()
        before_ns = device.host.now_ns
        with OpTimes(device, ranks, CollectiveWatch()):
            operation(*tensors)
    if not device.runs_at_once:
        device.synchronize()
    return (device.host.now_ns - before_ns - ranks.machine.launch_ns) / 1e9


@pytest.mark.parametrize(
    ("operation", "shapes", "dtype", "seconds"),
    [
        (torch.mm, [(N, N), (N, N)], torch.bfloat16, 2 * N**3 / MACHINE.flops["bfloat16"]),
        (torch.mm, [(N, N), (N, N)], torch.float32, 2 * N**3 / MACHINE.flops["float32"]),
        (torch.mm, [(N, 1), (1, N)], torch.bfloat16, 2 * (N * N + 2 * N) / MACHINE.memory_rate),
        (torch.add, [(N, N), (N, N)], torch.float32, 3 * 4 * N * N / MACHINE.memory_rate),
        (torch.relu_, [(N, N)], torch.float32, 4 * N * N / MACHINE.memory_rate),
        (torch.t, [(N, N)], torch.float32, -MACHINE.launch_ns / 1e9),
        (torch.empty_like, [(N, N)], torch.float32, -MACHINE.launch_ns / 1e9),
    ],
)
@on_one_rank
def test_an_operation_takes_as_long_as_its_arithmetic_or_its_bytes(operation, shapes, dtype, seconds):
    assert times(operation, *shapes, dtype=dtype) == pytest.approx(seconds, abs=2e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("operation", "dtype", "nanoseconds"),
    [
        (torch.add, torch.float32, 600),  # 3 x 4 x 100 bytes, between those that were measured
        (torch.add, torch.bfloat16, 600),  # not measured: bytes at the rate of the memory
        (torch.mul, torch.float32, 1200),
    ],
)
@on_one_rank
def test_an_operation_that_was_measured_takes_that_long_and_the_host_waits(operation, dtype, nanoseconds):
    ranks = PlannedRanks(machine=CALIBRATION.machine("here"), num_ranks=4)
    found = times(operation, [100], [100], dtype=dtype, ranks=ranks)
    assert found == pytest.approx(nanoseconds / 1e9, abs=2e-9)


FUSED, LOCAL = torch.ops.aten._fused_adamw_.default, torch.ops.aten._fused_adamw.default


@pytest.mark.parametrize(
    ("func", "of_first", "of_second", "is_known"),
    [
        (FUSED, [Shard(0), Shard(0), None], [Shard(1), Shard(1), None], True),
        (FUSED, [Replicate(), Replicate(), None], [Shard(0), Shard(0), None], True),
        (FUSED, [Shard(0), Replicate(), None], [Shard(0), Shard(0), None], False),
        (FUSED, [Partial(), Partial(), None], [Shard(0), Shard(0), None], False),
        (LOCAL, [Shard(0), Shard(0), None], [Shard(1), Shard(1), None], False),
        (torch.ops.aten._foreach_mul_.List, [Shard(0), Shard(0)], [Shard(1), Shard(1)], False),
    ],
)
@on_one_rank
def test_a_fused_step_is_the_same_on_local_tensors_if_all_of_a_parameter_is_split_alike(
    func, of_first, of_second, is_known
):
    mesh = init_device_mesh("cpu", (1,))

    def tensor(placement):
        return torch.ones(()) if placement is None else DTensor.from_local(torch.ones(2, 2), mesh, [placement])

    args = tuple([tensor(first), tensor(second)] for first, second in zip(of_first, of_second, strict=True))
    local = local_args(func, (*args, []), {})
    assert (local is not None) == is_known
    if local is not None:
        assert not any(isinstance(each, DTensor) for arg in local for each in arg)
        assert [len(arg) for arg in local] == [2, 2, 2, 0]
