"""The rules of a valid trace. A producer that breaks one has a bug; consumers may rely on all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.events import BESIDE, COLLECTIVES, MOVES, Category, Edge, Kind, Param, Phase
from workbench.trace.begin_end import partners
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import NO_CATEGORY, Header, HostClock

MAX_RANKS = 2**16
"""Maximum ranks of a world; views iterate over all of them."""

_MAX_BYTES, _MAX_ITEMSIZE = 2**56, 64

Rule = Callable[[Header, RankTrace], Iterator[str]]

_INSTANTS = tuple(kind for kind in Kind if not kind.info.is_span)
_TEXTS = tuple(kind for kind in Kind if kind.info.has_text)

# indexed by the column ``kind``, which may hold any byte
_IS_INSTANT, _HAS_TEXT, _IS_MOVE, _IS_COLLECTIVE, _IS_BESIDE = (
    np.isin(np.arange(256), kinds) for kinds in (_INSTANTS, _TEXTS, MOVES, COLLECTIVES, BESIDE)
)


def check(trace: Trace) -> list[str]:
    """Return one sentence per broken rule and rank; a valid trace gives an empty list.

    A trace cut on the left may contain an END without its BEGIN. Any trace may contain a BEGIN without its END.
    """
    return [*check_header(trace.header), *(sentence for r in trace.ranks for sentence in check_rank(trace.header, r))]


def check_rank(header: Header, rank: RankTrace) -> list[str]:
    """Return one sentence per rule that a rank breaks."""
    return [f"rank {rank.rank}: {sentence}" for rule in RULES for sentence in rule(header, rank)]


def _report(rank: RankTrace, broken: NDArray[Any], what: str) -> Iterator[str]:
    """Yield ``what`` with the first row where ``broken`` is true, if any."""
    if broken.any():
        places = np.flatnonzero(broken)
        such = "row" if len(places) == 1 else "rows"
        yield f"row {rank.start.seq + places[0]}: {what} ({len(places)} such {such})"


def _listed(kinds: Sequence[Kind]) -> str:
    *most, last = (kind.name for kind in kinds)
    return f"{', '.join(most)} and {last}"


def check_header(header: Header) -> Iterator[str]:
    """Yield one sentence per broken rule: ranks in the world, units at their index, consistent parameters."""
    if not 0 <= header.world_size <= MAX_RANKS:
        yield f"the world has {header.world_size} ranks, expected 0 to {MAX_RANKS}"
    named = [info.rank for info in header.ranks] + [rank for group in header.comm_groups for rank in group.ranks]
    named += [rank for clock in header.clocks for rank in clock.ranks]
    strangers = sorted({rank for rank in named if not 0 <= rank < header.world_size})
    if strangers:
        yield f"rank {strangers[0]} is out of range for {header.world_size} ranks"
    if min(header.mesh_shape, default=1) < 1 or len(header.mesh_axes) != len(header.mesh_shape):
        yield f"the mesh has the shape {header.mesh_shape} and the axes {header.mesh_axes}"
    yield from _clocks_fit(header.clocks)
    for place, unit in enumerate(header.units):
        if unit.index != place:
            yield f"unit {unit.name!r} has index {unit.index} but is at position {place}"
        if not -1 <= unit.root < len(header.units):
            yield f"unit {unit.name!r} has root {unit.root}, out of range for {len(header.units)} units"
        if not all(1 <= size <= header.world_size for size in (unit.shard_size, unit.replicate_size)):
            yield (
                f"unit {unit.name!r} has {unit.replicate_size} copies on {unit.shard_size} ranks each, in a world of "
                f"{header.world_size}"
            )
        if not all(0 <= size <= _MAX_ITEMSIZE for size in (unit.compute_itemsize, unit.reduce_itemsize)):
            yield f"unit {unit.name!r} has elements of {unit.compute_itemsize} and {unit.reduce_itemsize} bytes"
        for param in unit.params:
            yield from _param_fits(param, unit.shard_size)


def _clocks_fit(clocks: Sequence[HostClock]) -> Iterator[str]:
    ranks = sorted(rank for clock in clocks for rank in clock.ranks)
    if 0 in ranks or len(set(ranks)) < len(ranks):
        yield f"the other clocks list a rank twice, or rank 0, whose clock is the reference: {ranks[:8]}"
    for clock in clocks:
        if not clock.readings or list(clock.readings) != sorted(clock.readings):
            yield f"the clock of ranks {clock.ranks[:8]} has no readings, or they are not sorted by time"
        if min((reading.error_ns for reading in clock.readings), default=0) < 0:
            yield f"the clock error of ranks {clock.ranks[:8]} is negative"


def _param_fits(param: Param, shard_size: int) -> Iterator[str]:
    numbers = (*param.shape, *param.global_shape, *param.rows_per_rank, param.padded_rows, param.itemsize)
    if min(numbers) < 0 or _is_huge(param.shape, param) or _is_huge(param.global_shape, param):
        yield (
            f"parameter {param.fqn!r} has the shape {param.shape} of {param.global_shape}, {param.itemsize} bytes an "
            f"element, and shards of {param.rows_per_rank} rows, {param.padded_rows} padded"
        )
        return
    if not 0 <= param.shard_dim < len(param.shape):
        yield f"parameter {param.fqn!r} of shape {param.shape} is sharded on dimension {param.shard_dim}"
        return
    rows, have = param.shape[param.shard_dim], param.rows_per_rank
    if len(have) != shard_size or sum(have) != rows or not max(have, default=0) <= param.padded_rows <= max(rows, 1):
        yield (
            f"parameter {param.fqn!r} has {rows} rows on {shard_size} ranks, "
            f"its shards have {have} of {param.padded_rows} padded"
        )

    for part in param.parts:
        numbers = (*part.shape, *part.global_shape, part.first)
        if min(numbers) < 0 or _is_huge(part.global_shape, param) or part.first + part.numel > rows:
            yield (
                f"parameter {part.fqn!r} has the shape {part.shape} of {part.global_shape}, from element {part.first} "
                f"on, in the flat parameter {param.fqn!r} of {rows} elements"
            )
            return


def _is_huge(shape: Sequence[int], param: Param) -> bool:
    return math.prod(shape) * param.itemsize >= _MAX_BYTES


def _rank_is_known(header: Header, rank: RankTrace) -> Iterator[str]:
    if not 0 <= rank.rank < header.world_size:
        yield f"the world has {header.world_size} ranks"


def _key_frame_fits(header: Header, rank: RankTrace) -> Iterator[str]:
    start, num_units = rank.start, len(header.units)
    if min(start.seq, rank.lost) < 0 or start.seq >= 2**62:
        yield f"the rows begin at {start.seq}, with {rank.lost} lost before"
    if min(start.bytes_by_category) < 0 or max(start.bytes_by_category) >= _MAX_BYTES:
        yield f"the key frame has {start.bytes_by_category} live bytes"
    strangers = sorted(unit for unit in {*start.unit_states, *start.reducing} if not 0 <= unit < num_units)
    if strangers:
        yield f"the key frame has unit {strangers[0]}, out of range for {num_units} units"


def _seq_has_no_gap(_: Header, rank: RankTrace) -> Iterator[str]:
    ahead = rank.rows["seq"] - rank.start.seq
    yield from _report(rank, ahead != np.arange(len(ahead)), "seq does not increase by one from the key frame's")


def _values_are_known(_: Header, rank: RankTrace) -> Iterator[str]:
    columns = {"kind": rank.kinds, "edge": rank.rows["edge"], "phase": rank.rows["phase"]}
    for (name, column), words in zip(columns.items(), (Kind, Edge, Phase), strict=True):
        yield from _report(rank, column >= len(words), f"unknown {name}")


def _edges_fit_kinds(_: Header, rank: RankTrace) -> Iterator[str]:
    wrong = _IS_INSTANT[rank.kinds] != (rank.rows["edge"] == Edge.INSTANT)
    message = f"INSTANT belongs to {_listed(_INSTANTS)}, BEGIN / END to the rest"
    yield from _report(rank, wrong, message)


def _indices_are_in_range(header: Header, rank: RankTrace) -> Iterator[str]:
    lengths = {"unit": len(header.units), "module": len(header.strings), "comm_group": len(header.comm_groups)}
    for name, length in lengths.items():
        index = rank.rows[name]
        yield from _report(rank, (index < -1) | (index >= length), f"{name} is not in the header's table of {length}")
    yield from _report(rank, rank.rows["step"] < -1, "step is less than -1")


def _memory_rows_fit(_: Header, rank: RankTrace) -> Iterator[str]:
    rows, category = rank.rows, rank.rows["category"]
    is_alloc, is_free = rank.kinds == Kind.ALLOC, rank.kinds == Kind.FREE
    moves = is_alloc | is_free
    yield from _report(rank, moves & (category >= len(Category)), "ALLOC / FREE without a known category")
    yield from _report(rank, ~moves & (category != NO_CATEGORY), "a category on a row that is not ALLOC / FREE")
    yield from _report(rank, is_alloc & (rows["num_bytes"] <= 0), "ALLOC must have num_bytes > 0")
    yield from _report(rank, is_free & (rows["num_bytes"] >= 0), "FREE must have num_bytes < 0")
    yield from _report(rank, ~moves & (rows["num_bytes"] < 0), "num_bytes is negative")
    is_sample = rank.kinds == Kind.RESIDENT
    yield from _report(rank, is_sample & (rows["num_bytes"] <= 0), "RESIDENT must have num_bytes > 0")


def _live_bytes_stay_positive(_: Header, rank: RankTrace) -> Iterator[str]:
    rows = rank.rows
    moves = np.flatnonzero(_IS_MOVE[rank.kinds])
    moved, deltas = rows["category"][moves], rows["num_bytes"][moves]
    for category in Category:
        own = moved == category
        live = rank.start.bytes_by_category[category] + np.cumsum(deltas[own])
        if (live < 0).any():
            yield from _report(
                rank, _at(rank, moves[own][live < 0]), f"more bytes of {category.name} were freed than were live"
            )


def _collectives_are_numbered(_: Header, rank: RankTrace) -> Iterator[str]:
    rows = rank.rows
    is_collective = _IS_COLLECTIVE[rank.kinds]
    nameless = is_collective & ((rows["comm_group"] < 0) | (rows["comm_seq"] < 0))
    yield from _report(rank, nameless, "a collective without comm_group and comm_seq")
    issued = np.flatnonzero(is_collective & (rows["edge"] == Edge.BEGIN))
    order = issued[np.argsort(rows["comm_group"][issued], kind="stable")]
    group, comm_seq = rows["comm_group"][order], rows["comm_seq"][order]
    repeated = np.zeros(len(rows), bool)
    repeated[order[1:]] = (group[1:] == group[:-1]) & (comm_seq[1:] <= comm_seq[:-1])
    yield from _report(rank, repeated, "comm_seq does not increase within its comm_group")


def _spans_close(_: Header, rank: RankTrace) -> Iterator[str]:
    rows = rank.rows
    is_end, partner = rows["edge"] == Edge.END, partners(rows)
    if rank.start.seq == 0:
        yield from _report(rank, is_end & (partner < 0), "END without its BEGIN")
    backwards = is_end & (partner >= 0) & (rows["t_ns"] < rows["t_ns"][partner])
    yield from _report(rank, backwards, "END is earlier than its BEGIN")


def _texts_are_named(_: Header, rank: RankTrace) -> Iterator[str]:
    nameless = _HAS_TEXT[rank.kinds] & (rank.rows["module"] < 0)
    yield from _report(rank, nameless, f"{_listed(_TEXTS)} without a string")


def _device_rows_tell_of_others(_: Header, rank: RankTrace) -> Iterator[str]:
    """Each refers to a different, earlier row of device work, and is not earlier in time than that row."""
    rows = rank.rows
    places = np.flatnonzero(rank.kinds == Kind.DEVICE)
    if not len(places):
        return
    value = rows["value"][places]
    is_seq = (value >= 0) & (value < rows["seq"][places]) & (value == np.floor(value))
    referred = np.where(is_seq, value, -1).astype(np.int64)
    yield from _report(rank, _at(rank, places[~is_seq]), "DEVICE does not refer to an earlier row")
    first = np.unique(referred, return_index=True)[1]
    again = is_seq & ~np.isin(np.arange(len(referred)), first)
    yield from _report(rank, _at(rank, places[again]), "two DEVICE rows refer to the same row")
    of = referred - rank.start.seq
    here = is_seq & (of >= 0) & (of < places)  # the others are before the trace's left edge
    places, of = places[here], of[here]
    wrong = _IS_BESIDE[rank.kinds[of]]
    yield from _report(rank, _at(rank, places[wrong]), "DEVICE refers to a row that is not device work")
    ends = _IS_COLLECTIVE[rank.kinds[of]] & (rows["edge"][of] == Edge.END)  # recorded by the wait
    early = ~ends & (rows["t_ns"][places] < rows["t_ns"][of])
    yield from _report(rank, _at(rank, places[early]), "DEVICE is earlier than the row it refers to")


def _at(rank: RankTrace, places: NDArray[np.int64]) -> NDArray[np.bool_]:
    found = np.zeros(len(rank.rows), np.bool_)
    found[places] = True
    return found


def _earlier_steps_fit(header: Header, rank: RankTrace) -> Iterator[str]:
    """Yield the rules that rows of earlier steps break: they have gaps, but are rows before the first one."""
    rows = rank.earlier.rows
    part = RankTrace(rank.rank, rows, replace(rank.start, seq=0))
    seq = np.append(rows["seq"], rank.start.seq)
    if len(rows) and (seq[0] < 0 or (np.diff(seq) <= 0).any()):
        yield "seq of its earlier steps does not increase up to its first row"
    for rule in (_values_are_known, _edges_fit_kinds, _indices_are_in_range, _texts_are_named):
        yield from (f"of its earlier steps, {sentence}" for sentence in rule(header, part))


RULES: tuple[Rule, ...] = (
    _rank_is_known,
    _key_frame_fits,
    _seq_has_no_gap,
    _values_are_known,
    _edges_fit_kinds,
    _indices_are_in_range,
    _memory_rows_fit,
    _live_bytes_stay_positive,
    _collectives_are_numbered,
    _spans_close,
    _texts_are_named,
    _device_rows_tell_of_others,
    _earlier_steps_fit,
)
"""The rules that every rank's rows obey."""
