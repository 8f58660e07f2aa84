"""torch.distributed.pipelining over sharded stages: one script on torch's engine and ours.

Compares losses of the micro-batches, gradients, full parameters and numbers of collectives bit by bit.
"""

from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.both_engines import APIS, SAME
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.small_models import Block
from tests.helpers.unsharded_copy import DIM

BATCH, MICRO_BATCHES, STEPS = 8, 4, 3
SINGLE = (ScheduleGPipe, Schedule1F1B)  # one stage per rank; the others have two
ZERO_BUBBLE = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)


class Collectives(TorchDispatchMode):
    """Counts c10d calls. CommDebugMode hooks parameters, which a backward for inputs only forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def stages_of(kind: type, position: int, num_ranks: int) -> tuple[int, ...]:
    """Return the stages of the rank at ``position`` of the pipeline."""
    if kind in SINGLE:
        return (position,)
    return (position, (2 * num_ranks - 1 - position) if kind is ScheduleZBVZeroBubble else position + num_ranks)


def make_stage(api: ModuleType, index: int, mesh: DeviceMesh, reshard: bool | None) -> nn.Module:
    torch.manual_seed(index)
    stage = Stage().double()
    for module in (*stage.blocks, stage):
        api.fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return stage


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(2, BATCH, DIM, generator=generator, dtype=torch.float64)
    return values[0], values[1]


def train(api: ModuleType, kind: type, world: DeviceMesh, reshard: bool | None) -> list[Any]:
    """Return losses, counts of collectives and full gradients of each step, then the full parameters."""
    line, shard = world["pipeline"], world["shard"]
    indices = stages_of(kind, line.get_local_rank(), line.size())
    last = line.size() * len(indices) - 1
    modules = [make_stage(api, index, shard, reshard) for index in indices]
    stages = [
        PipelineStage(module, index, last + 1, torch.device("cpu"), group=line.get_group())
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = kind(stages[0] if kind in SINGLE else stages, MICRO_BATCHES, loss_fn=loss_of)
    params = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        inputs, target = data(step, shard.get_local_rank())
        losses: list[torch.Tensor] = []
        with Collectives() as counted:
            schedule.step(
                *((inputs,) if 0 in indices else ()),
                **({"target": target, "losses": losses} if last in indices else {}),
            )
        assert any("allgather" in name for name in counted.counts)
        assert any("reduce_scatter" in name for name in counted.counts)
        seen += [[loss.detach() for loss in losses], counted.counts]
        seen.append([None if p.grad is None else p.grad.full_tensor() for p in params])
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [p.full_tensor().detach() for p in params]]


def both(kind: type, reshard: bool | None) -> list[bool]:
    world = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pipeline", "shard"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_COMM", "default")  # the c10d calls that torch's engine makes
        ours, theirs = (train(api, kind, world, reshard) for api in APIS)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **SAME)
    return [grad is not None for grads in ours[2:-1:3] for grad in grads]


@pytest.mark.parametrize(
    "kind", quick([ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, *ZERO_BUBBLE], [Schedule1F1B])
)
def test_a_pipeline_of_sharded_stages_matches_torch(kind):
    for has_grad in run_ranks(4, both, kind, False):
        assert all(has_grad)


@pytest.mark.parametrize("kind", quick([ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B], [Schedule1F1B]))
@pytest.mark.parametrize("reshard", [None, True])
def test_stages_may_be_resharded_after_each_forward(kind, reshard):
    for has_grad in run_ranks(4, both, kind, reshard):
        assert all(has_grad)
