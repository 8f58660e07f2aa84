"""Healing: another process takes the place of a lost rank, and all ranks repeat the program up to where they were.

What the ranks did is in the session's :class:`~workbench.session.program.Program`. All of them, the new one included,
begin with its first cell, so collectives in cells find all ranks, and objects refer to each other as they did. Nothing
of it is recorded or printed again. From the newest snapshot on, steps are done again as well. If a replica of each lost
rank lives, and holds the state of the last completed step, no step is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.base.codec import decode, encode
from workbench.base.fault import listed
from workbench.base.text_formats import format_bytes
from workbench.cluster.engine_provider import OnWait
from workbench.cluster.release_ranks import free
from workbench.errors import ClusterError, RankError, UsageError
from workbench.protocol.checkpoint_replies import LoadReply, SaveReply
from workbench.protocol.commands import Command, Load, Reshard, Shard, Snapshot, Step, StepReply, Unshard, to_text
from workbench.protocol.rank_messages import Marks, SnapshotMark
from workbench.replay.grouping import label
from workbench.reports.heal_report import HealReport
from workbench.reports.next_line import AND_THEN
from workbench.session.outside_effects import effects_of
from workbench.session.program import CompletedCell, CompletedCommand, Entry, Omission
from workbench.session.request import RequestListener
from workbench.session.session import RECOVER_S, RUNTIME, Session, busy_sentence
from workbench.session.waiter import PATIENT_S

REPEATED = (Shard, Reshard, Unshard, Load)
"""The commands, besides steps, that leave something on the ranks."""

_KEPT = 2  # snapshots: the newest, and the one before until all ranks have the newest


def heal(session: Session, on_wait: OnWait, on_notice: OnWait) -> HealReport:
    """Replace all lost ranks, and bring all ranks to where they were.

    Args:
        session: the session.
        on_wait: receives what it waits for.
        on_notice: receives which cells have effects outside the ranks, before they run again.

    Raises:
        UsageError: no rank is lost, or their launcher cannot start single engines.
        ClusterError, RankDied: another rank was lost meanwhile; :func:`heal` may be called again.
    """
    begin = time.monotonic()
    if session.request is not None:
        raise UsageError(busy_sentence(session.request))
    living = session.living()
    lost = [rank for rank in range(session.cluster.num_ranks) if rank not in living]
    if not lost:
        raise UsageError("all ranks run: nothing to heal")
    entries = session.program.entries
    for sentence in effects_of(entries):
        on_notice(sentence)
    found_marks = _marks(session, living)
    snapshot = _newest_snapshot(session.cluster.num_ranks, found_marks)
    replicas = _newest_replicas(session.cluster.num_ranks, found_marks, entries)
    session.restart_ranks(on_wait)
    started_s = time.monotonic() - begin
    try:
        lacking = [] if replicas is None else _lacking(session, replicas)
        source = snapshot if replicas is None or (lacking and snapshot is not None) else replicas
        with session.repeating() as program:
            _on_all(session, "begin_replay")
            repeated = ReplayedProgram(session, entries, source, lost)
            repeated.run()
            found = _on_all(session, "end_replay")
            program[:] = repeated.entries
        if snapshot is not None:  # the new rank has none yet
            with session.repeating():
                session.run(Snapshot(), RequestListener())
    except (RankError, ClusterError):
        session.cluster.raise_loss()
        raise
    return HealReport(
        ranks=tuple(lost),
        seconds=time.monotonic() - begin,
        start_s=started_s,
        cells=repeated.cells,
        steps_redone=repeated.steps,
        steps_lost=repeated.lost,
        kept=tuple(sorted({name for rank in living for name in found[rank]["kept"]})),
        other=tuple(sorted({name for rank in living for name in found[rank]["other"]})) if source is not None else (),
        left_out=tuple(dict.fromkeys(repeated.left_out)),
        failed=tuple(repeated.failed),
        failed_again=tuple(repeated.failed_again),
        has_snapshot=source is not None and source is snapshot,
        replicas=tuple(sorted({*replicas.sources.values()})) if source is replicas and replicas is not None else (),
        lacking=tuple(lacking) if source is replicas else (),
        next=repeated.next,
        next_step=max(of_rank["next_step"] for of_rank in found.values()),
    )


def snapshot_notice(session: Session) -> str:
    """Return a sentence that says what snapshots will take on each rank; empty if the ranks can take none now."""
    num_ranks = session.cluster.num_ranks
    if session.request is not None or session.obstacle or len(session.living()) < num_ranks:
        return ""
    found = _on_all(session, "snapshot_bytes")
    own = [found[rank]["num_bytes"] for rank in range(num_ranks)]
    hosts = [info.host for info in session.cluster.rank_info]
    # the rank before shares its memory, or sends a copy from its host
    kept = [_KEPT * (own[r] + (own[r - 1] if hosts[r] != hosts[r - 1] else 0)) for r in range(num_ranks)]
    each = f"{_KEPT} copies of {format_bytes(max(own))}"
    grows = any(of_rank["grows"] for of_rank in found.values())
    more = "; the optimizer's first step adds its state" if grows else ""
    left_out = sorted({each for of_rank in found.values() for each in of_rank["left_out"]})
    less = f"; left out: {listed(left_out)}" if left_out else ""
    return f"snapshots take {format_bytes(max(kept))} of host memory on each rank, {each}{more}{less}"


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The state that all ranks get.

    Attributes:
        mark: when it was, by the entries of the program.
        sources: the ranks that do not have it, and from which ranks they get it.
        step: number of steps that led to it, if replicas hold it; None: it is a snapshot.
    """

    mark: SnapshotMark
    sources: dict[int, int]
    step: int | None = None


