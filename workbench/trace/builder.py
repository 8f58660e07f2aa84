"""A trace that grows from the drains of running ranks, with a bounded number of rows."""

from __future__ import annotations

import dataclasses
import mmap
import threading

import numpy as np

from workbench.errors import TraceError
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.earlier_steps import NO_STEPS, EarlierSteps
from workbench.trace.header import join, translate
from workbench.trace.keyframe import advance
from workbench.trace.schema import ROW_DTYPE, Header, HostClock, KeyFrame, Rows

MAX_ROWS = 2_000_000
_SPARE = 4
"""All buffers together have room for ``1 / _SPARE`` more rows than are kept: a row is copied about _SPARE times."""


class TraceBuilder:
    """Collects what ranks recorded; its methods may be called from any thread.

    The result does not depend on how the rows were split into drains, nor on how the ranks' drains interleaved.

    Args:
        max_rows: rows kept of all ranks together (52 bytes each). Beyond that, the oldest rows of the ranks with most
            rows are dropped, and the state after them becomes the key frame at the left edge.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self._max_rows = max_rows
        self._lock = threading.Lock()
        self._header = Header()
        self._headers: dict[int, Header] = {}
        self._ranks: dict[int, _RankRows] = {}

    def update_header(self, header: Header, *, rank: int | None = None) -> None:
        """Join a new version of the header; tables only ever grow.

        Args:
            header: its strings and comm_groups continue those of the version before.
            rank: whose header it is. Ranks number strings and groups in the order they use them; the rows of this rank
                are translated to the common tables. None: the tables hold for all ranks.
        """
        with self._lock:
            self._header = join(self._header, header)
            if rank is not None:
                self._headers[rank] = header

    def set_clocks(self, clocks: tuple[HostClock, ...]) -> None:
        """Replace the clocks in the header."""
        with self._lock:
            self._header = dataclasses.replace(self._header, clocks=clocks)

    def append(self, rank: int, packed: bytes | memoryview, *, lost: int = 0, key_frame: KeyFrame) -> None:
        """Add the rows of one drain.

        Args:
            rank: the rank that recorded them.
            packed: rows packed with :data:`~workbench.trace.schema.ROW`, in order.
            lost: rows the rank had to overwrite before this drain. If any, the rank's earlier rows no longer lead to
                these: all its rows are dropped, and it starts again at ``key_frame``.
            key_frame: state of the rank after ``packed``.

        Raises:
            TraceError: ``packed`` is not whole rows, or does not continue the rank's rows up to ``key_frame.seq``.
        """
        with self._lock:
            entry = self._ranks.setdefault(rank, _RankRows())
            if lost:
                self._ranks[rank] = _RankRows(key_frame, entry.lost + lost, entry.earlier.then(entry.rows))
                return
            rows = _unpack(rank, packed)
            _check_continues(rank, entry.end_seq, rows, key_frame)
            rows = translate(rows, self._headers.get(rank, self._header), self._header)
            entry.extend(rows, self._next_move(rank, entry.end_seq + len(rows)))
            self._trim()

    def begin(self, rank: int, start: KeyFrame, *, lost: int, earlier: EarlierSteps = NO_STEPS) -> None:
        """Continue a rank at ``start``: if this is not the end of its rows, they are dropped.

        Args:
            rank: the rank.
            start: state before its next row.
            lost: how many of its rows were lost so far.
            earlier: steps before ``start`` that it did not get.
        """
        with self._lock:
            entry = self._ranks.get(rank)
            if entry is None or entry.end_seq != start.seq:
                rows = translate(earlier.rows, self._headers.get(rank, self._header), self._header)
                known = NO_STEPS if entry is None else entry.earlier.then(entry.rows)
                self._ranks[rank] = _RankRows(start, lost, known.joined(dataclasses.replace(earlier, rows=rows)))

    def snapshot(self) -> Trace:
        """Return the trace so far; it shares memory with the builder and never changes."""
        with self._lock:
            ranks = tuple(entry.trace(rank) for rank, entry in self._ranks.items())
            return Trace(self._header, ranks)

    def _next_move(self, rank: int, end_seq: int) -> int:
        """Return the row, from ``end_seq`` on, at which ``rank`` moves to a new buffer.

        A snapshot keeps its buffers alive. Each rank moves once in ``every`` rows, at different rows than the others:
        where ranks record alike, the last snapshot then keeps one old buffer instead of one per rank.
        """
        every = max(self._max_rows // (_SPARE * len(self._ranks)), 1)
        first = list(self._ranks).index(rank) * every // len(self._ranks)
        return end_seq + (first - end_seq) % every

    def _trim(self) -> None:
        # from the rows received, not those left: otherwise the result would depend on the order of the drains
        received = [entry.received for entry in self._ranks.values()]
        if sum(received) > self._max_rows:
            longest = _fair_length(received, self._max_rows)
            for entry in self._ranks.values():
                entry.drop(max(0, len(entry.rows) - longest))


class _RankRows:
    """The rows of one rank in a growing buffer. Written rows never move: snapshots share them."""

    def __init__(self, start: KeyFrame | None = None, lost: int = 0, earlier: EarlierSteps = NO_STEPS) -> None:
        self.start = start or KeyFrame()
        self.lost, self.earlier = lost, earlier
        self.received = 0
        self._buffer: Rows = np.empty(0, ROW_DTYPE)
        self._begin = self._end = 0

    def trace(self, rank: int) -> RankTrace:
        """Return what is kept, as the trace of ``rank``."""
        return RankTrace(rank, self.rows, self.start, self.lost, self.earlier)

    @property
    def rows(self) -> Rows:
        """The rows kept."""
        return self._buffer[self._begin : self._end]

    @property
    def end_seq(self) -> int:
        """``seq`` of the next row."""
        return self.start.seq + self._end - self._begin

    def extend(self, rows: Rows, until_seq: int) -> None:
        """Append ``rows``; a full buffer is replaced by a new one with room up to row ``until_seq``."""
        if self._end + len(rows) > len(self._buffer):
            kept = self.rows
            self._buffer = _room(until_seq - self.start.seq)
            self._begin, self._end = 0, len(kept)
            self._buffer[: self._end] = kept
        self._buffer[self._end : self._end + len(rows)] = rows
        self._end += len(rows)
        self.received += len(rows)

    def drop(self, count: int) -> None:
        """Drop the oldest ``count`` rows; ``start`` becomes the state after them."""
        self.start = advance(self.start, self.rows[:count])
        self.earlier = self.earlier.then(self.rows[:count])
        self._begin += count


def _room(num_rows: int) -> Rows:
    """Return an array of ``num_rows`` that uses memory only as it is written to, and frees it when deleted.

    With :func:`numpy.empty`, the allocator may keep the memory for the next array of that size.
    """
    pages = mmap.mmap(-1, max(num_rows * ROW_DTYPE.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, ROW_DTYPE, num_rows)


def _unpack(rank: int, packed: bytes | memoryview) -> Rows:
    """Return packed rows as an array that shares their memory."""
    num_bytes = memoryview(packed).nbytes
    if num_bytes % ROW_DTYPE.itemsize:
        raise TraceError(f"rank {rank}: {num_bytes} bytes are not a whole number of {ROW_DTYPE.itemsize}-byte rows")
    return np.frombuffer(packed, ROW_DTYPE)


def _check_continues(rank: int, next_seq: int, rows: Rows, key_frame: KeyFrame) -> None:
    """Raise unless ``rows`` lead from ``next_seq`` to ``key_frame`` without a gap."""
    end_seq = next_seq + len(rows)
    if not np.array_equal(rows["seq"], np.arange(next_seq, end_seq)):
        raise TraceError(f"rank {rank}: expected rows {next_seq} to {end_seq - 1}, got {rows['seq'][[0, -1]].tolist()}")
    if key_frame.seq != end_seq:
        raise TraceError(f"rank {rank}: the rows end before row {end_seq}, but the key frame is at row {key_frame.seq}")


def _fair_length(lengths: list[int], room: int) -> int:
    """Return the largest n for which ``sum(min(length, n)) <= room``; ``room`` is less than the sum of lengths."""
    rest = sorted(lengths)
    while rest[0] <= room // len(rest):
        room -= rest.pop(0)
    return room // len(rest)
