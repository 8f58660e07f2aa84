"""The engine's process groups, behind objects whose process group can be replaced.

A group with an unfinished collective is never used again (its next collective could return stale data). So after an
abort or a failure every :class:`CommGroup` gets a new process group, and the units that refer to it do not change.
These groups are separate from the groups of the DTensor mesh, which the user's own collectives use.

No collective is issued before the order check (``collective_order.py``) has established that all ranks of the group
issue the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from workbench.engine import probe
from workbench.engine._torch import default_store, new_group
from workbench.engine.backends import backend_of, device_here
from workbench.engine.backends.async_work import CollectiveSpan, PendingWork, Transport
from workbench.engine.cancellable_waits import SLICE_S, AsyncWork, cancellation
from workbench.engine.collective_order import Collective, MessageBoard, OrderCheck
from workbench.engine.errors import RanksDisagreeError
from workbench.events import GROUP_INDICES, Comm, Edge, Indices, Kind

GROUP_NUMBERS = Indices()
"""Numbers of groups in their names, by which traces of ranks find them: all ranks make them in the same order.

A rank that replaces another one has not made as many groups before: all set ``next`` when they boot.
"""

SEPARATE = "reduce-scatter"
"""Purpose of the groups in which units reduce gradients while they gather parameters in others."""

OWN = "workbench/"
"""Name prefix of the engine's process groups."""


SIMULATED = "fake"
"""c10d's backend that sends nothing, for one rank that stands for many."""

around_creation: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context manager entered while a process group is created; set it to find the group's sockets."""