def _marks(session: Session, living: Sequence[int]) -> dict[int, Marks]:
    found = _on_all(session, "marks", ranks=living)
    return {rank: decode(Marks, data, f"marks of rank {rank}") for rank, data in found.items()}


def _newest_snapshot(num_ranks: int, found: Mapping[int, Marks]) -> _Source | None:
    """Return the newest snapshot that is whole: every rank's is on it, or on the rank after it."""
    sources = {rank: (rank + 1) % num_ranks for rank in range(num_ranks) if rank not in found}
    if not found or any(source not in found for source in sources.values()):
        return None
    own = [set(of_rank.own) for of_rank in found.values()]
    held = [set(found[source].held) for source in sources.values()]
    mark = max(set.intersection(*own, *held), default=None)
    return None if mark is None else _Source(mark=mark, sources=sources)


def _newest_replicas(num_ranks: int, found: Mapping[int, Marks], entries: Sequence[Entry]) -> _Source | None:
    """Return the newest state of which every rank, or a replica of it, holds its part."""
    marks = {rank: of_rank.replica for rank, of_rank in found.items() if of_rank.replica is not None}
    for step in sorted({mark.step for mark in marks.values()}, reverse=True):
        there = {rank: mark for rank, mark in marks.items() if mark.step == step}
        sources = {}
        for rank in range(num_ranks):
            holders = [each for each, mark in there.items() if rank in mark.ranks]
            if rank not in there and holders:
                sources[rank] = holders[0]
        if len(there) + len(sources) == num_ranks:
            count = max(
                (mark.mark.count for mark in there.values() if mark.mark.entry == _interrupted(entries)), default=None
            )
            at = SnapshotMark(entry=len(entries), count=0)
            mark = at if count is None else SnapshotMark(entry=_interrupted(entries), count=count)
            return _Source(mark=mark, sources=sources, step=step)
    return None


def _interrupted(entries: Sequence[Entry]) -> int:
    """Return the number of the steps that ended with the loss of a rank, if nothing was completed since; else -2."""
    for number in range(len(entries) - 1, -1, -1):
        entry = entries[number]
        if not isinstance(entry, Omission):
            return -2
        if entry.is_loss:
            return number if entry.left is not None else number - 1
    return -2


def _lacking(session: Session, replicas: _Source) -> list[int]:
    """Return the ranks that get a state of which their own part is nowhere: a rank ended just as it finished a step."""
    written = _on_all(session, "private_steps")
    return [rank for rank in replicas.sources if replicas.step not in written[rank]]


