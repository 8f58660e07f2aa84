"""Gradients: their divisor, reductions in flight, hooks, and parameters that take no part."""

import copy
from collections import Counter
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.both_engines import APIS, CLOSE, double_net, one_batch, shard_net_with, train_all, units_below
from tests.helpers.expected_sizes import BLOCK_SHAPES, FP32, NET, ROOT_SHAPES, UNITS, slots
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import assert_same_shards, average_grads
from tests.helpers.recording_probe import ROOT, Recording, recording
from tests.helpers.small_models import Block, make_net
from tests.helpers.unsharded_copy import DIM, data
from workbench import engine
from workbench.events import Edge, Kind

# ---- the divisor


def divided(api: ModuleType, factor: float | None, only_root: bool, force_sum: bool) -> None:
    """Each unit's gradient is the sum over ranks divided by the unit's factor, by default the number of ranks."""
    plain = double_net()
    model = shard_net_with(api, copy.deepcopy(plain))
    targets = [model] if only_root else list(units_below(model))
    for unit in units_below(model):
        # for a custom factor torch's engine needs an operation that gloo does not have
        unit.set_force_sum_reduction_for_comms(force_sum or (api is not engine and factor is not None))
    if factor is not None:
        for unit in targets:
            unit.set_gradient_divide_factor(factor)
    for m in (plain, model):
        one_batch(m, 0)
    average_grads(plain)
    for name, p in plain.named_parameters():
        if factor is not None and not (only_root and name.startswith("blocks")):
            p.grad.mul_(dist.get_world_size() / factor)
    assert_same_shards(model, plain, **CLOSE)


@pytest.mark.parametrize(("api", "world_size"), [(engine, 1), (engine, 2), (fsdp, 2)])  # one-rank torch divides twice
@pytest.mark.parametrize(("factor", "only_root"), [(None, False), (1.0, False), (3.0, False), (3.0, True)])
def test_gradients_are_divided_by_the_units_factor(api, world_size, factor, only_root):
    run_ranks(world_size, divided, api, factor, only_root, False)


@pytest.mark.parametrize("factor", [None, 3.0])
def test_sums_alone_give_the_same_numbers(factor):
    run_ranks(2, divided, engine, factor, False, True)


def divided_over_both_axes(api: ModuleType, factor: float) -> None:
    plain = double_net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_net_with(api, copy.deepcopy(plain), mesh=mesh)
    for unit in units_below(model):
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(factor)
    for m in (plain, model):
        one_batch(m, 0)
    average_grads(plain)
    for p in plain.parameters():
        p.grad.mul_(dist.get_world_size() / factor)
    assert_same_shards(model, plain, **CLOSE)


@pytest.mark.parametrize("api", APIS)
def test_the_divisor_counts_both_axes_of_a_hybrid_mesh_once(api):
    run_ranks(4, divided_over_both_axes, api, 3.0)


# ---- reductions in flight


def most_in_flight(record: Recording) -> int:
    """Return the largest number of reductions in flight at once."""
    now = most = 0
    for kind, edge, *_ in record.rows:
        if kind is Kind.REDUCE_SCATTER:
            now += 1 if edge is Edge.BEGIN else -1
            most = max(most, now)
    assert now == 0
    return most


def with_buffers(num_buffers: int) -> tuple[int, list[torch.Tensor]]:
    def shard(api: ModuleType, model: nn.Module) -> None:
        shard_net_with(api, model).set_reduce_scatter_max_input_buffers(num_buffers)

    record = train_all(lambda: double_net(num_blocks=5), shard)
    model = shard_net_with(engine, make_net(num_blocks=5))
    model.set_reduce_scatter_max_input_buffers(num_buffers)
    one_batch(model, 0)
    return most_in_flight(record), [p.grad.to_local() for p in model.parameters()]


def test_more_input_buffers_change_no_bit_and_bound_the_reductions_in_flight():
    results = {n: run_ranks(2, with_buffers, n) for n in (1, 2, 3)}
    for num_buffers, of_ranks in results.items():
        for (in_flight, grads), (_, reference) in zip(of_ranks, results[1], strict=True):
            assert in_flight == num_buffers
            assert all(torch.equal(a, b) for a, b in zip(grads, reference, strict=True))


def refused_buffers(value: object, error: type[Exception]) -> str:
    model = shard_net_with(engine, make_net(**NET))
    with pytest.raises(error) as caught:
        model.set_reduce_scatter_max_input_buffers(value)
    one_batch(model, 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), ("2", TypeError), (2.0, TypeError), (0, ValueError), (-1, ValueError)]
)
def test_other_numbers_of_input_buffers_are_refused(value, error):
    (message,) = run_ranks(1, refused_buffers, value, error)
    assert "max_input_buffers" in message
    assert repr(value) in message


# ---- hooks after accumulation


