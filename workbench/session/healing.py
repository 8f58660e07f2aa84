"""Healing: another process takes the place of a lost rank, and all ranks repeat the program up to where they were.

What the ranks did is in the session's :class:`~workbench.session.program.Program`. All of them, the new one included,
begin with its first cell, so collectives in cells find all ranks, and objects refer to each other as they did. Nothing
of it is recorded or printed again. From the newest snapshot on, steps are done again as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench.cluster.engine_provider import OnWait
from workbench.errors import ClusterError, RankError, UsageError
from workbench.protocol.commands import Reshard, Shard, Step, Unshard, to_text
from workbench.replay.grouping import label
from workbench.reports.heal_report import HealReport
from workbench.session.outside_effects import effects_of
from workbench.session.program import CompletedCell, CompletedCommand, Entry, Omission
from workbench.session.request import RequestListener
from workbench.session.session import RUNTIME, Session, busy_sentence
from workbench.session.waiter import PATIENT_S

REPEATED = (Shard, Reshard, Unshard)
"""The commands, besides steps, that leave something on the ranks."""


@dataclass
class _Repeated:
    """What was repeated of a program.

    Attributes:
        cells: number of cells and commands.
        steps: number of steps.
        lost: number of steps that were not.
        failed: cells and commands that raised, each with its error.
        entries: the program now.
    """

    cells: int = 0
    steps: int = 0
    lost: int = 0
    failed: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)


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
    session.restart_ranks(on_wait)
    started_s = time.monotonic() - begin
    with session.repeating() as program:
        _on_all(session, "begin_replay")
        repeated = _repeat(session, entries, f"lost with {label(lost)}")
        kept = _on_all(session, "end_replay")
        program[:] = repeated.entries
    return HealReport(
        ranks=tuple(lost),
        seconds=time.monotonic() - begin,
        start_s=started_s,
        cells=repeated.cells,
        steps_redone=repeated.steps,
        steps_lost=repeated.lost,
        kept=tuple(sorted({name for rank in living for name in kept[rank]})),
        failed=tuple(repeated.failed),
    )


def _repeat(session: Session, entries: Sequence[Entry], why: str) -> _Repeated:
    done = _Repeated()
    for entry in entries:
        now: Entry = entry
        try:
            if isinstance(entry, CompletedCell):
                session.run_cell(entry.code, None, RequestListener())
                done.cells += 1
            elif isinstance(entry, CompletedCommand) and isinstance(entry.command, REPEATED):
                session.run(entry.command, RequestListener())
                done.cells += 1
            elif isinstance(entry, CompletedCommand) and isinstance(entry.command, Step):
                done.lost += entry.command.count
                now = Omission(what=f"{_words(entry)}, {why}")
        except (RankError, UsageError) as error:
            done.failed.append(f"{_words(entry)}: {str(error).splitlines()[0]}")
            now = Omission(what=f"{_words(entry)} that raised when it ran again, because another rank was {why}")
        done.entries.append(now)
    return done


def _words(entry: Entry) -> str:
    if isinstance(entry, CompletedCommand):
        return f"%fsdp {to_text(entry.command)}"
    code = entry.code if isinstance(entry, CompletedCell) else entry.what
    return f"the cell {code.strip().splitlines()[0]!r}"


def _on_all(session: Session, name: str) -> dict[int, list[str]]:
    """Call a function of the ranks' side on all of them, between requests."""
    pending = session.cluster.apply(f"{RUNTIME}:{name}")
    if not pending.wait(PATIENT_S, or_error=True):
        raise ClusterError(f"the ranks did not finish {name!r} in time: %fsdp heal")
    pending.raise_error()
    return pending.results()
