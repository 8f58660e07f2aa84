"""What a rank holds of wrappers' flat parameters, which all ranks compare before they gather any of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import is_of_old_shards
from workbench.engine.agreement import Agreement, Holdings
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.wrapper_state import WrapperState, check_idle
from workbench.engine.fsdp_state import units_of
from workbench.engine.param_group import FSDPParamGroup


def sharded_flats(states: Iterable[WrapperState]) -> list[tuple[FSDPParamGroup, FlatParam]]:
    """Return the units of wrappers, sharded now and with what is registered, beside their flat parameters."""
    return [pair for state in states if (pair := sharded_flat(state)) is not None]


def sharded_flat(state: WrapperState) -> tuple[FSDPParamGroup, FlatParam] | None:
    """Return the unit of a wrapper and its flat parameter, as :func:`sharded_flats` does.

    None without parameters, and while the modules have whole parameters, which every rank holds.
    """
    unit, flat = state.unit, state.flat
    if unit is None or flat is None or state.is_summoned:
        return None
    unit.reshard()
    unit.adopt_registered()
    return unit, flat


def flats_holdings(
    flats: Sequence[tuple[FSDPParamGroup, FlatParam]],
    optimizers: Sequence[tuple[str, Mapping[Any, Mapping[str, Any]]]] = (),
    *,
    grads: bool = False,
    held: Container[nn.Parameter] | None = None,
) -> Holdings:
    """Describe what this rank has of flat parameters, before it is gathered.

    Args:
        flats: sharded now.
        optimizers: name and state of each, by parameter.
        grads: gradients are gathered as well.
        held: what the one optimizer holds, if ranks are to agree on that too.
    """
    found = Holdings()
    if optimizers:
        found.states["the optimizers"] = ", ".join(name for name, _ in optimizers)
    for _, flat in flats:
        for name, param, is_here in _owned(flat):
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


def _owned(flat: FlatParam) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield name and object of what an optimizer is given, and whether this rank has elements of it."""
    if not flat.use_orig_params:
        yield flat.fqn, flat.sharded_param, True
        return
    for part, piece in zip(flat.parts, flat.pieces_of(flat.slot), strict=True):
        yield part.fqn, part.held, bool(piece.numel()) or (flat.owns_wholes and part.tp_spec is None)


def _form(value: object) -> str:
    """Describe a value in words that are the same for pieces of different sizes; a number by what it is.

    If an optimizer has made more steps on some ranks than on others, only the value of ``step`` tells.
    """
    if isinstance(value, (bool, int, float)):
        return f"{type(value).__name__} {value!r}"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{f' number {value.item()!r}' if value.ndim == 0 else ''}"


def check_alike(states: Sequence[WrapperState], what: str, *, grads: bool = False) -> None:
    """Return once it is known that the ranks can gather what wrappers hold; collective.

    Args:
        states: of the wrappers.
        what: name of the operation, for messages.
        grads: gradients are gathered as well.

    Raises:
        RuntimeError: an iteration is under way.
        RanksDisagreeError: ranks hold different things, or an iteration is under way on some ranks only.
    """

    def holds() -> Holdings:
        check_idle(states, what)
        return flats_holdings(sharded_flats(states), grads=grads)

    Agreement(what, units_of(states)).check(holds)


def is_gathered(value: object) -> bool:
    """Return whether a value in a state dict is split over ranks, so that loading it gathers it."""
    return isinstance(value, DTensor) or is_of_old_shards(value)