def hooks_fired(api: ModuleType) -> list[Counter[str]]:
    """Count each parameter's hook calls in a micro-batch without sync, one with sync, and a second one with sync."""
    model = shard_net_with(api, make_net(**NET))
    fired: Counter[str] = Counter()

    def count(param: torch.Tensor) -> None:
        name = next(name for name, p in model.named_parameters() if p is param)
        assert param.grad is not None
        fired[name] += 1

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    counts = []
    for micro, sync in enumerate((False, True, True)):
        model.set_requires_gradient_sync(sync)
        one_batch(model, micro)
        counts.append(Counter(fired))
        fired.clear()
    return counts


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_post_accumulate_grad_hooks_fire_once_per_reduction(api, world_size):
    names = dict(make_net(**NET).named_parameters())
    once = Counter(dict.fromkeys(names, 1))
    assert run_ranks(world_size, hooks_fired, api) == [[Counter(), once, once]] * world_size


def optimizer_in_backward() -> None:
    plain = double_net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    models = [shard_net_with(api, copy.deepcopy(plain)) for api in APIS]
    optimizers = {}

    def step_and_drop(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for model in models:
        for param in model.parameters():
            optimizers[param] = torch.optim.AdamW([param], lr=1e-2)
            param.register_post_accumulate_grad_hook(step_and_drop)
    for step in range(3):
        for model in (plain, *models):
            one_batch(model, step)
        average_grads(plain)
        reference.step()
        reference.zero_grad()
        for model in models:
            assert_same_shards(model, plain, **CLOSE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_steps_within_backward(world_size):
    run_ranks(world_size, optimizer_in_backward)


# ---- one rank


def collectives_alone(hybrid: bool) -> tuple[set[Kind], dict[int, tuple[int, ...]]]:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")) if hybrid else None
    policy = engine.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with recording() as record:
        model = shard_net_with(engine, make_net(**NET), mesh=mesh, mp_policy=policy)
        for micro, sync in enumerate((False, True)):
            model.set_requires_gradient_sync(sync)
            one_batch(model, micro)
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return {kind for kind, *_ in record.rows}, record.groups


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_single_rank_does_not_communicate(hybrid):
    ((kinds, groups),) = run_ranks(1, collectives_alone, hybrid)
    assert not kinds & {Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.WAIT}
    assert groups == {}


# ---- freezing


def freeze_in_turn(model: nn.Module, step: int) -> None:
    """Freeze nothing, the embedding, a block, the embedding and the other block, then nothing again."""
    frozen = [(), ("embed",), ("blocks.0",), ("embed", "blocks.1"), ()][step]
    for name, module in model.named_children():
        if name != "blocks":
            module.requires_grad_(name not in frozen)
    for index, block in enumerate(model.blocks):
        block.requires_grad_(f"blocks.{index}" not in frozen)
    one_batch(model, step)


def reduced_bytes() -> list[dict[str, int]]:
    train_all(double_net, shard_net_with, freeze_in_turn, 5)
    model = shard_net_with(engine, make_net(**NET))
    reduced = []
    with recording() as record:
        for step in range(5):
            record.clear()
            freeze_in_turn(model, step)
            model.zero_grad()
            begun = [row for row in record.rows if row[:2] == (Kind.REDUCE_SCATTER, Edge.BEGIN)]
            reduced.append({record.name(unit): num_bytes for _, _, unit, num_bytes, *_ in begun})
    return reduced


def test_only_what_is_trained_is_reduced():
    block = 2 * slots(2, BLOCK_SHAPES) * FP32
    root = 2 * slots(2, ROOT_SHAPES) * FP32
    without_embedding = 2 * slots(2, ROOT_SHAPES[1:]) * FP32
    every = {ROOT: root} | dict.fromkeys(UNITS[1:], block)
    assert (
        run_ranks(2, reduced_bytes)
        == [
            [
                every,
                every | {ROOT: without_embedding},
                {ROOT: root, "blocks.1": block},
                {ROOT: without_embedding, "blocks.0": block},
                every,
            ]
        ]
        * 2
    )


# ---- outputs that are used partly


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(DIM), Block(DIM)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


class UsesSome(nn.Module):
    """Uses in turn both outputs of the second fork, the left one, the right one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TwoOutputs(), TwoOutputs()
        self.use = "both"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x)
        a, b = self.second(left + right)
        return {"both": a + b, "left": a, "right": b, "none": left * right}[self.use]


def some_used(model: nn.Module, step: int) -> None:
    model.use = ["both", "left", "right", "none", "both"][step]
    model(data(step).double()).square().mean().backward()


def partly_used(inner: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return UsesSome().double()

    def shard(api: ModuleType, model: nn.Module) -> None:
        for fork in (model.first, model.second):
            for module in (fork.left, fork.right) if inner else ():
                api.fully_shard(module)
            api.fully_shard(fork)
        api.fully_shard(model)

    train_all(make, shard, some_used, 5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("inner", [False, True])
def test_outputs_used_in_part(world_size, inner):
    run_ranks(world_size, partly_used, inner)
