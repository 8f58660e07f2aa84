"""One started cluster: its trace, its requests from sending to settled, and getting over what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.cluster.pending import Pending, Reply
from workbench.errors import ClusterError, Interrupted, RankDied, UsageError, WorkbenchError
from workbench.replay.alike import label
from workbench.session.collect import Collector
from workbench.session.failures import Position, death_sentence, first_cause, to_error
from workbench.session.names import Names
from workbench.session.watch import ASK_S, Interruptible, Outcome, Watch
from workbench.trace.columns import Trace
from workbench.trace.schema import Phase

RUNTIME = "workbench.runtime.rank"
"""The rank side, in the ranks' processes; here it is only a name."""

RECOVER_S = 30.0
"""How long ranks may take to build new process groups, in seconds."""

RESTART = "%fsdp stop, then %fsdp start"


class ClusterLike(Interruptible, Protocol):
    """What a workbench needs of a cluster: see :class:`workbench.cluster.Cluster`."""

    num_ranks: int

    @property
    def rank_info(self) -> Sequence[dict[str, Any]]:
        """Per rank: ``rank, host, device, pid``."""

    def start(self) -> None:
        """Start all ranks."""

    def stop(self) -> None:
        """Stop all ranks; may be called again."""

    def alive(self) -> tuple[bool, ...]:
        """Tell for each rank whether it can be reached."""

    def apply(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> Pending:  # noqa: ANN401
        """Call ``"module:function"`` in the main thread of ranks."""

    def run_cell(self, code: str, ranks: Iterable[int] | None = None) -> Pending:
        """Run a cell in the main thread of ranks."""


NEXT_THING = "the ranks are ready again and keep their variables: correct the code, run its cell, and go on"


def _nothing() -> None:
    """What happens meanwhile by default."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Where the ranks were before a request.

    Attributes:
        num_rows: rows recorded, by rank.
        optimizer_steps: by rank.
    """

    num_rows: dict[int, int]
    optimizer_steps: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class Meanwhile:
    """What a caller does while ranks work.

    Attributes:
        on_slice: called about 50 times a second.
        on_tick: called about 10 times a second after the trace was drained, and once when all is over.
    """

    on_slice: Callable[[], None] = _nothing
    on_tick: Callable[[], None] = _nothing


class Session:
    """See the module docstring.

    Args:
        cluster: started.
    """

    def __init__(self, cluster: ClusterLike) -> None:
        self.cluster = cluster
        self._collector = Collector()
        self._generation = 0
        self._needs_recovery = False

    # ---- asking

    @property
    def trace(self) -> Trace:
        """What was drained so far."""
        return self._collector.trace

    def living(self) -> list[int]:
        """Return the ranks that can be reached."""
        return [rank for rank, alive in enumerate(self.cluster.alive()) if alive]

    def drain(self) -> None:
        """Take what the ranks recorded since the last time."""
        self._collector.drain(self.cluster, self.living(), timeout_s=ASK_S)

    def names(self) -> dict[int, Names]:
        """Return what the ranks' namespaces hold; a rank that does not answer at once is left out."""
        replies = self._ask({"op": "names"})
        return {
            rank: Names(modules=tuple(content["modules"]), variables=tuple(content["variables"]))
            for rank, content in replies.items()
        }

    def where(self) -> dict[int, dict[str, Any]]:
        """Return where each rank is; one that does not answer at once is left out."""
        return self._ask({"op": "where"})

    def _ask(self, request: dict[str, Any]) -> dict[int, dict[str, Any]]:
        replies = self.cluster.ask(request, self.living(), timeout_s=ASK_S) if self.living() else {}
        return {rank: reply.content for rank, reply in replies.items() if isinstance(reply, Reply)}

    # ---- doing

    def ready(self, ranks: Sequence[int]) -> Mark:
        """Make sure that ``ranks`` can take a request, and return where things are before it.

        Raises:
            RankDied: one of them is gone.
            ClusterError: they could not be joined again after an earlier failure.
        """
        living = self.living()
        dead = tuple(rank for rank in ranks if rank not in living)
        if dead:
            raise RankDied(f"{label(dead)} died earlier\n{death_sentence(dead, living)}", ranks=dead)
        if self._needs_recovery and len(living) == self.cluster.num_ranks:
            self.recover()
        self.drain()
        steps = {rank: position["optimizer_steps"] for rank, position in self._collector.positions.items()}
        return Mark(num_rows=self._collector.next_seq, optimizer_steps=steps)

    def finish(self, pending: Pending, mark: Mark, meanwhile: Meanwhile, *, is_command: bool) -> dict[int, Any]:
        """Wait for ``pending`` and return the result of each rank; after a failure the ranks are ready again.

        Args:
            pending: the request, just sent.
            mark: what :meth:`ready` returned before it was.
            meanwhile: what to do while waiting.
            is_command: whether it is a command (else a cell): the engine then was at work.

        Raises:
            UsageError: the ranks refused the command.
            RankError: it raised on a rank.
            RankDied: a rank is gone.
            Interrupted: Ctrl-C.
        """

        def on_tick() -> None:
            self.drain()
            meanwhile.on_tick()

        try:
            outcome = Watch(self.cluster, pending, on_slice=meanwhile.on_slice, on_tick=on_tick).run()
        except BaseException:
            self._needs_recovery = True  # the ranks were aborted; nobody saw how they ended
            raise
        if not outcome.failures and not outcome.interrupts:
            return outcome.results
        raise self._settle(outcome, mark, is_command)

    def recover(self) -> None:
        """Have all ranks build new process groups and forget the step they were in.

        Raises:
            ClusterError: it failed or took too long; the cluster is of no more use.
        """
        self._needs_recovery = True
        self._generation += 1
        try:
            self.cluster.apply(f"{RUNTIME}:recover", self._generation).results(RECOVER_S)
        except WorkbenchError as error:
            raise ClusterError(f"the ranks could not be joined again ({error}): {RESTART}") from error
        self._needs_recovery = False

    def _settle(self, outcome: Outcome, mark: Mark, is_command: bool) -> WorkbenchError:
        """Get the ranks ready again and return what to raise."""
        positions = self._positions(mark)
        error = _error_of(outcome, positions)
        worked = is_command or self._collector.next_seq != mark.num_rows
        blocked = any(position.unfinished for position in positions.values())
        if not (worked or blocked or outcome.aborted or outcome.results):
            return error  # all ranks raised by themselves, before anything that concerns the others
        self._needs_recovery = True
        if outcome.abandoned or len(self.living()) < self.cluster.num_ranks:
            return error  # ranks that cannot take part would be waited for
        try:
            self.recover()
        except ClusterError as broken:
            return ClusterError(f"{error}\n{broken}")
        return error

    def _positions(self, mark: Mark) -> dict[int, Position]:
        """Return where the ranks that answer are, with what they did since ``mark``."""
        trace = self.trace
        names = {unit.index: unit.name for unit in trace.header.units}
        newest = {r.rank: r.rows[-1] for r in trace.ranks if r.end_seq > mark.num_rows.get(r.rank, 0) and len(r.rows)}
        return {
            rank: Position(
                step=int(newest[rank]["step"]) if rank in newest else None,
                phase=Phase(newest[rank]["phase"]).name.lower().replace("_", "-") if rank in newest else None,
                unit=names.get(int(newest[rank]["unit"])) if rank in newest else None,
                optimizer_steps=content["optimizer_steps"] - mark.optimizer_steps.get(rank, 0),
                unfinished=content["unfinished"],
            )
            for rank, content in self.where().items()
        }


def _error_of(outcome: Outcome, positions: dict[int, Position]) -> WorkbenchError:
    """Return what to raise for an outcome that is not a success."""
    if outcome.abandoned:
        still = f"{label(outcome.abandoned)} still {'run' if len(outcome.abandoned) > 1 else 'runs'}"
        return Interrupted(f"interrupted; {still} and nobody waits: {RESTART}")
    if outcome.interrupts and not any(failure.died for failure in outcome.failures):
        return Interrupted("interrupted; the ranks are ready again and keep their variables")
    cause = first_cause(outcome.failures)
    if cause.ename == UsageError.__name__:
        alike = sum(str(failure) == str(cause) for failure in outcome.failures)
        everywhere = alike == len(outcome.failures) + len(outcome.results)
        return UsageError(cause.evalue if everywhere else f"rank {cause.rank}: {cause.evalue}")
    return to_error(outcome.failures, positions, next_thing=NEXT_THING)
