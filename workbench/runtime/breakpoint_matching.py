"""At which events a rank stops: breakpoints, and what ``next`` and ``run_to`` ask for.

Every rank decides by itself, from what is equal on all ranks at the same event; so they stop at the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from workbench.events import COLLECTIVES, Edge, Kind, Phase
from workbench.protocol.breakpoints import Breakpoint, Condition, is_unit, split_event
from workbench.protocol.rank_messages import NOWHERE, StepPosition


@dataclass(frozen=True, kw_only=True)
class PendingEvent:
    """An event that is about to be announced.

    Attributes:
        unit: index of its unit, -1 without.
        unit_name: as people write it, ``(root)`` for the root's own; empty without.
        num_bytes: its payload.
        phase: what the rank is busy with.
        place: which event of which step it is.
    """

    kind: Kind
    edge: Edge
    unit: int
    unit_name: str
    num_bytes: int
    phase: Phase
    place: StepPosition


# ---- where to stop


@dataclass(frozen=True)
class ArmedBreakpoint:
    """A breakpoint as a rank compares it with events.

    Attributes:
        breakpoint: what the notebook has.
        rank: that compares.
        kind, edge: of its event.
        condition: its ``when``, read.
    """

    breakpoint: Breakpoint
    rank: int
    kind: Kind
    edge: Edge
    condition: Condition | None = None

    @classmethod
    def of(cls, breakpoint_: Breakpoint, rank: int) -> ArmedBreakpoint:
        """Read a breakpoint on rank ``rank``.

        Raises:
            UsageError: an unknown event or edge, or a condition that is none.
        """
        kind, edge = split_event(breakpoint_.event)
        when = breakpoint_.when
        condition = Condition.parse(when, breakpoint_.rank) if when is not None else None
        return cls(breakpoint_, rank, kind, edge, condition)

    def matches(self, event: PendingEvent) -> bool:
        """Tell whether to stop before ``event``."""
        if event.kind is not self.kind or event.edge is not self.edge:
            return False
        unit = self.breakpoint.unit
        if unit is not None and not is_unit(event.unit_name, unit):
            return False
        return self.condition is None or self.condition.holds(_fields(event, self.rank))


def _fields(event: PendingEvent, rank: int) -> dict[str, object]:
    """Return what a condition may look at."""
    return {
        "num_bytes": event.num_bytes,
        "unit": event.unit_name,
        "kind": event.kind.key,
        "edge": event.edge.key,
        "phase": event.phase.key,
        "step": event.place.step,
        "ordinal": event.place.ordinal,
        "rank": rank,
    }


def arm(breakpoints: Iterable[Breakpoint], rank: int) -> tuple[ArmedBreakpoint, ...]:
    """Read all breakpoints, and return those that stop rank ``rank``.

    Raises:
        UsageError: see :meth:`ArmedBreakpoint.of`; also of another rank's.
    """
    read = [ArmedBreakpoint.of(b, rank) for b in breakpoints]
    return tuple(armed for armed in read if armed.breakpoint.is_on and armed.breakpoint.rank in {None, rank})


# ---- next


def _is_collective(event: PendingEvent) -> bool:
    return event.kind in COLLECTIVES and event.edge is Edge.BEGIN


def _is_unit(event: PendingEvent) -> bool:
    return event.kind in {Kind.FORWARD, Kind.BACKWARD} and event.edge is Edge.BEGIN


def next_after(what: str, phase: Phase) -> Callable[[PendingEvent], bool]:
    """Return whether an event is the one that ``next`` goes to.

    Args:
        what: one of :data:`workbench.protocol.commands.NEXT`. ``event``; ``collective``: one is issued; ``unit``: the
            forward or backward of a unit begins; ``phase``: another one of forward, backward and optimizer.
        phase: where the rank is now.
    """
    now = phase.info.part
    rules: dict[str, Callable[[PendingEvent], bool]] = {
        "event": lambda event: True,
        "collective": _is_collective,
        "unit": _is_unit,
        "phase": lambda event: event.phase.info.part not in (None, now),
    }
    return rules[what]


# ---- what is asked for at present


@dataclass(frozen=True)
class StopTargets:
    """Where this rank is to stop.

    Attributes:
        pause: at once.
        target: at this place; breakpoints before it do not count.
        is_next: at the event this is true of.
        breakpoints: at these.
        after: not at this place or before. A rank that stood in a wait has not been asked about the event at which
            the others stood, and goes on past it as they do.
    """

    pause: bool = False
    target: StepPosition | None = None
    is_next: Callable[[PendingEvent], bool] | None = None
    breakpoints: tuple[ArmedBreakpoint, ...] = ()
    after: StepPosition = NOWHERE

    @property
    def is_anything(self) -> bool:
        """True if there is an event it would stop at."""
        return self.pause or self.target is not None or self.is_next is not None or bool(self.breakpoints)

    def may_stop_at(self, kind: Kind) -> bool:
        """Tell whether an event of ``kind`` is worth a closer look."""
        is_request = self.pause or self.target is not None or self.is_next is not None
        return is_request or any(b.kind is kind for b in self.breakpoints)

    def but(
        self,
        *,
        pause: bool = False,
        target: StepPosition | None = None,
        is_next: Callable[[PendingEvent], bool] | None = None,
    ) -> StopTargets:
        """Return the same breakpoints, and nothing else but what is given."""
        return StopTargets(breakpoints=self.breakpoints, pause=pause, target=target, is_next=is_next)

    def with_breakpoints(self, breakpoints: Iterable[ArmedBreakpoint]) -> StopTargets:
        """Return the same with other breakpoints; those for once, which came with what is under way, stay in front."""
        return replace(self, breakpoints=(*(b for b in self.breakpoints if b.breakpoint.once), *breakpoints))

    def lasting(self) -> StopTargets:
        """Return the breakpoints that are not for once, and nothing else."""
        return StopTargets(breakpoints=tuple(b for b in self.breakpoints if not b.breakpoint.once))

    def without(self, met: ArmedBreakpoint | None) -> StopTargets:
        """Return the same without ``met``, if that was for once."""
        left = tuple(b for b in self.breakpoints if b is not met or not b.breakpoint.once)
        return replace(self, breakpoints=left)

    def stops_waiting(self, place: StepPosition) -> bool:
        """Tell whether to stop in a wait after which the event at ``place`` comes."""
        return self.pause or (self.target is not None and place >= self.target)

    def stops_at(self, event: PendingEvent) -> tuple[bool, ArmedBreakpoint | None]:
        """Tell whether to stop before ``event``, and which breakpoint is met (or would be, but for ``after``)."""
        is_early = self.target is not None and event.place < self.target
        if is_early and not self.pause:
            return False, None
        met = next((b for b in self.breakpoints if b.matches(event)), None)
        if event.place <= self.after and not self.pause:
            return False, met
        stops = met is not None or self.stops_waiting(event.place) or bool(self.is_next and self.is_next(event))
        return stops, met
