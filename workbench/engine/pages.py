"""Host memory that can be emptied under the tensors that point into it: they read NaN then, and no page is used.

A storage that is resized to nothing ends the process of whoever reads what still points to it. The address range here
stays mapped instead: to pages of its own while it is filled, to pages of one small file, again and again, while not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from typing import BinaryIO

import torch

_TILE = 8 * 2**20  # bytes of the file; a range of n bytes takes n / _TILE of the few mappings a process may have
_NAN = b"\xff"  # in every byte, that is NaN in every floating-point dtype
_FIXED = 0x10  # MAP_FIXED, which Python's mmap does not name: at this very address, whatever was there


class Pages:
    """One range of memory; empty at first.

    Attributes:
        tensor: ``[numel]``; while empty it reads as NaN, and what is written to it is lost.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._num_bytes = numel * dtype.itemsize
        if self._num_bytes:
            mapped = mmap.mmap(-1, self._num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.tensor = torch.frombuffer(mapped, dtype=torch.uint8).view(dtype)  # unmapped when its last view dies
        else:
            self.tensor = torch.empty(0, dtype=dtype)

    def fill(self) -> None:
        """Make it memory that can be written and keeps its values; what is in it is not specified."""
        if self._num_bytes:
            self._map(0, self._num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)

    def empty(self) -> None:
        """Give the pages back to the system."""
        for first in range(0, self._num_bytes, _TILE):
            num_bytes = min(_TILE, self._num_bytes - first)
            self._map(first, num_bytes, mmap.MAP_PRIVATE, _nan_file(num_bytes).fileno())

    def _map(self, first: int, num_bytes: int, flags: int, fd: int) -> None:
        address = self.tensor.data_ptr() + first
        got = _mmap()(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _FIXED, fd, 0)
        if got != address:
            code = ctypes.get_errno()
            raise OSError(code, f"{num_bytes} bytes for full parameters cannot be mapped: {os.strerror(code)}")


def _nan_file(num_bytes: int) -> BinaryIO:
    """Return a file of at least so many bytes, and at most :data:`_TILE`, of NaN."""
    file = _file()
    size = os.fstat(file.fileno()).st_size
    if size < num_bytes:
        os.pwrite(file.fileno(), _NAN * (num_bytes - size), size)
    return file


@functools.cache
def _file() -> BinaryIO:
    return tempfile.TemporaryFile(buffering=0)


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    return function
