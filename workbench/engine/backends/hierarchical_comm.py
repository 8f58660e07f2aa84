"""Ranks of several hosts, as many on each: memory within a host, gloo between them, in one collective of two steps.

What crosses the network crosses it once for each host instead of once for each rank. H hosts of L ranks each, host
after host, so that rank ``h * L + l`` is the l-th of host h; F = H * L; S elements a shard::

    all-gather       rank (h, l) sends its shard to (g, l) of every other host g, into memory that host g shares;
                     then the ranks of a host meet: each has received its L-th part of all, and all of them read it
    reduce-scatter   the ranks of host h meet; (h, l) adds up what they have for (g, l), for every g, from memory;
                     then it sends each of these sums [S] to (g, l), which adds up what it gets

A rank sends ``(H - 1) * S`` elements for either, to ranks of other hosts; over gloo alone it would be ``(F - 1) * S``,
of which ``(F - L) * S`` cross. Sums are made within each host first, in the order of ranks, then over the hosts, in
their order: the same from run to run, but not the same bits as of a sum in the order of all ranks.

The second step begins in one of gloo's threads as soon as the first has ended: nobody need wait for that.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from workbench.engine.backends import shared_memory
from workbench.engine.backends.async_work import AllOf
from workbench.engine.backends.gloo import exchange, neighbours
from workbench.engine.backends.rank_sum import add_others
from workbench.engine.backends.shared_comm import (
    IssuedReduction,
    SharedMemoryCastAllGather,
    SharedMemoryReduceScatter,
    wait_for_all_to_issue,
)
from workbench.engine.backends.shared_memory import MAPPED, SET_UP, SharedMemory, barrier
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.comm import Peers

Issue = Callable[[dist.ProcessGroup], AsyncWork]


def ranks_per_host(identities: Sequence[str]) -> int:
    """Return L for ranks whose hosts, in their order, have these identities; 0 if they are arranged in another way.

    ``a a b b c c`` -> 2; ``a a``, ``a b``, ``a b a b`` and ``a a a b`` -> 0.
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(identities)]
    is_blocks = len(sizes) == len(set(identities)) > 1 and len(set(sizes)) == 1
    return sizes[0] if is_blocks and sizes[0] > 1 else 0


def _identity() -> str:
    """Identify this host, also if nobody has told how."""
    if shared_memory.host:
        return shared_memory.host
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()


class MemoryPerHost(SharedMemory):
    """What the ranks of one host map together, while those of the others do the same for theirs.

    Args:
        group: the ranks of this host.
        everyone: those of all hosts; they call every method together.
    """

    def __init__(self, group: Peers, everyone: Peers) -> None:
        super().__init__(group)
        self._everyone = everyone

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new mapping ``[L, numel]``; as :meth:`SharedMemory.rows`.

        Raises:
            OSError: on the ranks of all hosts, if one of them could not get or map the memory.
        """
        memory, problem = None, ""
        try:
            memory = super().rows(numel, dtype)
        except OSError as error:
            problem = str(error)
        problems = set(self._everyone.compare(SET_UP, problem or MAPPED)) - {MAPPED}
        if problems or memory is None:
            memory = None  # else the exception would keep it
            raise OSError("; ".join(sorted(problems)))
        return memory


class Hosts:
    """The hosts of one group.

    Attributes:
        group: the ranks, F.
        shared: the memory of this host's.
        gathering: what all-gathers take their two steps on.
        reducing: what reduce-scatters do.
    """

    def __init__(self, group: Peers, num_local: int) -> None:
        host, local_rank = divmod(group.rank, num_local)
        within = group.ranks[host * num_local : (host + 1) * num_local]
        across = group.ranks[local_rank::num_local]
        self.group = group
        self.gathering = relay_of(group, "all-gathers", across, within)
        self.reducing = relay_of(group, "reduce-scatters", within, across)
        self.shared = MemoryPerHost(self.gathering.then, group)

    @classmethod
    def connect(cls, group: Peers) -> Hosts | None:
        """Return the hosts of ``group``, or None on all of its ranks if it is not on several, with as many on each.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not come to an answer.
        """
        num_local = ranks_per_host(group.compare(SET_UP, _identity()))
        if not num_local:
            return None
        hosts = cls(group, num_local)
        return hosts if hosts.shared.connected() is not None else None

    @property
    def number(self) -> int:
        """Number of hosts, H."""
        return self.group.size // self.num_local

    @property
    def num_local(self) -> int:
        """Ranks of each, L."""
        return self.shared.group.size

    @property
    def here(self) -> int:
        """Which of them this rank is on."""
        return self.group.rank // self.num_local

    def alike(self) -> list[int]:
        """Return the places in the group of the ranks, one of each host, that this one exchanges with; its own too."""
        return list(range(self.shared.group.rank, self.group.size, self.num_local))


class Relay:
    """Collectives of two steps, on a group of ranks for each; the second steps begin in the order of the first ones.

    gloo pairs what ranks issue by its number alone. First steps are issued in the order of the program, which is the
    same on all ranks; they end in any order.

    Attributes:
        first: the ranks of the first step.
        then: those of the second.
    """

    def __init__(self, first: Peers, then: Peers) -> None:
        self.first = first
        self.then = then
        self._lock = threading.Lock()
        self._started: deque[TwoSteps] = deque()
        self._is_broken = False
        self._generation = then.index

    def begin_anew_if_rebuilt(self) -> None:
        """Forget what was begun on process groups that are no more: it never goes on."""
        with self._lock:
            if self._generation != self.then.index:
                self._generation = self.then.index
                self._started.clear()
                self._is_broken = False

    def start(self, first: Issue, then: Issue) -> TwoSteps:
        """Issue the first step; the second will be issued when it has ended, by a thread of gloo's."""
        self.begin_anew_if_rebuilt()
        steps = TwoSteps(then)
        work = self.first.step(first)
        with self._lock:
            self._started.append(steps)
        work.get_future().then(lambda future: self._go_on(steps, future))
        return steps

    def _go_on(self, steps: TwoSteps, ended: torch.futures.Future[Any]) -> None:
        with self._lock:
            steps.first_ended = ended
            while self._started and self._started[0].first_ended is not None:
                next_one = self._started.popleft()
                if self._is_broken:  # on ranks where nothing failed its second step would be another one's partner
                    next_one.fail(RuntimeError("a collective before it failed"))
                else:
                    self._is_broken = not next_one.go_on(self.then)


