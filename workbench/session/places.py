"""Where ranks stand inside a step, in words: from the plain positions of their side doors. Pure.

A *position* is a rank's answer to "where"; it is *held* when the thread that runs the step stands in the gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.events import Kind, Unit, unit_words
from workbench.replay.alike import label
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

Position = Mapping[str, Any]
State = Literal["held", "waiting", "running", "starting", "idle", "no answer", "gone"]

_WORDS = {kind.name.lower(): kind.words for kind in Kind}
_OF_ALL_UNITS = {"optimizer", "step"}


@dataclass(frozen=True)
class Place:
    """Where ranks run to: the ``ordinal``-th event of a step; later places are greater.

    Attributes:
        step: training step, -1 outside.
        ordinal: events of the step before it.
    """

    step: int
    ordinal: int

    def __lt__(self, other: Place) -> bool:
        return (self.step, self.ordinal) < (other.step, other.ordinal)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ranks that stand still inside a step.

    Attributes:
        positions: the newest of every rank of the request that has not ended.
        units: names by index.
        is_late: whether a rank neither stands in the gate nor waits; it stops at its next event.
    """

    positions: Mapping[int, Position]
    units: Mapping[int, str] = field(default_factory=dict)
    is_late: bool = False

    @property
    def held(self) -> tuple[int, ...]:
        """The ranks that stand in the gate."""
        return tuple(rank for rank, position in sorted(self.positions.items()) if position.get("held"))

    @property
    def synchronised(self) -> tuple[int, ...]:
        """The ranks that waited for a device before they stopped."""
        return tuple(rank for rank in self.held if self.positions[rank]["held"].get("synchronised"))

    @property
    def breakpoints(self) -> tuple[Any, ...]:
        """The breakpoints that hold them, each once."""
        found = (self.positions[rank]["held"].get("breakpoint") for rank in self.held)
        return tuple(dict.fromkeys(number for number in found if number is not None))

    def __str__(self) -> str:
        words = [f"{label_all(ranks, self.positions)} stopped {place}" for place, ranks in self._groups().items()]
        rest: dict[str, list[int]] = {}
        for rank in sorted(self.positions.keys() - set(self.held)):
            waits = state_of(self.positions[rank]) == "waiting"
            rest.setdefault("wait" if waits else "stop at the next event", []).append(rank)
        words += [f"{label(ranks)} {verb if len(ranks) > 1 else _third(verb)}" for verb, ranks in rest.items()]
        return "; ".join(words) or "no rank is stopped"

    def _groups(self) -> dict[str, list[int]]:
        """The held ranks by where they are; a rank in a wait is where those are that come to the same event."""
        names: dict[Place, str] = {}
        for rank in sorted(self.held, key=lambda rank: self.positions[rank]["held"]["kind"] == "wait"):
            names.setdefault(place_of(self.positions[rank]), describe(self.positions[rank]["held"], self.units))
        groups: dict[str, list[int]] = {}
        for rank in self.held:
            groups.setdefault(names[place_of(self.positions[rank])], []).append(rank)
        return groups


def label_all(ranks: Iterable[int], everyone: Iterable[int]) -> str:
    """Return ``"4 ranks"`` when ``ranks`` are all of several, else which they are."""
    chosen = set(ranks)
    return f"{len(chosen)} ranks" if chosen == set(everyone) and len(chosen) > 1 else label(chosen)


def _third(verb: str) -> str:
    """``"stop at ..."`` -> ``"stops at ..."``."""
    first, space, rest = verb.partition(" ")
    return f"{first}s{space}{rest}"


def place_of(position: Position) -> Place:
    """Return the event that a rank stands before, or will come to next."""
    here = position.get("held") or position
    return Place(int(here.get("step", -1)), int(here.get("ordinal", 0)))


def identity(held: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return what tells one hold from the next one."""
    return () if not held else (held["step"], held["ordinal"], held.get("since_ns"))


def state_of(position: Position, asked: State = "idle") -> State:
    """Return what a rank that answered is doing.

    Args:
        position: its answer.
        asked: what it does, as far as the one who asked something of it knows, if it says nothing of that itself.
    """
    if position.get("held"):
        return "held"
    if position.get("waiting"):
        return "waiting"
    return "running" if position.get("doing") or position.get("step", -1) >= 0 else asked


def event_words(kind: str, edge: str, unit: str | None) -> str:
    """Return an event in words: ``("all_gather", "end", "blocks.2")`` -> ``"the end of all-gather of blocks.2"``."""
    what = _WORDS.get(kind, kind)
    of = "" if unit is None or kind in _OF_ALL_UNITS else f" of {unit_words(unit)}"
    return f"{'the end of ' if edge == 'end' else ''}{what}{of}"


def describe(held: Mapping[str, Any], units: Mapping[int, str]) -> str:
    """Return where a hold is: ``"before all-gather of blocks.2, step 3"``."""
    step = f", {step_name(held['step'])}" if held["step"] >= 0 else ""
    where = "in a" if (held["kind"], held["edge"]) == ("wait", "begin") else "before"
    return f"{where} {event_words(held['kind'], held['edge'], units.get(held.get('unit', -1)))}{step}"


def unit_names(header: Header) -> dict[int, str]:
    """Return the names of all units by index, root ``""`` included."""
    return {unit.index: unit.name for unit in header.units}


def live_units(header: Header) -> list[Unit]:
    """Return the units that were not undone."""
    return [unit for unit in header.units if not unit.retired]
