"""At which events a rank stops: breakpoints, and the targets of ``next`` and ``run_to``.

Each rank decides alone, from values that are equal on all ranks at the same event, so all stop at the same event. The
values of gradients are made equal by an exchange: see :mod:`workbench.runtime.gradient_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from workbench.events import COLLECTIVES, Edge, Kind, Phase
from workbench.protocol.breakpoints import Breakpoint, Condition, is_unit, split_event
from workbench.protocol.rank_messages import NOWHERE, StepPosition
from workbench.runtime.gradient_values import GradientValues


@dataclass(frozen=True, kw_only=True)
class PendingEvent:
    """An event that is about to be recorded.

    Attributes:
        unit: index of its unit, -1 without.
        unit_name: its display name, ``(root)`` for the root; empty without.
        num_bytes: its payload.
        phase: phase of the rank.
        place: its position.
        gradients: the values that conditions compare; None: they are not known.
    """

    kind: Kind
    edge: Edge
    unit: int
    unit_name: str
    num_bytes: int
    phase: Phase
    place: StepPosition
    gradients: GradientValues | None = None


# ---- where to stop


@dataclass(frozen=True)
class ArmedBreakpoint:
    """A breakpoint in the form that a rank compares with events.

    Attributes:
        breakpoint: the breakpoint of the notebook.
        rank: the comparing rank.
        kind, edge: of its event.
        condition: its parsed ``when``.
    """

    breakpoint: Breakpoint
    rank: int
    kind: Kind
    edge: Edge
    condition: Condition | None = None

    @classmethod
    def of(cls, breakpoint_: Breakpoint, rank: int) -> ArmedBreakpoint:
        """Parse a breakpoint on rank ``rank``.

        Raises:
            UsageError: the event, edge or condition is invalid.
        """
        kind, edge = split_event(breakpoint_.event)
        when = breakpoint_.when
        condition = Condition.parse(when, breakpoint_.rank, breakpoint_.event) if when is not None else None
        return cls(breakpoint_, rank, kind, edge, condition)

    @property
    def uses_gradients(self) -> bool:
        """Whether its condition needs values of gradients."""
        return self.condition is not None and self.condition.uses_gradients

    def matches(self, event: PendingEvent) -> bool:
        """Return whether to stop before ``event``."""
        if event.kind is not self.kind or event.edge is not self.edge:
            return False
        unit = self.breakpoint.unit
        if unit is not None and not is_unit(event.unit_name, unit):
            return False
        return self.condition is None or self.condition.holds(_fields(event, self.rank))


def _fields(event: PendingEvent, rank: int) -> dict[str, object]:
    """Return the values of the names in a condition."""
    return {
        "num_bytes": event.num_bytes,
        "unit": event.unit_name,
        "kind": event.kind.key,
        "edge": event.edge.key,
        "phase": event.phase.key,
        "step": event.place.step,
        "ordinal": event.place.ordinal,
        "rank": rank,
        "nan": 0 if event.gradients is None else event.gradients.nan,
        "grad_norm": math.nan if event.gradients is None else event.gradients.grad_norm,
    }


def arm(breakpoints: Iterable[Breakpoint], rank: int) -> tuple[ArmedBreakpoint, ...]:
    """Parse all breakpoints, and return those that stop rank ``rank``.

    Raises:
        UsageError: as :meth:`ArmedBreakpoint.of`; also for breakpoints of other ranks.
    """
    read = [ArmedBreakpoint.of(b, rank) for b in breakpoints]
    return tuple(armed for armed in read if armed.breakpoint.is_on and armed.breakpoint.rank in {None, rank})


# ---- next


def _is_collective(event: PendingEvent) -> bool:
    return event.kind in COLLECTIVES and event.edge is Edge.BEGIN


def _is_unit(event: PendingEvent) -> bool:
    return event.kind in {Kind.FORWARD, Kind.BACKWARD} and event.edge is Edge.BEGIN


def next_after(what: str, phase: Phase) -> Callable[[PendingEvent], bool]:
    """Return a predicate for the event that ``next`` stops at.

    Args:
        what: one of :data:`workbench.protocol.commands.NEXT`. ``event``; ``collective``: one is issued; ``unit``: the
            forward or backward of a unit begins; ``phase``: another one of forward, backward and optimizer.
        phase: current phase of the rank.
    """
    now = phase.info.part
    rules: dict[str, Callable[[PendingEvent], bool]] = {
        "event": lambda event: True,
        "collective": _is_collective,
        "unit": _is_unit,
        "phase": lambda event: event.phase.info.part not in (None, now),
    }
    return rules[what]


# ---- current targets


@dataclass(frozen=True)
class StopTargets:
    """Where this rank is to stop.

    Attributes:
        pause: at once.
        target: at this position; breakpoints before it are ignored.
        is_next: at the first event for which this is true.
        breakpoints: at these.
        after: not at this position or before. A rank that was held in a wait has not yet checked the event at which the
            others were held; like them, it must pass that event.
    """

    pause: bool = False
    target: StepPosition | None = None
    is_next: Callable[[PendingEvent], bool] | None = None
    breakpoints: tuple[ArmedBreakpoint, ...] = ()
    after: StepPosition = NOWHERE

    @property
    def is_anything(self) -> bool:
        """Whether it can stop at any event."""
        return self.pause or self.target is not None or self.is_next is not None or bool(self.breakpoints)

    def may_stop_at(self, kind: Kind) -> bool:
        """Return whether events of ``kind`` need a full check."""
        is_request = self.pause or self.target is not None or self.is_next is not None
        return is_request or any(b.kind is kind for b in self.breakpoints)

    def but(
        self,
        *,
        pause: bool = False,
        target: StepPosition | None = None,
        is_next: Callable[[PendingEvent], bool] | None = None,
    ) -> StopTargets:
        """Return a copy with the same breakpoints and only the given targets."""
        return StopTargets(breakpoints=self.breakpoints, pause=pause, target=target, is_next=is_next)

    def with_breakpoints(self, breakpoints: Iterable[ArmedBreakpoint]) -> StopTargets:
        """Return a copy with other breakpoints; one-time breakpoints of the current command stay, in front."""
        return replace(self, breakpoints=(*(b for b in self.breakpoints if b.breakpoint.once), *breakpoints))

    def lasting(self) -> StopTargets:
        """Return a copy with only the permanent breakpoints."""
        return StopTargets(breakpoints=tuple(b for b in self.breakpoints if not b.breakpoint.once))

    def without(self, met: ArmedBreakpoint | None) -> StopTargets:
        """Return a copy without ``met``, if that is a one-time breakpoint."""
        left = tuple(b for b in self.breakpoints if b is not met or not b.breakpoint.once)
        return replace(self, breakpoints=left)

    def stops_waiting(self, place: StepPosition) -> bool:
        """Return whether to stop in a wait that precedes the event at ``place``."""
        return self.pause or (self.target is not None and place >= self.target)

    def stops_at(self, event: PendingEvent) -> tuple[bool, ArmedBreakpoint | None]:
        """Return whether to stop before ``event``, and the breakpoint it meets, even if ``after`` suppresses it."""
        is_early = self.target is not None and event.place < self.target
        if is_early and not self.pause:
            return False, None
        met = next((b for b in self.breakpoints if b.matches(event)), None)
        if event.place <= self.after and not self.pause:
            return False, met
        stops = met is not None or self.stops_waiting(event.place) or bool(self.is_next and self.is_next(event))
        return stops, met