class CommGroup:
    """A communication group with a replaceable c10d process group.

    Attributes:
        ranks: global ranks, in group order.
        device_type: of the tensors it communicates.
        purpose: purpose of a group that carries steps of another group's collectives; empty for units' collectives, or
            :data:`SEPARATE`.
        rank: this process's position among them.
        size: number of ranks.
        process_group: the current c10d group; None while there is none.
        index: number of this generation of the group, for the probe.
        incarnation: number of rebuilds since the default process group was created; equal on its ranks.
    """

    def __init__(self, ranks: tuple[int, ...], device_type: str = "cpu", purpose: str = "") -> None:
        self.ranks = ranks
        self.device_type = device_type
        self.purpose = purpose
        self.size = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.incarnation = -1
        self.process_group: dist.ProcessGroup | None = None
        self._in_flight: set[PendingWork] = set()
        self._store: Store | None = None
        self._order_check: OrderCheck | None = None
        self._transport = Transport()
        self.rebuild()

    def rebuild(self) -> None:
        """Create a new process group; all ranks of the group must call this together."""
        self.let_go()
        self.index = next(GROUP_INDICES)
        # another count than the index: that of c10d's groups, which not all ranks may use, must not change it
        is_of_units = self.purpose in {"", SEPARATE}
        name_in_trace = f"group {next(GROUP_NUMBERS)}" if is_of_units else ""
        self._seq = 0
        self._given_up = ""
        # a rank that joins later has the same count: a new default group resets it on all ranks
        store = default_store()
        self.incarnation = self.incarnation + 1 if store is self._store else 0
        self._store = store
        what = "/".join(filter(None, [self.device_type, self.purpose]))
        name = f"{OWN}{what}/{'-'.join(map(str, self.ranks))}/{self.incarnation}"
        self._renew_order_check(PrefixStore(name, store))  # ranks meet here first: c10d's wait is uninterruptible
        with around_creation():
            self.process_group = new_group(self.ranks, name, self.device_type)
        self._transport = backend_of(device_here(self.device_type)).transport(self.process_group)
        self._next_look_s = 0.0
        if probe.active is not None and is_of_units:
            probe.active.comm_group(self.index, self.ranks, name_in_trace)

    def _renew_order_check(self, store: Store) -> None:
        """Start a new order check, without the order so far."""
        old, self._order_check = self._order_check, None
        if self.size > 1 and dist.get_backend() != SIMULATED:  # a simulated world has one rank
            board = MessageBoard(store, self.rank, self.size)
            board.barrier()
            self._order_check = OrderCheck(board, self.ranks, self.rank, is_part=self.size < dist.get_world_size())
        if old is not None:
            old.close()  # all ranks have met at the new board: none reads the old one

    def let_go(self) -> None:
        """Drop the process group, which must not be used again; abort it if a collective is unfinished."""
        if self.num_unfinished and self.process_group is not None:
            self._transport.abort(self.process_group)
        self._in_flight.clear()
        self.process_group = None

    def next_comm(self) -> Comm:
        """Return the number of this group's next collective."""
        comm = Comm(group=self.index, seq=self._seq)
        self._seq += 1
        return comm

    def issue(
        self,
        comm: Callable[..., AsyncWork | None],
        *tensors: torch.Tensor,
        collective: Collective,
        op: object = None,
        kind: Kind | None = None,
        unit: int = probe.NO_UNIT,
    ) -> PendingWork:
        """Issue a collective once all ranks of the group are known to issue the same one.

        Args:
            comm: called with the tensors, the process group, ``op`` if given, and ``async_op=True``; see
                :class:`workbench.engine.comm.AllGather`.
            tensors: the output and the input, or one tensor that is both.
            collective: its description.
            op: operation of a reduction.
            kind: kind of its events; None: it is not announced.
            unit: index of its unit, for the probe.

        Raises:
            StepAborted: this rank was cancelled; the group may be partly closed already.
            RanksDisagreeError: another rank is about to issue another collective.
            RuntimeError: the group was destroyed or a wait cancelled, and the group was not rebuilt since.
        """
        span = None if kind is None else CollectiveSpan(unit, kind, collective.num_bytes, self.next_comm())
        if span is not None:
            probe.event(span.kind, Edge.BEGIN, span.unit, span.num_bytes, span.comm)
        process_group = self.usable_group(collective)
        with self._giving_up():
            cancellation.check()
            self._check_is_next(collective)
        work = comm(*tensors, process_group, *(() if op is None else (op,)), async_op=True)
        pending = self._tracked(self._transport.pending(work, collective, self, span))
        if span is not None and probe.active is not None and pending.lets_stream_wait is not None:
            probe.active.issued(span.comm, pending.lets_stream_wait)
        return pending

    def part(self, ranks: tuple[int, ...], purpose: str) -> CommGroup:
        """Return a subgroup for steps within this group's collectives; its ranks must call this together.

        Args:
            ranks: global ranks, including this one.
            purpose: groups of different purposes are separate; within one, all ranks issue steps in the same order.
        """
        return group_of(ranks, self.device_type, purpose)

    def step(self, issue: Callable[[dist.ProcessGroup], AsyncWork]) -> AsyncWork:
        """Issue a step of another group's order-checked collective; callable from any thread, one call at a time.

        Raises:
            RuntimeError: the group was destroyed and not rebuilt.
        """
        if self.process_group is None:
            raise RuntimeError(f"the process group of ranks {list(self.ranks)} ({self.purpose}) was destroyed")
        work = issue(self.process_group)
        self._tracked(self._transport.pending(work, self.purpose))
        return work

    def _tracked(self, pending: PendingWork) -> PendingWork:
        """Count ``pending`` as in flight, and drop what has ended: a reset leaves some collectives unawaited."""
        self._in_flight = {p for p in self._in_flight if not p.has_ended} | {pending}
        return pending

    def tell(self, collective: Collective, text: str) -> str:
        """Return the first rank's ``text``, through the store; all ranks of the group must call this together.

        Args:
            collective: the occasion, for errors.
            text: this rank's text; only the first rank's is used.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError, RuntimeError: as :meth:`issue`.
        """
        self.usable_group(collective)
        with self._giving_up():
            return text if self._order_check is None else self._order_check.tell(collective, text)

    def compare(self, collective: Collective, text: str) -> list[str]:
        """Return every rank's text, in group order, through the store; all its ranks must call this together.

        The ranks read each other's texts only if they differ. Arguments and errors as for :meth:`tell`.
        """
        self.usable_group(collective)
        with self._giving_up():
            return [text] * self.size if self._order_check is None else self._order_check.compare(collective, text)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Call :meth:`give_up` if the body raises, including an interrupt: other ranks may have continued."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def usable_group(self, collective: Collective) -> dist.ProcessGroup:
        """Return the process group if collectives can be issued; ``collective`` names the next one.

        Raises:
            StepAborted: this rank was cancelled.
            RuntimeError: the group was destroyed, or an earlier collective was abandoned.
        """
        if self.process_group is not None and not self._given_up:
            return self.process_group
        cancellation.check()
        if self.process_group is None:
            raise RuntimeError(f"{collective}: its process group was destroyed; recover or restart the ranks")
        raise RuntimeError(
            f"{collective}: an earlier collective was aborted ({self._given_up}), so the ranks' collectives may no "
            "longer match; call workbench.engine.rebuild_groups() on all ranks and reset_iter_state() on the root"
        )

    def _check_is_next(self, collective: Collective) -> None:
        if self._order_check is None:
            return
        if not self._transport.host_waits and time.monotonic() > self._next_look_s:
            self._next_look_s = time.monotonic() + SLICE_S
            self._order_check.check_peers()
        self._order_check.before(collective)

    def check_peers(self) -> None:
        """Raise RanksDisagreeError if another rank's collectives differ from this one's; called in wait slices."""
        if self._order_check is not None:
            self._order_check.check_peers()

    def give_up(self, error: BaseException) -> None:
        """Refuse further collectives on all groups of this rank; notify their ranks if ranks disagree."""
        for group in tuple(_groups.values()):
            group.leave(error)

    def leave(self, error: BaseException) -> None:
        """Refuse further collectives on this group; notify its ranks if ranks disagree."""
        self._given_up = self._given_up or f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        if isinstance(error, RanksDisagreeError) and self._order_check is not None:
            self._order_check.leave(str(error))

    def end_iteration(self) -> None:
        """See :func:`end_iteration`."""
        if self._order_check is None or self._given_up:
            return
        with self._giving_up():
            self._order_check.end_iteration()

    def finished(self, pending: PendingWork) -> None:
        """Drop a collective that was waited for, unless a part of it still runs."""
        if not pending.goes_on:
            self._in_flight.discard(pending)

    @property
    def num_unfinished(self) -> int:
        """Number of issued collectives that have not ended; callable from any thread."""
        return sum(not pending.has_ended for pending in tuple(self._in_flight))


