"""At which events a rank stops: breakpoints, and what ``next`` and ``run_to`` ask for.

Every rank decides by itself, from what is equal on all ranks at the same event; so they stop at the same one. An
event's *position* is (step, ordinal): the number of events its rank announced before it in that step.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

from workbench.errors import UsageError
from workbench.events import COLLECTIVES, STOPS, Edge, Kind, Phase


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event that is about to be announced.

    Attributes:
        unit: index of its unit, -1 without.
        unit_name: as people write it, ``(root)`` for the root's own; empty without.
        num_bytes: its payload.
        phase: what the rank is busy with.
        step, ordinal: its position.
    """

    kind: Kind
    edge: Edge
    unit: int
    unit_name: str
    num_bytes: int
    phase: Phase
    step: int
    ordinal: int

    @property
    def position(self) -> tuple[int, int]:
        """Return (step, ordinal)."""
        return self.step, self.ordinal


# ---- conditions

_NODES = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.UAdd,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Compare,
    ast.cmpop,
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Load,
    ast.Name,
)
_SAMPLE = {
    "num_bytes": 1,
    "unit": "",
    "kind": "",
    "edge": "",
    "phase": "",
    "step": 1,
    "ordinal": 1,
    "rank": 0,
}
FIELDS = tuple(_SAMPLE)
"""Names that a condition may use."""


@dataclass(frozen=True)
class Condition:
    """What ``--when`` says.

    Attributes:
        text: as it was written.
        rank: this rank.
    """

    text: str
    rank: int
    _code: CodeType = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, rank: int) -> Condition:
        """Read an expression over :data:`FIELDS`: names, numbers, texts and operators only.

        Raises:
            UsageError: it is something else, or compares what cannot be compared.
        """
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"the condition {text!r} is no expression: {error}") from error
        for node in ast.walk(tree):
            _check_node(text, node)
        made = cls(text, rank, compile(tree, "<when>", "eval", dont_inherit=True))
        try:
            made._value(_SAMPLE)
        except TypeError as error:
            raise UsageError(f"the condition {text!r} cannot be evaluated: {error}") from error
        except ArithmeticError:
            return made  # of the sample's numbers only
        return made

    def _value(self, values: dict[str, Any]) -> bool:
        return bool(eval(self._code, {"__builtins__": {}}, values))

    def holds(self, event: Event) -> bool:
        """Tell whether it is true of ``event``; where it cannot be computed, it is not."""
        values = {
            "num_bytes": event.num_bytes,
            "unit": event.unit_name,
            "kind": event.kind.name.lower(),
            "edge": event.edge.name.lower(),
            "phase": event.phase.name.lower(),
            "step": event.step,
            "ordinal": event.ordinal,
            "rank": self.rank,
        }
        try:
            return self._value(values)
        except ArithmeticError:
            return False


def _check_node(text: str, node: ast.AST) -> None:
    if not isinstance(node, _NODES):
        what = {ast.Call: "calls", ast.Attribute: "attributes"}.get(type(node), type(node).__name__)
        raise UsageError(
            f"the condition {text!r} has {what} in it; it may have names, numbers, texts and operators (without **)"
        )
    if isinstance(node, ast.Name) and node.id not in FIELDS:
        raise UsageError(f"the condition {text!r} asks for {node.id!r}; there are: {', '.join(FIELDS)}")


# ---- where to stop


@dataclass(frozen=True, kw_only=True)
class Breakpoint:
    """Where to stop.

    Attributes:
        id: its name for the one who set it.
        unit: glob pattern of unit names; None: any event of that kind.
        condition: what else must hold.
        once: it is gone after the first stop.
    """

    id: int | str
    kind: Kind
    edge: Edge
    unit: str | None = None
    condition: Condition | None = None
    once: bool = False

    @classmethod
    def parse(cls, data: dict[str, Any], rank: int) -> Breakpoint:
        """Read what the side door was given, on rank ``rank``.

        Raises:
            UsageError: an unknown event or edge, or a condition that is none.
        """
        kind, edge = parse_event(str(data["event"]))
        when = data.get("when")
        return cls(
            id=data["id"],
            kind=kind,
            edge=edge,
            unit=data.get("unit") or None,
            condition=Condition.parse(str(when), rank) if when else None,
            once=bool(data.get("once", False)),
        )

    def matches(self, event: Event) -> bool:
        """Tell whether to stop before ``event``."""
        if event.kind is not self.kind or event.edge is not self.edge:
            return False
        if self.unit is not None and not fnmatch.fnmatchcase(event.unit_name, self.unit):
            return False
        return self.condition is None or self.condition.holds(event)


