"""Healing: another process takes the place of a lost rank, and all ranks repeat the program up to where they were.

What the ranks did is in the session's :class:`~workbench.session.program.Program`. All of them, the new one included,
begin with its first cell, so collectives in cells find all ranks, and objects refer to each other as they did. Nothing
of it is recorded or printed again. From the newest snapshot on, steps are done again as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.base.codec import decode, encode
from workbench.cluster.engine_provider import OnWait
from workbench.cluster.release_ranks import free
from workbench.errors import ClusterError, RankError, UsageError
from workbench.protocol.commands import Load, Reshard, Shard, Snapshot, Step, Unshard, to_text
from workbench.protocol.rank_messages import Marks, SnapshotMark
from workbench.replay.grouping import label
from workbench.reports.heal_report import HealReport
from workbench.session.outside_effects import effects_of
from workbench.session.program import CompletedCell, CompletedCommand, Entry, Omission
from workbench.session.request import RequestListener
from workbench.session.session import RECOVER_S, RUNTIME, Session, busy_sentence
from workbench.session.waiter import PATIENT_S

REPEATED = (Shard, Reshard, Unshard, Load)
"""The commands, besides steps, that leave something on the ranks."""


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
    mark = _newest_mark(session, lost, living)
    session.restart_ranks(on_wait)
    started_s = time.monotonic() - begin
    with session.repeating() as program:
        _on_all(session, "begin_replay")
        repeated = _Repetition(session, entries, mark, lost)
        repeated.run()
        found = _on_all(session, "end_replay")
        program[:] = repeated.entries
    if mark is not None:  # the new rank has none yet
        with session.repeating():
            session.run(Snapshot(), RequestListener())
    return HealReport(
        ranks=tuple(lost),
        seconds=time.monotonic() - begin,
        start_s=started_s,
        cells=repeated.cells,
        steps_redone=repeated.steps,
        steps_lost=repeated.lost,
        kept=tuple(sorted({name for rank in living for name in found[rank]["kept"]})),
        other=tuple(sorted({name for rank in living for name in found[rank]["other"]})) if mark is not None else (),
        left_out=tuple(dict.fromkeys(repeated.left_out)),
        failed=tuple(repeated.failed),
        has_snapshot=mark is not None,
        next=repeated.next,
    )


def _newest_mark(session: Session, lost: Sequence[int], living: Sequence[int]) -> SnapshotMark | None:
    """Return when the newest snapshot was taken that is whole: every rank's is on it, or on the rank after it."""
    num_ranks = session.cluster.num_ranks
    found = {
        rank: decode(Marks, data, f"marks of rank {rank}")
        for rank, data in _on_all(session, "marks", ranks=living).items()
    }
    if not found or any((rank + 1) % num_ranks in lost for rank in lost):
        return None
    own = [set(of_rank.own) for of_rank in found.values()]
    held = [set(found[(rank + 1) % num_ranks].held) for rank in lost]
    return max(set.intersection(*own, *held), default=None)


class _Repetition:
    """Repeats the entries of a program, with its steps from the newest snapshot on.

    Args:
        session: whose ranks repeat it.
        before: the entries.
        mark: when the snapshot was taken; None: there is none.
        lost: the ranks that were replaced.

    Attributes:
        entries: the program then.
        cells: number of cells and commands repeated.
        steps: number of steps repeated.
        lost: number of steps that were not.
        failed: cells and commands that raised, each with its error.
        left_out: what is no part of the program, and was not repeated.
        next: what to type to go on with steps that were interrupted; empty: none were.
    """

    def __init__(
        self, session: Session, before: Sequence[Entry], mark: SnapshotMark | None, lost: Sequence[int]
    ) -> None:
        self._session, self._before, self._mark, self._ranks = session, before, mark, lost
        self.entries: list[Entry] = []
        self.cells = self.steps = self.lost = 0
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self.next = ""
        self._done = 0 if mark is None else mark.count  # steps of the next entry that the snapshot has

    def run(self) -> None:
        """Repeat them.

        Raises:
            ClusterError, RankDied: another rank was lost.
        """
        for number, entry in enumerate(self._before):
            if self._mark is not None and number == self._mark.entry:
                self._put_back(self._mark)
            try:
                self.entries.append(self._repeated(number, entry))
            except (RankError, UsageError) as error:
                self.failed.append(f"{_words(entry)}: {str(error).splitlines()[0]}")
                why = f"when it ran again, because {label(self._ranks)} had died"
                self.entries.append(Omission(what=f"{_words(entry)} that raised {why}"))
        if self._mark is not None and self._mark.entry >= len(self._before):
            self._put_back(self._mark)

    def _put_back(self, mark: SnapshotMark) -> None:
        _on_all(self._session, "put_back", encode(mark), self._ranks)

    def _repeated(self, number: int, entry: Entry) -> Entry:
        """Repeat an entry, and return that of the program now."""
        if isinstance(entry, CompletedCell):
            self._session.run_cell(entry.code, None, RequestListener())
            self.cells += 1
        elif isinstance(entry, CompletedCommand) and isinstance(entry.command, REPEATED):
            self._session.run(entry.command, RequestListener())
            self.cells += 1
        elif isinstance(entry, CompletedCommand) and isinstance(entry.command, Step):
            return self._steps(number, entry, entry.command)
        elif isinstance(entry, Omission) and entry.left is not None:
            self.next = f"%fsdp {to_text(entry.left)}"
        elif isinstance(entry, Omission) and not entry.is_loss:
            self.left_out.append(entry.what)
        return entry

    def _steps(self, number: int, entry: CompletedCommand, command: Step) -> Entry:
        is_before = self._mark is not None and number < self._mark.entry
        count = 0 if is_before else max(command.count, self._done)  # the rank that died may have told of fewer
        if self._mark is None:
            self.lost += command.count
            self.next = f"%fsdp {to_text(replace(command, count=self.lost + entry.left))}"
            return Omission(what=f"%fsdp {to_text(command)}, lost with {label(self._ranks)}")
        if is_before:
            return entry
        again, self._done = count - self._done, 0
        if again:
            self._session.run(Step(count=again, fn=command.fn), RequestListener())
            self.steps += again
        left = entry.left + command.count - count
        self.next = f"%fsdp {to_text(replace(command, count=left))}" if left > 0 else ""
        return replace(entry, command=replace(command, count=count), left=left)


def _words(entry: Entry) -> str:
    if isinstance(entry, CompletedCommand):
        return f"%fsdp {to_text(entry.command)}"
    code = entry.code if isinstance(entry, CompletedCell) else entry.what
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
