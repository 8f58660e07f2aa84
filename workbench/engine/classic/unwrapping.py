"""Unwrapping: turn wrapped modules back into plain ones, or copy them; optimizers follow in both directions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from workbench.engine.agreement import Agreement, Holdings
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.full_params import whole_parts
from workbench.engine.classic.param_states import split_states, whole_states
from workbench.engine.classic.shard_inventory import flats_holdings, sharded_flats
from workbench.engine.classic.wrapper_state import WrapperState, wrapper_states_below
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.managed_params import forget_taken
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.unsharding import check_undoable, copied, optimizers_in, undo

Mapped = dict[nn.Parameter, tuple[nn.Parameter, ...]]
"""The plain parameters for each parameter of an optimizer: several for a flat parameter, one for a piece."""

States = dict[nn.Parameter, dict[str, Any]]


@torch.no_grad()
def unwrap(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> tuple[nn.Module, Mapped]:
    """Remove every wrapper from ``module``'s tree; collective: all ranks must call it.

    Modules get whole parameters with the current values and gradients: the same objects as before wrapping, tied ones
    tied; module hooks stay. Changes to a wrapper itself, such as its hooks, are lost. Optimizers continue with the
    plain parameters, in the same groups with the same options, and their state is gathered. Nothing changes until every
    rank has all values, so shards and the whole model are in memory at once. After an error or interrupt the model is
    either wrapped on every rank, as before, or plain on every rank.

    Args:
        module: the root of the tree.
        optimizers: optimizers to convert too.

    Returns:
        The module without wrappers (the wrapped module, if ``module`` is a wrapper), and the plain parameters for each
        parameter that an optimizer could hold.

    Raises:
        TypeError: ``optimizers`` contains something that is not an optimizer.
        ValueError: the tree has no wrapper, it also uses ``fully_shard``, it is only a part of what one root shards,
            or an optimizer has state that cannot be gathered.
        RuntimeError: gradients accumulated without sync are not reduced yet; an iteration is in progress.
        RanksDisagreeError: only some ranks hold a gradient or optimizer state, or have one of the errors above.
        CollectiveFailed: another rank was interrupted.
    """
    held = optimizers_in(optimizers, "unwrap")
    states, ranks = _agreed(module, "unwrap", held)
    flats = sharded_flats(states)
    originals = [[part.original for part in flat.parts] for _, flat in flats]
    with ranks.all_or_none():
        wholes = [whole_parts(unit, flat, flat.slot) for unit, flat in flats]
        grads = [_whole_grads(unit, flat) for unit, flat in flats]
        gathered = [_gathered(flats, originals, optimizer) for optimizer in held]
    mapping: Mapped = {}
    for (_, flat), params, values, grads_of_params in zip(flats, originals, wholes, grads, strict=True):
        trains = flat.trains
        mapping |= _plain_of(list(flat.owned), params)
        flat.give_back(values)
        for param, grad, trained in zip(params, grads_of_params, trains, strict=True):
            param.requires_grad_(trained)
            param.grad = grad
        forget_taken(params)
    for unit, _ in flats:
        unit.retire()
    for state in states:
        state.restore_buffers()
        undo(state)
        state.comm_ctx.release_buffers()
    for optimizer, of_parts in zip(held, gathered, strict=True):
        _commit(optimizer, mapping, of_parts)
    return _without_wrappers(module, {state.wrapper: state.wrapped for state in states}), mapping


@torch.no_grad()
def plain_copy(
    module: nn.Module, memo: dict[int, Any], optimizers: Sequence[torch.optim.Optimizer] = ()
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return a deep copy of ``module`` without wrappers, with values and gradients gathered; collective.

    Args:
        module: the root of a tree of wrappers; it does not change.
        memo: filled as by :func:`copy.deepcopy`: the copy of every object by the id of its original. A wrapper's copy
            is the copy of its module.
        optimizers: optimizers to copy too; the copies hold the plain parameters and gathered state.

    Returns:
        The copy of the module, and the copies of the optimizers.

    Raises:
        ValueError, RuntimeError: as :func:`unwrap` does.
    """
    states, _ = _agreed(module, "plain_copy", optimizers)
    flats = sharded_flats(states)
    mapping: Mapped = {}
    plains = [_plain_params(unit, flat) for unit, flat in flats]
    for (_, flat), params in zip(flats, plains, strict=True):
        mapping |= _plain_of(list(flat.owned), params)
        for part, param in zip(flat.parts, params, strict=True):
            memo |= {id(part.original): param, id(part.held): param}
        memo |= {id(form): form for form in flat.unreadable()}

    def make() -> nn.Module:
        for state in reversed(states):  # inner wrappers first, so that copies of outer modules contain their copies
            memo[id(state.wrapper)] = copy.deepcopy(state.wrapped, memo)
        return copy.deepcopy(module, memo)

    plain = copied(module, memo, make)
    for (_, flat), params in zip(flats, plains, strict=True):
        flat.places.replace(params, lambda m: cast("nn.Module", memo[id(m)]))
    return plain, [
        copied_optimizer(optimizer, mapping, _gathered(flats, plains, optimizer), memo) for optimizer in optimizers
    ]


