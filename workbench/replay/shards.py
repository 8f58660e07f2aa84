"""Where the rows of each parameter are stored, and the memory that takes at rest; computed from the header alone.

A parameter is split along its ``shard_dim`` into *rows*; ``F`` is the number of ranks that share one copy, and a
*shard-rank* counts 0..F-1 among them. As in ``torch.chunk``, every shard-rank has room for ``ceil(rows / F)`` rows; the
last ones may hold fewer (the rest is *padding*) or none (an *empty shard*)::

    5 rows over F = 4  ->  room for 2 each; held 2, 2, 1, 0; padding 0, 0, 1, 2; shard-rank 3 is empty
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np

from workbench.events import FlatPart, Param, Unit
from workbench.replay.grouping import pattern
from workbench.trace.columns import Trace
from workbench.trace.schema import Header


@dataclass(frozen=True, kw_only=True)
class ParamShards:
    """One parameter and how it is split.

    Attributes:
        unit: the unit it belongs to.
        param: the parameter.
        row_bytes: bytes of one row of its ``shard_dim``, all other dimensions in full.
        begin_rows: first row of each shard-rank, F entries.
    """

    unit: Unit
    param: Param
    row_bytes: int
    begin_rows: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """F: shard-ranks that share this parameter."""
        return len(self.param.rows_per_rank)

    @property
    def padding_rows(self) -> tuple[int, ...]:
        """Unused rows per shard-rank."""
        return tuple(self.param.padded_rows - rows for rows in self.param.rows_per_rank)

    @property
    def bytes_unsharded(self) -> int:
        """Bytes that FSDP splits, without padding; under tensor parallelism, this rank's part."""
        return self.row_bytes * sum(self.param.rows_per_rank)

    @property
    def bytes_global(self) -> int:
        """Bytes of the parameter before tensor parallelism split it, without padding."""
        return self.param.itemsize * prod(self.param.global_shape)

    @property
    def bytes_at_rest(self) -> int:
        """Bytes each shard-rank's padded storage takes: ``b_p * padded elements / F``."""
        return self.row_bytes * self.param.padded_rows

    @property
    def bytes_wasted(self) -> int:
        """Bytes of padding in one copy, over all of its F shard-ranks."""
        return self.row_bytes * (self.num_shards * self.param.padded_rows - sum(self.param.rows_per_rank))


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over parameters.

    Attributes:
        num_params: parameters; a flat one counts as those it holds.
        num_flat: flat parameters.
        num_elements: elements of the parameters, before FSDP and tensor parallelism.
        bytes_unsharded: what a rank would hold without FSDP and tensor parallelism.
        bytes_at_rest: what each rank holds between steps, padding included.
        bytes_wasted: padding in one copy, over all of its shard-ranks.
        num_empty: empty shards in one copy.
    """

    num_params: int
    num_flat: int
    num_elements: int
    bytes_unsharded: int
    bytes_at_rest: int
    bytes_wasted: int
    num_empty: int


def shards(header: Header) -> tuple[ParamShards, ...]:
    """Return how every parameter is split, units and parameters in the header's order, without retired units."""
    return tuple(part for unit in header.units if unit.in_use for part in unit_shards(unit))


def unit_shards(unit: Unit) -> tuple[ParamShards, ...]:
    """Return how one unit's parameters are split."""
    return tuple(_param_shards(unit, param) for param in unit.params)


def totals(split: Iterable[ParamShards]) -> Totals:
    """Return the sums over some parameters: all of :func:`shards`, or one unit's."""
    parts = tuple(split)
    return Totals(
        num_params=sum(len(s.param.parts) or 1 for s in parts),
        num_flat=sum(bool(s.param.parts) for s in parts),
        num_elements=sum(prod(s.param.global_shape) for s in parts),
        bytes_unsharded=sum(s.bytes_global for s in parts),
        bytes_at_rest=sum(s.bytes_at_rest for s in parts),
        bytes_wasted=sum(s.bytes_wasted for s in parts),
        num_empty=sum(s.param.rows_per_rank.count(0) for s in parts if s.bytes_unsharded),
    )


def totals_of_used(trace: Trace) -> Totals:
    """Return the sums over the parameters of the units with rows in ``trace``, including units retired since."""
    used = {int(index) for rank in trace.ranks for index in np.unique(rank.rows["unit"])}
    return totals(part for unit in trace.header.units if unit.index in used for part in unit_shards(unit))


