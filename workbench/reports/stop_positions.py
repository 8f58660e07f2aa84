"""Where ranks stand inside a step, in words: from the positions that their side doors tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.events import Edge, Kind, Unit, unit_words
from workbench.protocol.rank_messages import Hold, Position, StepPosition
from workbench.replay.grouping import label
from workbench.replay.units import model_order
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

State = Literal["held", "waiting", "running", "starting", "idle", "no answer", "gone"]

_OF_ALL_UNITS = (Kind.OPTIMIZER, Kind.STEP)


@dataclass(frozen=True, kw_only=True)
class StopGroup:
    """Ranks that stand still inside a step.

    Attributes:
        positions: the newest of every rank of the request that has not ended.
        units: names by index.
    """

    positions: Mapping[int, Position]
    units: Mapping[int, str] = field(default_factory=dict)

    def renewed(self, positions: Mapping[int, Position]) -> StopGroup:
        """Return the same with what was heard of its ranks since."""
        newest = {r: max(positions.get(r, p), p, key=lambda p: p.now_ns) for r, p in self.positions.items()}
        return replace(self, positions=newest)

    @property
    def is_late(self) -> bool:
        """Whether a rank neither stands in the gate nor waits; it stops at its next event."""
        return any(state_of(position) == "running" for position in self.positions.values())

    @property
    def holds(self) -> dict[int, Hold]:
        """Where the ranks are held that stand in the gate, by rank."""
        return {rank: p.held for rank, p in sorted(self.positions.items()) if p.held is not None}

    @property
    def held(self) -> tuple[int, ...]:
        """The ranks that stand in the gate."""
        return tuple(self.holds)

    @property
    def synchronised(self) -> tuple[int, ...]:
        """The ranks that waited for a device before they stopped."""
        return tuple(rank for rank, hold in self.holds.items() if hold.synchronised)

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The breakpoints that hold them, each once."""
        found = (hold.breakpoint for hold in self.holds.values())
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
        names: dict[StepPosition, str] = {}
        for hold in sorted(self.holds.values(), key=lambda hold: hold.kind is Kind.WAIT):
            names.setdefault(hold.place, describe(hold, self.units))
        groups: dict[str, list[int]] = {}
        for rank, hold in self.holds.items():
            groups.setdefault(names[hold.place], []).append(rank)
        return groups


def label_all(ranks: Iterable[int], everyone: Iterable[int]) -> str:
    """Return ``"4 ranks"`` when ``ranks`` are all of several, else which they are."""
    chosen = set(ranks)
    return f"{len(chosen)} ranks" if chosen == set(everyone) and len(chosen) > 1 else label(chosen)


def _third(verb: str) -> str:
    """``"stop at ..."`` -> ``"stops at ..."``."""
    first, space, rest = verb.partition(" ")
    return f"{first}s{space}{rest}"


def state_of(position: Position, asked: State = "idle") -> State:
    """Return what a rank that answered is doing.

    Args:
        position: its answer.
        asked: what it does, as far as the one who asked something of it knows, if it says nothing of that itself.
    """
    if position.held is not None:
        return "held"
    if position.waiting:
        return "waiting"
    return "running" if position.doing or position.place.step >= 0 else asked


def event_words(kind: Kind, edge: Edge, unit: str | None) -> str:
    """Return an event in words: ``(ALL_GATHER, END, "blocks.2")`` -> ``"the end of all-gather of blocks.2"``."""
    of = "" if unit is None or kind in _OF_ALL_UNITS else f" {kind.info.of} {unit_words(unit)}"
    return f"{'the end of ' if edge is Edge.END else ''}{kind.words}{of}"


def describe(hold: Hold, units: Mapping[int, str]) -> str:
    """Return where a hold is: ``"before all-gather of blocks.2, step 3"``."""
    step = f", {step_name(hold.place.step)}" if hold.place.step >= 0 else ""
    unit = units.get(hold.unit)
    if hold.kind is not Kind.WAIT:
        return f"before {event_words(hold.kind, hold.edge, unit)}{step}"
    moment = "" if is_in_wait(hold) else ", just before the wait ends"
    return f"while waiting{'' if unit is None else f' for {unit_words(unit)}'}{moment}{step}"


def is_in_wait(hold: Hold) -> bool:
    """Whether a rank is held in a wait: what comes next is not known to it then."""
    return (hold.kind, hold.edge) == (Kind.WAIT, Edge.BEGIN)


def unit_names(header: Header) -> dict[int, str]:
    """Return the names of all units by index, root ``""`` included."""
    return {unit.index: unit.name for unit in header.units}


def live_units(header: Header) -> list[Unit]:
    """Return the units that were not undone, from the top of the model."""
    return [header.units[index] for index in model_order(header) if header.units[index].in_use]


def param_names(header: Header) -> list[str]:
    """Return the names of all sharded parameters, each once, of flat ones behind those that are in them."""
    found = [param for unit in live_units(header) for param in unit.params]
    return list(dict.fromkeys(name for param in found for name in (*(part.fqn for part in param.parts), param.fqn)))
