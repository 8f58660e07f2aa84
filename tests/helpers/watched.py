"""Training that the workbench's engine does not run, watched and recorded on ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.helpers.forked_ranks import run_ranks
from workbench.engine import probe
from workbench.models.engines import Watch
from workbench.runtime.loop_steps import LoopSteps
from workbench.runtime.recorder import Recorder
from workbench.trace import Trace, TraceBuilder, check
from workbench.trace.schema import Header, RankInfo


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Training on ranks: what each returned, and the trace."""

    results: list[Any]
    trace: Trace


def recorded(fn: Callable[..., Any], *args: Any) -> tuple[Any, Header, Any]:
    """Run ``fn`` on this rank while it is watched."""
    recorder = Recorder(Header(world_size=dist.get_world_size()))
    info = RankInfo(rank=dist.get_rank(), host="localhost", device="cpu", pid=1)
    recorder.set_run(info, mesh_shape=(dist.get_world_size(),), mesh_axes=("rank",))
    before, probe.active = probe.active, recorder
    watch = Watch().begin()
    hooks = LoopSteps(recorder).install()
    try:
        result = fn(*args)
    finally:
        watch.end()
        for hook in hooks:
            hook.remove()
        probe.active = before
    return result, recorder.header, recorder.drain()


def watch(world_size: int, fn: Callable[..., Any], *args: Any) -> Watched:
    """Run ``fn`` on ranks while they are watched, and check the trace's rules."""
    every = run_ranks(world_size, recorded, fn, *args)
    builder = TraceBuilder()
    for rank, (_, header, drained) in enumerate(every):
        builder.update_header(header, rank=rank)
        builder.append(rank, drained.rows, lost=drained.lost, key_frame=drained.key_frame)
    trace = builder.snapshot()
    assert check(trace) == []
    return Watched(results=[result for result, *_ in every], trace=trace)


def make_blocks(num_blocks: int = 4, dim: int = 16) -> nn.Sequential:
    """Return blocks and a head of 3 outputs, with the same weights on every rank; its dimensions do not divide."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)) for _ in range(num_blocks))
    return nn.Sequential(*blocks, nn.Linear(dim, 3))


def shard_by_torch(model: nn.Sequential, shape: Sequence[int] = (), **options: Any) -> nn.Sequential:
    """Shard each block, then the rest, with torch's ``fully_shard`` on a mesh of ``shape``; empty: all ranks."""
    names = ("replicate", "shard")[-max(len(shape), 1) :]
    mesh = init_device_mesh("cpu", tuple(shape) or (dist.get_world_size(),), mesh_dim_names=names)
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def train(model: nn.Module, num_steps: int = 2, num_backwards: int = 1) -> list[float]:
    """Train with AdamW on this rank's own data; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        for _ in range(num_backwards):
            loss = model(torch.randn(8, 16, generator=data)).square().mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses
