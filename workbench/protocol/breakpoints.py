"""Breakpoints: the events before which ranks stop, such as ``all_gather:blocks.2``, and the conditions on them."""

from __future__ import annotations

import ast
import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import CodeType

from workbench.errors import UsageError
from workbench.events import STOPS, Edge, Kind, unit_words

EVENTS = tuple(STOPS)
EDGES = (Edge.BEGIN.key, Edge.END.key)
_OPTIMIZER = Kind.OPTIMIZER.key
UNTIL = 0
"""Number of the breakpoint of ``step --until``."""

_SAMPLE: dict[str, object] = {
    "num_bytes": 1,
    "unit": "",
    "kind": "",
    "edge": "",
    "phase": "",
    "step": 1,
    "ordinal": 1,
    "rank": 0,
}
GRADIENTS = {"nan": 0, "grad_norm": 1.0}
"""Names of values of gradients, with samples; a condition may use them before an optimizer's step."""

_SAMPLE |= GRADIENTS
FIELDS = tuple(_SAMPLE)
"""Names that a condition may use."""

_PLAIN = (ast.Expression, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Compare, ast.cmpop)
_LOGIC = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd)
_SUMS = (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_ALLOWED = (*_PLAIN, *_LOGIC, *_SUMS)


@dataclass(frozen=True, kw_only=True)
class Breakpoint:
    """Where ranks stop.

    Attributes:
        id: its number; 0 for ``step --until``.
        event: one of :data:`EVENTS`, optionally with ``.begin`` or ``.end``.
        unit: name or glob of units; ``(root)`` for the root; None: any unit or none.
        rank: the only rank that stops; None: all.
        when: condition over :data:`FIELDS`; None: always.
        once: whether it is removed after it stopped a rank; it belongs to one ``step`` command and ends with it.
        is_on: whether it is turned on.
    """

    id: int
    event: str
    unit: str | None = None
    rank: int | None = None
    when: str | None = None
    once: bool = False
    is_on: bool = True

    def __str__(self) -> str:
        words = [self.event if self.unit is None else f"{self.event}:{self.unit}"]
        words += [f"--rank {self.rank}"] if self.rank is not None else []
        words += [f"--when {shlex.quote(self.when)}"] if self.when is not None else []
        return " ".join(words)


def parse_event(text: str, units: Sequence[str]) -> tuple[str, str | None]:
    """Return ``"all-gather.end:blocks.2"`` as event and unit: ``("all_gather.end", "blocks.2")``.

    Args:
        text: as the user writes it.
        units: names of all units, root ``""`` included.

    Raises:
        UsageError: there is no such event or unit; the message lists the known ones, the nearest first.
    """
    event, unit = read_event(text)
    if unit is not None:
        chosen_units(unit, units)
    return event, unit


def read_event(text: str) -> tuple[str, str | None]:
    """Return ``"all-gather.end:blocks.2"`` as event and unit, without checking the unit.

    Raises:
        UsageError: there is no such event; the message lists the known ones, the nearest first.
    """
    name, colon, unit = text.strip().partition(":")
    event = name.strip().replace("-", "_")
    split_event(event)
    return event, unit.strip() if colon else None


def with_condition(text: str, when: str | None = None) -> tuple[str, str | None]:
    """Return ``"grad_norm > 10"`` as the event whose condition it is, and the condition; other events as they are.

    Example: ``"nan"``, ``"step > 5"`` -> ``"optimizer"``, ``"(step > 5) and (nan)"``.
    """
    if ":" in text or not any(re.search(rf"\b{name}\b", text) for name in GRADIENTS):
        return text, when
    return _OPTIMIZER, text.strip() if when is None else f"({when}) and ({text.strip()})"


def split_event(event: str) -> tuple[Kind, Edge]:
    """Return ``"forward.end"`` as kind and edge; without an edge it is the begin, or the instant.

    Raises:
        UsageError: there is no such event, or it has no such edge.
    """
    name, dot, edge = event.partition(".")
    if name not in STOPS:
        raise UsageError(f"there is no event {name!r}; the events, nearest first: {', '.join(nearest(name, EVENTS))}")
    kind = STOPS[name]
    if dot and (edge not in EDGES or not kind.info.is_span):
        ends = "begin and end" if kind.info.is_span else "neither begin nor end: it is an instant"
        raise UsageError(f"{event!r}: {name} has {ends}")
    if not kind.info.is_span:
        return kind, Edge.INSTANT
    return kind, Edge.END if edge == "end" else Edge.BEGIN


def chosen_units(unit: str, units: Sequence[str]) -> list[str]:
    """Return the names among ``units`` that match ``unit``.

    Args:
        unit: a name, a glob, or ``(root)``.
        units: names of all units, root ``""`` included.

    Raises:
        UsageError: none matches; the message lists the known ones, the nearest first.
    """
    known = {name: unit_words(name) for name in units}
    if not known:
        raise UsageError(f"nothing is sharded yet, so there is no unit {unit!r}: first %fsdp shard MODEL")
    chosen = [name for name, words in known.items() if is_unit(words, unit)]
    if not chosen:
        found = nearest(unit, known.values())
        more = f", ... {len(found) - 12} more" if len(found) > 12 else ""
        raise UsageError(f"there is no unit {unit!r}; the units, nearest first: {', '.join(found[:12])}{more}")
    return chosen


def is_unit(words: str, unit: str) -> bool:
    """Return whether the unit with the display name ``words`` matches ``unit``, a name or a glob."""
    return words == unit or fnmatchcase(words, unit)


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return ``known``, sorted by similarity to ``word``."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, word, other).ratio())


@dataclass(frozen=True)
class Condition:
    """A parsed ``--when`` condition of names of :data:`FIELDS`, constants and operators.

    Attributes:
        text: the source text.
    """

    text: str
    _code: CodeType = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, rank: int | None, event: str = "") -> Condition:
        """Parse a condition; ``rank`` is the only rank that stops, None if all do, and ``event`` the event, "" if any.

        Raises:
            UsageError: it holds something else, compares incompatible values, uses ``rank`` although every rank has
                to stop at the same event, or gradients where they are not compared.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError):
            raise UsageError(f"--when takes a Python expression such as 'num_bytes > 1e6', not {text!r}") from None
        for node in ast.walk(tree):
            _check_node(node, text, rank)
        read = cls(text, compile(tree, "<when>", "eval", dont_inherit=True))
        if event and read.uses_gradients:
            if event != _OPTIMIZER:
                when = shlex.quote(text)
                raise UsageError(
                    f"gradients are compared before an optimizer's step: %fsdp break add optimizer --when {when}"
                )
            if rank is not None:
                raise UsageError("all ranks compare the gradients together, and stop together: leave --rank out")
        try:
            read._value(_SAMPLE)
        except ArithmeticError:  # from the sample values; others may work
            pass
        except TypeError as error:
            raise UsageError(f"--when cannot evaluate {text!r}: {error}") from None
        return read

    @property
    def uses_gradients(self) -> bool:
        """Whether it needs values of gradients."""
        return not GRADIENTS.keys().isdisjoint(self._code.co_names)

    def holds(self, values: Mapping[str, object]) -> bool:
        """Return whether it is true of an event with these :data:`FIELDS`; False if it cannot be computed."""
        try:
            return self._value(values)
        except (ArithmeticError, TypeError):  # parse does not evaluate what follows a false "and"
            return False

    def _value(self, values: Mapping[str, object]) -> bool:
        return bool(eval(self._code, {"__builtins__": {}}, values))


def _check_node(node: ast.AST, text: str, rank: int | None) -> None:
    if not isinstance(node, _ALLOWED):
        raise UsageError(f"--when takes names, numbers and operators only, no {type(node).__name__} as in {text!r}")
    if isinstance(node, ast.Name) and node.id not in FIELDS:
        known = ", ".join(nearest(node.id, FIELDS))
        raise UsageError(f"--when has no name {node.id!r}; the names, nearest first: {known}")
    if isinstance(node, ast.BinOp) and (_is_no_number(node.left) or _is_no_number(node.right)):
        raise UsageError(f"--when computes with numbers only, not with strings or lists as in {text!r}")
    if isinstance(node, ast.Name) and node.id == "rank" and rank is None:
        raise UsageError("a condition on the rank would stop ranks at different events: write --rank R instead")


def _is_no_number(node: ast.AST) -> bool:
    """Return whether ``node`` may be a text or a list; a list multiplied by ``num_bytes`` would fill the memory."""
    match node:
        case ast.Constant(value=value):
            return not isinstance(value, (int, float))
        case ast.Name(id=name):
            return isinstance(_SAMPLE.get(name), str)
        case ast.BoolOp(values=values):
            return any(map(_is_no_number, values))
    return isinstance(node, (ast.Tuple, ast.List, ast.Set))
