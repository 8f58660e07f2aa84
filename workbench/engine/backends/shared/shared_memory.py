"""Memory that the ranks of one host share.

A *mapping* is memory that all ranks of a group have mapped; only rank r writes its *row* r, and all ranks read it.
``shared_comm.py`` has the collectives over it, and the rules for when a rank may write.

The memory belongs to no file system: the system frees it with the last process that maps it, however that process ends.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist

from workbench.engine import probe
from workbench.engine.backends.page_pool import Region, can_share, madvise
from workbench.engine.cancellable_waits import SLICE_S, AsyncWork, cancellation
from workbench.engine.collective_order import FIRST_POLL_S, LAST_POLL_S, Collective
from workbench.engine.comm import Peers
from workbench.engine.errors import CollectiveFailed
from workbench.events import Edge

host = ""
"""Identity of this process's host; empty if it was never set.

Ranks share memory only if their identities are equal. Seeing each other's processes is not enough: a rank in its own
network namespace represents another host.
"""

SET_UP = Collective("set-up of shared memory", None, 0)
MAPPED = "mapped"
ELSEWHERE = "its shards are in memory allocated by the user"
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14
_NO_MEMORY = {errno.ENOMEM, errno.EFAULT}  # EFAULT: a write there would raise SIGBUS
PARAMETERS = "its gathered parameters"
_CPU = torch.device("cpu")
_ON_CPU = dist.BarrierOptions()
_ON_CPU.device = _CPU  # otherwise a group with both gloo and NCCL uses NCCL

T = TypeVar("T")


def barrier(process_group: dist.ProcessGroup) -> AsyncWork:
    """Start a barrier, which ends once every rank has started it.

    It is gloo's cheapest collective: log2(F) sequential messages; an all-reduce or all-gather of one byte needs more.
    """
    return cast("AsyncWork", process_group.barrier(_ON_CPU))


def _attempt(action: Callable[..., T], *args: Any) -> tuple[T | None, str]:  # noqa: ANN401 - action's own
    """Return (result, ""), or (None, error message) if the system refused."""
    try:
        return action(*args), ""
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if it cannot map
        return None, str(error).splitlines()[0]


def _available_bytes() -> int:
    """Return the bytes of memory available without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def create_memory(num_bytes: int, until_mapped: ExitStack) -> str:
    """Create anonymous memory and return an address that processes of this host can map it by."""
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    available = _available_bytes()
    if num_bytes > available:  # the kernel would not refuse, but start to kill processes
        raise OSError(errno.ENOMEM, f"only {available} bytes of memory are available")
    name = f"workbench-{secrets.token_hex(8)}"
    fd = os.memfd_create(name)
    until_mapped.callback(os.close, fd)
    os.posix_fallocate(fd, 0, num_bytes)  # allocate now: lack of memory is an error here instead of a SIGBUS later
    return f"{os.getpid()} {fd} {name} {host}"


def map_memory(address: str, num_bytes: int) -> torch.Tensor:
    """Map the memory at an address; return ``[num_bytes]`` uint8, unmapped when its last view dies."""
    if not can_share():
        raise OSError(errno.ENOSYS, "this system cannot map memory at an address that is in use")
    pid, fd, name, its_host = address.split(" ", 3)
    if its_host != host:
        raise OSError(errno.ENXIO, "the other rank is on another host")
    path = f"/proc/{pid}/fd/{fd}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":  # the name is random, so no other process has it
        raise OSError(
            errno.ENXIO,
            f"{path} is not the other rank's memory: the rank is on another host or in another pid namespace",
        )
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def give_back_pages(memory: torch.Tensor) -> bool:
    """Return whole pages of a mapping to the system until they are written again; return whether that worked.

    They then read as zeros on all ranks. If the system does not support this, nothing changes.
    """
    return memory.nbytes == 0 or madvise()(memory.data_ptr(), memory.nbytes, mmap.MADV_REMOVE) == 0


def take_pages(memory: torch.Tensor) -> None:
    """Allocate the pages of a part of a mapping at once, which is cheaper than page by page at the first write.

    If the system does not support this, nothing changes.

    Raises:
        OSError: there is not enough memory.
    """
    if madvise()(memory.data_ptr(), memory.nbytes, _POPULATE_WRITE) and ctypes.get_errno() in _NO_MEMORY:
        raise OSError(ctypes.get_errno(), f"not enough memory for {memory.nbytes} bytes of gradients")


