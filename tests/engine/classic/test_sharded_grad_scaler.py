"""Loss scaling with sharded gradients: all ranks skip a step or none does, as with torch's scaler."""

import inspect
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Theirs

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from workbench.engine.classic import ShardedGradScaler

OPTIONS = {"device": "cpu", "init_scale": 1024.0, "growth_interval": 2}


def train(kind, overflows, **options):
    """Train a float16 shard for 7 steps; ``overflows`` maps steps to the rank whose gradient overflows.

    Returns:
        Scale and shard after each step.
    """
    shard = nn.Parameter(torch.full((4,), 1.0 + dist.get_rank(), dtype=torch.float16))
    optimizer = torch.optim.SGD([shard], lr=0.5)
    scaler = kind(**OPTIONS | options)
    history = []
    for step in range(7):
        loss = (shard * (0.25 + step)).sum()
        scaler.scale(loss).backward()
        if overflows.get(step) == dist.get_rank():
            shard.grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((scaler.get_scale(), shard.tolist()))
    return history


def test_an_overflow_on_one_rank_makes_all_skip():
    args = ({1: 0, 4: 1, 5: 1},)
    ours, like = (run_ranks(2, train, kind, *args) for kind in (ShardedGradScaler, Theirs))
    assert ours == like
    for history in ours:
        shards = [shard for _, shard in history]
        assert [after == before for before, after in itertools.pairwise(shards)] == [
            True,
            False,
            False,
            True,
            True,
            False,
        ]
    scales = [[scale for scale, _ in history] for history in ours]
    assert scales == [[1024.0, 512.0, 512.0, 1024.0, 512.0, 256.0, 256.0]] * 2


def step_of_a_rank_without_gradients(fused):
    """Rank 1 has no elements of the unit, as happens with small parameters; rank 0 finds an inf."""
    params = [nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=1.0, fused=fused)
    scaler = ShardedGradScaler(**OPTIONS)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0:
        params[0].grad = torch.tensor([1.0, torch.nan])
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), params[0].tolist()


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_a_rank_without_gradients_learns_of_the_overflow(fused):
    assert run_ranks(2, step_of_a_rank_without_gradients, fused) == [(512.0, [1.0, 1.0])] * 2


def step_of_a_fused_optimizer():
    """A fused optimizer gets the flag and skips the step itself."""
    shard = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([shard], lr=1.0, fused=True)
    scaler = ShardedGradScaler(**OPTIONS)
    scaler.scale(shard.sum()).backward()
    if dist.get_rank() == 1:
        shard.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), shard.tolist()


def test_a_fused_optimizer_skips_on_all_ranks():
    assert run_ranks(2, step_of_a_fused_optimizer) == [(512.0, [1.0, 1.0])] * 2


def step_with_a_part_of_the_world():
    groups = [dist.new_group([rank]) for rank in range(2)]
    return train(ShardedGradScaler, {0: 0}, process_group=groups[dist.get_rank()])[0]


def test_only_the_ranks_of_its_group_are_queried():
    assert [scale for scale, _ in run_ranks(2, step_with_a_part_of_the_world)] == [512.0, 1024.0]


@on_one_rank
def test_unscaled_gradients_are_those_without_a_scale():
    shard = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float16))
    scaler = ShardedGradScaler(**OPTIONS)
    optimizer = torch.optim.SGD([shard], lr=1.0)
    scaler.scale((shard * 0.5).sum()).backward()
    assert shard.grad.tolist() == [512.0, 512.0]
    scaler.unscale_(optimizer)
    assert shard.grad.tolist() == [0.5, 0.5]
    assert shard.grad.dtype == torch.float16
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scaled_outputs_keep_their_dtype_and_container(dtype):
    ours, like = ShardedGradScaler(**OPTIONS), Theirs(**OPTIONS)
    one, more = torch.tensor(1.5, dtype=dtype), torch.ones(2, dtype=dtype)
    for outputs in (one, [one, more], (one, [more]), (x for x in (one,))):
        again = outputs if not inspect.isgenerator(outputs) else (x for x in (one,))
        mine, theirs = ours.scale(outputs), like.scale(again)
        assert type(mine) is type(theirs)
        torch.testing.assert_close(
            list(mine) if isinstance(mine, map) else mine, list(theirs) if isinstance(theirs, map) else theirs
        )


def test_an_invalid_tensor_is_refused():
    message = "^ShardedGradScaler.scale takes a tensor or an iterable of tensors, got "
    for outputs in (1.0, "loss", [1.0]):
        with pytest.raises(TypeError, match=message):
            ShardedGradScaler(**OPTIONS).scale(outputs)


def test_a_missing_process_group_is_reported():
    scaler = ShardedGradScaler(**OPTIONS)
    shard = nn.Parameter(torch.ones(1))
    scaler.scale(shard.sum()).backward()
    with pytest.raises(RuntimeError, match=r"^ShardedGradScaler needs a process group: call"):
        scaler.unscale_(torch.optim.SGD([shard]))


def test_switched_off_it_does_nothing():
    scaler = ShardedGradScaler(device="cpu", enabled=False)
    shard = nn.Parameter(torch.ones(1))
    loss = shard.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.step(torch.optim.SGD([shard], lr=1.0))
    scaler.update()
    assert shard.tolist() == [0.0]


def test_arguments_and_defaults_are_torchs():
    ours, theirs = (
        {name: p.default for name, p in inspect.signature(kind.__init__).parameters.items()}
        for kind in (ShardedGradScaler, Theirs)
    )
    assert list(ours.items()) == list(theirs.items())
