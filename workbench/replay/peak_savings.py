"""Ways to lower a rank's peak: the peak of a step under another policy, by formula, and its price.

A formula changes the recorded bytes where the policy would, and takes the highest moment of the result. So a saving
that only moves the peak elsewhere counts as what it is.

- *reshard after forward*: a unit that stays unsharded after its forward, and is not freed before its backward, would be
  freed at the end of its forward, gathered again during the backward of the unit before it, and copied out at the begin
  of its own. Price: one all-gather per such unit and pass, of the same bytes as in forward.
- *mixed precision*: bytes of unsharded parameters, their gathers and their gradients times the new item size over the
  old one; and those of reductions and activations likewise. At most: some activations have other dtypes.
- *fewer units ahead*: of the units that were gathered ahead at the peak, all but the one that runs next and the one
  after it. At most: the peak may move.
- *offload*: shards, their gradients and the optimizer's state leave the device. At most.
- *smaller units*: the largest submodule of the largest unit at the peak gets a unit of its own, or all of its name do;
  what is gathered, and its gradients, are then those of it alone. About: units also run and reduce at other moments.
  Price: an all-gather for each of the outer units'.
- *checkpointing*: what a numbered module such as ``blocks.2`` makes and keeps itself is not there from its forward to
  the begin of its backward. Its input stays, as another module makes it. At most: its output stays as well.

Arrays: ``M`` rows that move bytes. Times are nanoseconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
from numpy.typing import NDArray

from workbench.events import MOVES, OFFLOADED, Category, Edge, Kind, Phase, Unit
from workbench.replay.activations import block_of, moves, owners
from workbench.replay.collectives import table
from workbench.replay.memory import Peak, in_use
from workbench.replay.spans import Ints, of_kind
from workbench.replay.unit_history import AWAITED, UnitCause, UnitHistory
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header, Rows

_GATHERED = (Category.UNSHARDED_PARAMS, Category.ALL_GATHER_BUFFERS)
_FULL = (*_GATHERED, Category.UNSHARDED_GRADS)
_OF_UNITS = (*_FULL, Category.REDUCE_SCATTER_BUFFERS)
BF16 = 2
"""Bytes of an element of bfloat16."""


class Knob(Enum):
    """A setting that lowers a peak; the value is its name."""

    RESHARD = "reshard after forward"
    PRECISION = "mixed precision"
    FEWER_AHEAD = "fewer units ahead"
    OFFLOAD = "offload"
    SMALLER_UNITS = "smaller units"
    CHECKPOINT = "checkpointing"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The bytes that a knob saves, by formula.

    Attributes:
        knob: the setting.
        peak_bytes: the peak of the step with it.
        saved_bytes: how much lower that is.
        is_bound: whether it is only the most that it saves.
        units: the units that it changes.
        modules: the list of modules that it changes, such as ``"blocks"``, or the name that submodules of its units
            share, such as ``"mlp"``; empty: none.
        more_calls: all-gathers that a step has in addition.
        more_bytes: their payload.
        more_ns: what they take if nothing overlaps with them, by those of the step; 0: unknown.
    """

    knob: Knob
    peak_bytes: int
    saved_bytes: int
    is_bound: bool = False
    units: tuple[int, ...] = ()
    modules: str = ""
    more_calls: int = 0
    more_bytes: int = 0
    more_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class _Edits:
    """Changes of the bytes in use: before the row at each place, ``[E]``."""

    place: tuple[int, ...] = ()
    num_bytes: tuple[int, ...] = ()


def savings(
    header: Header, part: RankTrace, found: Peak, at_peak: dict[int, UnitHistory], *, on_device: bool
) -> tuple[Saving, ...]:
    """Return what would lower the peak of a rank's step, the settings that change no numbers first.

    Args:
        header: of the trace.
        part: the rank's rows of the step, with the state before them.
        found: the peak of these rows.
        at_peak: history of each unit that was unsharded or being gathered at the peak.
        on_device: whether the rank computes on a device with memory of its own.
    """
    units = {unit.index: unit for unit in header.units if unit.in_use and unit.runner.splits}
    known = [_checkpoint(header, part, found)]
    if units:
        known = [
            _reshard(part, found, units),
            _fewer_ahead(header, part, found, at_peak),
            _offload(found, units) if on_device else None,
            *_smaller(header, part, found, at_peak),
            *known,
            _precision(part, found, units),
        ]
    return tuple(saving for saving in known if saving is not None and saving.saved_bytes > 0)


