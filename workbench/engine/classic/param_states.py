"""Optimizer state of a flat parameter, converted to whole state per parameter and back.

*State* maps keys to tensors or numbers. Anything laid out like the flat parameter can be converted, its gradient as
well; *pieces* of state correspond to the pieces of parameters in ``flat_param.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.backends import is_of_kind
from workbench.engine.classic.flat_param import FlatParam, FlatSlice
from workbench.engine.classic.full_params import whole_parts
from workbench.engine.param_group import FSDPParamGroup

State = Mapping[str, Any]
"""State of one parameter, by the optimizer's keys."""


@dataclass(frozen=True)
class SplitState:
    """Description of state that is split like its parameter."""

    dtype: torch.dtype


@dataclass(frozen=True)
class ReplicatedState:
    """State that is the same for all of a parameter; tensors are kept on the host.

    Attributes:
        value: the number, tensor or other object.
        computes: whether the tensor was on the compute device.
    """

    value: Any
    computes: bool = False

    def on(self, device: torch.device) -> Any:  # noqa: ANN401 - optimizer state holds anything
        """Return a copy of the value, on ``device`` if it was on the device."""
        value = copy.deepcopy(self.value)
        return value.to(device) if self.computes else value


@dataclass(frozen=True)
class UnknownState:
    """State that is neither: it has ``shape`` on a rank that holds ``numel`` elements of the parameter."""

    shape: tuple[int, ...]
    numel: int


Known = Mapping[str, SplitState | ReplicatedState | UnknownState]


Keep = Callable[[FlatSlice, torch.Tensor], Any]


def _cloned(part: FlatSlice, whole: torch.Tensor) -> torch.Tensor:
    return part.as_global(whole.clone())


@torch.no_grad()
def whole_states(
    unit: FSDPParamGroup,
    flat: FlatParam,
    states: Mapping[Any, State],
    keep: Keep = _cloned,
) -> list[dict[str, Any] | None]:
    """Return the gathered state of each part, None if no rank has any; collective, one key at a time.

    The ranks exchange their keys first; a part that only another rank holds gets that rank's numbers.

    Args:
        unit: the unit, sharded.
        flat: its flat parameter.
        states: state of the parameters that ``flat`` owns; those without state may be missing.
        keep: converts a part's gathered tensor, of :attr:`FlatSlice.shape` and possibly a view, to the result; by
            default copies it, to a DTensor if tensor parallelism has split the part.

    Raises:
        ValueError: a tensor of a split parameter is neither split like it nor a single number.
    """
    if flat.owns_wholes and not flat.is_tensor_parallel:
        return [_copied(part, states.get(part.held), keep, unit.device) for part in flat.parts]
    pieces = _states_of_pieces(flat, states)
    known = _agreed(unit, flat, [_known(flat, part, had, unit) for part, had in zip(flat.parts, pieces, strict=True)])
    found = [None if keys is None else {key: _same(v, unit) for key, v in keys.items()} for keys in known]
    splits = {(key, v.dtype) for keys in known if keys for key, v in keys.items() if isinstance(v, SplitState)}
    for key, dtype in sorted(splits, key=str):
        slot = torch.zeros_like(flat.slot, dtype=dtype)
        for piece, had in zip(flat.flat_layout.pieces_of(slot), pieces, strict=True):
            if had is not None and piece.numel() and isinstance(had.get(key), torch.Tensor):
                piece.copy_(had[key].view_as(piece))
        for part, whole, keys, state in zip(flat.parts, whole_parts(unit, flat, slot), known, found, strict=True):
            if state is not None and keys is not None and keys.get(key) == SplitState(dtype):
                state[key] = keep(part, whole)
    return [None if state is None else _as_torchs(state, numbers_first=flat.use_orig_params) for state in found]


def _as_torchs(state: dict[str, Any], *, numbers_first: bool) -> dict[str, Any]:
    """Return state in the order in which torch's wrapper saves it: alphabetical, numbers before or after tensors."""

    def place(key: str) -> tuple[int, str]:
        value = state[key]
        dims = -1 if not isinstance(value, torch.Tensor) else min(value.ndim, 1)
        return (dims if numbers_first else -dims), str(key)

    return {key: state[key] for key in sorted(state, key=place)}


