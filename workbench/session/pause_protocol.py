"""Stopping all ranks at the same event, and detecting that they are stopped.

A pause has two steps. First every rank holds at its next event, or where it waits. Then all ranks run on to the
position of the furthest one. That rank has already issued everything that the others need to get there, so none waits
for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, TypeVar

from workbench.cluster.channel_protocol import ControlChannel, answers
from workbench.protocol.commands import Continue, Next, Pause, RankRequest
from workbench.protocol.rank_messages import Hold, Locate, Position, RunTo, StepPosition
from workbench.reports.stop_positions import StopGroup, is_in_wait

R = TypeVar("R")

ALIGN_S = 0.15
"""Time in seconds to wait for running ranks to hold before the furthest position is sent to all."""

PAUSE_S = 0.4
"""Time in seconds after a pause to wait for a rank that computes; it stops later, at its next event.

The same holds for a rank in a wait that has not checked for the pause yet.
"""

SETTLED_S = 0.25
"""Time in seconds without any change after which ranks that wait for a held rank count as stopped."""

STARVED_S = 5.0
"""The same if no held rank can be the one they wait for, in seconds: then they may still go on, on a slow machine.

Also how long a pause waits for a rank that does not answer: it may be ahead of the others and wait for them.
"""

WHERE_S, WHERE_PER_RANK_S = 0.15, 0.02
"""Timeout of a position query, in seconds: minimum, and per rank, as the ranks share the cores."""


class PauseProtocol:
    """Stops the ranks of one request, releases them, and detects when they are stopped.

    Args:
        channel: control channels of the cluster.
        clock: monotonic clock, in seconds.

    Attributes:
        eager: whether a stop is due soon, so that positions are worth polling 50 times a second.
        is_armed: whether ranks may still stop because of an earlier pause or next.
    """

    def __init__(self, channel: ControlChannel, clock: Callable[[], float] = time.monotonic) -> None:
        self._channel, self._clock = channel, clock
        self.eager = self.is_armed = False
        self._paused_at: float | None = None
        self._sent_to: StepPosition | None = None
        self._left: dict[int, Hold | None] = {}
        self._standing: dict[int, Position] = {}  # ranks seen held; they stay held until released
        self._ask_at = 0.0
        self._seen: Any = None
        self._seen_at = 0.0

    @property
    def is_pausing(self) -> bool:
        """Whether a pause is under way."""
        return self._paused_at is not None

    def pause(self, ranks: Set[int]) -> None:
        """Begin to stop ``ranks``; a second call while they are stopping does nothing."""
        if self._paused_at is not None:
            return
        self._paused_at, self._sent_to = self._clock(), None
        self.eager = self.is_armed = True
        self._ask(Pause(), ranks)

    def release(self, ranks: Set[int], positions: Mapping[int, Position], what: str | None = None) -> None:
        """Release ``ranks``, until the next ``what`` (event, collective, unit, phase) if one is given."""
        self._left = {rank: position.held for rank, position in positions.items()}
        self._paused_at, self._seen, self._standing = None, None, {}
        self.eager = self.is_armed = what is not None
        self._ask(Continue() if what is None else Next(what=what), ranks)

    def disarm(self, ranks: Set[int]) -> None:
        """Cancel an earlier pause or next that could still stop ``ranks``."""
        if self.is_armed:
            self.release(ranks, {})

    def ask_where(self, ranks: Set[int]) -> dict[int, Position] | None:
        """Return the positions of those of ``ranks`` not seen held yet, without ranks that do not answer.

        None if the last query is too recent: answering costs CPU time that other ranks need to reach their stops, so
        the pause between two queries is at least as long as a query.
        """
        begin = self._clock()
        if begin < self._ask_at:
            return None
        found = self._ask(Locate(), ranks - self._standing.keys())
        end = self._clock()
        self._ask_at = end + (end - begin)
        return found

    def look(self, positions: Mapping[int, Position], running: Set[int]) -> StopGroup | None:
        """Return the stop if the ``running`` ranks are stopped, else None; let ranks held too early run on."""
        fresh = {rank: self._fresh(rank, position) for rank, position in positions.items()}
        self._standing |= {rank: p for rank, p in fresh.items() if p.held is not None and not is_in_wait(p.held)}
        known = fresh | self._standing
        here = {rank: known[rank] for rank in sorted(running) if rank in known}
        held = {rank for rank, position in here.items() if position.held is not None}
        self._note({rank: (position.held, position.place, position.waiting) for rank, position in here.items()})
        if self._paused_at is not None and self._align(here, held, running):
            return None
        if not held or not self._is_over(here, held, running):
            return None
        self._paused_at, self.eager, self._standing = None, False, {}
        return StopGroup(positions={rank: here.get(rank, Position(rank=rank)) for rank in sorted(running)})

    def _fresh(self, rank: int, position: Position) -> Position:
        """Return ``position`` without its hold if the rank was released from that hold already."""
        is_old = position.held is not None and position.held == self._left.get(rank)
        return replace(position, held=None) if is_old else position

    def _note(self, seen: object) -> None:
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()

    def _align(self, here: Mapping[int, Position], held: Set[int], running: Set[int]) -> bool:
        """Send all ranks to the furthest position; return whether the pause has to wait until they get there."""
        since = self._clock() - (self._paused_at or 0.0)
        if held != running and since < ALIGN_S:
            return True
        places = {rank: position.place for rank, position in here.items()}
        furthest = max(places.values(), default=None)
        if furthest is None or all(place == furthest for place in places.values()):
            return False
        if self._sent_to is None or self._sent_to < furthest:
            self._sent_to = furthest
            self._left = {rank: here[rank].held for rank in held if places[rank] < furthest}
            for rank in self._left:
                self._standing.pop(rank, None)
            self._ask(RunTo(place=furthest), running)
            return True
        return since < PAUSE_S

    def _is_over(self, here: Mapping[int, Position], held: Set[int], running: Set[int]) -> bool:
        if held == running:
            return True
        if self._paused_at is not None:  # ranks that still run stop later, at their next event
            return self._clock() - self._paused_at >= (PAUSE_S if running <= here.keys() else STARVED_S)
        others_wait = all(rank in here and here[rank].waiting for rank in running - held)
        places = {rank: position.place for rank, position in here.items()}
        # the rank furthest behind has everything it needs from the others, so it can only be stuck if it is held
        is_held_up = min(places.values()) in {places[rank] for rank in held}
        return others_wait and self._clock() - self._seen_at >= (SETTLED_S if is_held_up else STARVED_S)

    def _ask(self, request: RankRequest[R], ranks: Set[int]) -> dict[int, R]:
        timeout_s = max(WHERE_S, WHERE_PER_RANK_S * len(ranks))
        return answers(self._channel, request, sorted(ranks), timeout_s=timeout_s) if ranks else {}
