"""Where the ranks of a recorded run are: what each did last, and which rank has not started a collective.

The run may continue, be stalled, have been killed or have ended. What a rank waited for is kept after its end: it may
have ended because it waited. Durations are differences of times of one rank's own clock; only whether a process is
alive is judged by the time of day.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.events import BESIDE, NUMBERED, Edge, Kind
from workbench.replay.endings import Ending, ending_of
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.frames import is_of_a_library, with_lines
from workbench.trace.process_state import ProcessState
from workbench.trace.read_recording import ALIVE_NS, RecordedRank, Recording
from workbench.trace.recording import Activity, RunEnd
from workbench.trace.schema import Header, Rows

STALLED_NS = 5_000_000_000
"""A rank without an event for this long is stalled."""

DEADLOCKED_NS = 1_000_000_000
"""A rank of a live request that is within a collective for this long waits: who it waits for is not busy by chance."""

TOGETHER_NS = 1_500_000_000
"""Limit of the time between the last sign of life of a process that is killed, and its end."""

_AT_ONCE_NS = 20_000_000
"""How late an end may be: the time of a file has ticks."""

# indexed by the column ``kind``
_IS_BESIDE, _IS_NUMBERED = (np.isin(np.arange(256), kinds) for kinds in (BESIDE, NUMBERED))

_SILENT_AS: Mapping[ProcessState, Activity] = {"stopped": "stopped", "alive": "without a processor or disk"}
"""What a process does that lives and writes nothing."""


class RunState(Enum):
    """State of a rank; the value is its display text."""

    RUNS = "runs"
    # within a collective, for a moment
    IN_COLLECTIVE = "communicates"
    # within a collective, for long
    WAITS = "waits"
    # outside of any collective, for long
    SILENT = "has recorded no event"
    ENDED = "has ended"
    FAILED = "failed"
    # its recording stopped before its program
    UNRECORDED = "is no longer recorded"
    # without an end
    LOST = "was killed"


@dataclass(frozen=True, kw_only=True)
class PendingCollective:
    """A collective that a rank has begun and not ended.

    Attributes:
        unit: index of its unit; -1: none.
        group: name of its communication group.
        number: how many collectives the group issued before it.
        absent: ranks of the group that have not started it.
        others: what other ranks of the group issued in its place, by rank.
        unknown: ranks of the group of which nothing about it is recorded.
    """

    kind: Kind
    unit: int
    group: str
    number: int
    absent: tuple[int, ...] = ()
    others: tuple[tuple[int, Kind], ...] = ()
    unknown: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunPosition:
    """Where a rank is.

    Attributes:
        step: number of its step; -1: outside.
        kind: kind of its last event; None: it has announced none.
        edge: edge of its last event.
        unit: unit of its last event; -1: none.
        for_ns: time since its last event, or since it began, until it was last known to be alive.
        pending: the collective that it waits for, or waited for when its program ended other than by success.
        reason: why its program ended; empty for success, or while it has not.
        frames: its stack, the innermost call last, if it was written since its last event; of a program that failed,
            that of its error, and of one that ended by ``sys.exit``, that of this call.
        activity: what its main thread did when it wrote the stack.
        since_ns: time of its last event on the trace's clock; of a rank that failed in a collective, of its begin.
        ended_ns: time of its end on the trace's clock; of a rank that was killed, of its last sign of life; None: it
            has not ended.
        ago_ns: time since its end, or since its last sign of life; 0 while it has not ended.
    """

    rank: int
    state: RunState
    step: int = -1
    kind: Kind | None = None
    edge: Edge = Edge.INSTANT
    unit: int = -1
    for_ns: int = 0
    pending: PendingCollective | None = None
    reason: str = ""
    frames: tuple[str, ...] = ()
    activity: Activity = ""
    since_ns: int = 0
    ended_ns: int | None = None
    ago_ns: int = 0

    @property
    def ending(self) -> Ending | None:
        """Why its program ended, as it wrote itself; None: it has not, or was killed."""
        return ending_of(self.reason, self.frames) if self.state in (RunState.ENDED, RunState.FAILED) else None

    @property
    def is_over(self) -> bool:
        """Whether its program has ended or was killed."""
        return self.state in (RunState.ENDED, RunState.FAILED, RunState.LOST)

    @property
    def users_frames(self) -> tuple[str, ...]:
        """The calls that are not of a library, the innermost last; empty if unknown."""
        return tuple(frame for frame in self.frames if not is_of_a_library(frame))

    @property
    def users_frame(self) -> str:
        """The innermost of them; empty if unknown."""
        return next(reversed(self.users_frames), "")

    @property
    def short_frames(self) -> tuple[str, ...]:
        """The stack without the calls of libraries, except the innermost of all."""
        return tuple(dict.fromkeys((*self.users_frames, *self.frames[-1:])))


def positions(recording: Recording, now_wall_ns: int) -> tuple[RunPosition, ...]:
    """Return where every recorded rank is.

    Args:
        recording: the recording.
        now_wall_ns: time of day, in nanoseconds since 1970.
    """
    trace = recording.trace
    begun = {part.rank: _begun(trace.header, part, is_whole=not part.start.seq) for part in trace.ranks}
    stopped = {rank for rank, known in recording.ranks.items() if known.stop is not None}
    return tuple(
        _position(trace.header, rank_trace, recording.ranks[rank_trace.rank], begun, stopped, now_wall_ns)
        for rank_trace in sorted(trace.ranks, key=lambda each: each.rank)
    )


def at_first_end(recording: Recording, found: Sequence[RunPosition]) -> Recording:
    """Return a recording as it was when the first program ended other than by success.

    What ranks do after that is no part of what the run stalled in: a handler of SIGTERM may enter a collective.

    Args:
        recording: the recording.
        found: the positions of its ranks.
    """
    over = [each for each in found if each.state in (RunState.FAILED, RunState.LOST) and each.ended_ns is not None]
    if not over:
        return recording
    trace = recording.trace
    slack_ns = max((reading.error_ns for clock in trace.header.clocks for reading in clock.readings), default=0)
    first_ns = min(
        (each.ended_ns or 0) + (TOGETHER_NS if each.state is RunState.LOST else _AT_ONCE_NS) for each in over
    )
    ranks, known = [], dict(recording.ranks)
    for part in trace.ranks:
        later = np.flatnonzero(part.rows["t_ns"] > first_ns + slack_ns)
        if not len(later):
            ranks.append(part)
            continue
        begin = part.start.seq
        own = part.cut(begin, begin + int(later[0]))
        ranks.append(own)
        known[part.rank] = _before_end(known[part.rank], own)
    return replace(recording, trace=Trace(trace.header, tuple(ranks)), ranks=known)


def _before_end(known: RecordedRank, part: RankTrace) -> RecordedRank:
    """Return what is known of a rank without what it did after its rows in ``part``, except its error."""
    beat, end = known.last_beat, known.end
    if beat is not None:
        last_ns = int(part.rows["t_ns"][-1]) + known.offset_ns if len(part.rows) else known.start.t_ns
        beat = replace(beat, event_ns=min(beat.event_ns, last_ns))
    if end is not None and ending_of(end.reason) is not Ending.ERROR:
        was_quiet = any(quiet.seq == part.end_seq for quiet in known.quiet)
        end = replace(end, frames=() if was_quiet else end.frames)
    return replace(known, last_beat=beat, end=end)


def live_positions(
    trace: Trace,
    for_ns: Mapping[int, int],
    ended: Mapping[int, str],
    since: Mapping[int, int],
    frames: Mapping[int, tuple[str, ...]],
) -> tuple[RunPosition, ...]:
    """Return where the ranks of a running request are.

    Args:
        trace: of the ranks, the newest rows of the request.
        for_ns: time since the last event of each rank that answered.
        ended: for each rank that has ended the request, the error that it raised as ``Name: text``; empty: none.
        since: number of each rank's first row of the request; before it, all ranks had issued the same collectives.
        frames: calls of the user's code on the ranks that answered, the innermost last; of a rank that has raised, the
            line that did.
    """
    whole = {part.rank for part in trace.ranks if part.start.seq <= since.get(part.rank, 0)}
    begun = {part.rank: _begun(trace.header, part, is_whole=part.rank in whole) for part in trace.ranks}
    found = []
    for part in trace.ranks:
        call = _open_call(part)
        pending = None if call is None or part.rank in ended else _pending(trace.header, part, call, begun)
        quiet_ns = for_ns.get(part.rank, 0)
        reason = ended.get(part.rank, "")
        if part.rank in ended:
            state = RunState.FAILED if reason else RunState.ENDED
        elif pending is not None:
            state = RunState.WAITS if quiet_ns >= DEADLOCKED_NS else RunState.IN_COLLECTIVE
        else:
            state = RunState.SILENT if quiet_ns >= STALLED_NS else RunState.RUNS
        row = call if call is not None else _last_row(part, ~_IS_BESIDE[part.kinds])
        found.append(
            RunPosition(
                rank=part.rank,
                state=state,
                **_event_of(row),
                for_ns=quiet_ns,
                pending=pending,
                frames=frames.get(part.rank, ()),
                reason=reason,
            )
        )
    return tuple(found)


def begins_of_newest_step(trace: Trace) -> dict[int, int]:
    """Return the first row of each rank, by its number, of the newest step that all ranks have begun; empty: none."""
    begun = {p.rank: p.rows[(p.kinds == Kind.STEP) & (p.rows["edge"] == Edge.BEGIN)] for p in trace.ranks}
    newest = min((int(rows["step"][-1]) if len(rows) else -1 for rows in begun.values()), default=-1)
    found = {rank: rows["seq"][rows["step"] == newest] for rank, rows in begun.items()}
    return (
        {rank: int(seqs[-1]) for rank, seqs in found.items()} if newest >= 0 and all(map(len, found.values())) else {}
    )


def _frames_at_end(end: RunEnd, quiet: tuple[str, ...]) -> tuple[str, ...]:
    """Return the calls of a program that has ended: with those of libraries, if its stack before was the same."""
    found = with_lines(end.frames, quiet) or (quiet if end.reason else ())
    own = tuple(frame for frame in quiet if not is_of_a_library(frame))
    return quiet if found and own[-len(found) :] == found else found


def _position(
    header: Header,
    rank_trace: RankTrace,
    known: RecordedRank,
    begun: Mapping[int, _OfGroups],
    stopped: Container[int],
    now_wall_ns: int,
) -> RunPosition:
    last_ns = _last_time(rank_trace.rows, known)
    at_ns, wall_ns = _last_alive(known, last_ns)
    if known.process in _SILENT_AS:  # it lives, and writes nothing
        at_ns, wall_ns = at_ns + now_wall_ns - wall_ns, now_wall_ns
    for_ns = max(at_ns - last_ns, 0)
    is_lost = known.end is None and (known.process == "gone" or now_wall_ns - wall_ns > ALIVE_NS)
    has_failed = known.end is not None and bool(known.end.reason)
    of_call = known.end is not None and ending_of(known.end.reason, known.end.frames) in (Ending.PEER, Ending.TIMEOUT)
    call = _open_call(rank_trace, has_failed=has_failed or is_lost, of_call=of_call)
    row = call if call is not None else _last_row(rank_trace, ~_IS_BESIDE[rank_trace.kinds])
    pending = None if call is None else _pending(header, rank_trace, call, begun, stopped)
    next_seq = int(rank_trace.rows["seq"][-1]) + 1 if len(rank_trace.rows) else 0
    quiet = next((quiet for quiet in reversed(known.quiet) if quiet.seq == next_seq), None)
    frames = () if quiet is None else quiet.frames
    if known.end is not None:
        state = RunState.FAILED if has_failed else RunState.ENDED
        frames = _frames_at_end(known.end, frames)
    elif known.stop is not None:
        state = RunState.UNRECORDED
    elif is_lost:
        state = RunState.LOST
    elif for_ns < STALLED_NS:
        state = RunState.RUNS if pending is None else RunState.IN_COLLECTIVE
    else:
        state = RunState.SILENT if pending is None else RunState.WAITS
    is_over = state in (RunState.ENDED, RunState.FAILED, RunState.LOST)
    return RunPosition(
        rank=rank_trace.rank,
        state=state,
        step=-1 if row is None else int(row["step"]),
        **_event_of(row),
        for_ns=for_ns,
        pending=None if state in (RunState.ENDED, RunState.UNRECORDED) else pending,
        reason="" if known.end is None else known.end.reason,
        frames=frames,
        activity=_SILENT_AS.get(known.process) or ("" if quiet is None else quiet.activity),
        since_ns=int(call["t_ns"]) if call is not None and of_call else last_ns - known.offset_ns,
        ended_ns=at_ns - known.offset_ns if is_over else None,
        ago_ns=max(now_wall_ns - wall_ns, 0) if is_over else 0,
    )


def _event_of(row: np.void | None) -> dict[str, Any]:
    """Return what a row says of an event, as fields of a position."""
    if row is None:
        return {}
    return {"kind": Kind(row["kind"]), "edge": Edge(row["edge"]), "unit": int(row["unit"])}


def _last_alive(known: RecordedRank, last_ns: int) -> tuple[int, int]:
    """Return when a rank ended, or was last known to be alive: on its own clock, and in time of day.

    Args:
        known: of the rank.
        last_ns: time of its last event on its own clock: a sign of life too.
    """
    sign = known.last_sign
    t_ns = max(last_ns, sign.t_ns) if known.end is None else known.end.t_ns
    return t_ns, sign.wall_ns + t_ns - sign.t_ns


def _last_time(rows: Rows, known: RecordedRank) -> int:
    """Return the time of the last event, recorded or not, on the rank's own clock; when it began if there is none."""
    told = known.start.t_ns if known.last_beat is None else known.last_beat.event_ns
    return max(told, int(rows["t_ns"][-1]) + known.offset_ns) if len(rows) else told