_relays: WeakValueDictionary[Peers, Relay] = WeakValueDictionary()
"""By the group of the second steps: those of whatever models must take their turns."""


def relay_of(group: Peers, what: str, first: tuple[int, ...], then: tuple[int, ...]) -> Relay:
    """Return the relay for some collectives of ``group``, on these of its ranks; they call it together."""
    begin, end = (group.part(ranks, f"{step} {what}") for step, ranks in (("begin", first), ("end", then)))
    relay = _relays.get(end) or Relay(begin, end)
    _relays[end] = relay
    return relay


class TwoSteps:
    """A collective of two steps; ends with the second.

    Attributes:
        first_ended: the future of the first step; None until it has ended.
    """

    def __init__(self, then: Issue) -> None:
        self.first_ended: torch.futures.Future[Any] | None = None
        self._then: Issue | None = then
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def go_on(self, group: Peers) -> bool:
        """Issue the second step; False, and this has failed, if the first has, or if that cannot be."""
        then, self._then = self._then, None
        try:
            if self.first_ended is not None:
                self.first_ended.wait()
            if then is not None:
                group.step(then).get_future().then(self._second_ended)
        except Exception as error:  # noqa: BLE001 - this is a thread of gloo's: who waits is to learn of it
            self.fail(error)
            return False
        return True

    def _second_ended(self, ended: torch.futures.Future[Any]) -> None:
        try:
            ended.wait()
        except RuntimeError as error:
            self.fail(error)
        else:
            self._future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let whoever waits for it raise ``error``."""
        self._future.set_exception(error)

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the second step."""
        return self._future

    def wait(self) -> None:
        """Wait for both.

        Raises:
            RuntimeError: one of them failed.
        """
        self._future.wait()


