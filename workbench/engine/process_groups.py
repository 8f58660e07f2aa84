"""The engine's process groups, behind objects that can be given new ones.

A group with an unfinished collective is never used again (its next collective could return stale data). So after an
abort or a failure every :class:`CommGroup` gets a fresh process group, and the units that refer to it do not notice.
They are kept apart from the groups of the DTensor mesh, which the user's own collectives use.

No collective is issued before the order check (``collective_order.py``) knows that all ranks of the group issue the
same one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from workbench.engine import probe
from workbench.engine._torch import default_store, new_group
from workbench.engine.backends import backend_of, device_here
from workbench.engine.backends.async_work import PendingWork, Transport
from workbench.engine.cancellable_waits import SLICE_S, AsyncWork, cancellation
from workbench.engine.collective_order import Board, Collective, OrderCheck
from workbench.engine.errors import RanksDisagreeError
from workbench.events import Comm

OWN = "workbench/"
"""What the names of the engine's process groups begin with."""

_indices = itertools.count()

around_creation: Callable[[], AbstractContextManager[None]] = nullcontext
"""Entered around the making of every process group; whoever must find its sockets sets this."""


class CommGroup:
    """Ranks that communicate as one.

    Attributes:
        ranks: global ranks, in group order.
        device_type: of the tensors it communicates.
        purpose: what it is for, if it carries no collectives of units, but steps within those of another group.
        rank: this process's position among them.
        size: number of ranks.
        process_group: the live c10d group; None between two of them.
        index: number of this generation of the group, as the probe knows it.
        incarnation: how often the group was built anew since the default process group was made; equal on its ranks.
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
        """Take a new process group; all ranks of the group must call this together."""
        self.let_go()
        self.index = next(_indices)
        self._seq = 0
        self._given_up = ""
        # a rank that joined later counts like the others: with a new default group everyone begins at 0
        store = default_store()
        self.incarnation = self.incarnation + 1 if store is self._store else 0
        self._store = store
        what = "/".join(filter(None, [self.device_type, self.purpose]))
        name = f"{OWN}{what}/{'-'.join(map(str, self.ranks))}/{self.incarnation}"
        self._renew_order_check(PrefixStore(name, store))  # where ranks meet: c10d would wait for them uninterruptibly
        with around_creation():
            self.process_group = new_group(self.ranks, name, self.device_type)
        self._transport = backend_of(device_here(self.device_type)).transport(self.process_group)
        self._next_look_s = 0.0
        if probe.active is not None and not self.purpose:
            probe.active.comm_group(self.index, self.ranks)

    def _renew_order_check(self, store: Store) -> None:
        """Forget the order of the collectives so far."""
        old, self._order_check = self._order_check, None
        if self.size > 1 and dist.get_backend() != "fake":  # a simulated world has one rank
            board = Board(store, self.rank, self.size)
            board.meet()
            self._order_check = OrderCheck(board, self.ranks, self.rank, is_part=self.size < dist.get_world_size())
        if old is not None:
            old.close()  # all have met at the new board: nobody looks at the old one

    def let_go(self) -> None:
        """Drop the process group, which must not be used again; with a collective unfinished it is aborted."""
        if self.num_unfinished and self.process_group is not None:
            self._transport.abort(self.process_group)
        self._in_flight.clear()
        self.process_group = None

    def next_comm(self) -> Comm:
        """Number the next collective of this group."""
        comm = Comm(group=self.index, seq=self._seq)
        self._seq += 1
        return comm

    def start(self, issue: Callable[[dist.ProcessGroup], AsyncWork | None], collective: Collective) -> PendingWork:
        """Issue a collective once all ranks of the group are known to issue the same.

        Args:
            issue: calls c10d, async.
            collective: what it is.

        Raises:
            StepAborted: this rank was told to give up; the group may be half closed already.
            RanksDisagreeError: another rank is about to do something else.
            RuntimeError: the group was destroyed, or a wait given up, and it was not built anew.
        """
        process_group = self._usable(collective)
        try:
            cancellation.check()
            self._check_is_next(collective)
        except BaseException as error:  # an interrupt as well: others may have issued it
            self.give_up(error)
            raise
        pending = self._transport.pending(issue(process_group), collective, self)
        self._in_flight = {p for p in self._in_flight if not p.has_ended} | {pending}  # a reset drops some unwaited
        return pending

    def part(self, ranks: tuple[int, ...], purpose: str) -> CommGroup:
        """Return a group of some of these ranks for steps within this one's collectives; those ranks call it together.

        Args:
            ranks: global ranks, this one among them.
            purpose: whatever is issued on it for one purpose, all of its ranks issue in the same order.
        """
        return group_of(ranks, self.device_type, purpose)

    def step(self, issue: Callable[[dist.ProcessGroup], AsyncWork]) -> AsyncWork:
        """Issue a step within another group's collective, which all ranks are known to issue; from any thread, in turn.

        Raises:
            RuntimeError: the group was destroyed, and not built anew.
        """
        if self.process_group is None:
            raise RuntimeError(f"the process group of ranks {list(self.ranks)} ({self.purpose}) was destroyed")
        work = issue(self.process_group)
        pending = self._transport.pending(work, self.purpose)
        self._in_flight = {p for p in self._in_flight if not p.has_ended} | {pending}
        return work

    def tell(self, collective: Collective, text: str) -> str:
        """Return what the first rank of the group tells, through the store; all of its ranks call this together.

        Args:
            collective: the occasion, for errors.
            text: what this rank would tell.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError, RuntimeError: as :meth:`start`.
        """
        self._usable(collective)
        with self._giving_up():
            return text if self._order_check is None else self._order_check.tell(collective, text)

    def compare(self, collective: Collective, text: str) -> list[str]:
        """Return every rank's text, in group order, through the store; all of its ranks call this together.

        As long as all have the same text, nobody reads the others'. Arguments and errors as of :meth:`tell`.
        """
        self._usable(collective)
        with self._giving_up():
            return [text] * self.size if self._order_check is None else self._order_check.compare(collective, text)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give up if the body raises, an interrupt as well: others may have gone on."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def _usable(self, collective: Collective) -> dist.ProcessGroup:
        if self.process_group is not None and not self._given_up:
            return self.process_group
        cancellation.check()
        if self.process_group is None:
            raise RuntimeError(f"{collective}: its process group was destroyed; recover or start the ranks again")
        raise RuntimeError(
            f"{collective}: an earlier collective was given up ({self._given_up}), so collectives of the ranks may not "
            "match any more; call workbench.engine.rebuild_groups() on all ranks, and reset_iter_state() on the root"
        )

    def _check_is_next(self, collective: Collective) -> None:
        if self._order_check is None:
            return
        if not self._transport.host_waits and time.monotonic() > self._next_look_s:
            self._next_look_s = time.monotonic() + SLICE_S
            self._order_check.look()
        self._order_check.before(collective)

    def look(self) -> None:
        """Raise RanksDisagreeError if another rank does something else than this one did; asked in wait slices."""
        if self._order_check is not None:
            self._order_check.look()

    def give_up(self, error: BaseException) -> None:
        """Refuse collectives on all groups of this rank from now on; what disagrees is told to their ranks."""
        for group in tuple(_groups.values()):
            group._leave(error)

    def _leave(self, error: BaseException) -> None:
        self._given_up = self._given_up or f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        if isinstance(error, RanksDisagreeError) and self._order_check is not None:
            self._order_check.leave(str(error))

    def check_usable(self, collective: Collective) -> None:
        """Check that collectives can be issued; ``collective`` names the next one.

        Raises:
            StepAborted: this rank was cancelled.
            RuntimeError: the group was destroyed, or an earlier collective was given up.
        """
        self._usable(collective)

    def end_iteration(self) -> None:
        """See the function of that name."""
        if self._order_check is None or self._given_up:
            return
        with self._giving_up():
            self._order_check.end_iteration()

    def finished(self, pending: PendingWork) -> None:
        """Forget a collective that was waited for, unless a part of it goes on."""
        if not pending.goes_on:
            self._in_flight.discard(pending)

    @property
    def num_unfinished(self) -> int:
        """Collectives issued that have not ended; asked from any thread."""
        return sum(not pending.has_ended for pending in tuple(self._in_flight))


_groups: dict[tuple[str, str, tuple[int, ...]], CommGroup] = {}


def group_of(ranks: tuple[int, ...], device_type: str = "cpu", purpose: str = "") -> CommGroup:
    """Return the engine's group of these global ranks for tensors on a kind of device.

    Made at first use, by all of them together; for each purpose of its own, see :meth:`CommGroup.part`.
    """
    key = (device_type, purpose, ranks)
    if key not in _groups:
        _groups[key] = CommGroup(ranks, device_type, purpose)
    return _groups[key]


def end_iteration(of_model: Iterable[CommGroup]) -> None:
    """End the iteration of the groups of one model: the order of their collectives begins anew.

    Call it at the end of a root's backward, and of a root's forward that no backward can follow. Groups of other models
    have ranks that may be idle now.

    Raises:
        RanksDisagreeError: another rank has still to issue collectives of this iteration, or has issued fewer.
        StepAborted: cancelled while waiting for the others to say.
        CollectiveFailed: the store cannot be reached.
    """
    for group in of_model:
        group.end_iteration()


def rebuild_all() -> None:
    """Give every group a new process group, in the order of their making; all ranks must call this together."""
    for group in _groups.values():
        group.rebuild()


def forget_all() -> None:
    """Drop all groups: the process groups they hold were destroyed for good."""
    for group in _groups.values():
        group.let_go()
    _groups.clear()


def num_unfinished() -> int:
    """Collectives of the engine that were issued on this rank and have not ended; asked from any thread."""
    return sum(group.num_unfinished for group in tuple(_groups.values()))
