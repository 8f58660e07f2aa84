"""Parameters that some ranks use and others do not, such as experts."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import APIS
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import recording
from workbench.engine import RanksDisagreeError, collective_order, fully_shard
from workbench.events import Kind


class OneOfTwo(nn.Module):
    """Two experts of one size, of which a forward uses one; dim 5 is uneven on 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.out = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.out(self.experts[expert](x).relu())


def make() -> OneOfTwo:
    torch.manual_seed(0)
    return OneOfTwo()


def data() -> torch.Tensor:
    """Return the input [3, 5], different on every rank."""
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(dist.get_rank()))


def backward(model: nn.Module, expert: int) -> None:
    model(data(), expert).square().mean().backward()


def each_its_own() -> str:
    with pytest.raises(RanksDisagreeError) as refused:
        backward(fully_shard(make()), dist.get_rank())
    return str(refused.value)


def test_ranks_with_different_used_parameters_are_reported(monkeypatch):
    """Both ranks have equally many bytes: without the check, one expert would silently get the other's gradient."""
    monkeypatch.setattr(collective_order, "ANSWERS_S", 600.0)  # wait for a slow rank's part of the message
    for what in run_ranks(2, each_its_own):
        for rank, unused in enumerate(("experts.1.weight, experts.1.bias", "experts.0.weight, experts.0.bias")):
            assert f"rank {rank} reduce-scatter without {unused} (no gradient; " in what
        assert "set_reduce_scatter_unused_params(True) treats it as zero" in what


def average_with_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_grads(model)


def counted_as_zero(accumulate: bool) -> None:
    plain = make()
    both = [api.fully_shard(copy.deepcopy(plain)) for api in APIS]
    experts = [0, dist.get_rank()] if accumulate else [dist.get_rank()]
    for sharded in both:
        sharded.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        for model in (plain, *both):
            for number, expert in enumerate(experts, start=1):
                if model is not plain:
                    model.set_requires_gradient_sync(number == len(experts))
                backward(model, expert)
        average_with_zeros(plain)
        assert_same_shards(both[0], plain)
        for ours, *theirs in zip(*(sharded.parameters() for sharded in both), strict=True):
            assert all(torch.equal(ours.grad.to_local(), b.grad.to_local()) for b in theirs)
        for model in (plain, *both):
            model.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_an_absent_gradient_may_count_as_zero(world_size, accumulate):
    run_ranks(world_size, counted_as_zero, accumulate)


def accounted_for() -> None:
    model = fully_shard(make())
    model.set_reduce_scatter_unused_params(True)
    with recording() as record:
        backward(model, dist.get_rank())
        at_rest = record.alive
        model.zero_grad()
        record.clear()
        backward(model, dist.get_rank())
    assert record.alive == at_rest  # the zeros are freed
    assert record.payload(Kind.REDUCE_SCATTER) == 2 * 3 * 4 * (3 * 5 + 3)  # ranks, rows, bytes, weights and biases


def test_the_zeros_are_reduced_and_freed():
    run_ranks(2, accounted_for)


def unused_everywhere() -> None:
    plain = make()
    sharded = fully_shard(copy.deepcopy(plain))
    for expert in (0, 1, 0):  # the choice may change if it changes on every rank
        for model in (plain, sharded):
            backward(model, expert)
        for expected, ours in zip(plain.parameters(), sharded.parameters(), strict=True):
            assert (ours.grad is None) == (expected.grad is None)
            assert ours.grad is None or isinstance(ours.grad, DTensor)
        plain.zero_grad()
        sharded.zero_grad()


def test_parameters_that_no_rank_uses_have_no_gradient():
    run_ranks(2, unused_everywhere)