_groups: dict[tuple[str, str, tuple[int, ...]], CommGroup] = {}


def group_of(ranks: tuple[int, ...], device_type: str = "cpu", purpose: str = "") -> CommGroup:
    """Return the engine's group of these global ranks for tensors on a kind of device.

    The first use creates it; all its ranks must call this together then. For ``purpose`` see :meth:`CommGroup.part`.
    """
    key = (device_type, purpose, ranks)
    if key not in _groups:
        _groups[key] = CommGroup(ranks, device_type, purpose)
    return _groups[key]


def end_iteration(of_model: Iterable[CommGroup]) -> None:
    """End the iteration for the groups of one model: restart the order of their collectives.

    Call it at the end of a root's backward, and of a root's forward that no backward can follow. Leave out the groups
    of other models: some of their ranks may be idle now.

    Raises:
        RanksDisagreeError: another rank issues more collectives in this iteration, or has issued fewer.
        StepAborted: cancelled while waiting for the other ranks.
        CollectiveFailed: the store cannot be reached.
    """
    for group in of_model:
        group.end_iteration()


def rebuild_all() -> None:
    """Rebuild every group, in order of creation; all ranks must call this together."""
    for group in _groups.values():
        group.rebuild()


def forget_all() -> None:
    """Drop all groups after their process groups were destroyed."""
    for group in _groups.values():
        group.let_go()
    _groups.clear()


def num_unfinished() -> int:
    """Return the number of the engine's unfinished collectives on this rank; callable from any thread."""
    return sum(group.num_unfinished for group in tuple(_groups.values()))