class ReplayedProgram:
    """Repeats the entries of a program, with its steps from the newest snapshot on.

    Args:
        session: whose ranks repeat it.
        before: the entries.
        source: the state that the ranks get; None: there is none.
        lost: the ranks that were replaced.

    Attributes:
        entries: the program then.
        cells: number of cells and commands repeated.
        steps: number of steps repeated.
        lost: number of steps that were not.
        failed: cells and commands that did not end as before, each with its error.
        failed_again: cells that raised as before, each with the name of its exception.
        left_out: what is no part of the program, and was not repeated.
    """

    def __init__(self, session: Session, before: Sequence[Entry], source: _Source | None, lost: Sequence[int]) -> None:
        mark = None if source is None else source.mark
        self._session, self._before, self._source, self._mark, self._ranks = session, before, source, mark, lost
        self.entries: list[Entry] = []
        self.cells = self.steps = self.lost = 0
        self.failed: list[str] = []
        self.failed_again: list[str] = []
        self.left_out: list[str] = []
        self._owed: list[Step] = []  # steps that are lost, since the newest checkpoint in ``_saved``
        self._rest: Sequence[Step] = ()  # steps that the newest command did not do
        self._saved = ""  # the newest checkpoint that this program saved
        self._done = 0 if mark is None else mark.count  # steps of the next entry that the snapshot has

    def run(self) -> None:
        """Repeat them.

        Raises:
            ClusterError, RankDied: another rank was lost.
        """
        for number, entry in enumerate(self._before):
            if self._mark is not None and number == self._mark.entry:
                self._put_back()
            try:
                now = self._repeated(number, entry)
                self.entries += [] if now is None else [now]
            except (RankError, UsageError) as error:
                before = f", not {entry.what.rpartition(' ')[2]} as before" if isinstance(entry, Omission) else ""
                self.failed.append(f"{_words(entry)}: {str(error).splitlines()[0]}{before}")
                why = f"when it ran again, because {label(self._ranks)} had died"
                self.entries.append(Omission(what=f"{_words(entry)} that raised {why}"))
        if self._mark is not None and self._mark.entry >= len(self._before):
            self._put_back()

    @property
    def next(self) -> str:
        """What to type to do the lost steps again and to go on with interrupted ones; empty: there are none."""
        steps: list[Step] = []
        for each in [*self._owed, *self._rest]:
            before = steps[-1] if steps else None
            if before is not None and replace(before, count=each.count) == each:
                steps[-1] = replace(each, count=before.count + each.count)
            else:
                steps.append(each)
        load = [Load(self._saved)] if self._saved else []
        return AND_THEN.join(f"%fsdp {to_text(command)}" for command in [*load, *steps])

    def _put_back(self) -> None:
        if self._source is None:
            return
        mark, sources, step = encode(self._source.mark), self._source.sources, self._source.step
        newest = self._newest_step()
        if newest and any(_on_all(self._session, "lacks_objects", mark, step).values()):  # a step makes them
            self._session.run(Step(count=1, fn=newest.fn), RequestListener())
        _on_all(self._session, "put_back", mark, sources, step)

    def _newest_step(self) -> Step | None:
        """Return the last command that took steps before the state that the ranks get; None if none did."""
        entries = () if self._mark is None else self._before[: self._mark.entry + 1]
        commands = [each.left if isinstance(each, Omission) else getattr(each, "command", None) for each in entries]
        return next((each for each in reversed(commands) if isinstance(each, Step)), None)

    def _repeated(self, number: int, entry: Entry) -> Entry | None:
        """Repeat an entry; return what takes its place in the program, or None if its steps are lost."""
        if isinstance(entry, CompletedCell):
            self._session.run_cell(entry.code, None, RequestListener())
            self.cells += 1
        elif isinstance(entry, CompletedCommand) and isinstance(entry.command, REPEATED):
            self._session.run(_as_it_was(entry.command, entry.reply), RequestListener())
            self.cells += 1
            if isinstance(entry.command, Load):  # the steps before it led to nothing that is left
                self.lost, self._owed, self._rest, self._saved = 0, [], (), ""
        elif isinstance(entry, CompletedCommand) and isinstance(entry.command, Step):
            return self._steps(number, entry, entry.command)
        elif isinstance(entry, CompletedCommand) and isinstance(entry.reply, SaveReply):
            self._note_saved(entry.reply)
        elif isinstance(entry, Omission) and entry.left is not None:
            return self._undone(entry, entry.left)
        elif isinstance(entry, Omission) and entry.code:
            return self._raised(entry)
        elif isinstance(entry, Omission) and not entry.is_loss:
            self.left_out.append(entry.what)
        return entry

    def _note_saved(self, saved: SaveReply) -> None:
        """Note a checkpoint that still has the steps so far, if these are lost on the ranks."""
        if self._mark is None:
            self._saved, self._owed = saved.folder, []

    def _raised(self, entry: Omission) -> Entry:
        """Run a cell again that raised on every rank, and return its entry now."""
        self.cells += 1
        try:
            self._session.run_cell(entry.code, None, RequestListener())
        except RankError as error:
            if not entry.what.endswith(f" {error.ename}"):
                raise
            self.failed_again.append(f"{_words(entry)}: {error.ename}")
            return entry
        self.failed.append(f"{_words(entry)}: it completed, and is {entry.what} of before")
        return CompletedCell(code=entry.code)

    def _undone(self, entry: Omission, left: Step) -> Entry:
        """Return the entry of steps of which none was seen to end; the state that the ranks got may have some."""
        done, self._done = self._done, 0
        self._rest = _without_stop(left, left.count - done)
        if not done:
            return entry
        command = replace(left, count=done, until="", background=False)
        return CompletedCommand(command=command, left=left.count - done)

    def _steps(self, number: int, entry: CompletedCommand, command: Step) -> Entry | None:
        is_before = self._mark is not None and number < self._mark.entry
        count = 0 if is_before else max(command.count, self._done)  # the rank that died may have told of fewer
        if self._mark is None:
            self.lost += command.count
            self._owed += _without_stop(command, command.count)
            self._rest = _without_stop(command, entry.left)
            if isinstance(entry.reply, StepReply) and entry.reply.saved:
                self._note_saved(entry.reply.saved[-1])
                since = command.count % command.every if command.every else 0
                self._owed += _without_stop(command, since)
            return None
        if is_before:
            return entry
        again, self._done = count - self._done, 0
        if again:
            self._session.run(Step(count=again, fn=command.fn), RequestListener())
            self.steps += again
        left = entry.left + command.count - count
        self._rest = _without_stop(command, left)
        return replace(entry, command=replace(command, count=count), left=left)


