"""When the ranks' state differs after a failed step, all raise the same error, and the next step works."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.pairwise import quick
from tests.helpers.parity import shard_net
from tests.helpers.small_models import adamw, batch, loss_of, make_net
from tests.helpers.wrapped_models import OURS, wrap_net
from workbench.engine import agreement, reshard_module, unshard_module, unsharding
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.classic import param_states, unwrap
from workbench.engine.classic import unwrapping as classic_undo
from workbench.engine.fsdp_state import states_below

F = OURS.FullyShardedDataParallel
ODD = 1
"""The rank that differs from the others."""


def another_mesh(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shard"))
    reshard_module(model, mesh=mesh, optimizers=[optimizer])


def with_grads(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with F.summon_full_params(model, with_grads=True):
        pass


FULLY_SHARD: dict[str, Callable[..., Any]] = {
    "unshard": lambda model, optimizer: unshard_module(model, [optimizer]),
    "reshard": another_mesh,
    "copy": lambda model, optimizer: unsharding.plain_copy(model, {}, [optimizer]),
}
CLASSIC: dict[str, Callable[..., Any]] = {
    "unwrap": lambda model, optimizer: unwrap(model, [optimizer]),
    "copy": lambda model, optimizer: classic_undo.plain_copy(model, {}, [optimizer]),
    "optimizer state": F.optim_state_dict,
    "clip": lambda model, optimizer: model.clip_grad_norm_(1.0),
    "clip by the largest": lambda model, optimizer: model.clip_grad_norm_(1.0, float("inf")),
    "summon": with_grads,
}
GATHERS_NO_GRADS, GATHERS_NO_STATE = {"optimizer state"}, {"clip", "clip by the largest", "summon"}


def no_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients on one rank only."""
    if dist.get_rank() == ODD:
        optimizer.zero_grad()


def no_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Undo the optimizer's first step on one rank only."""
    if dist.get_rank() == ODD:
        optimizer.state.clear()


