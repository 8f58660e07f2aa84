"""Report on where the ranks of a recorded run are, and who waits for whom. Pure."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.fault import LATE, Fault
from workbench.base.text_formats import format_long
from workbench.events import Kind, unit_words
from workbench.replay.endings import short_reason
from workbench.replay.grouping import by_value, label
from workbench.replay.run_positions import PendingCollective, RunPosition, RunState, at_first_end, positions
from workbench.reports.event_text import event_words, unit_names
from workbench.reports.fault_report import cause_html, cause_lines
from workbench.reports.report import Report
from workbench.reports.stall_cause import not_judged, parted, pending_words, stall_cause
from workbench.reports.tables import Table
from workbench.trace.read_recording import Recording
from workbench.trace.recording import THREAD_ENDED, TWO_THREADS
from workbench.trace.schema import Header
from workbench.trace.step_names import step_name

LONG_NS = 600 * 10**9
"""Silence that is a stall although no rank waits: a rank that waited would be given up after it, by NCCL's default."""

_STALLED = (RunState.WAITS, RunState.SILENT, RunState.UNRECORDED)


@dataclass(frozen=True, kw_only=True)
class AwaitedCollective:
    """A collective that a rank of a recorded run has begun and not ended.

    Attributes:
        kind: its kind.
        unit: name of its unit; None: none.
        group: name of its communication group.
        number: how many collectives the group issued before it.
        absent: ranks of the group that have not started it.
        others: what other ranks of the group issued in its place, by rank.
        unknown: ranks of the group of which nothing about it is recorded.
    """

    kind: Kind
    unit: str | None
    group: str
    number: int
    absent: tuple[int, ...]
    others: Mapping[int, Kind]
    unknown: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RecordedPosition:
    """Where a rank of a recorded run is.

    Attributes:
        rank: global rank.
        state: what it does, or how it ended.
        step: training step; None: outside.
        unit: name of the unit of its last event; None: none.
        kind: kind of its last event; None: it has announced none.
        event: its last event as text; empty if it has announced none.
        for_ns: time since its last event, or since it began, until it was last known to be alive, in nanoseconds.
        pending: the collective that it waits for, or waited for when its program failed or was killed; None: none.
        reason: why its program ended; empty for success, or while it has not.
        stack: its calls, the innermost last, of a program that failed those of its error; empty if it wrote none since
            its last event.
        ago_ns: time since its end, of a rank that was killed since its last sign of life, in nanoseconds; None: it has
            not ended.
    """

    rank: int
    state: RunState
    step: int | None
    unit: str | None
    kind: Kind | None
    event: str
    for_ns: int
    pending: AwaitedCollective | None
    reason: str
    stack: tuple[str, ...]
    ago_ns: int | None