@dataclass
class _Issued:
    """Collectives that a rank has begun in a group.

    Attributes:
        kinds: their kinds, by number.
        newest: the highest number; -1: none.
    """

    kinds: dict[int, int]
    newest: int = -1


_OfGroups = Mapping[int, _Issued]
"""A rank's collectives, by group."""


def _begun(header: Header, rank_trace: RankTrace, *, is_whole: bool) -> _OfGroups:
    """Return the collectives that a rank has begun.

    Args:
        header: of the trace.
        rank_trace: the rank's rows.
        is_whole: whether a group without a row was not used: older rows are not about it, or as on all other ranks.
    """
    begins = np.flatnonzero(_IS_NUMBERED[rank_trace.kinds] & (rank_trace.rows["edge"] == Edge.BEGIN))
    group, number = (rank_trace.rows[name][begins] for name in ("comm_group", "comm_seq"))
    kind = rank_trace.kinds[begins]
    used = np.unique(group).tolist()
    found = {each: _Issued({}) for each in (*(range(len(header.comm_groups)) if is_whole else ()), *used)}
    for each in used:
        own = group == each
        found[each] = _Issued(dict(zip(number[own].tolist(), kind[own].tolist(), strict=True)), int(number[own].max()))
    return found


def _open_call(part: RankTrace, *, has_failed: bool = False, of_call: bool = False) -> np.void | None:
    """Return the begin of the collective, or of the wait for one, within which a rank is; None outside of any.

    Ends of other collectives may be noticed and recorded while a rank waits. A collective that failed has an end too:
    a wait for it that has none raised (``has_failed``), and so did the newest collective if the rank's error is of one
    (``of_call``).
    """
    rows = part.rows
    is_end = _IS_NUMBERED[part.kinds] & (rows["edge"] == Edge.END)
    row = _last_row(part, ~(is_end | _IS_BESIDE[part.kinds]))
    if row is None:
        return None
    if row["kind"] not in (*NUMBERED, Kind.WAIT) or row["edge"] != Edge.BEGIN or row["comm_group"] < 0:
        return None
    if of_call or (has_failed and row["kind"] == Kind.WAIT):
        return row
    has_ended = is_end & (rows["comm_seq"] == row["comm_seq"]) & (rows["comm_group"] == row["comm_group"])
    return None if has_ended.any() else row