def _copied(part: FlatSlice, state: State | None, keep: Keep, device: torch.device) -> dict[str, Any] | None:
    """Return a copy of a whole parameter's state, with tensors of any shape."""
    if state is None:
        return None
    return {
        key: keep(part, value.to(device)) if isinstance(value, torch.Tensor) and value.ndim else copy.deepcopy(value)
        for key, value in state.items()
    }


def _states_of_pieces(flat: FlatParam, states: Mapping[Any, State]) -> list[State | None]:
    """Return this rank's state for its piece of each part."""
    if flat.use_orig_params:
        return [states.get(part.held) for part in flat.parts]
    state = states.get(flat.sharded_param)
    if state is None:
        return [None] * len(flat.parts)
    by_key = {key: _cut(flat, value) for key, value in state.items()}
    return [{key: values[i] for key, values in by_key.items()} for i in range(len(flat.parts))]


def _cut(flat: FlatParam, value: object) -> Sequence[object]:
    if isinstance(value, torch.Tensor) and value.shape == flat.slot.shape:
        return flat.flat_layout.pieces_of(value)
    return [value] * len(flat.parts)


def _known(flat: FlatParam, part: FlatSlice, state: State | None, unit: FSDPParamGroup) -> Known | None:
    """Return the description of this rank's state of a part for the other ranks."""
    if state is None:
        return None
    num_held = flat.flat_layout.num_held(part.index, flat.flat_layout.rank)
    return {key: _described(value, num_held, unit.device) for key, value in state.items()}


def _described(value: Any, numel: int, device: torch.device) -> SplitState | ReplicatedState | UnknownState:  # noqa: ANN401 - any
    if not isinstance(value, torch.Tensor):
        return ReplicatedState(value)
    if value.ndim and value.numel() == numel:
        return SplitState(value.dtype)
    if value.numel() == 1:
        return ReplicatedState(value.detach().cpu(), is_of_kind(value, device))
    return UnknownState(tuple(value.shape), numel)


def _agreed(unit: FSDPParamGroup, flat: FlatParam, own: Sequence[Known | None]) -> list[Known | None]:
    """Return the description of each part's state, joined over all ranks; collective."""
    mesh = flat.mesh_info
    of_ranks: list[Any] = [own]
    if unit.shard_group is not None:
        of_ranks = [None] * mesh.shard_mesh_size
        dist.all_gather_object(of_ranks, own, group=mesh.mesh.get_group(cast("int", mesh.shard_mesh_dim)))
    found = [_joined(part, flat, [known[i] for known in of_ranks]) for i, part in enumerate(flat.parts)]
    for group in dict.fromkeys(group for part in flat.parts for group in part.tp_groups):
        of_group: list[Any] = [None] * group.size()
        dist.all_gather_object(of_group, found, group=group)  # a rank with no element of a part has no state of it
        found = [own or next(filter(None, others), None) for own, *others in zip(found, *of_group, strict=True)]
    return found


def _joined(part: FlatSlice, flat: FlatParam, of_ranks: Sequence[Known | None]) -> Known | None:
    """Return the joined description of one part's state; ranks that hold elements of the part take precedence."""
    holders = [
        known
        for rank, known in enumerate(of_ranks)
        if known is not None and flat.flat_layout.num_held(part.index, rank)
    ]
    values = holders or [known for known in of_ranks if known is not None]
    if not values:
        return None
    joined = {key: value for known in reversed(values) for key, value in known.items()}
    for known in values:  # a single element counts as split state on its rank, but may be a number on the others
        joined |= {key: value for key, value in known.items() if isinstance(value, ReplicatedState)}
    unknown = [(key, value) for key, value in joined.items() if isinstance(value, UnknownState)]
    if unknown:
        key, value = unknown[0]
        raise ValueError(
            f"optimizer state {key!r} of {part.fqn!r} has shape {list(value.shape)} on a rank with {value.numel} "
            "elements of the parameter: only a scalar, or state with one value per element, can be gathered"
        )
    return joined


def _same(value: SplitState | ReplicatedState | UnknownState, unit: FSDPParamGroup) -> Any:  # noqa: ANN401 - optimizer state holds anything
    return value.on(unit.device) if isinstance(value, ReplicatedState) else None


