"""Optimizers that were made of plain parameters go on with what wrappers made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.engine.classic.flat_param import FlatParam, Part

State = dict[str, Any]  # of one parameter


@torch.no_grad()
def carry(optimizers: Iterable[torch.optim.Optimizer], flats: Sequence[FlatParam]) -> None:
    """Let optimizers go on with the parameters of wrappers, in place; nothing is communicated.

    With ``use_orig_params`` they keep the parameters that they have, and of their state this rank's pieces. Else each
    flat parameter takes the place of its parts, its state that of theirs, end to end; where a part has none it is zero.

    Args:
        optimizers: were made before the wrappers.
        flats: of all the wrappers, which hold whole parameters' originals.

    Raises:
        ValueError: a flat parameter's parts are not all, or not all in one group, in an optimizer; or its state has a
            value for each part, such as a count of steps, and they differ. No optimizer is changed then.
    """
    commits = [_staged(optimizer, flats) for optimizer in optimizers]
    for commit in commits:
        commit()


def _staged(optimizer: torch.optim.Optimizer, flats: Sequence[FlatParam]) -> Callable[[], None]:
    """Do all of :func:`carry` that can fail."""
    place = {param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
    new: dict[nn.Parameter, nn.Parameter | None] = {}  # None: another one of its flat parameter stands for it
    states: dict[nn.Parameter, State] = {}
    for flat in flats:
        held = [part.original for part in flat.parts if part.original in place]
        if not held:
            continue
        if flat.use_orig_params:
            states |= _pieces(optimizer, flat)
            continue
        _check_one(optimizer, flat, place)
        new |= {held[0]: flat.sharded_param, **dict.fromkeys(held[1:])}
        together = _together(optimizer, flat)
        if together:
            states[flat.sharded_param] = together
    old = [part.original for flat in flats for part in flat.parts]
    return partial(_commit, optimizer, new, states, old)


def _commit(
    optimizer: torch.optim.Optimizer,
    new: Mapping[nn.Parameter, nn.Parameter | None],
    states: Mapping[nn.Parameter, State],
    old: Iterable[nn.Parameter],
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [param for param in (new.get(p, p) for p in group["params"]) if param is not None]
    for param in old:
        optimizer.state.pop(param, None)
    for param, state in states.items():
        optimizer.state[param] = state


def _check_one(optimizer: torch.optim.Optimizer, flat: FlatParam, place: Mapping[nn.Parameter, int]) -> None:
    """Check that one group of an optimizer has all parts of a flat parameter."""
    first = next(part for part in flat.parts if part.original in place)
    for part in flat.parts:
        if place.get(part.original) != place[first.original]:
            where = "in another group" if part.original in place else "not in it"
            raise ValueError(
                f"parameters {first.fqn!r} and {part.fqn!r} are of one flat parameter, but of the "
                f"{type(optimizer).__name__} that has the first the second is {where}: give use_orig_params=True "
                "(--orig-params), or make the optimizer after wrapping"
            )


def _is_of_elements(part: Part, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == part.shape and value.ndim > 0


def _pieces(optimizer: torch.optim.Optimizer, flat: FlatParam) -> dict[nn.Parameter, State]:
    """Return the states of the originals that have a piece here, elements cut to it."""
    found: dict[nn.Parameter, State] = {}
    for part, piece in zip(flat.parts, flat.pieces_of(flat.slot), strict=True):
        if part.original in optimizer.state and len(piece):
            found[part.original] = {
                key: flat.piece_of_full(part, value).to(piece.device, copy=True)
                if _is_of_elements(part, value)
                else value
                for key, value in optimizer.state[part.original].items()
            }
    return found


def _together(optimizer: torch.optim.Optimizer, flat: FlatParam) -> State:
    """Return what the states of the parts are as the state of the flat parameter; empty: there are none."""
    have = [part for part in flat.parts if optimizer.state.get(part.original)]
    found: State = {}
    for part in have:
        for key, value in optimizer.state[part.original].items():
            if _is_of_elements(part, value):
                slot = found.setdefault(key, torch.zeros_like(flat.slot, dtype=value.dtype))
                flat.pieces_of(slot)[flat.parts.index(part)].copy_(flat.piece_of_full(part, value))
            elif not _is_equal(found.setdefault(key, value), value):
                raise ValueError(
                    f"parameters {have[0].fqn!r} and {part.fqn!r} are of one flat parameter, but their {key!r} in "
                    f"{type(optimizer).__name__} differs: {found[key]} and {value}; give use_orig_params=True "
                    "(--orig-params)"
                )
    return found


def _is_equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)