def whole_pages(numel: int, dtype: torch.dtype) -> int:
    """Return ``numel`` rounded up to a number of elements that fills whole pages."""
    step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, dtype.itemsize)
    return -(-numel // step) * step


class LiesElsewhereError(OSError):
    """On some rank, the shards are not in memory whose pages can be replaced."""


class SharedMemory:
    """Shared memory of the ranks of one group.

    Attributes:
        group: the ranks; all of them call every method together, in the same order.
        readers: the reads of the ranks; set once the ranks are connected.
    """

    readers: Readers

    def __init__(self, group: Peers) -> None:
        self.group = group

    @classmethod
    def connect(cls, group: Peers) -> SharedMemory | None:
        """Return the shared memory of ``group``, or None on all of its ranks if one of them cannot map it.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not agree.
        """
        return cls(group).connected()

    def connected(self) -> Self | None:
        """Set up the readers and return this object, or None as :meth:`connect` does."""
        try:
            self.readers = Readers(self.group, self.rows(3, torch.int64), PARAMETERS)
        except OSError:
            return None
        return self

    def rows(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new mapping ``[F, numel]``, contiguous, zeroed; row r is rank r's.

        Rows are not padded: row r begins ``r * numel * dtype.itemsize`` bytes after row 0, which begins a page.

        Raises:
            OSError: on all ranks, if one of them could not get or map the memory; the message names the rank and why.
            StepAborted, CollectiveFailed: see :class:`PendingWork`.
        """
        return self._rows(numel, dtype, refusal="")

    def lay_beneath(self, region: Region | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the shards of all ranks, ``[F, numel]``, each in its own pages; map this rank's pages at ``region``.

        Args:
            region: this rank's shard ``[numel]``; None if the shard is in other memory.
            numel: elements of a shard.
            dtype: dtype of all shards.

        Raises:
            LiesElsewhereError: on all ranks, if one of them has no region.
            OSError, StepAborted, CollectiveFailed: as :meth:`rows`.
            RuntimeError: this rank could not map the pages at its shard, whose values are lost.
        """
        rows = self._rows(whole_pages(numel, dtype), dtype, refusal=ELSEWHERE if region is None else "")[:, :numel]
        if region is not None:
            try:
                region.lie_on(rows[self.group.rank])
            except OSError as error:  # on this rank only, so not an OSError for the caller
                raise RuntimeError(f"a shard of {numel} elements was lost: {error}") from error
        return rows

    def _rows(self, numel: int, dtype: torch.dtype, refusal: str) -> torch.Tensor:
        num_bytes = self.group.size * numel * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(self.group.size, numel, dtype=dtype)
        return self._map_together(num_bytes, refusal).view(dtype).view(self.group.size, numel)

    def _map_together(self, num_bytes: int, refusal: str) -> torch.Tensor:
        memory: torch.Tensor | None = None
        address: str | None = None
        problem = refusal
        with ExitStack() as until_mapped:
            if self.group.rank == 0 and not refusal:
                address, problem = _attempt(create_memory, num_bytes, until_mapped)
            address = self.group.tell(SET_UP, address or "")
            if address and not refusal:
                memory, problem = _attempt(map_memory, address, num_bytes)
            answers = self.group.compare(SET_UP, problem or MAPPED)
        problems = [f"rank {r}: {a}" for r, a in zip(self.group.ranks, answers, strict=True) if a != MAPPED]
        if problems or memory is None:
            memory = None  # otherwise the exception would keep it alive
            kind = LiesElsewhereError if ELSEWHERE in answers else OSError
            raise kind(
                f"ranks {list(self.group.ranks)} cannot share {num_bytes} bytes of memory; {'; '.join(problems)}. To "
                "run without shared memory, set WORKBENCH_COMM=gloo."
            )
        return memory


class Readers:
    """Shared counters of the collectives that each rank has read; a rank writes its own and sees all.

    After a collective through shared memory, each rank reads the others' rows in its own time. Before a shard may be
    written, :meth:`wait` waits until the others have read what this rank has read; before a stage is written again,
    :meth:`wait_for` waits until they have read its old contents. Unlike a barrier this needs no action of the others:
    usually they have read long ago, and the check costs one pass over the counters.

    Args:
        group: the ranks.
        numbers: ``[F, 3]`` int64, zeroed; per rank its process id, the number of collectives it has issued, and how
            many of these, counted from the first, it has finished reading.
        what: the data that a rank reads, for errors.
    """

    def __init__(self, group: Peers, numbers: torch.Tensor, what: str) -> None:
        self._group = group
        self._memory = numbers  # keeps it mapped
        self._numbers = (ctypes.c_int64 * numbers.numel()).from_address(numbers.data_ptr())
        self._what = what
        self._own = 3 * group.rank
        self._numbers[self._own] = os.getpid()
        self._lock = threading.Lock()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._generation = self._group.index
        self._unread: set[int] = set()
        self._num_read = 0  # number of the last collective read, plus 1
        self._numbers[self._own + 1] = self._numbers[self._own + 2] = 0

    def issue(self) -> int:
        """Return the number of a collective that is about to be issued."""
        if self._generation != self._group.index:
            self._begin_anew()  # counts may differ between ranks; collectives of the old group are no longer read
        with self._lock:
            number = self._numbers[self._own + 1]
            self._numbers[self._own + 1] = number + 1
            self._unread.add(number)
        return number

    def is_unread(self, number: int) -> bool:
        """Whether this rank may still read collective ``number``."""
        return number in self._unread

    def done(self, number: int) -> None:
        """Record that this rank has finished reading collective ``number``; thread-safe."""
        with self._lock:
            if number not in self._unread:
                return
            self._unread.discard(number)
            self._num_read = max(self._num_read, number + 1)
        with self._lock:  # again: the mutex orders the reads before the counter, also on weakly ordered processors
            self._say(min(self._unread, default=self._numbers[self._own + 1]))

    def _say(self, number: int) -> None:
        self._numbers[self._own + 2] = max(number, self._numbers[self._own + 2])

    def wait(self) -> None:
        """Wait, interruptibly, until the other ranks have read what this rank has read.

        First mark all collectives issued by this rank as read, so that no rank waits for the ones it has not read.

        Raises:
            StepAborted: the wait was cancelled.
            RanksDisagreeError: a rank does something else.
            CollectiveFailed: a rank has ended.
        """
        if self._generation != self._group.index:
            return
        self._say(self._numbers[self._own + 1])
        self._wait_while(self._behind)

    def wait_for(self, number: int) -> None:
        """Wait, interruptibly, until the others have read collective ``number``; wait for its barrier first.

        Raises:
            StepAborted, RanksDisagreeError, CollectiveFailed: as :meth:`wait`.
        """
        if self._generation == self._group.index:
            self._wait_while(lambda: self._not_above(number, 2))

    def _wait_while(self, find_behind: Callable[[], list[int]]) -> None:
        behind = find_behind()
        if not behind:
            return
        probe.readers(Edge.BEGIN)
        delay_s, next_look_s = FIRST_POLL_S, time.monotonic() + SLICE_S
        try:
            while behind:
                last = behind[-1]
                cancellation.sleep(delay_s)
                delay_s = min(2 * delay_s, LAST_POLL_S)
                if time.monotonic() > next_look_s:
                    next_look_s += SLICE_S
                    self._check(behind)
                behind = find_behind()
        except BaseException as error:
            self._group.give_up(error)
            raise
        probe.readers(Edge.END, self._group.ranks[last])

    def wait_until_issued(self, number: int) -> None:
        """Wait, interruptibly, until the others have issued collective ``number``.

        Raises:
            StepAborted, RanksDisagreeError, CollectiveFailed: as :meth:`wait`.
        """
        if self._generation == self._group.index:
            self._wait_while(lambda: self._not_above(number, 1))

    def _behind(self) -> list[int]:
        """Return the ranks that have yet to read, except those ahead: nothing that they do can wait for this rank."""
        numbers, issued = self._numbers, self._numbers[self._own + 1]
        places = range(0, len(numbers), 3)
        return [i // 3 for i in places if numbers[i + 2] < self._num_read and numbers[i + 1] <= issued]

    def _not_above(self, number: int, column: int) -> list[int]:
        """Return the other ranks whose count of collectives, issued (column 1) or read (2), leaves ``number`` out."""
        places = range(column, len(self._numbers), 3)
        return [i // 3 for i in places if self._numbers[i] <= number and i != self._own + column]

    def _check(self, behind: list[int]) -> None:
        self._group.check_peers()
        for rank in behind:
            if _has_ended(self._numbers[3 * rank]):
                cancellation.check_after_failure()
                raise CollectiveFailed(f"rank {self._group.ranks[rank]} ended before it read {self._what}")


def _has_ended(pid: int) -> bool:
    """Whether a process of this host has ended, even if its exit code has not been collected yet."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # unknown on this system
    try:
        return bool(select.select([fd], [], [], 0)[0])
    finally:
        os.close(fd)
