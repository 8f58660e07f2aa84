"""Running code on ranks held in the gate: jobs for the held threads, sent and polled on the control channels."""

from __future__ import annotations

import ast
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from workbench.cluster.channel_protocol import Interruptible, answers
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError, WorkbenchError
from workbench.protocol.commands import Evaluate, Inspect
from workbench.protocol.rank_messages import CellLine, Forget, Job, JobReply, Locate, LocateLine, RunCell
from workbench.replay.grouping import by_value, label
from workbench.session.stall_notice import QUIET_S, OnStanding, StallNotice, no_standing, place_words, who_works
from workbench.session.waiter import ASK_S, PATIENT_S, SLICE_S

Inner = Inspect | Evaluate | RunCell
"""A request inside a stopped step."""

R = TypeVar("R")

INTERRUPTED_S = 0.5
"""Time in seconds for ranks to end a job after Ctrl-C, before it is said where they still are."""

GROUP_MAKERS = frozenset(
    {
        "init_device_mesh",
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    }
)
"""Functions that wait for other ranks without a collective, so that a rank cannot detect them as one."""

_numbers = itertools.count(1)


def group_maker_in(code: str) -> str:
    """Return the name of the first of :data:`GROUP_MAKERS` that ``code`` calls; ``""`` if there is none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return ""  # the rank reports it better
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in GROUP_MAKERS:
                return str(name)
    return ""


@dataclass(frozen=True, kw_only=True)
class JobRanks:
    """The ranks of a job.

    Attributes:
        ranks: ranks that run it.
        held: ranks held in the gate.
        num_ranks: number of all ranks.
    """

    ranks: Sequence[int]
    held: Sequence[int]
    num_ranks: int

    @property
    def alone(self) -> str:
        """End of the message that the job cannot wait for other ranks: who runs it, what to do; empty: all run it."""
        if len(self.ranks) == self.num_ranks:
            return ""
        part = "or read this rank's shard with to_local()"
        if len(self.held) == self.num_ranks:
            return f"{label(self.ranks)} would call it: leave -t out, {part}"
        return f"{label(self.held)} of {self.num_ranks} can call it here: stop where all ranks stop, {part}"

    def job(self, ticket: str, work: Inner) -> Job:
        """Return the job of ``work``.

        Raises:
            UsageError: it creates a process group, which waits for ranks that do not run the job.
        """
        alone = "" if isinstance(work, Inspect) else self.alone  # an inspection waits for no other rank
        code = work.expr if isinstance(work, Evaluate) else work.code if isinstance(work, RunCell) else ""
        maker = group_maker_in(code) if alone else ""
        if maker:
            raise UsageError(f"{maker}() waits for other ranks, and only {alone}")
        return Job(ticket=ticket, work=work, ranks=tuple(self.ranks), alone=alone)


def check_held(ranks: Sequence[int], held: Sequence[int]) -> None:
    """Check that all ``ranks`` are among the ``held`` ones.

    Raises:
        UsageError: the message names those that are not.
    """
    missing = [rank for rank in ranks if rank not in held]
    if missing:
        there = f", only {label(held)}" if held else ""
        verb = "is" if len(missing) == 1 else "are"
        raise UsageError(f"{label(missing)} {verb} not held in the gate{there}: see %fsdp where")


class RemoteEval:
    """Runs jobs in the held threads of stopped ranks.

    Args:
        cluster: the cluster.
        company: the ranks that run the jobs.
        on_standing: receives notices of ranks that do not end a job.
        quiet_s: time in seconds before the first notice.
    """

    def __init__(
        self,
        cluster: Interruptible,
        company: JobRanks,
        on_standing: OnStanding = no_standing,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._cluster, self._company = cluster, company
        self._on_standing, self._quiet_s = on_standing, quiet_s

    def run(self, work: Inner) -> dict[int, JobReply]:
        """Run ``work`` on every rank and return each rank's reply.

        The first Ctrl-C is sent to the ranks, the second one ends the wait; ranks that still run then have no reply.

        Raises:
            UsageError: a rank is not held in the gate, or the job creates a process group on some ranks only.
            RankDied: a rank is gone.
        """
        ticket, ranks = str(next(_numbers)), self._company.ranks
        replies = self._cluster.ask(self._company.job(ticket, work), ranks, timeout_s=PATIENT_S)
        accepted = [rank for rank in ranks if _value(replies[rank])]
        try:
            check_held(ranks, accepted)
            return self._wait(ticket, ranks)
        finally:
            self._cluster.ask(Forget(tickets=(ticket,)), ranks, timeout_s=ASK_S)

    def _wait(self, ticket: str, ranks: Sequence[int]) -> dict[int, JobReply]:
        done: dict[int, JobReply] = {}
        notice = StallNotice(time.monotonic, self._quiet_s)
        interrupted_at = math.inf
        with CountInterrupts() as interrupts:
            while (left := [rank for rank in ranks if rank not in done]) and interrupts.count < 2:
                if interrupts.count and interrupted_at == math.inf:
                    self._cluster.interrupt(left)
                    interrupted_at = time.monotonic()
                found = self._look(ticket, left)
                done |= found
                if len(found) < len(left):
                    self._tell_who_works(notice, left, done, interrupted_at)
                    time.sleep(SLICE_S)
        return done

    def _tell_who_works(
        self, notice: StallNotice, left: Sequence[int], done: Mapping[int, JobReply], interrupted_at: float
    ) -> None:
        """Say which ranks have ended the job and where the others are, if it is time."""
        has_no_effect = time.monotonic() >= interrupted_at + INTERRUPTED_S

        def sentence(seconds: float) -> str:
            working = [rank for rank in left if rank not in done]
            lines = answers(self._cluster, LocateLine(), working, timeout_s=ASK_S)
            means = "; Ctrl-C did not end this, Ctrl-C again stops waiting" if has_no_effect else ""
            return who_works(seconds, working, lines, done) + means

        notice.look(len(done), sentence, self._on_standing, is_urgent=has_no_effect)

    def _look(self, ticket: str, ranks: Sequence[int]) -> dict[int, JobReply]:
        found = {}
        for rank, reply in self._cluster.ask(Locate(), ranks, timeout_s=ASK_S).items():
            position = _value(reply)
            if position is None:
                continue
            if ticket in position.tickets:
                found[rank] = position.tickets[ticket]
            elif position.held is None:
                raise ClusterError(f"rank {rank} left the gate before its reply: see %fsdp where")
        return found


def abandoned(lines: Mapping[int, CellLine | None]) -> Interrupted:
    """Return the exception that the notebook no longer waits for ranks, each with the line in which it is."""
    places = by_value((rank, place_words(line)) for rank, line in sorted(lines.items()))
    left = "; ".join(f"{label(ranks)}{place}" for place, ranks in places.items())
    return Interrupted(f"Interrupted; the notebook no longer waits for {left}: %fsdp abort ends this and the step")


def to_error(done: Mapping[int, JobReply], where: str) -> WorkbenchError | None:
    """Return the error of failed jobs, with a line for each distinct error; None if none failed.

    Args:
        done: replies by rank.
        where: where the ranks are stopped, in words; empty: they are between steps.
    """
    errors = {rank: ended.error for rank, ended in sorted(done.items()) if ended.error is not None}
    if not errors:
        return None
    groups = by_value((r, f"{e.ename}: {e.evalue}".removesuffix(": ").splitlines()[0]) for r, e in errors.items())
    first, error = next(iter(errors.items()))
    if error.ename == UsageError.__name__:
        return UsageError(error.evalue)
    lines = [f"{label(ranks)} raised {what}" for what, ranks in groups.items()]
    return RankError(
        "\n".join([*lines, *([f"the step is still stopped: {where}"] if where else [])]),
        rank=first,
        ename=error.ename,
        evalue=error.evalue,
        also=tuple(rank for rank in next(iter(groups.values())) if rank != first),
    )


def _value(reply: R | Exception) -> R | None:
    """Return a rank's reply; None if it did not answer in time.

    Raises:
        RankDied: its process is gone.
        RankError: it refused the request.
    """
    if isinstance(reply, (RankDied, RankError)):
        raise reply
    return None if isinstance(reply, Exception) else reply
