"""Breakpoints: the events before which ranks stop, such as ``all_gather:blocks.2``; checked before ranks hear of it."""

from __future__ import annotations

import ast
import difflib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from workbench.errors import UsageError
from workbench.events import STOPS, unit_words

EVENTS = tuple(STOPS)
SPANS = tuple(name for name, kind in STOPS.items() if kind.info.is_span)
"""Events that begin and end."""

EDGES = ("begin", "end")
UNTIL = 0
"""Number of the breakpoint of ``step --until``."""

_SAMPLE = {"num_bytes": 1, "unit": "", "kind": "", "edge": "", "phase": "", "step": 1, "ordinal": 1, "rank": 0}
FIELDS = tuple(_SAMPLE)
"""What a condition may look at."""

_PLAIN = (ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Compare, ast.cmpop)
_LOGIC = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd)
_SUMS = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_ALLOWED = (*_PLAIN, *_LOGIC, *_SUMS)


@dataclass(frozen=True, kw_only=True)
class Breakpoint:
    """Where ranks stop.

    Attributes:
        id: tells it from others; 0 for ``step --until``.
        event: one of :data:`EVENTS`, maybe with ``.begin`` or ``.end``.
        unit: name or glob of units; ``(root)`` for the root; None: any unit or none.
        rank: the only rank that stops; None: all.
        when: condition over :data:`FIELDS`; None: always.
        once: whether it is gone after it stopped a rank.
    """

    id: int
    event: str
    unit: str | None = None
    rank: int | None = None
    when: str | None = None
    once: bool = False

    def __str__(self) -> str:
        words = [self.event if self.unit is None else f"{self.event}:{self.unit}"]
        words += [f"--rank {self.rank}"] if self.rank is not None else []
        words += [f"--when {shlex.quote(self.when)}"] if self.when is not None else []
        return " ".join(words)


def to_data(breakpoint_: Breakpoint) -> dict[str, Any]:
    """Return a breakpoint as its rank reads it."""
    return {name: value for name, value in vars(breakpoint_).items() if name != "once" or value}


def parse_event(text: str, units: Sequence[str]) -> tuple[str, str | None]:
    """Return ``"all-gather.end:blocks.2"`` as event and unit: ``("all_gather.end", "blocks.2")``.

    Args:
        text: as a person writes it.
        units: names of the units there are, root ``""`` included.

    Raises:
        UsageError: no such event or unit; the message lists those there are, the nearest first.
    """
    name, colon, unit = text.strip().partition(":")
    kind, dot, edge = name.strip().replace("-", "_").partition(".")
    if kind not in EVENTS:
        raise UsageError(f"there is no event {kind!r}; the events, nearest first: {', '.join(nearest(kind, EVENTS))}")
    if dot and (edge not in EDGES or kind not in SPANS):
        ends = "begin and end" if kind in SPANS else "neither begin nor end: it is an instant"
        raise UsageError(f"{name!r}: {kind} has {ends}")
    return f"{kind}{dot}{edge}", _check_unit(unit.strip(), units) if colon else None


def _check_unit(unit: str, units: Sequence[str]) -> str:
    known = [unit_words(name) for name in units]
    if not known:
        raise UsageError(f"nothing is sharded yet, so there is no unit {unit!r}: first %fsdp shard MODEL")
    if not any(name == unit or fnmatchcase(name, unit) for name in known):
        found = nearest(unit, known)
        more = f", ... {len(found) - 12} more" if len(found) > 12 else ""
        raise UsageError(f"there is no unit {unit!r}; the units, nearest first: {', '.join(found[:12])}{more}")
    return unit


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return ``known``, what reads most like ``word`` first."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, word, other).ratio())


def check_condition(when: str, rank: int | None) -> None:
    """Check that ``when`` is names of :data:`FIELDS`, constants and operators.

    Raises:
        UsageError: it holds something else, compares what cannot be compared, or asks for the rank where every rank
            has to stop at the same event.
    """
    try:
        tree = ast.parse(when.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise UsageError(f"--when takes a Python expression such as 'num_bytes > 1e6', not {when!r}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise UsageError(f"--when takes names, numbers and operators only, no {type(node).__name__} as in {when!r}")
        if isinstance(node, ast.Name) and node.id not in FIELDS:
            known = ", ".join(nearest(node.id, FIELDS))
            raise UsageError(f"--when knows no {node.id!r}; it knows, nearest first: {known}")
        if isinstance(node, ast.Name) and node.id == "rank" and rank is None:
            raise UsageError("a condition on the rank would stop ranks at different events: write --rank R instead")
    try:
        eval(compile(tree, "<when>", "eval", dont_inherit=True), {"__builtins__": {}}, dict(_SAMPLE))
    except ArithmeticError:
        return  # of the sample's numbers only
    except TypeError as error:
        raise UsageError(f"--when cannot be computed as in {when!r}: {error}") from None


class Breakpoints:
    """The breakpoints there are, in the order they were added."""

    def __init__(self) -> None:
        self._all: dict[int, Breakpoint] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._all.values()))

    def to_data(self) -> list[dict[str, Any]]:
        """Return all as ranks read them."""
        return [to_data(entry) for entry in tuple(self._all.values())]

    def named(self, number: int) -> str:
        """Return breakpoint ``number`` in words."""
        found = self._all.get(number)
        if number == UNTIL:
            return f"--until {found or ''}".rstrip()
        return f"breakpoint {number}" + (f": {found}" if found is not None else "")

    def add(self, event: str, unit: str | None, *, rank: int | None, when: str | None) -> Breakpoint:
        """Add one and return it."""
        added = Breakpoint(id=self._next, event=event, unit=unit, rank=rank, when=when)
        self._next += 1
        self._all[added.id] = added
        return added

    def set_until(self, event: str, unit: str | None) -> None:
        """Add the one of ``step --until``, which stops ranks once."""
        self._all[UNTIL] = Breakpoint(id=UNTIL, event=event, unit=unit, once=True)

    @property
    def until(self) -> Breakpoint | None:
        """The one of ``step --until``, as long as it has not stopped ranks and the steps are not over."""
        return self._all.get(UNTIL)

    def clear_until(self) -> bool:
        """Take the one of ``step --until`` away; tell whether it was there."""
        return self._all.pop(UNTIL, None) is not None

    def clear(self, number: int | None) -> int:
        """Take one away, or all; return how many.

        Raises:
            UsageError: there is no such breakpoint.
        """
        if number is None:
            count = len(self._all)
            self._all.clear()
            return count
        if number not in self._all:
            known = ", ".join(map(str, self._all)) or "none"
            raise UsageError(f"there is no breakpoint {number}; there are: {known}")
        del self._all[number]
        return 1
