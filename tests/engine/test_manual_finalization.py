"""Iterations that the caller ends: backwards leave reductions and resharding to ``finalize_backward``."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.both_engines import APIS, call_setter, double_net, one_batch, shard_net_with, sharded, train_all
from tests.helpers.expected_sizes import NET, UNITS
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.events import Kind

MICRO_BATCHES = 3


def manual(model: nn.Module, step: int, *, syncs: bool, keeps: bool = False, handle: bool = False) -> None:
    """Run micro-batches and finalize once; ``syncs``: each backward reduces what its hooks reach."""
    call_setter(model, "set_manual_backward_finalization", True)
    call_setter(model, "set_requires_gradient_sync", syncs)
    call_setter(model, "set_reshard_after_backward", not keeps)
    for micro in range(MICRO_BATCHES):
        one_batch(model, MICRO_BATCHES * step + micro)
        if hasattr(model, "finalize_backward"):
            assert sharded(model) is not (keeps or syncs)  # the root's gradients have no hook of its inputs
    call_setter(model, "set_requires_gradient_sync", True)
    call_setter(model, "set_reshard_after_backward", True)
    if hasattr(model, "finalize_backward"):
        ended = model.finalize_backward(async_op=handle)
        assert sharded(model)
        assert (ended is not None) is handle
        for _ in range(2 * handle):
            ended.wait()


def one_forward_one_backward(model: nn.Module, step: int) -> None:
    """Keep two micro-batches in flight; the forward of one is pending while another's backward ends."""
    call_setter(model, "set_manual_backward_finalization", True)
    call_setter(model, "set_requires_gradient_sync", False)
    losses = [loss_of(model, batch(dist.get_rank(), MICRO_BATCHES * step))]
    for micro in range(1, MICRO_BATCHES):
        losses.append(loss_of(model, batch(dist.get_rank(), MICRO_BATCHES * step + micro)))
        losses.pop(0).backward()
    losses.pop().backward()
    call_setter(model, "set_requires_gradient_sync", True)
    call_setter(model, "finalize_backward")


RUNS = {
    "at the end": (lambda m, s: manual(m, s, syncs=False), 1),
    "at the end, from kept parameters": (lambda m, s: manual(m, s, syncs=False, keeps=True, handle=True), 1),
    "in each backward": (lambda m, s: manual(m, s, syncs=True, handle=True), MICRO_BATCHES),
    "in pipeline order": (one_forward_one_backward, 1),
}


def trained(name: str) -> dict[str, int]:
    apis = APIS if torch.__version__ >= "2.15" else APIS[:1]
    return dict(train_all(double_net, shard_net_with, RUNS[name][0], 2, apis).count(Kind.REDUCE_SCATTER))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_the_plain_model_and_of_torch(world_size, name):
    counts = dict.fromkeys(UNITS, RUNS[name][1]) | {"root": 1}
    assert run_ranks(world_size, trained, name) == [counts if world_size > 1 else {}] * world_size


def refusals() -> list[str]:
    model = shard_net_with_root()
    inner = model.blocks[0]
    said = []

    def refuse(call, *args, **kwargs):
        with pytest.raises(RuntimeError) as refused:
            call(*args, **kwargs)
        said.append(str(refused.value))

    model.finalize_backward()
    model.finalize_backward(async_op=True).wait()  # neither has an effect before the first forward
    inner.set_manual_backward_finalization(True)
    refuse(one_batch, model, 0)
    inner.set_manual_backward_finalization(False)
    one_batch(model, 0)
    refuse(inner.finalize_backward)
    refuse(inner.set_manual_backward_finalization, True)
    refuse(model.finalize_backward)
    model.set_manual_backward_finalization(True)
    one_batch(model, 1)
    refuse(model.set_manual_backward_finalization, False)
    handle = model.finalize_backward(async_op=True)
    refuse(model.finalize_backward)
    refuse(one_batch, model, 2)
    model.reset_iter_state()
    refuse(handle.wait)
    model.set_manual_backward_finalization(False)
    one_batch(model, 3)
    return said


def shard_net_with_root() -> nn.Module:
    return shard_net_with(APIS[0], make_net(**NET))


REFUSALS = [
    "call set_manual_backward_finalization on the root, FSDPNet",
    "call finalize_backward on the root, not on a FSDPBlock inside it",
    "call set_manual_backward_finalization on the root, not on a FSDPBlock inside it",
    "call set_manual_backward_finalization(True) before forward",
    "a backward of this iteration has begun with True",
    "finalize_backward: first call wait() of the handle",
    "forward: first call wait() of the handle",
    "the iteration was reset since finalize_backward",
]


def test_a_mistake_is_named():
    for said in run_ranks(2, refusals):
        assert [words in text for words, text in zip(REFUSALS, said, strict=True)] == [True] * len(REFUSALS)


def failed() -> None:
    model = shard_net_with_root()
    model.set_manual_backward_finalization(True)
    loss = loss_of(model, batch(dist.get_rank(), 0))
    model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    loss = loss_of(model, batch(dist.get_rank(), 0))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with pytest.raises(RuntimeError, match="a backward still runs, or has raised"):
        model.finalize_backward()
    model.reset_iter_state()
    model.finalize_backward()


def test_a_backward_that_raised_is_reset_first():
    run_ranks(2, failed)
