"""Every collective of a c10d program as events."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine.backends.async_work import has_failed
from workbench.engine.backends.memory_aliasing import address_of
from workbench.engine.process_groups import OWN
from workbench.events import GROUP_INDICES, Comm, Edge, Kind
from workbench.models._torch_private import HAS_HOOKS, AnyWork, Tensors, Work, ranks_of
from workbench.models.patches import Watching

active: CollectiveWatch | None = None
"""The watch in force, from :meth:`workbench.models.Watch.begin` to its end."""

_MAX_FILLING = 1024
"""Calls that are remembered by the memory that they fill; of more, the oldest are forgotten."""

_OF_OUTPUTS = (Kind.ALL_GATHER, Kind.SCATTER, Kind.RECV)
"""Kinds whose payload is their outputs; that of the others is their inputs."""


@dataclass(eq=False, slots=True)
class Call:
    """A call of c10d that was announced and whose end was not.

    Attributes:
        ended_ns: time at which the transport finished it; None while it is unknown.
        has_failed: whether it failed then, such as because a rank has left: it has no end.
        addresses: of the memory that it fills; empty: unknown.
    """

    kind: Kind
    unit: int
    num_bytes: int
    comm: Comm | None
    is_async: bool
    on_device: bool
    ended_ns: int | None = None
    has_failed: bool = False
    addresses: tuple[int, ...] = ()


@dataclass(slots=True)
class _Group:
    """A process group as the trace knows it; ``index`` is None for the engine's own, which announces itself."""

    index: int | None
    issued: int = 0
    threads: tuple[str, ...] = ()


class Within:
    """Context in which calls that begin belong to a unit; ``before_issue`` is called with the tensors of each.

    Several are entered in each step, and a generator would take twice as long.
    """

    __slots__ = ("_before", "_inside", "_watch")

    def __init__(
        self, watch: CollectiveWatch, unit: int, before_issue: Callable[[Kind, Tensors, Tensors], None] | None = None
    ) -> None:
        self._watch, self._inside = watch, (unit, before_issue)

    def __enter__(self) -> None:
        watch = self._watch
        self._before = watch.unit, watch.before_issue, watch.after_wait
        watch.unit, watch.before_issue = self._inside
        watch.after_wait = None

    def __exit__(self, *_: object) -> None:
        watch = self._watch
        watch.unit, watch.before_issue, watch.after_wait = self._before