def _in_use(rows: Rows) -> tuple[Ints, Ints]:
    """Return the places of the rows that move bytes in use, and by how many, ``[M]``."""
    places = np.flatnonzero(
        of_kind(rows, MOVES) & (rows["category"] < len(Category)) & (rows["category"] != Category.RESERVED)
    )
    return places, rows["num_bytes"][places]


def peak_with(part: RankTrace, edits: _Edits) -> int:
    """Return the peak of a rank's rows with further changes of the bytes in use."""
    places, deltas = _in_use(part.rows)
    order = np.argsort(np.concatenate([2 * places + 1, 2 * np.array(edits.place, np.int64)]), kind="stable")
    total = np.cumsum(np.concatenate([deltas, np.array(edits.num_bytes, np.int64)])[order])
    return in_use(part.start.bytes_by_category) + int(total.max(initial=0))


def _peak_times(part: RankTrace, deltas: Ints, factor: NDArray[np.float64]) -> int:
    """Return the peak of a rank if ``deltas`` of its bytes in use, ``[M]``, were ``factor`` times as large, ``[M]``."""
    total = np.cumsum((deltas * factor).astype(np.int64))
    return in_use(part.start.bytes_by_category) + int(total.max(initial=0))


def _reshard(part: RankTrace, found: Peak, units: dict[int, Unit]) -> Saving | None:
    """Return what freeing units after forward saves that a step keeps until backward; roots only if that helps."""
    kept = {unit: _unsharded_pieces(part.rows, unit) for unit in units if units[unit].shard_size > 1}
    kept = {unit: spans for unit, spans in kept.items() if spans}
    chosen = tuple(unit for unit in kept if units[unit].root != unit)
    with_root = tuple(kept)
    peaks = {some: peak_with(part, _edits(part.rows, kept, some)) for some in {chosen, with_root} if some}
    if not peaks:
        return None
    best = chosen if chosen and peaks[chosen] <= peaks[with_root] else with_root
    gathers = table(part)
    is_one = (gathers.kind == Kind.ALL_GATHER) & np.isin(gathers.unit, best)
    calls = sum(len(kept[unit]) for unit in best)
    payload = {int(unit): int(size) for unit, size in zip(gathers.unit[is_one], gathers.num_bytes[is_one], strict=True)}
    return Saving(
        knob=Knob.RESHARD,
        peak_bytes=peaks[best],
        saved_bytes=found.num_bytes - peaks[best],
        units=best,
        more_calls=calls,
        more_bytes=sum(payload.get(unit, _full_bytes(part.rows, unit)) * len(kept[unit]) for unit in best),
        more_ns=int(gathers.time_ns[is_one].mean() * calls) if is_one.any() else 0,
    )


def _unsharded_pieces(rows: Rows, unit: int) -> list[tuple[int, int, int]]:
    """Return where a unit stays unsharded: the row after its forward, where it would be gathered, its backward."""
    mine = np.flatnonzero(rows["unit"] == unit)
    kind, edge = rows["kind"][mine], rows["edge"][mine]
    decides = (
        ((kind == Kind.FORWARD) & (edge == Edge.END))
        | ((kind == Kind.BACKWARD) & (edge == Edge.BEGIN))
        | (kind == Kind.RESHARD)
    )
    places, kinds = mine[decides], kind[decides]
    pairs = np.flatnonzero((kinds[:-1] == Kind.FORWARD) & (kinds[1:] == Kind.BACKWARD))
    if not len(pairs):
        return []
    backwards = np.flatnonzero((rows["kind"] == Kind.BACKWARD) & (rows["edge"] == Edge.BEGIN))
    found = []
    for pair in pairs.tolist():
        end, begin = int(places[pair]), int(places[pair + 1])
        earlier = backwards[(backwards > end) & (backwards < begin)]
        found.append((end + 1, int(earlier[-1]) if len(earlier) else begin, begin))
    return found


