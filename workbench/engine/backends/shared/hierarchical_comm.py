"""Two-step collectives for several hosts with equally many ranks: shared memory within a host, gloo between hosts.

Data crosses the network once per host instead of once per rank. There are H hosts of L ranks each, numbered host by
host, so rank ``h * L + l`` is rank l of host h; F = H * L; a shard has S elements::

    all-gather       rank (h, l) sends its shard to (g, l) of every other host g, into memory that host g shares;
                     after a barrier within the host, every rank reads all parts, of which it received 1/L itself
    reduce-scatter   barrier within host h; (h, l) sums what its host's ranks have for (g, l), for every g, from memory;
                     then it sends each of these sums [S] to (g, l), which adds the sums that it receives

In both, a rank sends ``(H - 1) * S`` elements to ranks of other hosts; over gloo alone it would send ``(F - 1) * S``,
of which ``(F - L) * S`` cross hosts. The sum runs within each host first, in rank order, and then over the hosts, in
order: it is the same from run to run, but not bit-equal to a sum in the order of all ranks.

A gloo thread starts the second step as soon as the first has ended, so no caller has to wait in between.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from workbench.engine.backends.async_work import CombinedWork, FutureWork
from workbench.engine.backends.gloo import exchange, neighbours
from workbench.engine.backends.rank_sum import add_others
from workbench.engine.backends.shared import shared_memory
from workbench.engine.backends.shared.shared_comm import (
    IssuedReduction,
    SharedMemoryCastAllGather,
    SharedMemoryReduceScatter,
    wait_for_all_to_issue,
)
from workbench.engine.backends.shared.shared_memory import MAPPED, SET_UP, SharedMemory, barrier
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.comm import Peers

Issue = Callable[[dist.ProcessGroup], AsyncWork]


def ranks_per_host(identities: Sequence[str]) -> int:
    """Return L, the ranks per host, given the host identity of each rank in order; 0 for any other arrangement.

    ``a a b b c c`` -> 2; ``a a``, ``a b``, ``a b a b`` and ``a a a b`` -> 0.
    """
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(identities)]
    is_blocks = len(sizes) == len(set(identities)) > 1 and len(set(sizes)) == 1
    return sizes[0] if is_blocks and sizes[0] > 1 else 0


def _identity() -> str:
    """Return this host's identity, with a fallback if it was not set."""
    if shared_memory.host:
        return shared_memory.host
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()


class MemoryPerHost(SharedMemory):
    """Shared memory of one host's ranks, set up on all hosts together.

    Args:
        group: the ranks of this host.
        everyone: the ranks of all hosts; they call every method together.
    """

    def __init__(self, group: Peers, everyone: Peers) -> None:
        super().__init__(group)
        self._everyone = everyone

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new mapping ``[L, numel]``; see :meth:`SharedMemory.rows`.

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
            memory = None  # otherwise the exception would keep it alive
            raise OSError("; ".join(sorted(problems)))
        return memory


class Hosts:
    """The hosts of one group.

    Attributes:
        group: the F ranks.
        shared: the shared memory of this host's ranks.
        gathering: the relay of all-gathers.
        reducing: the relay of reduce-scatters.
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
        """Return the hosts of ``group``; None on all of its ranks unless it has several hosts with equally many ranks.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not agree.
        """
        num_local = ranks_per_host(group.compare(SET_UP, _identity()))
        if not num_local:
            return None
        hosts = cls(group, num_local)
        return hosts if hosts.shared.connected() is not None else None

    @property
    def number(self) -> int:
        """H, the number of hosts."""
        return self.group.size // self.num_local

    @property
    def num_local(self) -> int:
        """L, the number of ranks per host."""
        return self.shared.group.size

    @property
    def here(self) -> int:
        """Index of this rank's host."""
        return self.group.rank // self.num_local

    def alike(self) -> list[int]:
        """Return the group ranks that this rank exchanges with, one per host, including itself."""
        return list(range(self.shared.group.rank, self.group.size, self.num_local))


