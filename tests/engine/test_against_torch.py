"""The engine next to torch's fully_shard: same model, same data, same numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from workbench.engine import fully_shard

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def both(reshard: bool | None, *, tied: bool) -> tuple[nn.Module, nn.Module]:
    model = make_net(tied=tied)
    pair = (model, copy.deepcopy(model))
    for each, shard in zip(pair, (fully_shard, torch_fully_shard), strict=True):
        for block in each.blocks:
            shard(block, reshard_after_forward=reshard)
        shard(each, reshard_after_forward=reshard)
    return pair


def assert_same_shard(ours: DTensor, theirs: DTensor) -> None:
    assert (ours.placements, ours.shape, ours.stride()) == (theirs.placements, theirs.shape, theirs.stride())
    torch.testing.assert_close(ours.to_local(), theirs.to_local(), **TOLERANCE)


def five_steps(reshard: bool | None, tied: bool) -> None:
    ours, theirs = both(reshard, tied=tied)
    optimizers = [adamw(m.parameters()) for m in (ours, theirs)]
    for step in range(5):
        tokens = batch(dist.get_rank(), step)
        losses = [loss_of(m, tokens) for m in (ours, theirs)]
        torch.testing.assert_close(*losses, **TOLERANCE)
        for loss in losses:
            loss.backward()
        for (name, a), (their_name, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            assert name == their_name
            assert_same_shard(a.grad, b.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [m.state_dict() for m in (ours, theirs)]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert_same_shard(value, states[1][name])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("reshard", "tied"), [(None, True), (True, False), (False, False)])
def test_five_steps_match_torch(world_size, reshard, tied):
    run_ranks(world_size, five_steps, reshard, tied)