@dataclass(frozen=True, kw_only=True)
class AtRest:
    """Bytes that one rank holds between steps; in host memory for offloaded units.

    Attributes:
        params: its shards, padding included.
        grads: gradients of the trainable ones, padded like their shards.
        adam: two moments of each trainable element in its shard, and 4 bytes per parameter for the step. For a flat
            parameter this includes padding, and the step counts once. With ``use_orig_params`` the optimizer has the
            pieces instead: no padding, no frozen ones, and a step for each piece that is not empty.
    """

    params: int
    grads: int
    adam: int

    @property
    def total(self) -> int:
        """Sum of all bytes."""
        return self.params + self.grads + self.adam


def at_rest(header: Header, shard_rank: int) -> AtRest:
    """Return what a rank holds between steps of training with Adam.

    Example: one trainable float32 parameter of 5 rows of 3 over F = 4: shard-rank 2 holds 2 padded rows, 24 bytes, the
    gradient likewise, and for its one real row ``8 * 3 + 4`` bytes of Adam's state.

    Args:
        header: its units, retired ones left out.
        shard_rank: the rank's place among those that share a copy, modulo F where a unit is on fewer ranks.
    """
    split = shards(header)
    given = [(part, _given(part.param, shard_rank % part.num_shards)) for part in split if part.param.trainable]
    return AtRest(
        params=sum(part.bytes_at_rest for part in split),
        grads=sum(part.bytes_at_rest for part, rows in given if rows),
        adam=sum(2 * part.row_bytes * sum(rows) + 4 * len(rows) for part, rows in given),
    )


def _given(param: Param, shard_rank: int) -> list[int]:
    """Return the number of rows of each tensor of a parameter that the optimizer trains.

    For a flat parameter these are the padded rows; with ``use_orig_params``, the elements of each trainable piece that
    is not empty.
    """
    if not param.use_orig_params:
        return [param.padded_rows if param.parts else param.rows_per_rank[shard_rank]]
    begin, end = shard_rank * param.padded_rows, (shard_rank + 1) * param.padded_rows
    bounds = [part.within(begin, end) for part in param.parts if part.trainable]
    return [last - first for first, last in bounds if first < last]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The elements of one parameter within one shard-rank's part of a flat parameter; at least one.

    Attributes:
        part: the parameter.
        shard_rank: shard-rank that holds the piece.
        begin, end: elements of the flat parameter, ``end`` excluded.
    """

    part: FlatPart
    shard_rank: int
    begin: int
    end: int

    @property
    def own(self) -> tuple[int, int]:
        """First and last element of the piece, counted within the parameter."""
        return self.begin - self.part.first, self.end - self.part.first - 1

    @property
    def is_begun_before(self) -> bool:
        """Whether a border between two ranks cuts the parameter at the start of the piece."""
        return self.begin > self.part.first

    @property
    def goes_on(self) -> bool:
        """Whether a border between two ranks cuts the parameter at the end of the piece."""
        return self.end < self.part.first + self.part.numel


def pieces(param: Param) -> tuple[Piece, ...]:
    """Return the pieces of a flat parameter from first element to last, cut at the borders between ranks.

    Example: parameters of 3 and 4 elements over F = 2 -> shard-rank 0: all 3 and 1 of the 4, shard-rank 1: the other 3.
    """
    room = param.padded_rows
    found = (
        (part, rank, *part.within(rank * room, (rank + 1) * room))
        for rank in range(len(param.rows_per_rank))
        for part in param.parts
    )
    return tuple(Piece(part=p, shard_rank=r, begin=begin, end=end) for p, r, begin, end in found if begin < end)


def alike(split: Iterable[ParamShards]) -> list[tuple[ParamShards, ...]]:
    """Return parameters in groups that differ only in the numbers in their names.

    Their whole units must match: ``blocks.0`` and ``blocks.1`` have the same parameters, shapes, split and policy.
    Groups are in the order of their first members.
    """
    units: dict[int, Hashable] = {}
    found: dict[Hashable, list[ParamShards]] = {}
    for part in split:
        if part.unit.index not in units:
            units[part.unit.index] = _unit_key(part.unit)
        found.setdefault((units[part.unit.index], _param_key(part.param)), []).append(part)
    return [tuple(group) for group in found.values()]


def _unit_key(unit: Unit) -> Hashable:
    params = tuple(_param_key(param) for param in unit.params)
    policy = replace(unit, index=0, name=pattern(unit.name), params=())
    return policy, params


def _param_key(param: Param) -> Hashable:
    parts = tuple(replace(part, fqn=pattern(part.fqn)) for part in param.parts)
    return replace(param, fqn=pattern(param.fqn), parts=parts)


def _param_shards(unit: Unit, param: Param) -> ParamShards:
    others = (size for dim, size in enumerate(param.shape) if dim != param.shard_dim)
    return ParamShards(
        unit=unit,
        param=param,
        row_bytes=param.itemsize * prod(others),
        begin_rows=tuple(accumulate(param.rows_per_rank, initial=0))[:-1],
    )
