"""The start and end of a pass: forwards under other names, several roots, exceptions midway."""

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.both_engines import (
    APIS,
    CLOSE,
    call_setter,
    double_net,
    one_batch,
    shard_net_with,
    sharded,
    train_all,
)
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import Block, Net
from tests.helpers.unsharded_copy import DIM, data
from workbench import engine
from workbench.engine.fsdp_state import roots_below
from workbench.events import Category

# ---- forwards under another name


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self._through(x))

    def encode(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        """Return the input of the last layer, plus that layer's bias."""
        return scale * self._through(x) + self.out.bias

    def _through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def shard_coder(api: ModuleType, model: Coder) -> None:
    shard_net_with(api, model)
    api.register_fsdp_forward_method(model, "encode")


def make_coder() -> nn.Module:
    torch.manual_seed(0)
    return Coder().double()


def encode_alone(model: Coder, step: int) -> None:
    x = data(step).double().requires_grad_()
    encoded = model.encode(x, scale=0.5) if step % 2 else model(x)
    assert not hasattr(model, "unshard") or not isinstance(model.out.bias, DTensor)
    encoded.square().mean().backward()
    assert x.grad is not None


def own_forward() -> None:
    plain = nn.Linear(DIM, DIM)
    for api in APIS:
        api.register_fsdp_forward_method(plain, "extra_repr")  # no-op for a plain module
        assert "extra_repr" not in vars(plain)
        with pytest.raises(ValueError, match="decode"):
            api.register_fsdp_forward_method(api.fully_shard(Coder()), "decode")
    train_all(make_coder, shard_coder, encode_alone, 4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_method_can_be_a_forward(world_size):
    run_ranks(world_size, own_forward)


# ---- several roots


class Stages(nn.Module):
    """Two roots, like the stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Block(DIM), Block(DIM)) for _ in range(2))


def make_stages() -> nn.Module:
    torch.manual_seed(0)
    return Stages().double()


def shard_stages(api: ModuleType, model: Stages) -> None:
    for stage in model.stages:
        for block in stage:
            api.fully_shard(block)
        api.fully_shard(stage)
    api.share_comm_ctx(list(model.stages))
    first, second = (stage._get_fsdp_state()._comm_ctx for stage in model.stages)
    assert first is second


def in_stages(model: Stages, step: int) -> None:
    """Run two micro-batches: the last stage's backward as early as possible, then the first stage's."""
    first, last = model.stages
    outs, ins = [], []
    for micro in range(2):
        outs.append(first(data(2 * step + micro).double()))
        ins.append(outs[-1].detach().requires_grad_())
        last(ins[-1]).square().mean().backward()
    for out, received in zip(outs, ins, strict=True):
        out.backward(received.grad)


def in_stages_told_which_is_last(model: Stages, step: int) -> None:
    """Like :func:`in_stages`, and announce each stage's last backward."""
    first, last = model.stages
    outs, ins = [], []
    for micro in range(2):
        call_setter(last, "set_is_last_backward", micro == 1)
        outs.append(first(data(2 * step + micro).double()))
        ins.append(outs[-1].detach().requires_grad_())
        last(ins[-1]).square().mean().backward()
    for micro, (out, received) in enumerate(zip(outs, ins, strict=True)):
        call_setter(first, "set_is_last_backward", micro == 1)
        out.backward(received.grad)


def in_one_graph(model: Stages, step: int) -> None:
    first, last = model.stages
    last(first(data(step).double())).square().mean().backward()
    assert not hasattr(first, "unshard") or sharded(model)


def stages(run: Callable[[nn.Module, int], None], apis: tuple[ModuleType, ...]) -> None:
    record = train_all(make_stages, shard_stages, run, apis=apis)
    assert {Category.UNSHARDED_PARAMS, Category.UNSHARDED_GRADS}.isdisjoint(record.alive)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("run", "apis"),
    # when the last stage ends, torch's engine forgets the first one's order: an IndexError, or a stale prefetch
    [(in_stages, (engine,)), (in_stages_told_which_is_last, (engine,)), (in_one_graph, APIS)],
)
def test_roots_that_share_a_context(world_size, run, apis):
    run_ranks(world_size, stages, run, apis)


# ---- exceptions midway


class ByTheUser(Exception):
    """Raised by a hook in the middle of a pass."""


def fail(*_: object) -> None:
    raise ByTheUser


def break_off(model: Net, where: str) -> None:
    mlp = model.blocks[1].mlp
    handle = mlp.register_forward_hook(fail) if where == "forward" else mlp.register_full_backward_pre_hook(fail)
    with pytest.raises(ByTheUser):
        one_batch(model, 9)
    handle.remove()
    for p in model.parameters():
        p.grad = None


def broken_off(where: str, with_lists: bool) -> dict[Category, int]:
    plain = double_net(num_blocks=3)
    with recording() as record:
        models = [shard_net_with(api, copy.deepcopy(plain)) for api in APIS]
        for step in range(4):
            for model in models:
                if with_lists:
                    call_setter(model.blocks[0], "set_modules_to_forward_prefetch", list(model.blocks[1:]))
                    call_setter(model.blocks[2], "set_modules_to_backward_prefetch", [model.blocks[1], model.blocks[0]])
                if step in (1, 3):
                    break_off(model, where)
                    model.reset_iter_state()
                    assert sharded(model)
            for model in (plain, *models):
                model.zero_grad()
                one_batch(model, step)
            average_grads(plain)
            for model in models:
                assert_same_shards(model, plain, **CLOSE)
    return record.alive


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("with_lists", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_step_after_a_reset_is_right(world_size, where, with_lists):
    for alive in run_ranks(world_size, broken_off, where, with_lists):
        assert set(alive) <= {Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.RESERVED}


def paths_of_roots() -> tuple[list[str], list[str], list[str]]:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential(*(nn.Linear(2, 2),) * 2)})
    plain = [path for path, _ in roots_below(model)]
    for module in (model["a"][0], model["b"][0], model["b"]):
        engine.fully_shard(module)
    return plain, [path for path, _ in roots_below(model)], [path for path, _ in roots_below(model["b"])]


def test_roots_are_the_outermost_calls_by_their_paths():
    assert run_ranks(1, paths_of_roots) == [([], ["a.0", "b"], [""])]