class TwoStepRelay:
    """Two-step collectives, with a group of ranks per step; second steps start in the order of the first steps.

    gloo matches the ranks' collectives only by their sequence number. First steps are issued in program order, which is
    the same on all ranks, but they end in any order.

    Attributes:
        first: the ranks of the first step.
        then: the ranks of the second step.
    """

    def __init__(self, first: Peers, then: Peers) -> None:
        self.first = first
        self.then = then
        self._lock = threading.Lock()
        self._started: deque[TwoSteps] = deque()
        self._is_broken = False
        self._generation = then.index

    def begin_anew_if_rebuilt(self) -> None:
        """Forget the collectives of process groups that were since rebuilt; they never continue."""
        with self._lock:
            if self._generation != self.then.index:
                self._generation = self.then.index
                self._started.clear()
                self._is_broken = False

    def start(self, first: Issue, then: Issue) -> TwoSteps:
        """Issue the first step; a gloo thread issues the second when the first has ended."""
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
                if self._is_broken:  # on ranks without a failure, its second step would match another collective
                    next_one.fail(RuntimeError("an earlier collective failed"))
                else:
                    self._is_broken = not next_one.go_on(self.then)


_relays: WeakValueDictionary[Peers, TwoStepRelay] = WeakValueDictionary()
"""Relays by the group of their second steps; models that share a group share its relay, to keep one order."""


def relay_of(group: Peers, what: str, first: tuple[int, ...], then: tuple[int, ...]) -> TwoStepRelay:
    """Return the relay for one kind of collective of ``group``, with the ranks of each step; collective."""
    begin, end = (group.part(ranks, f"{step} {what}") for step, ranks in (("begin", first), ("end", then)))
    relay = _relays.get(end) or TwoStepRelay(begin, end)
    _relays[end] = relay
    return relay


class TwoSteps(FutureWork):
    """A two-step collective; it ends with the second step.

    Attributes:
        first_ended: the future of the first step; None until it has ended.
    """

    def __init__(self, then: Issue) -> None:
        self.first_ended: torch.futures.Future[Any] | None = None
        self._then: Issue | None = then
        self._future: torch.futures.Future[Any] = torch.futures.Future()

    def go_on(self, group: Peers) -> bool:
        """Issue the second step and return True; on an error of the first or of issuing, fail and return False."""
        then, self._then = self._then, None
        try:
            if self.first_ended is not None:
                self.first_ended.wait()
            if then is not None:
                group.step(then).get_future().then(self._second_ended)
        except Exception as error:  # noqa: BLE001 - in a gloo thread: the waiting thread must get the error
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
        """Make waits for this collective raise ``error``."""
        self._future.set_exception(error)


