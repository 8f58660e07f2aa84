"""Bytes at the peak of a step as terms in a model's sizes: read off one plan, and checked with another.

A plan of a small model of :mod:`workbench.zoo.llama` says which buffer is allocated and freed when, and of which block.
Each buffer's bytes are those of one quantity, such as a block's shard in float32, or the batch's tokens times the width
in bfloat16: the small model's sizes are chosen so that no two quantities have equal bytes. So what a rank has at a
moment is a sum of terms, in which all blocks but those at both ends have equal parts, and a model with more blocks has
more of these. Nothing here knows what FSDP does; terms that another plan, of another model on other ranks,
contradicts are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.errors import WorkbenchError
from workbench.events import OFFLOADED, Category
from workbench.trace.columns import Trace
from workbench.trace.schema import NO_CATEGORY

PARAMS: Mapping[str, Sequence[tuple[str, str]]] = {
    "block": [
        *[("width", "width")] * 2,
        *[("kv", "width")] * 2,
        *[("hidden", "width")] * 2,
        ("width", "hidden"),
        *[("width", "one")] * 2,
    ],
    "outside": [("vocab", "width"), ("vocab", "width"), ("width", "one")],
}
"""Rows and columns of the parameters of a block, and of those in no block."""

ENDS = 3
"""Blocks at each end of a model that need not be like the others."""

_KEPT = ("one", "width", "kv", "hidden", "heads", "vocab")
_ITEM_SIZES = (1, 2, 4, 8)
_BLOCK = re.compile(r"blocks\.(\d+)\b")
_NOWHERE = -1

Sizes = Mapping[str, int]
"""The fields of :class:`workbench.zoo.llama.LlamaSizes`, by name."""

Terms = Mapping[str, int]
"""By quantity, a number of bytes for each of its elements: ``{"block.shard": 4}``."""


class TermsError(WorkbenchError):
    """A plan's bytes are not those that its sizes suggest."""


@dataclass(frozen=True)
class Count:
    """Bytes for each element of a quantity: ``ends``, and ``middle`` for each block that is not at an end."""

    ends: int = 0
    middle: int = 0

    def of(self, blocks: int) -> int:
        """Return the bytes for each element in a model with so many blocks."""
        return self.ends + self.middle * (blocks - 2 * ENDS)


Moment = Mapping[tuple[Category, str], Count]
"""What a rank has at a moment: by class and quantity."""


@dataclass(frozen=True, kw_only=True)
class SizeTerms:
    """Where a rank may have most in a step under one policy.

    Attributes:
        moments: in the order of the step.
        host: what is in the host's memory at the end of a step.
    """

    moments: Sequence[Moment]
    host: Moment

    def peak(self, sizes: Sizes, shards: int) -> dict[Category, int]:
        """Return the bytes of each class at the peak, without those that are 0.

        Args:
            sizes: of the model and the batch.
            shards: number of ranks that share a copy of the model.
        """
        found = [bytes_at(moment, sizes, shards) for moment in self.moments]
        return max(found, key=lambda each: sum(each.values()))


def bytes_at(moment: Moment, sizes: Sizes, shards: int) -> dict[Category, int]:
    """Return the bytes of each class at a moment, without those that are 0."""
    known, found = quantities(sizes, shards), Counter[Category]()
    for (category, quantity), count in moment.items():
        found[category] += count.of(sizes["blocks"]) * known[quantity]
    return {category: size for category, size in found.items() if size}