def _last_row(part: RankTrace, chosen: NDArray[np.bool_]) -> np.void | None:
    """Return the last of the ``chosen`` rows; None if there is none."""
    at = np.flatnonzero(chosen)
    return part.rows[at[-1]] if len(at) else None


def _pending(
    header: Header, rank_trace: RankTrace, call: np.void, begun: Mapping[int, _OfGroups], stopped: Container[int] = ()
) -> PendingCollective | None:
    """Return the collective that ``call`` begins or waits for; None if its begin is not among the rank's rows.

    Of the ranks in ``stopped``, later collectives are not recorded.
    """
    rows = rank_trace.rows
    group, number = int(call["comm_group"]), int(call["comm_seq"])
    mine = np.flatnonzero(_IS_NUMBERED[rank_trace.kinds] & (rows["comm_seq"] == number) & (rows["comm_group"] == group))
    if not len(mine):
        return None
    kind, info = Kind(rows["kind"][mine[0]]), header.comm_groups[group]
    known = {rank: begun[rank][group] for rank in info.ranks if group in begun.get(rank, {})}
    known = {r: issued for r, issued in known.items() if r not in stopped or issued.newest >= number}
    others = {rank: issued for rank, issued in known.items() if rank != rank_trace.rank}
    return PendingCollective(
        kind=kind,
        unit=int(rows["unit"][mine[0]]),
        group=info.name,
        number=number,
        absent=tuple(rank for rank, issued in others.items() if issued.newest < number),
        others=tuple(
            (rank, Kind(issued.kinds[number]))
            for rank, issued in others.items()
            if issued.kinds.get(number, kind) != kind
            and not kind.info.is_point_to_point  # one sends, the other receives
        ),
        unknown=tuple(rank for rank in info.ranks if rank not in known),
    )