@torch.no_grad()
def split_states(
    flat: FlatParam,
    wholes: Sequence[State | None],
    fetch: Callable[[Any], Any] = lambda value: value,
) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state of the parameters that ``flat`` owns, from each part's; the inverse of :func:`whole_states`.

    Args:
        flat: the flat parameter.
        wholes: the state of each part, with tensors of :attr:`FlatSlice.global_shape`; None for a part without state.
        fetch: returns the actual value for a value in ``wholes``; called in the same order on all ranks.

    Raises:
        ValueError: a tensor to split does not have its parameter's shape; without ``use_orig_params``, parameters of
            the flat parameter differ in keys, numbers or dtypes.
    """
    return dict(_split_pieces(flat, wholes, fetch) if flat.use_orig_params else _split_flat(flat, wholes, fetch))


def _split_pieces(
    flat: FlatParam, wholes: Sequence[State | None], fetch: Callable[[Any], Any]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    for part, piece, state in zip(flat.parts, flat.flat_layout.pieces_of(flat.slot), wholes, strict=True):
        found: dict[str, Any] = {}
        for key in sorted(state or ()):
            value = fetch((state or {})[key])
            found[key] = copy.deepcopy(_own(flat, part, key, value, piece.device))
        if state is not None and piece.numel():
            yield part.held, found


def _own(flat: FlatParam, part: FlatSlice, key: str, value: Any, device: torch.device) -> Any:  # noqa: ANN401 - any
    """Return the state that an optimizer of pieces has for a part."""
    if flat.owns_wholes:
        has_its_shape = isinstance(value, torch.Tensor) and value.shape == part.global_shape
        return part.local_part(value) if has_its_shape else value
    return (
        flat.flat_layout.piece_of_full(part.index, part.local_part(value)).to(device)
        if _is_split(part, key, value)
        else value
    )


def _split_flat(
    flat: FlatParam, wholes: Sequence[State | None], fetch: Callable[[Any], Any]
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    first = next((state for state in wholes if state is not None), None)
    if first is None:
        return
    for part, state in zip(flat.parts, wholes, strict=True):
        if state is None or state.keys() != first.keys():
            came = "no state" if state is None else f"state {', '.join(sorted(state))}" if state else "empty state"
            raise ValueError(
                f"{part.fqn!r} has {came}, and another parameter of its flat parameter has "
                f"{', '.join(sorted(first))}: the parameters of a flat parameter share their optimizer state; to "
                "keep it per parameter, wrap with use_orig_params=True"
            )
    yield flat.sharded_param, {key: _filled(flat, key, [s[key] for s in wholes if s], fetch) for key in sorted(first)}


def _filled(flat: FlatParam, key: str, values: Sequence[Any], fetch: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - any
    """Return one value for all parts: a slot filled with their pieces, or their common number."""
    slot: torch.Tensor | None = None
    had: list[Any] = []
    for i, (part, given) in enumerate(zip(flat.parts, values, strict=True)):
        value = fetch(given)
        if not _is_split(part, key, value):
            had.append(value)
            continue
        if slot is None:
            slot = torch.zeros_like(flat.slot, dtype=value.dtype)
        if slot.dtype != value.dtype:
            break
        flat.flat_layout.pieces_of(slot)[i].copy_(flat.flat_layout.piece_of_full(part.index, part.local_part(value)))
    else:
        if slot is not None and not had:
            return slot
        if slot is None and all(_is_equal(value, had[0]) for value in had):
            return copy.deepcopy(had[0])
    raise ValueError(
        f"the parameters of flat parameter {flat.fqn!r} differ in optimizer state {key!r}, but share one state; to "
        "keep it per parameter, wrap with use_orig_params=True"
    )


def _is_split(part: FlatSlice, key: str, value: object) -> bool:
    """Whether state has one element per element of the parameter.

    Raises:
        ValueError: the state has neither the parameter's shape nor is a single number.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    if value.shape == part.global_shape:
        return True
    if value.numel() == 1:
        return False
    raise ValueError(
        f"optimizer state {key!r} of {part.fqn!r} has shape {list(value.shape)}, the parameter "
        f"{list(part.global_shape)}: only a scalar, or state of the parameter's shape, can be sharded"
    )


def _is_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 - optimizer state holds anything
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
    return type(one) is type(other) and bool(one == other)