def quantities(sizes: Sizes, shards: int) -> dict[str, int]:
    """Return the number of elements of each quantity.

    ``block.full`` are those of a block's parameters, ``block.shard`` of its part on rank 0, whose rows are rounded up,
    ``block.padded`` of as many such parts as there are, and ``block.vectors`` of its parameters with one dimension;
    ``outside`` is what is in no block. ``batch*width`` are numbers for each of the batch's tokens.
    """
    kv = sizes["width"] // sizes["heads"] * sizes["kv_heads"]
    basic = {**sizes, "one": 1, "kv": kv, "batch": sizes["sequences"] * sizes["tokens"]}
    found = {"one": 1, "indices": basic["batch"] + sizes["sequences"]}
    found |= {f"batch*{name}": basic["batch"] * basic[name] for name in _KEPT}
    for unit, params in PARAMS.items():
        shapes = [(basic[rows], basic[columns]) for rows, columns in params]
        shard = sum(-(-rows // shards) * columns for rows, columns in shapes)
        found |= {
            f"{unit}.full": sum(rows * columns for rows, columns in shapes),
            f"{unit}.shard": shard,
            f"{unit}.padded": shard * shards,
            f"{unit}.vectors": sum(basic[rows] for rows, columns in params if columns == "one"),
        }
    return found


def read_off(trace: Trace, sizes: Sizes, shards: int, *, is_offloaded: bool) -> SizeTerms:
    """Return the terms of a planned trace's last step.

    Args:
        trace: the trace of rank 0.
        sizes: what was planned, with more blocks that are at no end than are gathered at once.
        shards: number of ranks that share a copy of the model.
        is_offloaded: whether shards, their gradients and the optimizer's state are in the host's memory.

    Raises:
        TermsError: a buffer has the bytes of no quantity, or of several.
    """
    (known, elements), blocks = _known(sizes, shards), sizes["blocks"]
    hosts = OFFLOADED if is_offloaded else ()
    (rank,) = trace.ranks
    rows = rank.rows[rank.rows["category"] != NO_CATEGORY]
    last = int(rows["step"].max())
    live: dict[tuple[Category, str], list[int]] = {}  # by block, and what is in none
    moments: list[Moment] = []
    for row in rows[: 1 + max(place for place, step in enumerate(rows["step"]) if step == last)]:
        category = Category(row["category"])
        text = trace.header.strings[row["module"]] if row["module"] >= 0 else ""
        found = _BLOCK.search(trace.header.units[row["unit"]].name if row["unit"] >= 0 else text.partition("\t")[0])
        owner = int(found[1]) if found else _NOWHERE
        num_bytes = int(row["num_bytes"])
        if category is Category.OPTIMIZER_STATE:
            terms = _of_optimizer(elements, num_bytes, blocks)
        else:
            terms = {owner: _decoded(known, category, owner, num_bytes, text)}
        for each, parts in terms.items():
            for quantity, size in parts.items():
                held = live.setdefault((category, quantity), [0] * (blocks + 1))
                held[each] += size if num_bytes > 0 else -size
        if row["step"] == last and num_bytes > 0 and category not in hosts:
            moment = _counted({key: held for key, held in live.items() if key[0] not in hosts})
            moments.extend([moment] if moment is not None else [])
    at_end = _counted({key: held for key, held in live.items() if key[0] in hosts})
    return SizeTerms(moments=_needed(moments), host=at_end or {})


_Known = Mapping[str, Mapping[int, Sequence[Terms]]]
"""By ``block``, ``outside`` and ``activations``: what has so many bytes."""


def _known(sizes: Sizes, shards: int) -> tuple[_Known, dict[str, int]]:
    """Return the quantities by their bytes, and their elements."""
    elements = quantities(sizes, shards)
    known: dict[str, dict[int, list[Terms]]] = {}
    for name, number in elements.items():
        part = name.partition(".")[0] if "." in name else "activations"
        for size in _ITEM_SIZES:
            known.setdefault(part, {}).setdefault(size * number, []).append({name: size})
    for part in PARAMS:  # gradients in bfloat16, of vectors in float32
        terms = {f"{part}.full": 2, f"{part}.vectors": 2}
        known[part].setdefault(_size(terms, elements), []).append(terms)
    return known, elements


def _size(terms: Terms, elements: Mapping[str, int]) -> int:
    return sum(size * elements[name] for name, size in terms.items())


def _decoded(known: _Known, category: Category, owner: int, num_bytes: int, what: str) -> Terms:
    part = "activations" if category is Category.ACTIVATIONS else "outside" if owner == _NOWHERE else "block"
    found = known[part].get(abs(num_bytes), ())
    if len(found) != 1:
        raise TermsError(
            f"{category.words} of {abs(num_bytes)} bytes ({what or part}) are those of "
            f"{' and of '.join(map(str, found)) or 'no quantity'}"
        )
    return found[0]


def _of_optimizer(elements: Mapping[str, int], num_bytes: int, blocks: int) -> dict[int, Terms]:
    """Return the terms of Adam's state by block: two shards in float32, and the number of steps of each parameter.

    Raises:
        TermsError: it has other bytes.
    """
    each: dict[str, Terms] = {part: {f"{part}.shard": 8, "one": 4 * len(params)} for part, params in PARAMS.items()}
    found = {owner: each["outside" if owner == _NOWHERE else "block"] for owner in range(_NOWHERE, blocks)}
    size = sum(_size(terms, elements) for terms in found.values())
    if size != abs(num_bytes):
        raise TermsError(f"the optimizer's state has {abs(num_bytes)} bytes, and not {size}")
    return found


def _counted(live: Mapping[tuple[Category, str], Sequence[int]]) -> Moment | None:
    """Return what is held as counts; None if blocks in the middle differ, as one of them is at work."""
    found = {}
    for key, held in live.items():
        middle = held[ENDS : -1 - ENDS]  # the last one is of no block
        if any(each != middle[0] for each in middle):
            return None
        ends = sum(held) - sum(middle)
        if ends or middle[0]:
            found[key] = Count(ends, middle[0])
    return found


def _needed(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments that no other one exceeds in every term, whatever the sizes are."""
    sums = [Counter[tuple[str, str]]() for _ in moments]
    for total, moment in zip(sums, moments, strict=True):
        for (_, quantity), count in moment.items():
            total[quantity, "ends"] += count.ends + 2 * count.middle  # a model has at least two of these
            total[quantity, "middle"] += count.middle
    kept: list[int] = []
    for place, total in enumerate(sums):
        if any(total <= sums[other] for other in kept):
            continue
        kept = [other for other in kept if not sums[other] <= total] + [place]
    return [moments[place] for place in kept]