@torch.no_grad()
def rewrap_optimizers(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Convert optimizers of a module to the parameters of its wrappers, and split their state.

    Args:
        module: the wrapped module.
        optimizers: optimizers made before wrapping, which hold the plain parameters.

    Raises:
        TypeError: ``optimizers`` contains something that is not an optimizer.
        ValueError: an optimizer has the parameters of one flat parameter in several groups, lacks some of them, or
            has different state for them; no optimizer is changed.
    """
    held = optimizers_in(optimizers, "rewrap_optimizers")
    flats = sharded_flats(wrapper_states_below(module))
    commits = [(optimizer, *_rewrapped(flats, optimizer)) for optimizer in held]
    for optimizer, mapping, states in commits:
        _commit(optimizer, mapping, states)


def _rewrapped(
    flats: Sequence[tuple[FSDPParamGroup, FlatParam]], optimizer: torch.optim.Optimizer
) -> tuple[Mapped, States]:
    mapping: Mapped = {}
    states: States = {}
    for _, flat in flats:
        if flat.use_orig_params:
            mapping |= {part.original: (part.held,) for part in flat.parts}
        else:
            check_in_one_group([(part.fqn, part.original) for part in flat.parts], optimizer)
            mapping |= {part.original: () for part in flat.parts} | {flat.parts[0].original: (flat.sharded_param,)}
        states |= split_states(flat, [optimizer.state.get(part.original) for part in flat.parts])
    return mapping, states


def check_in_one_group(named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
    """Check that one flat parameter can replace the given (name, parameter) pairs in an optimizer.

    Raises:
        ValueError: the optimizer holds them in several groups, or holds only some.
    """
    group_of = {param: i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    places: dict[int | None, str] = {}
    for fqn, param in named:
        places.setdefault(group_of.get(param), fqn)
    if len(places) > 1:
        groups = ", ".join(f"{fqn!r} in {'none' if i is None else f'group {i}'}" for i, fqn in places.items())
        raise ValueError(
            f"an optimizer holds the parameters of one flat parameter in several groups: {groups}; wrap with "
            "use_orig_params=True, or put them into one"
        )


def _agreed(
    module: nn.Module, what: str, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[list[WrapperState], Agreement]:
    """Check that all ranks hold the same, without changing anything; return the wrappers' states, parents first."""
    states = states_below(module)
    wrappers = wrapper_states_below(module)

    def holds() -> Holdings:
        check_undoable(module, states, what, WrapperState)
        held = [(type(o).__name__, o.state) for o in optimizers]
        return flats_holdings(sharded_flats(wrappers), module, held, grads=True)

    ranks = Agreement(what, units_of(states))
    ranks.check(holds)
    return wrappers, ranks


def _whole_grads(unit: FSDPParamGroup, flat: FlatParam) -> list[torch.Tensor | None]:
    """Return the whole gradient of each part, shaped like its plain parameter; None if no rank has one."""
    grads = {param: {"grad": param.grad} for param in flat.owned if param.grad is not None}
    return [None if found is None else found["grad"] for found in whole_states(unit, flat, grads)]


def _gathered(
    flats: Sequence[tuple[FSDPParamGroup, FlatParam]],
    plains: Sequence[Sequence[nn.Parameter]],
    optimizer: torch.optim.Optimizer,
) -> States:
    """Return the optimizer's gathered state by plain parameter; collective."""
    found: States = {}
    for (unit, flat), params in zip(flats, plains, strict=True):
        states = whole_states(unit, flat, optimizer.state)
        found |= {param: state for param, state in zip(params, states, strict=True) if state is not None}
    return found


def _plain_of(owned: Sequence[nn.Parameter], plain: Sequence[nn.Parameter]) -> Mapped:
    if len(owned) == 1:
        return {owned[0]: tuple(plain)}
    return {old: (new,) for old, new in zip(owned, plain, strict=True)}


def _plain_params(unit: FSDPParamGroup, flat: FlatParam) -> list[nn.Parameter]:
    wholes, grads = whole_parts(unit, flat, flat.slot), _whole_grads(unit, flat)
    params = []
    for part, whole, grad, trains in zip(flat.parts, wholes, grads, flat.trains, strict=True):
        params.append(nn.Parameter(part.as_global(whole.clone()), requires_grad=trains))
        params[-1].grad = grad
    return params


def _commit(optimizer: torch.optim.Optimizer, mapping: Mapped, states: States) -> None:
    """Replace the parameters in an optimizer's groups and state; the groups keep their options."""
    for group in optimizer.param_groups:
        group["params"] = [new for old in group["params"] for new in mapping.get(old, (old,))]
    for old in mapping:
        optimizer.state.pop(old, None)
    for param, state in states.items():
        optimizer.state[param] = state


def copied_optimizer(
    optimizer: torch.optim.Optimizer, mapping: Mapped, states: States, memo: dict[int, Any]
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with replaced parameters, without copying the state that is replaced.

    Args:
        optimizer: the optimizer.
        mapping: new parameters for each one that is replaced.
        states: state of the new parameters.
        memo: as of :func:`copy.deepcopy`.
    """
    kept: dict[int, Any] = {id(old): old for old in mapping} | {
        id(optimizer.state[p]): {} for p in mapping if p in optimizer.state
    }
    copied: torch.optim.Optimizer = copy.deepcopy(optimizer, {**memo, **kept})
    _commit(copied, mapping, states)
    return copied


def _without_wrappers(module: nn.Module, wrapped: Mapping[nn.Module, nn.Module]) -> nn.Module:
    top = wrapped.get(module, module)
    for parent in list(top.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in wrapped:
                parent._modules[name] = wrapped[child]
    return top