class CollectiveWatch:
    """Observer of c10d that announces calls, waits and ends to the probe.

    Attributes:
        before_issue: called with the kind, inputs and outputs of the next call, after its input is ready and before it
            is announced.
        after_wait: called once when the next wait has ended.
        is_paused: whether calls that begin are those of the workbench itself, and not announced.
        num_paused: calls that began meanwhile.
        is_watching: whether calls are seen; False once watching them failed.
        on_two_threads: called once when a second thread of the program uses a group: with the names of the first and
            of the second, and the call as text.
        num_renewals: how often the process groups were replaced, the same on all ranks; names of groups tell it, since
            not every rank may have used each of them.
    """

    def __init__(self) -> None:
        self._unit, self._thread = probe.NO_UNIT, 0
        self.before_issue: Callable[[Kind, Tensors, Tensors], None] | None = None
        self.after_wait: Callable[[], None] | None = None
        self.is_paused = False
        self.num_paused = 0
        self.is_watching = True
        self.on_two_threads: Callable[[str, str, str], object] | None = None
        self.num_renewals = 0
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, _Group] = weakref.WeakKeyDictionary()
        self._pairs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], _Group]] = (
            weakref.WeakKeyDictionary()
        )
        # not weakly: a hook's object is another one than c10d's caller gets, unless it is kept
        self._in_flight: dict[AnyWork, Call] = {}
        # by address; functional collectives are waited for by their tensor, also after their end
        self._filling: dict[int, Call] = {}
        # asynchronous, ended, and perhaps still to be waited for
        self._ended: weakref.WeakKeyDictionary[AnyWork, Call] = weakref.WeakKeyDictionary()

    @property
    def unit(self) -> int:
        """Index of the unit to which the next calls of this thread belong.

        Another thread than the one that has set it, such as one that saves a checkpoint meanwhile, has none.
        """
        return self._unit if self._is_own else probe.NO_UNIT

    @unit.setter
    def unit(self, index: int) -> None:
        """Let the next calls of this thread belong to a unit."""
        self._unit, self._thread = index, threading.get_ident()

    @property
    def _is_own(self) -> bool:
        """Whether this thread is the one that has set the unit, so that the callbacks are for its calls."""
        return self._thread == threading.get_ident()

    def begin(
        self, group: dist.ProcessGroup, kind: Kind, inputs: Tensors, outputs: Tensors, *, is_async: bool, root: int = -1
    ) -> Call | None:
        """Announce that a call begins; if it raises then, it has no end."""
        if probe.active is None or self.is_paused:
            self.num_paused += self.is_paused
            return None
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = self._announced(group)
        if known.index is None:
            return None
        self._note_thread(group, known, kind)
        if self.before_issue is not None and self._is_own:
            self.before_issue(kind, inputs, outputs)
        if self._in_flight:
            self._end_synchronous()
        if self._in_flight:
            self.settle()
        num_bytes, on_device, dtypes = 0, False, []
        for tensor in outputs if kind in _OF_OUTPUTS else inputs:
            num_bytes += tensor.nbytes
            on_device = on_device or not tensor.is_cpu
            dtypes.append(tensor.dtype)
        comm = None
        numbered = self._between(group, kind, root) if kind.info.is_point_to_point else known
        if numbered is not None and numbered.index is not None:
            of_group = kind.info.has_root and root >= 0
            comm = Comm(
                group=numbered.index,
                seq=numbered.issued,
                dtype=_names_of(*dtypes),
                root=(ranks_of(group) or range(group.size()))[root] if of_group else -1,
            )
            numbered.issued += 1
        unit = self.unit
        call = Call(kind, unit, num_bytes, comm, is_async, on_device)
        if HAS_HOOKS and is_async:  # else only a functional collective fills what is waited for by its memory
            self.fills(call, outputs or inputs)  # an all-reduce has only inputs, which it replaces
        probe.event(kind, Edge.BEGIN, unit, num_bytes, comm)
        return call

    def _note_thread(self, group: dist.ProcessGroup, known: _Group, kind: Kind) -> None:
        """Report that several threads of the program use a group: then nothing fixes the order of their calls.

        Threads of autograd, in which hooks of a backward run, are no such threads.
        """
        if self.on_two_threads is None or len(known.threads) > 1:
            return
        name = threading.current_thread().name
        if name in known.threads or name.startswith("Dummy-"):
            return
        known.threads = (*known.threads, name)
        if len(known.threads) > 1:
            self.on_two_threads(known.threads[0], name, f"{kind.words} on {self._name_of(group)}")

    def fills(self, call: Call | None, outputs: Tensors) -> None:
        """Remember the memory that a call fills: a functional collective is waited for by a tensor, or a view of it."""
        if call is None:
            return
        call.addresses = tuple(map(address_of, outputs))
        for address in call.addresses:
            self._filling.pop(address, None)
            self._filling[address] = call
            if len(self._filling) > _MAX_FILLING:
                del self._filling[next(iter(self._filling))]

    def _announced(self, group: dist.ProcessGroup) -> _Group:
        if group.group_name.startswith(OWN):
            return _Group(None)
        index = next(GROUP_INDICES)
        if probe.active is not None:
            probe.active.comm_group(index, ranks_of(group) or tuple(range(group.size())), self._name_of(group))
        return _Group(index)

    def _name_of(self, group: dist.ProcessGroup) -> str:
        again = f" (rebuild {self.num_renewals})" if self.num_renewals else ""
        return f"c10d group {group.group_name}{again}"

    def _between(self, group: dist.ProcessGroup, kind: Kind, peer: int) -> _Group | None:
        """Return the group of a sender and a receiver, of which this rank is one; None if the other is unknown.

        Messages of a pair are numbered in the order of the calls. Hooks do not report tags, so tags are ignored.
        """
        if peer < 0:
            return None
        pair = (group.rank(), peer) if kind is Kind.SEND else (peer, group.rank())
        known = self._pairs.setdefault(group, {}).get(pair)
        if known is None:
            index = next(GROUP_INDICES)
            known = self._pairs[group][pair] = _Group(index)
            ranks = ranks_of(group) or tuple(range(group.size()))
            sender, receiver = ranks[pair[0]], ranks[pair[1]]
            if probe.active is not None:
                name = f"{self._name_of(group)} from rank {sender} to rank {receiver}"
                probe.active.comm_group(index, (sender, receiver), name)
        return known

    def issued(self, call: Call | None, work: AnyWork | None) -> None:
        """Follow a call that was made to its end."""
        if call is None:
            return
        if work is None:  # it ended within the call, or it is a part of a coalesced one
            self._announce_end(call)
            return
        self._in_flight[work] = call
        if call.on_device:
            if probe.active is not None and call.comm is not None and isinstance(work, Work):
                probe.active.issued(call.comm, lambda: _original_wait(work))
        elif call.is_async:
            with suppress(RuntimeError):  # this transport has no futures
                work.get_future().add_done_callback(lambda future: _note_end(call, future))

    def ended(self, call: Call | None, t_ns: int) -> None:
        """Announce the end of a call whose transport has no future."""
        if call is not None:
            call.ended_ns = t_ns
            self.settle()

    def wait(self, work: AnyWork, *_: Any, **__: Any) -> Watching:  # noqa: ANN401
        """Watch a wait for a work: announce it, and the end of its call."""
        call = self._in_flight.get(work) or self._ended.pop(work, None)
        if call is not None:
            yield from self._wait(call, work)

    def wait_for_tensor(self, tensor: torch.Tensor) -> Watching:
        """Watch a wait for the functional collective that fills a tensor: announce it, and the end of the call."""
        call = self._filling.get(address_of(tensor))
        if call is not None:
            yield from self._wait(call, next((work for work, own in self._flying() if own is call), None))

    def _wait(self, call: Call, work: AnyWork | None) -> Watching:
        for address in call.addresses:
            self._filling.pop(address, None)
        probe.event(Kind.WAIT, Edge.BEGIN, call.unit, 0, call.comm)
        yield
        probe.event(Kind.WAIT, Edge.END, call.unit, 0, call.comm)
        if work is not None and self._in_flight.pop(work, None) is not None:
            (self._announce_late_end if call.is_async else self._announce_end)(call)
        if self.after_wait is not None and self._is_own:
            then, self.after_wait = self.after_wait, None
            then()

    def _flying(self) -> list[tuple[AnyWork, Call]]:
        """Return the calls in flight and their works; meanwhile another thread may find that some have ended."""
        return list(self._in_flight.items())

    def settle(self, *, is_last: bool = False) -> None:
        """Announce the ends of asynchronous calls that have ended meanwhile; callable from any thread.

        Args:
            is_last: do not wait for the transport's end times of collectives that have ended.
        """
        for work, call in self._flying():
            if call.ended_ns is not None or (is_last and work.is_completed()):
                self._ended[work] = call  # first, so that a wait in another thread always finds it
                if self._in_flight.pop(work, None) is not None and not call.has_failed:
                    self._announce_late_end(call)

    def abandon(self) -> None:
        """Announce the ends of all calls, as nothing is known of them any more, nor of later ones."""
        self.is_watching = False
        for work, call in self._flying():
            if self._in_flight.pop(work, None) is not None:
                self._announce_late_end(call)

    def has_settled(self) -> bool:
        """Announce the ends of calls that have ended; return whether none is in flight."""
        self.settle()
        return not self._in_flight

    def _end_synchronous(self) -> None:
        """Announce the end of a call for which C++ has waited: it was not asynchronous, and the next one begins."""
        for work, call in self._flying():
            if not call.is_async and self._in_flight.pop(work, None) is not None:
                self._announce_end(call)

    @staticmethod
    def _announce_end(call: Call) -> None:
        probe.event(call.kind, Edge.END, call.unit, call.num_bytes, call.comm, call.ended_ns)

    @staticmethod
    def _announce_late_end(call: Call) -> None:
        """Announce an end that ranks learn of at different events."""
        if probe.active is not None:
            ended_ns = time.monotonic_ns() if call.ended_ns is None else call.ended_ns
            probe.active.late_end(call.kind, call.unit, call.num_bytes, call.comm, ended_ns)


@functools.cache
def _names_of(*dtypes: torch.dtype) -> str:
    """Return the names of some dtypes, each once."""
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _note_end(call: Call, future: Any) -> None:  # noqa: ANN401
    """Note how and when a call ended, in the transport's thread."""
    call.has_failed = has_failed(future)
    call.ended_ns = time.monotonic_ns()


_original_wait: Callable[[Work], object] = Work.wait


def holds(owner: torch.Tensor | torch.UntypedStorage) -> probe.BufferHandle | None:
    """Return the handle that counts the bytes of a tensor or a storage; None if it has none."""
    return getattr(owner, "_workbench_bytes", None)


def count(owner: torch.Tensor | torch.UntypedStorage, handle: probe.BufferHandle | None) -> None:
    """Count bytes by ``handle`` as long as ``owner`` exists."""
    owner._workbench_bytes = handle  # type: ignore[union-attr]


def sees_all_collectives() -> bool:
    """Return whether this torch announces every collective, also those that C++ issues; else only Python's are seen."""
    return HAS_HOOKS
