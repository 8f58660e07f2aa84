"""How a cluster is doing at this moment: the trace so far, and the state of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.session.places import Position, State, state_of
from workbench.trace.columns import Trace


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """What a live view is told.

    Attributes:
        trace: what happened so far.
        running: whether there are ranks.
        states: of each rank, by number; none without ranks.
        positions: where each rank was when it was last heard of.
    """

    trace: Trace
    running: bool = False
    states: Mapping[int, State] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)


def pulse(trace: Trace, alive: Sequence[bool], positions: Mapping[int, Position]) -> Pulse:
    """Return the pulse of ranks of which some are ``alive`` and some were heard of at ``positions``."""
    return Pulse(
        trace=trace,
        running=True,
        states={rank: _state(is_alive, positions.get(rank)) for rank, is_alive in enumerate(alive)},
        positions=dict(positions),
    )


def _state(is_alive: bool, position: Position | None) -> State:
    if not is_alive:
        return "gone"
    return "no answer" if position is None else state_of(position)