class HostsAllGather(SharedMemoryCastAllGather):
    """All-gather of the units of a group on several hosts that compute in one dtype; see the head of this file.

    It gathers in stages, as its base class says; their rows are those of all ranks, and lie in the memory of each host.
    A rank that writes its own row has the others of its host write, in the rows of the ranks they exchange with, too.

    Attributes:
        reads_own_row: see :func:`workbench.engine.comm.reads_own_row`.
    """

    reads_own_row = True

    def __init__(self, hosts: Hosts, dtype: torch.dtype) -> None:
        self._hosts = hosts
        super().__init__(hosts.shared, dtype)
        self._rank, self._size = hosts.group.rank, hosts.group.size

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.release()  # what was given up on the process groups before may still arrive in those stages

    def _start(self, output: torch.Tensor, _group: dist.ProcessGroup) -> AsyncWork:
        rows = output.view(self._size, output.numel() // self._size)
        places = [rows[place] for place in self._hosts.alike()]

        def send(across: dist.ProcessGroup) -> AsyncWork:
            return _exchanges(across, lambda _target: places[self._hosts.here], lambda source: places[source])

        return self._hosts.gathering.start(send, barrier)


def _exchanges(
    across: dist.ProcessGroup, given: Callable[[int], torch.Tensor], taken: Callable[[int], torch.Tensor]
) -> AsyncWork:
    """Start to send ``given(h)`` ``[S]`` to every other host h, and to receive ``taken(h)`` ``[S]`` from it."""
    return AllOf(
        [exchange(taken(source), [source], given(target), [target], across) for source, target in neighbours(across)]
    )


class HostsReduceScatter(SharedMemoryReduceScatter):
    """Reduce-scatter of all units of a group on several hosts with the same reduce dtype; see the head of this file.

    Stages are as of its base class, with 2 n of them; this rank's own is where the sums of its host are made that it
    sends on: nobody else reads what it has there for the ranks that it exchanges with. So a stage may be written anew
    once a later reduction has ended here: its second step was issued by a rank only after it was done with the first.

    Args:
        hosts: of the group.
        dtype: of the gradients that are summed.
        max_outstanding: n, reductions issued and not yet waited for.
    """

    def __init__(self, hosts: Hosts, dtype: torch.dtype, max_outstanding: int = 1) -> None:
        super().__init__(hosts.shared, dtype, max_outstanding, 2 * max_outstanding)
        self._hosts = hosts
        self._size = hosts.group.size

    def staging_nbytes(self, num_bytes: int, group: Peers) -> int:
        """Bytes it needs beside an input of ``num_bytes``, for what comes from other hosts."""
        return num_bytes // (group.size - 1) * (self._hosts.number - 1)

    def _begin_anew_if_rebuilt(self) -> None:
        self._hosts.reducing.begin_anew_if_rebuilt()
        super()._begin_anew_if_rebuilt()

    def _start(self, output: torch.Tensor, _group: dist.ProcessGroup, done: Callable[[], None]) -> IssuedReduction:
        hosts, numel = self._hosts, output.numel()
        stages, first = self._next_stages(), hosts.here * hosts.num_local  # [L, capacity]

        def chunk(local_rank: int, place: int) -> torch.Tensor:
            """Return what a rank of this host has for the one at ``place`` in the group."""
            row = place - (place > first + local_rank)  # it keeps its own elsewhere
            return stages[local_rank, row * numel : (row + 1) * numel]

        within = self._shared.group.rank
        others = [local_rank for local_rank in range(hosts.num_local) if local_rank != within]
        sums = [output if place == hosts.group.rank else chunk(within, place) for place in hosts.alike()]
        parts = [[chunk(other, place) for other in others] for place in hosts.alike()]
        received = torch.empty(hosts.number - 1, numel, dtype=self._dtype)

        def send(across: dist.ProcessGroup) -> AsyncWork:
            with torch.no_grad():  # a thread of gloo's has modes of its own
                for total, chunks in zip(sums, parts, strict=True):
                    add_others(chunks, within, total)
            done()
            return _exchanges(across, sums.__getitem__, lambda source: received[source - (source > hosts.here)])

        return _SumOverHosts(hosts.reducing.start(barrier, send), received, hosts.here, output)


class _SumOverHosts:
    """A reduction whose ``wait`` also adds what came from the other hosts to this one's sum."""

    def __init__(self, steps: TwoSteps, received: torch.Tensor, host: int, output: torch.Tensor) -> None:
        self._steps = steps
        self._received: torch.Tensor | None = received  # [H - 1, S], of the other hosts in order; None once summed
        self._host = host
        self._output: torch.Tensor | None = output  # [S]; this host's, until then; None: it is others' to keep
        self._has_ended = False

    def get_future(self) -> torch.futures.Future[Any]:
        """Future of the second step."""
        return self._steps.get_future()

    def wait(self) -> None:
        """Wait for both steps and sum into the output; later calls do nothing.

        Raises:
            RuntimeError: one of them failed.
        """
        self._steps.wait()
        self._has_ended = True
        if self._received is not None and self._output is not None:
            add_others(self._received.unbind(0), self._host, self._output)
        self._received = self._output = None

    def wait_for_all_to_issue(self) -> None:
        """Wait for both steps, interruptibly; later calls do nothing.

        Raises:
            StepAborted, CollectiveFailed: see :class:`PendingWork`.
        """
        if not self._has_ended:
            wait_for_all_to_issue(self._steps, "reduce-scatter over hosts")
            self._has_ended = True

    def give_up_reading(self) -> None:
        """Do nothing: what is read in :meth:`wait` is no stage."""
