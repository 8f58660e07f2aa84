"""Inventory of a rank's shards of wrappers' flat parameters; ranks compare it before they gather anything."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import is_of_old_shards
from workbench.engine.agreement import Agreement, Holdings, names_from
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.wrapper_state import WrapperState, check_idle, flat_of
from workbench.engine.fsdp_state import units_of
from workbench.engine.param import ParamModuleInfo
from workbench.engine.param_group import FSDPParamGroup


def sharded_flats(states: Iterable[WrapperState]) -> list[tuple[FSDPParamGroup, FlatParam]]:
    """Return (unit, flat parameter) of each wrapper, after resharding the unit and adopting registered parameters."""
    return [pair for state in states if (pair := sharded_flat(state)) is not None]


def sharded_flat(state: WrapperState) -> tuple[FSDPParamGroup, FlatParam] | None:
    """Return a wrapper's (unit, flat parameter), as :func:`sharded_flats` does.

    None if it has no parameters, and within ``summon_full_params``, when every rank holds whole parameters.
    """
    unit, flat = state.unit, state.flat
    if unit is None or flat is None or state.is_summoned:
        return None
    unit.reshard()
    unit.adopt_registered()
    return unit, flat


def flats_holdings(
    flats: Sequence[tuple[FSDPParamGroup, FlatParam]],
    module: nn.Module,
    optimizers: Sequence[tuple[str, Mapping[Any, Mapping[str, Any]]]] = (),
    *,
    grads: bool = False,
    held: Container[nn.Parameter] | None = None,
) -> Holdings:
    """Return a description of this rank's shards of flat parameters, made before they are gathered.

    Args:
        flats: (unit, flat parameter) pairs, sharded.
        module: contains all of them; names are paths from it.
        optimizers: name and state by parameter of each optimizer.
        grads: whether gradients are gathered as well.
        held: the parameters of the only optimizer, if ranks must agree on them too.
    """
    found, name_of = Holdings(), names_from(module)
    if optimizers:
        found.states["the optimizers"] = ", ".join(name for name, _ in optimizers)
    for _, flat in flats:
        for name, param, is_here in _owned(flat, name_of):
            found.params[name] = _form(param)
            if grads:
                had = "none" if param.grad is None else _form(param.grad)
                found.grads[name] = had if is_here else None
            if held is not None:
                found.held[name] = (optimizers[0][0] if param in held else "none") if is_here else None
            for number, (owner, states) in enumerate(optimizers):
                state = states.get(param) or {}
                had = ", ".join(f"{key} {_form(state[key])}" for key in sorted(state, key=str)) or "none"
                found.states[f"{owner} {number}: {name}"] = had if is_here else None
    return found


def check_same_grads(module: nn.Module, states: Sequence[WrapperState], what: str) -> None:
    """Check that all ranks hold the same gradients of wrappers; collective, one small all-reduce.

    Ranks compare descriptions only if they differ. Arguments and errors are those of :func:`check_alike`.
    """
    flats = [(state, unit, flat_of(unit)) for state in states for unit in units_of([state])]

    def codes() -> list[int | None]:
        check_idle(states, what)
        for state, unit, flat in flats:
            if not state.is_summoned:
                unit.reshard()
                if not flat.is_on_modules:
                    unit.adopt_registered()
        return [code for state, _, flat in flats for code in _grad_codes(state, flat)]

    if not Agreement(what, units_of(states)).is_same(codes, sum(len(flat.owned) for *_, flat in flats)):
        check_alike(module, states, what, grads=True)


def _grad_codes(state: WrapperState, flat: FlatParam) -> Iterator[int | None]:
    """Yield a code for the state of each gradient on this rank; :func:`flats_holdings` describes the same state."""
    for param, is_here in zip(flat.owned, flat.is_here, strict=True):
        if state.is_summoned or not is_here:
            yield None
        else:
            yield 0 if param.grad is None else _number_of(param.dtype, param.grad.dtype)


@cache
def _number_of(*dtypes: torch.dtype) -> int:
    return 1 + crc32(" ".join(map(str, dtypes)).encode())


def _owned(flat: FlatParam, name_of: Callable[[ParamModuleInfo, str], str]) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield (name, parameter, whether this rank has elements of it) for each parameter that an optimizer gets."""
    if not flat.use_orig_params:
        yield name_of(flat.info, flat.fqn), flat.sharded_param, True
        return
    for part, is_here in zip(flat.parts, flat.is_here, strict=True):
        yield name_of(part.info, part.fqn), part.held, is_here


def _form(value: object) -> str:
    """Describe a value independently of its size; a number by its value.

    Only the value of ``step`` shows that an optimizer has made more steps on some ranks than on others.
    """
    if isinstance(value, (bool, int, float)):
        return f"{type(value).__name__} {value!r}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{f' number {value.item()!r}' if value.ndim == 0 else ''}"


def check_alike(module: nn.Module, states: Sequence[WrapperState], what: str, *, grads: bool = False) -> None:
    """Check that all ranks can gather the shards of wrappers; collective.

    Args:
        module: contains the wrappers.
        states: states of the wrappers.
        what: name of the operation, for messages.
        grads: whether gradients are gathered as well.

    Raises:
        RuntimeError: an iteration is in progress.
        RanksDisagreeError: ranks hold different things, or an iteration is in progress on some ranks only.
    """

    def holds() -> Holdings:
        check_idle(states, what)
        return flats_holdings(sharded_flats(states), module, grads=grads)

    Agreement(what, units_of(states)).check(holds)


def is_gathered(value: object) -> bool:
    """Return whether a state dict's value is sharded over ranks, so that loading it is collective."""
    return isinstance(value, DTensor) or is_of_old_shards(value)
