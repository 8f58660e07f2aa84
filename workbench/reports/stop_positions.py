"""Where ranks are stopped inside a step, as text, from the positions that their control channels report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from workbench.events import Edge, Kind, Unit, unit_words
from workbench.protocol.rank_messages import Hold, Position, StepPosition
from workbench.replay.grouping import by_value, label
from workbench.replay.units import model_order
from workbench.reports.event_text import event_words
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

State = Literal["held", "waiting", "running", "starting", "idle", "no answer", "gone"]


@dataclass(frozen=True, kw_only=True)
class StopGroup:
    """Ranks that are stopped inside a step.

    Attributes:
        positions: newest position of every rank that has not finished the request.
        units: unit names by index.
    """

    positions: Mapping[int, Position]
    units: Mapping[int, str] = field(default_factory=dict)

    def renewed(self, positions: Mapping[int, Position]) -> StopGroup:
        """Return the group with newer positions of its ranks."""
        newest = {r: max(positions.get(r, p), p, key=lambda p: p.now_ns) for r, p in self.positions.items()}
        return replace(self, positions=newest)

    @property
    def is_late(self) -> bool:
        """Whether a rank is neither held in the gate nor waiting; it stops at its next event."""
        return any(state_of(position) == "running" for position in self.positions.values())

    @property
    def holds(self) -> dict[int, Hold]:
        """The holds of the ranks in the gate, by rank."""
        return {rank: p.held for rank, p in sorted(self.positions.items()) if p.held is not None}

    @property
    def held(self) -> tuple[int, ...]:
        """The ranks held in the gate."""
        return tuple(self.holds)

    @property
    def synchronised(self) -> tuple[int, ...]:
        """The ranks that waited for a device before they stopped."""
        return tuple(rank for rank, hold in self.holds.items() if hold.synchronised)

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """The breakpoints that hold the ranks, each once."""
        found = (hold.breakpoint for hold in self.holds.values())
        return tuple(dict.fromkeys(number for number in found if number is not None))

    def __str__(self) -> str:
        words = [f"{label_all(ranks, self.positions)} stopped {place}" for place, ranks in self._groups().items()]
        waits = {rank: state_of(self.positions[rank]) == "waiting" for rank in sorted(self.positions)}
        rest = by_value((r, "wait" if waits[r] else "stop at the next event") for r in waits if r not in self.holds)
        words += [f"{label(ranks)} {verb if len(ranks) > 1 else _third(verb)}" for verb, ranks in rest.items()]
        return "; ".join(words) or "no rank is stopped"

    def _groups(self) -> dict[str, list[int]]:
        """The held ranks by position; a rank held in a wait joins the ranks held at the same place."""
        names: dict[StepPosition, str] = {}
        for hold in sorted(self.holds.values(), key=lambda hold: hold.kind is Kind.WAIT):
            names.setdefault(hold.place, describe(hold, self.units))
        return by_value((rank, names[hold.place]) for rank, hold in self.holds.items())


def label_all(ranks: Iterable[int], everyone: Iterable[int]) -> str:
    """Return ``"4 ranks"`` if ``ranks`` are all of several ranks, else their label."""
    chosen = set(ranks)
    return f"{len(chosen)} ranks" if chosen == set(everyone) and len(chosen) > 1 else label(chosen)


def _third(verb: str) -> str:
    """Return the third person of a verb phrase: ``"stop at ..."`` -> ``"stops at ..."``."""
    first, space, rest = verb.partition(" ")
    return f"{first}s{space}{rest}"


def state_of(position: Position, default: State = "idle") -> State:
    """Return what a rank that answered is doing.

    Args:
        position: its reply.
        default: the state that the caller assumes if the reply does not contain one.
    """
    if position.held is not None:
        return "held"
    if position.waiting:
        return "waiting"
    return "running" if position.doing or position.place.step >= 0 else default


def describe(hold: Hold, units: Mapping[int, str]) -> str:
    """Return the place of a hold as text: ``"before all-gather of blocks.2, for its backward, step 3"``."""
    step = f", {step_name(hold.place.step)}" if hold.place.step >= 0 else ""
    unit = units.get(hold.unit)
    if hold.kind is not Kind.WAIT:
        return f"before {event_words(hold.kind, hold.edge, unit)}{_phase_words(hold, unit)}{step}"
    moment = "" if is_in_wait(hold) else ", just before the wait ends"
    return f"while waiting{'' if unit is None else f' for {unit_words(unit)}'}{moment}{_phase_words(hold, None)}{step}"


def _phase_words(hold: Hold, unit: str | None) -> str:
    """Return the phase of a hold, in which the same event may occur twice in a step; empty if the event implies it."""
    phase = hold.phase.info
    if phase.part in {None, hold.kind}:
        return ""
    is_gathered = unit is not None and hold.kind in {Kind.ALL_GATHER, Kind.UNSHARD} and phase.part is not Kind.OPTIMIZER
    return f", for its {phase.part.words}" if is_gathered else f", in the {phase.part.words}"


def is_in_wait(hold: Hold) -> bool:
    """Whether a rank is held in a wait, where its next event is unknown."""
    return (hold.kind, hold.edge) == (Kind.WAIT, Edge.BEGIN)


def live_units(header: Header) -> list[Unit]:
    """Return the units in use, from the top of the model."""
    return [header.units[index] for index in model_order(header) if header.units[index].in_use]


def param_names(header: Header) -> list[str]:
    """Return the names of all sharded parameters, each once; flat ones follow the parameters they hold."""
    found = [param for unit in live_units(header) for param in unit.params]
    return list(dict.fromkeys(name for param in found for name in (*(part.fqn for part in param.parts), param.fqn)))
