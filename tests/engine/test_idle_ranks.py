"""Ranks that train a model while others are idle."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.small_models import batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, adam, wrap_net
from workbench.engine import process_groups


def gather_with_modules(model: torch.nn.Module) -> None:
    model.unshard()
    model.reshard()


def gather_with_optimizer(model: torch.nn.Module) -> None:
    optimizer = adam(model.parameters())
    loss_of(model, batch(dist.get_rank(), 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    OURS.FullyShardedDataParallel.full_optim_state_dict(model, optimizer)


def make_modules(mesh: DeviceMesh) -> torch.nn.Module:
    return shard_net(make_net(num_blocks=1), mesh=mesh)


def make_wrapped(mesh: DeviceMesh) -> torch.nn.Module:
    return wrap_net(OURS, make_net(num_blocks=1), device_mesh=mesh)


def trained_beside_idle(
    make: Callable[[DeviceMesh], torch.nn.Module], gather: Callable[[torch.nn.Module], None]
) -> list[float]:
    """All ranks gather once; then ranks 0 and 1 train another model while rank 2 waits; then all train the first."""
    everyone = make(DeviceMesh("cpu", [0, 1, 2]))
    gather(everyone)
    pair = DeviceMesh("cpu", [0, 1])
    losses = []
    if dist.get_rank() < 2:
        model = make(pair)
        for step in range(3):
            loss = loss_of(model, batch(dist.get_rank(), step))
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(loss_of(model, batch(dist.get_rank(), 3)).item())
    dist.barrier()
    for step in range(2):
        loss_of(everyone, batch(dist.get_rank(), step)).backward()
    assert process_groups.num_unfinished() == 0
    return losses


@pytest.mark.parametrize(
    ("make", "gather"), [(make_modules, gather_with_modules), (make_wrapped, gather_with_optimizer)]
)
def test_an_iteration_does_not_involve_idle_ranks(make, gather):
    first, second, idle = run_ranks(3, trained_beside_idle, make, gather)
    assert len(first) == len(second) == 4
    assert idle == []