def one_grad_less(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == ODD:
        next(p for p in model.parameters() if p.numel()).grad = None


def another_dtype(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if dist.get_rank() == ODD:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].double()


def mended(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Follow the advice of the error messages."""
    optimizer.zero_grad()
    optimizer.state.clear()


DIFFERENCES = {
    "no gradient": (no_grad, "the gradient of"),
    "one gradient less": (one_grad_less, "the gradient of"),
    "no state": (no_state, "ranks differ in the optimizer state of"),
    "another dtype": (another_dtype, "ranks differ in the optimizer state of"),
}


def another_count(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Apply a step on one rank only, as if the optimizer had raised on the others."""
    if dist.get_rank() == ODD:
        for state in optimizer.state.values():
            state["step"] = state["step"] + 1


def both(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    no_grad(model, optimizer)
    no_state(model, optimizer)


DIFFERENCES |= {
    "another number of steps": (another_count, "ranks differ in the optimizer state of"),
    "no gradient and no state": (both, "ranks differ in the optimizer state of"),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    loss_of(model, batch(dist.get_rank(), number)).backward()
    optimizer.step()


def made(api: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if api == "fully_shard":
        model = shard_net(make_net(num_blocks=1))
    else:
        model = wrap_net(OURS, make_net(num_blocks=1), use_orig_params=api == "originals")
    return model, adamw(model.parameters())


def refused_alike(api: str) -> dict[tuple[str, str], str]:
    """Return the message of each operation after each difference; check that nothing has changed."""
    found = {}
    for operation, call in (FULLY_SHARD if api == "fully_shard" else CLASSIC).items():
        for difference, (differ, _) in DIFFERENCES.items():
            if not_for(api, operation, difference):
                continue
            model, optimizer = made(api)
            step(model, optimizer)
            differ(model, optimizer)
            before = [(p, p.detach().clone()) for p in model.parameters()]
            with pytest.raises(agreement.RanksDisagreeError) as refused:
                call(model, optimizer)
            found[operation, difference] = str(refused.value)
            for param, (same, value) in zip(model.parameters(), before, strict=True):
                assert param is same
                assert torch.equal(local(param), local(value))
            mended(model, optimizer)
            step(model, optimizer)
            call(model, optimizer)
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def not_for(api: str, operation: str, difference: str) -> bool:
    if "gradient and" in difference:
        return operation in GATHERS_NO_GRADS or operation in GATHERS_NO_STATE
    if "gradient" in difference:
        return operation in GATHERS_NO_GRADS or (operation == "summon" and api == "flat")
    return operation in GATHERS_NO_STATE


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("api", ["fully_shard", "flat", "originals"])
def test_every_rank_refuses_with_the_same_sentence_and_continues_after_the_fix(api, world_size):
    results = run_ranks(world_size, refused_alike, api)
    assert all(result == results[0] for result in results)
    assert len(results[0]) >= 10
    for (_, difference), sentence in results[0].items():
        assert DIFFERENCES[difference][1] in sentence
        assert difference != "no gradient and no state" or "the gradient of" in sentence
        assert "optimizer.state.clear()" in sentence or "model.zero_grad()" in sentence


def another_set() -> list[str]:
    model, optimizer = made("fully_shard")
    held = [optimizer] if dist.get_rank() != ODD else []
    with pytest.raises(agreement.RanksDisagreeError) as refused:
        unshard_module(model, held)
    unshard_module(model, [optimizer])
    return [str(refused.value)]


def test_an_optimizer_on_one_rank_only():
    first, second = run_ranks(2, another_set)
    assert first == second
    assert "optimizer state" in first[0]


def one_cannot() -> str:
    model, _ = made("fully_shard")
    state = states_below(model)[0]
    if dist.get_rank() == ODD:
        state.training_state = type(state.training_state).FORWARD
    with pytest.raises(agreement.RanksDisagreeError) as refused:
        unshard_module(model)
    state.training_state = type(state.training_state).IDLE
    unshard_module(model)
    return str(refused.value)


def test_if_one_rank_cannot_no_rank_does():
    first, second = run_ranks(2, one_cannot)
    assert first == second
    assert "unshard_module is not possible on rank 1, so no rank did it: RuntimeError" in first


# ---- interrupted


class Interrupted(Exception):
    """Any exception that ends a collective."""


@contextmanager
def failing(module: Any, name: str, number: int) -> Iterator[list[int]]:
    """Make call ``number`` of a module's function raise; yield the number of calls so far."""
    calls, original = [0], getattr(module, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise Interrupted
        return original(*args, **kwargs)

    setattr(module, name, call)
    try:
        yield calls
    finally:
        setattr(module, name, original)


WAYS: dict[str, tuple[str, Callable[..., Any], Any, str]] = {
    "unshard": ("fully_shard", FULLY_SHARD["unshard"], unsharding, "_gathered"),
    "reshard": ("fully_shard", FULLY_SHARD["reshard"], unsharding, "_gathered"),
    "unwrap": ("originals", CLASSIC["unwrap"], param_states, "whole_parts"),
}


def interrupted_everywhere(way: str) -> int:
    """Interrupt an operation at each of its collectives; the model must train on as if nothing had happened."""
    api, call, module, name = WAYS[way]
    number = 0
    while True:
        number += 1
        model, optimizer = made(api)
        expected, expected_optimizer = made(api)
        for m, o in ((model, optimizer), (expected, expected_optimizer)):
            step(m, o)
        with failing(module, name, number) as calls:
            try:
                call(model, optimizer)
            except Interrupted:
                assert calls[0] == number
            else:
                return number - 1
        for m, o in ((model, optimizer), (expected, expected_optimizer)):
            step(m, o, 1)
        for value, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(local(value), local(wanted))


@pytest.mark.parametrize("way", quick(["reshard", "unwrap"], ["unwrap"]))  # reshard begins as unshard does
def test_interrupted_at_any_collective_the_model_is_as_it_was(way):
    numbers = run_ranks(2, interrupted_everywhere, way)
    assert numbers[0] == numbers[1] > 3


def interrupted_before_the_exchange(way: str) -> str:
    """Interrupt the odd rank after it has gathered everything, while the other one is ready and waits."""
    api, call, *_ = WAYS[way]
    model, optimizer = made(api)
    step(model, optimizer)
    before, original = list(model.parameters()), agreement._Vote.settle

    def settle(vote: Any) -> None:
        if dist.get_rank() == ODD:
            while vote._store.add("ready", 0) < dist.get_world_size() - 1:
                cancellation.sleep(0.001)
            vote.give_up(Interrupted("now"))
            raise Interrupted
        original(vote)

    agreement._Vote.settle = settle  # type: ignore[method-assign]
    with pytest.raises((agreement.CollectiveFailed, Interrupted)) as raised:
        call(model, optimizer)
    agreement._Vote.settle = original  # type: ignore[method-assign]
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    call(model, optimizer)
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
def test_no_rank_exchanges_anything_if_one_is_interrupted_before(way):
    others, _ = run_ranks(2, interrupted_before_the_exchange, way)
    assert "was aborted on every rank because rank 1 raised Interrupted: now" in others


def interrupted_too_late() -> bool:
    """Interrupt the odd rank after its vote, when the other rank has decided: the operation still finishes."""
    model, optimizer = made("fully_shard")
    step(model, optimizer)
    settle, sleep, interrupted = agreement._Vote.settle, cancellation.sleep, []

    def settle_later(vote: Any) -> None:
        def sleep_too_long(_: float) -> None:
            while not vote._store.check(["outcome"]):
                sleep(0.001)
            interrupted.append(True)
            raise Interrupted

        if dist.get_rank() == ODD:
            cancellation.sleep = sleep_too_long  # type: ignore[method-assign]
        else:
            while vote._store.add("ready", 0) < 1:
                sleep(0.001)
        settle(vote)
        cancellation.sleep = sleep  # type: ignore[method-assign]

    agreement._Vote.settle = settle_later  # type: ignore[method-assign]
    unshard_module(model, [optimizer])
    agreement._Vote.settle = settle  # type: ignore[method-assign]
    assert not states_below(model)
    return bool(interrupted)


def test_an_interrupt_after_the_agreement_has_no_effect():
    assert run_ranks(2, interrupted_too_late) == [False, True]


def of_two_roots(api: str) -> list[str]:
    """Two independently sharded parts have the same parameter names; they differ in the first part."""
    models = [made(api) for _ in range(2)]
    around = nn.ModuleList(model for model, _ in models)
    for model, _ in models:
        loss_of(model, batch(dist.get_rank(), 0)).backward()
    if dist.get_rank() == ODD:
        models[0][0].zero_grad()
    found = []
    undo = {"fully_shard": unshard_module}.get(api, unwrap)
    for refuse in (undo, *([] if api != "originals" else [with_grads_of])):
        with pytest.raises(agreement.RanksDisagreeError, match="ranks differ in the gradient of '0") as refused:
            refuse(around)
        found.append(str(refused.value))
    around.zero_grad()
    undo(around)
    return found


def with_grads_of(around: nn.Module) -> None:
    with F.summon_full_params(around, with_grads=True):
        pass


@pytest.mark.parametrize("api", ["fully_shard", "flat", "originals"])
def test_parameters_of_several_roots_are_distinguished(api):
    first, second = run_ranks(2, of_two_roots, api)
    assert first == second