def _edits(rows: Rows, kept: dict[int, list[tuple[int, int, int]]], units: Sequence[int]) -> _Edits:
    edits = []
    for unit in units:
        full, buffer = _full_bytes(rows, unit), _gather_buffer(rows, unit)
        for end, ahead, begin in kept[unit]:
            edits += [(end, -full), (ahead, buffer), (begin, full), (begin, -buffer)]
    return _edits_of(sorted(edits, key=lambda edit: edit[0]))


def _edits_of(edits: Sequence[tuple[int, int]]) -> _Edits:
    return _Edits(place=tuple(place for place, _ in edits), num_bytes=tuple(size for _, size in edits))


def _full_bytes(rows: Rows, unit: int) -> int:
    return _most(rows, unit, Category.UNSHARDED_PARAMS)


def _gather_buffer(rows: Rows, unit: int) -> int:
    return _most(rows, unit, Category.ALL_GATHER_BUFFERS)


def _most(rows: Rows, unit: int, category: Category) -> int:
    """Return the most bytes of a class that a unit allocates or frees at once in some rows."""
    is_one = of_kind(rows, MOVES) & (rows["unit"] == unit) & (rows["category"] == category)
    return int(np.abs(rows["num_bytes"][is_one]).max(initial=0))


def _fewer_ahead(header: Header, part: RankTrace, found: Peak, at_peak: dict[int, UnitHistory]) -> Saving | None:
    """Return what gathering one unit ahead saves instead of several."""
    ahead = [
        unit
        for unit, known in at_peak.items()
        if known.last in {*AWAITED, UnitCause.IN_FLIGHT}
        and known.events[0].cause in {UnitCause.AHEAD_IN_FORWARD, UnitCause.AHEAD_IN_BACKWARD}
    ]
    ahead.sort(key=lambda unit: at_peak[unit].events[0].seq)
    more = ahead[2:]
    saved = sum(_bytes_at(header, part, found, unit) for unit in more)
    if not saved:
        return None
    return Saving(
        knob=Knob.FEWER_AHEAD,
        peak_bytes=found.num_bytes - saved,
        saved_bytes=saved,
        is_bound=True,
        units=tuple(more),
    )


def _bytes_at(header: Header, part: RankTrace, found: Peak, unit: int) -> int:
    """Return the bytes of a unit's full parameters and gather buffers at the peak."""
    rows = part.rows[: found.seq + 1 - part.start.seq]
    is_one = of_kind(rows, MOVES) & (rows["unit"] == unit) & np.isin(rows["category"], _GATHERED)
    return max(int(rows["num_bytes"][is_one].sum()), 0)


def _offload(found: Peak, units: dict[int, Unit]) -> Saving | None:
    if any(unit.offload for unit in units.values()):
        return None
    saved = sum(found.bytes_by_category[category] for category in OFFLOADED)
    return Saving(knob=Knob.OFFLOAD, peak_bytes=found.num_bytes - saved, saved_bytes=saved, is_bound=True)


def _smaller(header: Header, part: RankTrace, found: Peak, at_peak: dict[int, UnitHistory]) -> list[Saving]:
    """Return what a unit of its own saves for the largest submodule of the largest unit, and for all of its name.

    None of these where the cut units have less than half of the unsharded bytes.
    """
    sizes = {unit: _full_bytes(part.rows, unit) for unit in at_peak if unit in found.unsharded_units}
    if not sizes:
        return []
    unit = max(sizes, key=lambda one: sizes[one])
    parts = parts_of(header.units[unit])
    if len(parts) < 2:
        return []
    inner = parts.most_common(1)[0][0]
    model = [each for each in header.units if each.in_use and each.root == header.units[unit].root]
    alike = tuple(each.index for each in model if inner in parts_of(each))
    both = [((unit,), ""), *([(alike, inner)] if len(alike) > 1 else [])]
    made = (_cut(header, part, found, units, inner, modules) for units, modules in both)
    unsharded = found.bytes_by_category[Category.UNSHARDED_PARAMS]
    return [saving for saving in made if 2 * sum(sizes.get(each, 0) for each in saving.units) > unsharded]