class HostsAllGather(SharedMemoryCastAllGather):
    """All-gather for a group on several hosts, of the units that compute in one dtype; see the head of this file.

    It gathers in the stages of its base class. Each host's stages have a row for every rank of all hosts. A rank fills
    its own row, and its exchanges fill the rows of the ranks it exchanges with.
    """

    def __init__(self, hosts: Hosts, dtype: torch.dtype) -> None:
        self._hosts = hosts
        super().__init__(hosts.shared, dtype)
        self._rank, self._size = hosts.group.rank, hosts.group.size

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self.release()  # abandoned collectives of the old process groups may still write to those stages

    def _start(self, output: torch.Tensor, _group: dist.ProcessGroup) -> AsyncWork:
        rows = output.view(self._size, output.numel() // self._size)
        places = [rows[place] for place in self._hosts.alike()]

        def send(across: dist.ProcessGroup) -> AsyncWork:
            return _exchanges(across, lambda _target: places[self._hosts.here], lambda source: places[source])

        return self._hosts.gathering.start(send, barrier)


def _exchanges(
    across: dist.ProcessGroup, given: Callable[[int], torch.Tensor], taken: Callable[[int], torch.Tensor]
) -> AsyncWork:
    """Start sending ``given(h)`` ``[S]`` to every other host h and receiving ``taken(h)`` ``[S]`` from it."""
    return CombinedWork(
        [exchange(taken(source), [source], given(target), [target], across) for source, target in neighbours(across)]
    )


class HostsReduceScatter(SharedMemoryReduceScatter):
    """Reduce-scatter for a group on several hosts, of all units with one reduce dtype; see the head of this file.

    It has 2 n stages as in its base class. This rank makes the sums that it sends to other hosts in its own stage; no
    other rank reads the parts there for the ranks that it exchanges with. A stage may be overwritten once a later
    reduction has ended here, because a rank issues the second step only after it has finished reading in the first.

    Args:
        hosts: the hosts of the group.
        dtype: dtype of the gradients.
        max_outstanding: n, the maximum number of reductions issued and not yet waited for.
    """

    def __init__(self, hosts: Hosts, dtype: torch.dtype, max_outstanding: int = 1) -> None:
        super().__init__(hosts.shared, dtype, max_outstanding, 2 * max_outstanding)
        self._hosts = hosts
        self._size = hosts.group.size
        self.traits = replace(self.traits, staging_nbytes=partial(_received_nbytes, hosts.number))

    def _begin_anew_if_rebuilt(self) -> None:
        self._hosts.reducing.begin_anew_if_rebuilt()
        super()._begin_anew_if_rebuilt()

    def _start(self, output: torch.Tensor, _group: dist.ProcessGroup, done: Callable[[], None]) -> IssuedReduction:
        hosts, numel = self._hosts, output.numel()
        stages, first = self._next_stages(), hosts.here * hosts.num_local  # [L, capacity]

        def chunk(local_rank: int, place: int) -> torch.Tensor:
            """Return the gradients that a rank of this host has for group rank ``place``."""
            row = place - (place > first + local_rank)  # a rank's own chunk is not in its stage
            return stages[local_rank, row * numel : (row + 1) * numel]

        within = self._shared.group.rank
        others = [local_rank for local_rank in range(hosts.num_local) if local_rank != within]
        sums = [output if place == hosts.group.rank else chunk(within, place) for place in hosts.alike()]
        parts = [[chunk(other, place) for other in others] for place in hosts.alike()]
        received = torch.empty(hosts.number - 1, numel, dtype=self._dtype)

        def send(across: dist.ProcessGroup) -> AsyncWork:
            with torch.no_grad():  # runs in a gloo thread, which has its own grad mode
                for total, chunks in zip(sums, parts, strict=True):
                    add_others(chunks, within, total)
            done()
            return _exchanges(across, sums.__getitem__, lambda source: received[source - (source > hosts.here)])

        return _SumOverHosts(hosts.reducing.start(barrier, send), received, hosts.here, output)


def _received_nbytes(num_hosts: int, num_bytes: int, num_ranks: int) -> int:
    """Return the bytes needed for receiving from other hosts, in addition to an input of ``num_bytes``."""
    return num_bytes // (num_ranks - 1) * (num_hosts - 1)


class _SumOverHosts:
    """A reduction whose ``wait`` also adds the other hosts' sums to this host's."""

    def __init__(self, steps: TwoSteps, received: torch.Tensor, host: int, output: torch.Tensor) -> None:
        self._steps = steps
        self._received: torch.Tensor | None = received  # [H - 1, S], of the other hosts in order; None once summed
        self._host = host
        self._output: torch.Tensor | None = output  # [S]; this host's sum until then; None once summed
        self._has_ended = False

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the second step."""
        return self._steps.get_future()

    def wait(self) -> None:
        """Wait for both steps and sum into the output; later calls do nothing.

        Raises:
            RuntimeError: one of the steps failed.
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
        """Do nothing: :meth:`wait` does not read the stages."""
