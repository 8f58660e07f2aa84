"""Host memory that can be emptied under the tensors that point into it: they read NaN then, and no page is used.

A storage that is resized to nothing ends the process of whoever reads what still points to it. The address range here
stays mapped instead: to pages of its own while it is filled, to pages of one small file, again and again, while not.

Fresh pages cost more than copying into them: each one a fault, and zeros. So the pages of a range that is emptied go,
as they are, to the next one that is filled. Only the system's tables change, no byte is copied, and who points into a
range never sees what another one holds.

Where they are many they are huge ones, if the system gives any to who asks: one fault then for 512 of them, and far
fewer entries of its tables to move. Only what is large enough, and lies wholly within a range, becomes one.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Sequence

import torch

from workbench.engine import probe
from workbench.events import Category, Probe

_TILE = 8 * 2**20  # bytes of the file; a range of n bytes takes n / _TILE of the few mappings a process may have
_ALIGNMENT = 2 * 2**20  # bytes; between ranges that begin at multiples of it the system moves so many at a time
_NAN = b"\xff"  # in every byte, that is NaN in every floating-point dtype
_FIXED = 0x10  # MAP_FIXED, which Python's mmap does not name: at this very address, whatever was there
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP: the range that pages leave stays mapped
_SHARE = 1 | 2  # with an old size of 0: what a shared mapping has is mapped once more
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_HUGE = getattr(mmap, "MADV_HUGEPAGE", 0)  # on Linux alone; 0 asks for nothing
_KEPT = "_workbench_kept"  # attribute of a buffer: the pages it lies in, which so live as long as it does


class _Range:
    """Addresses, ``num_bytes`` of them; without pages at first, and unmapped when the last view dies."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        size = num_bytes + (_ALIGNMENT if num_bytes >= _ALIGNMENT else 0)
        whole = torch.frombuffer(mmap.mmap(-1, size, flags=_ANONYMOUS), dtype=torch.uint8)
        begin = -whole.data_ptr() % _ALIGNMENT if size > num_bytes else 0
        self.memory = whole[begin : begin + num_bytes]
        self.address = self.memory.data_ptr()
        _ask_for_huge(self.address, num_bytes)


class Region:
    """Zeroed memory at an address that stays, whichever pages lie beneath it.

    Attributes:
        tensor: ``[numel]``.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._range = _Range(numel * dtype.itemsize) if numel else None
        self.tensor = torch.empty(0, dtype=dtype) if self._range is None else self._range.memory.view(dtype)

    def lie_on(self, shared: torch.Tensor) -> None:
        """Have the pages of ``shared``, which begins a page of a shared mapping, beneath the same address.

        Values go along. From then on a write to either is a write to both.

        Raises:
            OSError: the system refused; there is no telling what lies at the address then.
        """
        if self._range is None:
            return
        shared.copy_(self.tensor)
        _share(shared.data_ptr(), self._range.address, self._range.num_bytes)


class KeptPages:
    """Pages that were given back; what of them nobody uses counts as RESERVED, until another probe listens.

    Attributes:
        has_pages: they were written before.
    """

    def __init__(self, num_bytes: int) -> None:
        self.range = _Range(num_bytes)
        self.has_pages = False
        self._probe: Probe | None = None
        self._told = 0  # bytes that count as RESERVED for that probe

    @property
    def num_bytes(self) -> int:
        """How many there are."""
        return self.range.num_bytes

    def used(self, num_bytes: int) -> None:
        """So many bytes of them are used from now on."""
        if self._probe is probe.active:
            self._tell(self.num_bytes - num_bytes)

    def unused(self) -> None:
        """None of them is used any more."""
        self.has_pages = True
        if self._probe is not probe.active:
            self._probe, self._told = probe.active, 0
        self._tell(self.num_bytes)

    def _tell(self, num_bytes: int) -> None:
        probe.memory(Category.RESERVED, probe.NO_UNIT, num_bytes - self._told)
        self._told = num_bytes

    def __del__(self) -> None:
        if self._probe is probe.active:
            self._tell(0)


class SparePages:
    """Pages that no range uses now: as many as were ever used at once, until they are released."""

    def __init__(self) -> None:
        self._free: list[KeptPages] = []

    def take(self, num_bytes: int) -> KeptPages:
        """Return the smallest that are enough; where there are none, room for new ones, instead of the largest."""
        fitting = [kept for kept in self._free if kept.num_bytes >= num_bytes]
        if not fitting:
            self._drop_largest()
            return KeptPages(num_bytes)
        kept = min(fitting, key=lambda each: each.num_bytes)
        self._free.remove(kept)
        kept.used(num_bytes)
        return kept

    def give_back(self, kept: KeptPages) -> None:
        """Take back what :meth:`take` gave out."""
        self._free.append(kept)
        kept.unused()

    def release(self) -> None:
        """Give them back to the system."""
        while self._free:
            self._drop_largest()

    def _drop_largest(self) -> None:
        if self._free:
            self._free.remove(max(self._free, key=lambda each: each.num_bytes))


class Buffers:
    """Host memory for what is in flight, whose pages go from one buffer to the next; thread-safe.

    An allocator may give what is free at the end of its heap to the system, again and again, and then each page of the
    next buffer is a fault.
    """

    def __init__(self) -> None:
        self._spare = SparePages()
        self._lock = threading.Lock()

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``; it lives as long as somebody has it, given back or not."""
        num_bytes = math.prod(size) * dtype.itemsize
        if not num_bytes:
            return torch.empty(tuple(size), dtype=dtype)
        with self._lock:
            kept = self._spare.take(num_bytes)
        buffer = kept.range.memory[:num_bytes].view(dtype).view(tuple(size))
        buffer.__dict__[_KEPT] = kept
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Let the next one have the memory of what :meth:`take` gave out; nobody may use it any more."""
        if buffer.numel():
            kept = buffer.__dict__.pop(_KEPT)
            with self._lock:
                self._spare.give_back(kept)

    def release(self) -> None:
        """Let the system have what was given back."""
        with self._lock:
            self._spare.release()


class PageRange:
    """One range of memory; empty at first.

    Attributes:
        tensor: ``[numel]``; while empty it reads as NaN, and what is written to it is lost.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._num_bytes = numel * dtype.itemsize
        self._kept: KeptPages | None = None
        if self._num_bytes:
            self._range = _Range(self._num_bytes)
            self.tensor = self._range.memory.view(dtype)
            self._map_nan()
        else:
            self.tensor = torch.empty(0, dtype=dtype)

    def fill(self, spare: SparePages) -> None:
        """Make it memory that can be written and keeps its values; what is in it is not specified."""
        if not self._num_bytes:
            return
        if not _can_move():
            self._map_fresh()
            return
        self._kept = spare.take(self._num_bytes)
        if self._kept.has_pages:
            _move(self._kept.range.address, self._range.address, self._num_bytes)
        else:
            self._map_fresh()

    def empty(self, spare: SparePages) -> None:
        """Give the pages to whoever comes next."""
        if not self._num_bytes:
            return
        if self._kept is not None:
            _move(self._range.address, self._kept.range.address, self._num_bytes)
            spare.give_back(self._kept)
            self._kept = None
        self._map_nan()

    def _map_fresh(self) -> None:
        self._map(0, self._num_bytes, _ANONYMOUS, -1)
        _ask_for_huge(self._range.address, self._num_bytes)

    def _map_nan(self) -> None:
        for first in range(0, self._num_bytes, _TILE):
            num_bytes = min(_TILE, self._num_bytes - first)
            self._map(first, num_bytes, mmap.MAP_PRIVATE, _nan_file(num_bytes))

    def _map(self, first: int, num_bytes: int, flags: int, fd: int) -> None:
        address = self._range.address + first
        got = _mmap()(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, fd, 0)
        _check(got, address, num_bytes)


