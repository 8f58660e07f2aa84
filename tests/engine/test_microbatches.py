"""Several forwards and backwards per optimizer step: sync, keep, is_last_backward, pipeline order."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.both_engines import call_setter, double_net, one_batch, shard_net_with, sharded, train_all
from tests.helpers.expected_sizes import NET, UNITS
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from workbench import engine
from workbench.events import Category, Edge, Kind

MICRO_BATCHES = 3

# ---- micro-batches


def sync_last(model: nn.Module, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        call_setter(model, "set_requires_gradient_sync", micro == MICRO_BATCHES - 1)
        one_batch(model, MICRO_BATCHES * step + micro)


def say_which_is_last(model: nn.Module, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        call_setter(model, "set_is_last_backward", micro == MICRO_BATCHES - 1)
        one_batch(model, MICRO_BATCHES * step + micro)


def keep_until_the_last(model: nn.Module, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        call_setter(model, "set_reshard_after_backward", micro == MICRO_BATCHES - 1)
        one_batch(model, MICRO_BATCHES * step + micro)
        if micro < MICRO_BATCHES - 1 and hasattr(model, "unshard"):
            assert not sharded(model)


def all_three(model: nn.Module, step: int) -> None:
    for micro in range(MICRO_BATCHES):
        is_last = micro == MICRO_BATCHES - 1
        call_setter(model, "set_is_last_backward", is_last)
        call_setter(model, "set_requires_gradient_sync", is_last)
        call_setter(model, "set_reshard_after_backward", is_last)
        one_batch(model, MICRO_BATCHES * step + micro)


def one_forward_one_backward(model: nn.Module, step: int) -> None:
    """Pipeline order: two micro-batches are in flight at any time."""
    losses: list[torch.Tensor] = []
    for micro in range(2 * MICRO_BATCHES):
        losses.append(loss_of(model, batch(dist.get_rank(), 2 * MICRO_BATCHES * step + micro)))
        if len(losses) == 2:
            _backward(model, losses.pop(0), last=False)
    _backward(model, losses.pop(), last=True)


def _backward(model: nn.Module, loss: torch.Tensor, *, last: bool) -> None:
    call_setter(model, "set_is_last_backward", last)
    call_setter(model, "set_requires_gradient_sync", last)
    call_setter(model, "set_reshard_after_backward", last)
    loss.backward()


def one_forward_one_backward_reduced_each_time(model: nn.Module, step: int) -> None:
    first = loss_of(model, batch(dist.get_rank(), 3 * step))
    second = loss_of(model, batch(dist.get_rank(), 3 * step + 1))
    first.backward()
    third = loss_of(model, batch(dist.get_rank(), 3 * step + 2))
    second.backward()
    third.backward()


RUNS = {
    sync_last: 1,
    say_which_is_last: MICRO_BATCHES,
    keep_until_the_last: MICRO_BATCHES,
    all_three: 1,
    one_forward_one_backward: 1,
    one_forward_one_backward_reduced_each_time: 3,
}


def accumulated(run: Callable[[nn.Module, int], None], reshard: bool | None) -> dict[str, int]:
    def shard(api: ModuleType, model: nn.Module) -> None:
        shard_net_with(api, model, reshard_after_forward=reshard)

    record = train_all(double_net, shard, run, 2)
    assert record.count(Kind.REDUCE_SCATTER) == record.count(Kind.REDUCE_SCATTER, Edge.END)
    assert set(record.alive) <= {Category.SHARDED_PARAMS, Category.RESERVED}  # zero_grad has freed the gradients
    return dict(record.count(Kind.REDUCE_SCATTER))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("run", RUNS)
def test_micro_batches_add_up_to_the_unsharded_gradient(world_size, run):
    reductions = dict.fromkeys(UNITS, RUNS[run]) if world_size > 1 else {}
    assert run_ranks(world_size, accumulated, run, None) == [reductions] * world_size


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("run", [all_three, one_forward_one_backward])
def test_micro_batches_under_every_reshard_policy(run, reshard):
    assert run_ranks(2, accumulated, run, reshard) == [dict.fromkeys(UNITS, 1)] * 2


def gathers_of_a_kept_model() -> tuple[dict[str, int], bool]:
    with recording() as record:
        model = shard_net_with(engine, make_net(**NET), reshard_after_forward=False)
        all_three(model, 0)
    return dict(record.count(Kind.ALL_GATHER)), sharded(model)


def test_parameters_kept_over_all_micro_batches_are_gathered_once():
    assert run_ranks(2, gathers_of_a_kept_model) == [(dict.fromkeys(UNITS, 1), True)] * 2