@dataclass(frozen=True, kw_only=True)
class RunWhereReport(Report):
    """Where every rank of a recorded run is.

    Attributes:
        positions: of every recorded rank.
        units: unit names by index.
        notes: what the recording lacks.
        cause: why it does not continue, or how ranks of a run that does issued different collectives; None: what is
            recorded does not tell, or they did not.
        may_wait: whether a rank may wait for a collective unseen: for its device, or in one that its torch does not
            announce.
    """

    computed = (*Report.computed, "is_stalled", "ranks")
    internal = ("positions", "units", "may_wait")

    positions: tuple[RunPosition, ...]
    units: Mapping[int, str]
    notes: tuple[str, ...] = ()
    cause: Fault | None = None
    may_wait: bool = False

    @property
    def is_stalled(self) -> bool:
        """Whether one rank failed or was killed, or none continues and one waits, or is no longer recorded.

        Ranks that compute for long, or sleep, and that no rank waits for, are no stall before :data:`LONG_NS`.
        """
        if not self._is_still or self._left != {RunState.SILENT} or self.may_wait or self.cause is not None:
            return self._is_still
        return all(each.for_ns >= LONG_NS for each in self.positions if each.state is RunState.SILENT)

    @property
    def _left(self) -> set[RunState]:
        """States of the ranks whose programs have not ended with success."""
        return {position.state for position in self.positions} - {RunState.ENDED}

    @property
    def _is_still(self) -> bool:
        """Whether no rank that is left continues, as far as is recorded, or one failed or was killed."""
        left = self._left
        return bool(left) and (RunState.LOST in left or RunState.FAILED in left or left <= set(_STALLED))

    @property
    def ranks(self) -> tuple[RecordedPosition, ...]:
        """The position of each recorded rank, with names."""
        return tuple(map(self._named, self.positions))

    def _named(self, position: RunPosition) -> RecordedPosition:
        pending = position.pending
        return RecordedPosition(
            rank=position.rank,
            state=position.state,
            step=position.step if position.step >= 0 else None,
            unit=self._unit(position.unit),
            kind=position.kind,
            event=self._event(position),
            for_ns=position.for_ns,
            pending=None
            if pending is None
            else AwaitedCollective(
                kind=pending.kind,
                unit=self._unit(pending.unit),
                group=pending.group,
                number=pending.number,
                absent=pending.absent,
                others=dict(pending.others),
                unknown=pending.unknown,
            ),
            reason=position.reason,
            stack=position.frames,
            ago_ns=position.ago_ns if position.is_over else None,
        )

    def _unit(self, index: int) -> str | None:
        return unit_words(self.units[index]) if index in self.units else None

    def _event(self, position: RunPosition) -> str:
        if position.kind is None:
            return ""
        return event_words(position.kind, position.edge, self.units.get(position.unit))

    @property
    def headline(self) -> str:
        """The cause of a run that does not continue, or else what its ranks do."""
        if not self._is_still:
            return self._progress()
        return self.cause.verdict if self.cause is not None else self._states()

    def _states(self) -> str:
        return "; ".join([*self._over(), *self._pending(), *self._silent()])

    def _progress(self) -> str:
        if all(position.state is RunState.ENDED for position in self.positions):
            return "the run has ended"
        steps = sorted({position.step for position in self.positions if position.step >= 0})
        at = f", at {step_name(steps[0], steps[-1])}" if steps else ""
        return f"the run continues{at}"

    def _over(self) -> list[str]:
        found: dict[str, list[int]] = {}
        for position in self.positions:
            if position.state in (RunState.FAILED, RunState.LOST, RunState.UNRECORDED):
                reason = f": {short_reason(position.reason)}" if position.reason else ""
                found.setdefault(f"{position.state.value}{reason}", []).append(position.rank)
        return [f"{label(ranks)} {_plural(words, ranks)}" for words, ranks in found.items()]

    def _pending(self) -> list[str]:
        """Name each collective that ranks wait for, and who has not started it."""
        waiting: dict[PendingCollective, list[RunPosition]] = {}
        for position in self.positions:
            if position.pending is not None and position.state is RunState.WAITS:
                waiting.setdefault(position.pending, []).append(position)
        return [self._wait_words(pending, found) for pending, found in waiting.items()]

    def _wait_words(self, pending: PendingCollective, found: Sequence[RunPosition]) -> str:
        ranks = [position.rank for position in found]
        has = "has" if len(ranks) == 1 else "have"
        longest = max(position.for_ns for position in found)
        words = f"{label(ranks)} {has} waited {format_long(longest)} for {pending_words(pending, self.units)}"
        blame = []
        if pending.others:
            instead = [f"{label([rank])} issued {kind.words} in its place" for rank, kind in pending.others]
            blame.append("; ".join(instead))
        if pending.absent:
            have = "has" if len(pending.absent) == 1 else "have"
            blame.append(f"{label(pending.absent)} {have} not started it")
        if pending.unknown:
            blame.append(f"no record of {label(pending.unknown)}")
        if not blame:
            blame.append("all of its ranks have started it")
        return f"{words}: {', '.join(blame)}"

    def _silent(self) -> list[str]:
        silent = (each for each in self.positions if each.state is RunState.SILENT)
        alike = by_value((each.rank, (format_long(each.for_ns), each.users_frame)) for each in silent)
        return [
            f"{label(ranks)} {'has' if len(ranks) == 1 else 'have'} recorded no event for {time}"
            + (f", in {frame}" if frame else "")
            for (time, frame), ranks in alike.items()
        ]

    def __str__(self) -> str:
        found = [*self._cause_lines(), *self.table().lines(), *self._more()]
        return "\n".join([self.headline, *(f"  {line}" for line in found)])

    def _repr_html_(self) -> str:
        more = html.escape("\n".join(self._more()))
        below = f'<pre style="overflow-x:auto">{more}</pre>' if more else ""
        cause = cause_html(self._cause_lines())
        return f"<div><strong>{html.escape(self.headline)}</strong>{cause}{self.table().html()}{below}</div>"

    def _cause_lines(self) -> list[str]:
        if not self._is_still or self.cause is None:
            return cause_lines(self.cause)
        are_over = all(position.is_over for position in self.positions)
        return cause_lines(self.cause, "" if are_over else self._states())

    def _more(self) -> list[str]:
        """Return the stacks of ranks that are stalled or were when they ended, and the notes."""
        alike = by_value((each.rank, (_stack_verb(each), each.short_frames)) for each in self._with_stacks())
        lines = []
        for (verb, frames), ranks in alike.items():
            lines += [f"{label(ranks)} {verb[len(ranks) > 1]} in", *(f"  {frame}" for frame in frames)]
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def _with_stacks(self) -> list[RunPosition]:
        shown = (*_STALLED, RunState.FAILED, RunState.LOST)
        return [position for position in self.positions if position.frames and position.state in shown]

    def table(self) -> Table:
        """Return a row for each rank."""
        head = ("rank", "state", "step", "last event", "ago")
        return Table(head=head, rows=[self._row(position) for position in self.positions])

    def _row(self, position: RunPosition) -> tuple[str, ...]:
        return (
            str(position.rank),
            position.state.value,
            "" if position.step < 0 else str(position.step),
            self._event(position),
            self._ago(position),
        )

    def _ago(self, position: RunPosition) -> str:
        """Return the time since the last event; of programs that have ended since the first end, and from there on."""
        if not position.is_over:
            return "" if position.kind is None else format_long(position.for_ns)
        first = max((each for each in self.positions if each.is_over), key=lambda each: each.ago_ns)
        later = first.ago_ns - position.ago_ns
        return f"{format_long(later)} after rank {first.rank}" if later else format_long(first.ago_ns)