def _ask_for_huge(address: int, num_bytes: int) -> None:
    """Let pages that are not there yet be huge ones where that fits; a system that has none gives small ones."""
    if num_bytes >= _ALIGNMENT:
        madvise()(address, num_bytes, _HUGE)


def _move(source: int, target: int, num_bytes: int) -> None:
    """Move the pages at one address to another one, where others may be; those are gone then."""
    _check(_mremap()(source, num_bytes, num_bytes, _MOVE, target), target, num_bytes)


def _share(source: int, target: int, num_bytes: int) -> None:
    """Map the pages of a shared mapping at another address as well, where others may be; those are gone then."""
    _check(_mremap()(source, 0, num_bytes, _SHARE, target), target, num_bytes)


def _check(got: int, address: int, num_bytes: int) -> None:
    if got != address:
        code = ctypes.get_errno()
        raise OSError(code, f"{num_bytes} bytes for parameters cannot be mapped: {os.strerror(code)}")


@functools.cache
def can_share() -> bool:
    """Whether the system can map shared pages beneath an address that is in use: Linux."""
    region, shared = Region(1, torch.uint8), torch.frombuffer(mmap.mmap(-1, 1), dtype=torch.uint8)
    try:
        region.lie_on(shared)
    except (AttributeError, OSError):
        return False
    shared.fill_(1)
    return bool(region.tensor == 1)


@functools.cache
def _can_move() -> bool:
    """Whether the system can move pages: Linux, from 5.7 on."""
    source, target = _Range(1), _Range(1)
    source.memory.fill_(1)
    try:
        _move(source.address, target.address, 1)
    except (AttributeError, OSError):
        return False
    return bool(target.memory == 1)


def _nan_file(num_bytes: int) -> int:
    """Return the descriptor of a file of at least so many bytes, and at most :data:`_TILE`, of NaN."""
    size = os.fstat(_file()).st_size
    if size < num_bytes:
        os.pwrite(_file(), _NAN * (num_bytes - size), size)
    return _file()


@functools.cache
def _file() -> int:
    """Make a file that nobody else can open, and that ends with the process."""
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return function


@functools.cache
def _mremap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mremap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return function


@functools.cache
def madvise() -> ctypes._NamedFuncPointer:
    """Return the system's ``madvise(address, num_bytes, advice)``; it leaves its error in ``ctypes.get_errno()``."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
