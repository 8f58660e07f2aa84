"""How a cluster is doing at this moment: the trace so far, and the state of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workbench.events import Unit
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.rank_messages import Position
from workbench.reports.cursor import Cursor
from workbench.reports.step_progress import Progress
from workbench.reports.stop_positions import State, state_of
from workbench.trace.columns import Trace

Exchange = Literal["", "start", "stop", "open"]
"""Word of the command that is exchanging the ranks, or what is shown instead of them; empty: none is."""


@dataclass(frozen=True, kw_only=True)
class ActiveRequest:
    """What ranks were asked and have not ended.

    Attributes:
        words: such as ``%fsdp step 40``, or ``a cell``.
        is_stopped: whether they stand still inside it.
        stop: where they stand, in words; empty: they do not.
        reasons: because of which breakpoints, in words.
        in_background: whether a thread waits for it, and the notebook does not.
        progress: of steps; None: it has none, or none is known yet.
    """

    words: str
    is_stopped: bool = False
    stop: str = ""
    reasons: tuple[str, ...] = ()
    in_background: bool = False
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class LastResult:
    """How the last thing that the ranks were asked ended, whoever asked it.

    Attributes:
        count: how many have ended; another one than before: this is news.
        line: what it was, such as ``%fsdp step 40``, or ``a cell``.
        text: its result or its error.
        is_error: whether it failed or was given up.
    """

    count: int
    line: str
    text: str
    is_error: bool


@dataclass(frozen=True, kw_only=True)
class ActivePolicy:
    """How models are sharded, and since when.

    Attributes:
        from_step: the step that was under way when it came into force, or the next one if none was.
        units: those in use.
    """

    from_step: int
    units: tuple[Unit, ...]


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """What a live view is told.

    Attributes:
        trace: what happened so far.
        running: whether there are ranks.
        exchange: whether they are being started or stopped.
        waits_for: what a start or an attach waits for, such as ``starting 4 ranks, 12 s: importing torch``; empty:
            nothing, or not long enough to say so.
        states: of each rank, by number; none without ranks.
        positions: where each rank was when it was last heard of.
        losses: of each rank that was lost, how.
        holder: who else commands the ranks, in words; empty: nobody.
        is_free: whether the holder has let go of them, so that they can be attached.
        cursor: up to where the views show what was recorded; None: all of it.
        record: name of the file that the trace is from; empty: ranks recorded it.
        under_way: what the ranks were asked and have not ended; None: nothing.
        ended: how the last thing ended that they were asked; None: none has.
        breakpoints: in the order they were added.
        policies: those that were in force, from the first on.
    """

    trace: Trace
    running: bool = False
    exchange: Exchange = ""
    waits_for: str = ""
    states: Mapping[int, State] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)
    losses: Mapping[int, str] = field(default_factory=dict)
    holder: str = ""
    is_free: bool = False
    cursor: Cursor | None = None
    record: str = ""
    under_way: ActiveRequest | None = None
    ended: LastResult | None = None
    breakpoints: tuple[Breakpoint, ...] = ()
    policies: tuple[ActivePolicy, ...] = ()


def pulse(
    trace: Trace,
    alive: Sequence[bool],
    positions: Mapping[int, Position],
    state: Callable[[int, Position], State] = lambda rank, position: state_of(position),
) -> ClusterSnapshot:
    """Return the pulse of ranks of which some are ``alive`` and some were heard of at ``positions``.

    Args:
        trace: what happened so far.
        alive: for each rank, whether it can be reached.
        positions: by rank.
        state: tells what a rank at a position is doing.
    """
    return ClusterSnapshot(
        trace=trace,
        running=True,
        states={
            rank: "gone" if not is_alive else state(rank, positions[rank]) if rank in positions else "no answer"
            for rank, is_alive in enumerate(alive)
        },
        positions=dict(positions),
    )