def _is_on_cpu(header: Header, rank: int) -> bool:
    """Return whether a rank has no device, for which it would wait outside of any collective."""
    info = header.info_of.get(rank)
    return info is not None and info.device.startswith("cpu")


def _stack_verb(position: RunPosition) -> tuple[str, str]:
    """Return what a stack says of one rank, and of several: ``"is"``, in these calls."""
    if position.activity == "since its last collective":
        return ("issued its last collective",) * 2
    return ("was", "were") if position.is_over else ("is", "are")


def _plural(words: str, ranks: Sequence[int]) -> str:
    return words if len(ranks) == 1 else words.replace("was killed", "were killed").replace("is no", "are no")


def where(recording: Recording, now_wall_ns: int) -> RunWhereReport:
    """Return where the ranks of a recording are at a time of day, in nanoseconds since 1970."""
    trace, here = recording.trace, positions(recording, now_wall_ns)
    unknown = not_judged(trace, here)
    found = RunWhereReport(
        positions=here,
        units=unit_names(trace.header),
        notes=(*recording.notes, *([unknown] if unknown else [])),
        may_wait=bool(unknown) or not all(_is_on_cpu(trace.header, each.rank) for each in here),
    )
    if not found._is_still:
        return replace(found, cause=parted(trace, here))
    then = at_first_end(recording, here)
    cause = stall_cause(then.trace, positions(then, now_wall_ns))
    return replace(found, cause=cause and _with_ended_threads(_with_threads(cause, recording), recording))


_OF_ONE_RANK = ("dead-rank", LATE)
_PARTED = ("other-collective", "wrong-order", "other-payload", "stuck-collective", "crossed-groups")


def _with_ended_threads(cause: Fault, recording: Recording) -> Fault:
    """Return a fault of one rank, with the error that has ended a thread of it, if one has."""
    told = [note for rank, note in _notes(recording, THREAD_ENDED) if re.match(rf"rank {rank}\b", cause.verdict)]
    if not told or cause.rule not in _OF_ONE_RANK:
        return cause
    fix = f"see first whether it waited for the thread that an error has ended; else {cause.fix}"
    return replace(cause, evidence=(*told, *cause.evidence), fix=fix)


def _with_threads(cause: Fault, recording: Recording) -> Fault:
    """Return a fault of ranks that part, with the threads that use one group, if that is recorded."""
    told = [note for _, note in _notes(recording, TWO_THREADS)]
    if not told or cause.rule not in _PARTED:
        return cause
    fix = "let one thread issue all collectives of a group, or make a group of its own for the other: dist.new_group()"
    return replace(cause, evidence=(*cause.evidence, *told[:1]), fix=fix)


def _notes(recording: Recording, begin: str) -> Iterator[tuple[int, str]]:
    """Yield the ranks' own notes that begin in a way, each with its rank, which the text names too."""
    for rank, known in recording.ranks.items():
        yield from ((rank, f"rank {rank}: {note}") for note in known.notes if note.startswith(begin))