def _without_stop(command: Step, count: int) -> Sequence[Step]:
    """Return the command for so many of its steps, in the foreground and without a stop; nothing for none."""
    return (replace(command, count=count, until="", background=False),) if count > 0 else ()


def _as_it_was(command: Command, reply: object) -> Command:
    """Return a command to repeat: a load of the checkpoint that was the newest then."""
    return Load(reply.folder) if isinstance(reply, LoadReply) else command


def _words(entry: Entry) -> str:
    if isinstance(entry, CompletedCommand):
        return f"%fsdp {to_text(entry.command)}"
    code = entry.what if isinstance(entry, Omission) and not entry.code else entry.code
    return f"the cell {code.strip().splitlines()[0]!r}"


def _on_all(session: Session, name: str, *args: Any, ranks: Sequence[int] | None = None) -> dict[int, Any]:  # noqa: ANN401 - plain data
    """Call a function of the ranks' side on ranks, by default all, between requests; return their replies.

    Raises:
        RankDied, ClusterError: a rank was lost, or is too slow; the others no longer wait for it.
    """
    pending = session.cluster.apply(f"{RUNTIME}:{name}", *args, ranks=ranks)
    is_done = pending.wait(RECOVER_S, or_error=True)
    if not is_done:
        free(session.cluster, session.living(), pending, "another rank was lost")
        pending.wait(PATIENT_S)
    pending.raise_error()
    if not is_done:
        raise ClusterError(f"the ranks did not finish {name!r} in time: %fsdp heal begins again")
    return pending.results()
