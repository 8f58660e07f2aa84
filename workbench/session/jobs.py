"""Code for ranks that stand in the gate: sent to the held threads through the side doors, results asked for there."""

from __future__ import annotations

import ast
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.cluster.pending import Reply
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError, WorkbenchError
from workbench.replay.alike import label
from workbench.session.watch import ASK_S, PATIENT_S, SLICE_S, CountInterrupts, Interruptible

JobKind = Literal["evaluate", "inspect", "cell"]

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
"""Functions that wait for other ranks without a collective: a rank sees the collectives themselves, not these."""

_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a job ended on one rank.

    Attributes:
        ok: whether it returned.
        text: its value as text, or what it wrote.
        result: plain data, of an inspection.
        error: ``ename, evalue, traceback`` of what it raised.
    """

    ok: bool
    text: str = ""
    result: Any = None
    error: Mapping[str, str] = field(default_factory=dict)


def group_maker_in(code: str) -> str:
    """Return the name of the first of :data:`GROUP_MAKERS` that ``code`` calls; ``""`` if there is none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return ""  # the rank says so better
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in GROUP_MAKERS:
                return str(name)
    return ""


@dataclass(frozen=True, kw_only=True)
class Company:
    """Who runs a job.

    Attributes:
        ranks: that run it.
        held: ranks that stand in the gate.
        num_ranks: how many ranks there are.
    """

    ranks: Sequence[int]
    held: Sequence[int]
    num_ranks: int

    @property
    def alone(self) -> str:
        """Who runs it and what to do instead, the end of a sentence of why others cannot be waited for; empty: all."""
        if len(self.ranks) == self.num_ranks:
            return ""
        part = "or look at the part of this rank with to_local()"
        if len(self.held) == self.num_ranks:
            return f"{label(self.ranks)} would call it: leave -t out, {part}"
        return f"{label(self.held)} of {self.num_ranks} can call it here: stop where all ranks stop, {part}"

    def job(self, kind: JobKind, text: str, frame: int = 0) -> dict[str, Any]:
        """Return a job as ranks read it.

        Args:
            kind: what is to be done.
            text: with what: an expression, a cell, the name of a parameter.
            frame: number of the user's frame in which names are looked up first.

        Raises:
            UsageError: it makes a process group, which waits for ranks that do not run it.
        """
        alone = "" if kind == "inspect" else self.alone  # an inspection waits for nobody
        maker = group_maker_in(text) if alone else ""
        if maker:
            raise UsageError(f"{maker}() waits for other ranks, and only {alone}")
        return {"kind": kind, "text": text, "frame": frame, "alone": alone, "ranks": list(self.ranks)}


def check_held(ranks: Sequence[int], held: Sequence[int]) -> None:
    """Check that each of ``ranks`` stands in the gate, as ``held`` do.

    Raises:
        UsageError: the message names those that do not.
    """
    missing = [rank for rank in ranks if rank not in held]
    if missing:
        there = f"; there is {label(held)}" if held else ""
        verb = "does" if len(missing) == 1 else "do"
        raise UsageError(f"{label(missing)} {verb} not stand in the gate{there}: see %fsdp where")


class Jobs:
    """Runs jobs in the held threads of stopped ranks.

    Args:
        cluster: where the ranks are.
        company: who runs them.
    """

    def __init__(self, cluster: Interruptible, company: Company) -> None:
        self._cluster, self._company = cluster, company

    def run(self, kind: JobKind, text: str, *, frame: int = 0) -> dict[int, Done]:
        """Run one job, as :meth:`Company.job` has it, and return how it ended on each rank.

        Raises:
            UsageError: a rank does not stand in the gate, or the job makes a process group on some ranks only.
            RankDied: a rank is gone.
            Interrupted: a second Ctrl-C; the first one is sent to the ranks.
        """
        ticket, ranks = str(next(_numbers)), self._company.ranks
        request = {"op": "enqueue", "ticket": ticket, "job": self._company.job(kind, text, frame)}
        replies = self._cluster.ask(request, ranks, timeout_s=PATIENT_S)
        accepted = [rank for rank in ranks if _content(replies[rank]).get("accepted")]
        try:
            check_held(ranks, accepted)
            return self._wait(ticket, ranks)
        finally:
            self._forget(ticket, ranks)

    def _wait(self, ticket: str, ranks: Sequence[int]) -> dict[int, Done]:
        done: dict[int, Done] = {}
        seen = 0
        with CountInterrupts() as interrupts:
            while len(done) < len(ranks):
                if interrupts.count > seen:
                    seen += 1
                    self._interrupt(seen, [rank for rank in ranks if rank not in done])
                done |= self._look(ticket, [rank for rank in ranks if rank not in done])
                if len(done) < len(ranks):
                    time.sleep(SLICE_S)
        return done

    def _interrupt(self, count: int, ranks: Sequence[int]) -> None:
        if count > 1:
            raise Interrupted(f"interrupted; nobody waits for {label(ranks)} any more: %fsdp where, %fsdp abort")
        self._cluster.interrupt(ranks)

    def _look(self, ticket: str, ranks: Sequence[int]) -> dict[int, Done]:
        found = {}
        for rank, reply in self._cluster.ask({"op": "where"}, ranks, timeout_s=ASK_S).items():
            content = _content(reply)
            ended = content.get("tickets", {}).get(ticket)
            if ended is not None:
                error = ended.get("error") or {}
                text = str(ended.get("text") or "")
                found[rank] = Done(ok=bool(ended["ok"]), text=text, result=ended.get("result"), error=error)
            elif content and not content.get("held"):
                raise ClusterError(f"rank {rank} left the gate before it was done: see %fsdp where")
        return found

    def _forget(self, ticket: str, ranks: Sequence[int]) -> None:
        self._cluster.ask({"op": "forget", "tickets": [ticket]}, ranks, timeout_s=ASK_S)


def to_error(done: Mapping[int, Done], where: str) -> WorkbenchError | None:
    """Return what to raise for jobs that failed, one line a kind of error; None if all returned.

    Args:
        done: by rank.
        where: where the ranks stand, as before.
    """
    groups: dict[str, list[int]] = {}
    for rank, ended in sorted(done.items()):
        if not ended.ok:
            what = f"{ended.error.get('ename', 'error')}: {ended.error.get('evalue', '')}".rstrip(": ")
            groups.setdefault(what.splitlines()[0], []).append(rank)
    if not groups:
        return None
    first = min(rank for ranks in groups.values() for rank in ranks)
    error = done[first].error
    if error.get("ename") == UsageError.__name__:
        return UsageError(error.get("evalue", ""))
    lines = [f"{label(ranks)} raised {what}" for what, ranks in groups.items()]
    return RankError(
        "\n".join([*lines, f"the stop stays: {where}"]),
        rank=first,
        ename=error.get("ename", ""),
        evalue=error.get("evalue", ""),
        also=tuple(rank for rank in next(iter(groups.values())) if rank != first),
    )


def _content(reply: Reply | Exception) -> dict[str, Any]:
    """Return a rank's answer; one that does not answer in time has none.

    Raises:
        RankDied: its process is gone.
        RankError: its side door refused the request.
    """
    if isinstance(reply, Reply):
        return reply.content
    if isinstance(reply, (RankDied, RankError)):
        raise reply
    return {}