def parse_event(text: str) -> tuple[Kind, Edge]:
    """Read ``all_gather``, ``forward.end`` ...; without an edge it is the begin, or the instant there is.

    Raises:
        UsageError: there is no such event, or it has no such edge.
    """
    name, _, edge = text.strip().partition(".")
    kind = STOPS.get(name.replace("-", "_"))
    if kind is None:
        raise UsageError(f"there is no event {name!r}; there are: {', '.join(STOPS)}")
    if not kind.info.is_span:
        if edge:
            raise UsageError(f"{name} is an instant: write {name}, not {text}")
        return kind, Edge.INSTANT
    if edge not in {"", "begin", "end"}:
        raise UsageError(f"an event has a begin and an end, not {edge!r}: write {name}.begin or {name}.end")
    return kind, Edge.END if edge == "end" else Edge.BEGIN


def parse_all(data: Sequence[dict[str, Any]], rank: int) -> tuple[Breakpoint, ...]:
    """Read all breakpoints of this rank; those of other ranks are left out.

    Raises:
        UsageError: see :meth:`Breakpoint.parse`.
    """
    read = [(item.get("rank"), Breakpoint.parse(item, rank)) for item in data]
    return tuple(made for wanted, made in read if wanted is None or int(wanted) == rank)


# ---- next


def _is_collective(event: Event) -> bool:
    return event.kind in COLLECTIVES and event.edge is Edge.BEGIN


def _is_unit(event: Event) -> bool:
    return event.kind in {Kind.FORWARD, Kind.BACKWARD} and event.edge is Edge.BEGIN


def next_after(what: str, phase: Phase) -> Callable[[Event], bool]:
    """Return whether an event is the one that ``next`` goes to.

    Args:
        what: ``event``; ``collective``: one is issued; ``unit``: the forward or backward of a unit begins; ``phase``:
            another one of forward, backward and optimizer.
        phase: where the rank is now.

    Raises:
        UsageError: another word.
    """
    now = phase.info.part
    rules: dict[str, Callable[[Event], bool]] = {
        "event": lambda event: True,
        "collective": _is_collective,
        "unit": _is_unit,
        "phase": lambda event: event.phase.info.part not in (None, now),
    }
    if what not in rules:
        raise UsageError(f"next goes to the next {', '.join(rules)}, not {what!r}")
    return rules[what]


# ---- what is asked for at present


@dataclass(frozen=True)
class Wanted:
    """Where this rank is to stop.

    Attributes:
        pause: at once.
        target: at this position; breakpoints before it do not count.
        is_next: at the event this is true of.
        breakpoints: at these.
        after: not at this position or before. A rank that stood in a wait has not been asked about the event at which
            the others stood, and goes on past it as they do.
    """

    pause: bool = False
    target: tuple[int, int] | None = None
    is_next: Callable[[Event], bool] | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    after: tuple[int, int] = (-1, -1)

    @property
    def is_anything(self) -> bool:
        """True if there is an event it would stop at."""
        return self.pause or self.target is not None or self.is_next is not None or bool(self.breakpoints)

    def may_stop_at(self, kind: Kind) -> bool:
        """Tell whether an event of ``kind`` is worth a closer look."""
        is_request = self.pause or self.target is not None or self.is_next is not None
        return is_request or any(b.kind is kind for b in self.breakpoints)

    def going_on(self) -> Wanted:
        """Return the same breakpoints, and nothing else."""
        return Wanted(breakpoints=self.breakpoints)

    def without(self, met: Breakpoint | None) -> Wanted:
        """Return the same without ``met``, if that was for once."""
        return replace(self, breakpoints=tuple(b for b in self.breakpoints if b is not met or not b.once))

    def with_breakpoints(self, breakpoints: tuple[Breakpoint, ...]) -> Wanted:
        """Return the same with other breakpoints."""
        return replace(self, breakpoints=breakpoints)

    def stops_waiting(self, position: tuple[int, int]) -> bool:
        """Tell whether to stop in a wait after which the event at ``position`` comes."""
        return self.pause or (self.target is not None and position >= self.target)

    def stops_at(self, event: Event) -> tuple[bool, Breakpoint | None]:
        """Tell whether to stop before ``event``, and which breakpoint is met (or would be, but for ``after``)."""
        is_early = self.target is not None and event.position < self.target
        if is_early and not self.pause:
            return False, None
        met = next((b for b in self.breakpoints if b.matches(event)), None)
        if event.position <= self.after and not self.pause:
            return False, met
        stops = met is not None or self.stops_waiting(event.position) or bool(self.is_next and self.is_next(event))
        return stops, met