def _cut(header: Header, part: RankTrace, found: Peak, units: tuple[int, ...], inner: str, modules: str) -> Saving:
    """Return about what units save whose submodule ``inner`` has a unit of its own, if that alone is gathered."""
    places, deltas = _in_use(part.rows)
    rows = part.rows[places]
    factor = np.ones(len(rows))
    for unit in units:
        parts = parts_of(header.units[unit])
        factor[(rows["unit"] == unit) & np.isin(rows["category"], _OF_UNITS)] = parts[inner] / max(parts.total(), 1)
    peak = _peak_times(part, deltas, factor)
    gathers = table(part)
    calls = int(((gathers.kind == Kind.ALL_GATHER) & np.isin(gathers.unit, units)).sum())
    return Saving(
        knob=Knob.SMALLER_UNITS,
        peak_bytes=peak,
        saved_bytes=found.num_bytes - peak,
        units=units,
        modules=modules,
        more_calls=calls,  # the inner unit is gathered whenever the outer one is
    )


def parts_of(unit: Unit) -> Counter[str]:
    """Return the elements of each submodule directly below a unit, by its name in the unit's module."""
    prefix = f"{unit.name}." if unit.name else ""
    found = Counter[str]()
    for param in unit.params:
        for name, shape in ((each.fqn, each.shape) for each in (param.parts or (param,))):
            inner = name.removeprefix(prefix)
            if "." in inner:
                found[inner.partition(".")[0]] += prod(shape)
    return found


def _checkpoint(header: Header, part: RankTrace, found: Peak) -> Saving | None:
    """Return what checkpointing each module of a numbered list saves, of the list for which it is most."""
    rows = part.rows
    places = moves(rows)
    edits: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    dropped = Counter[str]()  # of each block, until its backward computes it again
    for place, owner in zip(places.tolist(), owners(header, rows[places]), strict=True):
        block = block_of(owner.module) if owner is not None else ""
        if owner is None or not block or owner.module == block_of(owner.kept_by) or block != block_of(owner.kept_by):
            continue
        name, num_bytes = re.sub(r"\.?\d+$", "", block), int(rows["num_bytes"][place])
        if rows["kind"][place] == Kind.ALLOC and rows["phase"][place] == Phase.FORWARD:
            edits[name].append((place, -num_bytes))
            dropped[block] += num_bytes
        elif num_bytes < 0 and dropped[block]:
            edits[name].append((place, dropped.pop(block)))
    known = [(peak_with(part, _edits_of(some)), name) for name, some in edits.items()]
    if not known:
        return None
    peak, name = min(known)
    saved = found.num_bytes - peak
    return Saving(knob=Knob.CHECKPOINT, peak_bytes=peak, saved_bytes=saved, is_bound=True, modules=name)


def _precision(part: RankTrace, found: Peak, units: dict[int, Unit]) -> Saving | None:
    """Return what bfloat16 saves in compute and reductions, if units compute in a larger dtype."""
    wide = tuple(unit for unit, each in units.items() if each.compute_itemsize > BF16)
    if not wide:
        return None
    places, deltas = _in_use(part.rows)
    rows = part.rows[places]
    compute = np.ones(max(units) + 2)  # the last entry is for -1
    reduce = np.ones(max(units) + 2)
    for unit in wide:
        compute[unit] = BF16 / units[unit].compute_itemsize
        reduce[unit] = BF16 / units[unit].reduce_itemsize
    number = np.where(rows["unit"] < len(compute) - 1, rows["unit"], -1)
    factor = np.where(np.isin(rows["category"], _FULL), compute[number], 1.0)
    factor = np.where(rows["category"] == Category.REDUCE_SCATTER_BUFFERS, reduce[number], factor)
    factor = np.where(rows["category"] == Category.ACTIVATIONS, compute.min(), factor)
    peak = _peak_times(part, deltas, factor)
    return Saving(knob=Knob.PRECISION, peak_bytes=peak, saved_bytes=found.num_bytes - peak, is_bound=True, units=wide)
