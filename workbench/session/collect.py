"""Emptying the ranks' recorders through their side doors into one growing trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from workbench.cluster.pending import Reply
from workbench.events import Category
from workbench.trace import header_from_dict, key_frame_from_dict
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import Trace
from workbench.trace.wire import from_wire


class SideDoor(Protocol):
    """What of a cluster is needed here."""

    def ask(
        self, request: dict[str, Any], ranks: Iterable[int] | None = None, timeout_s: float = ...
    ) -> Mapping[int, Reply | Exception]:
        """Put one request to the side doors of ``ranks`` at the same time."""


class Collector:
    """The trace of one cluster so far, and where each rank was when it was last heard of. Thread-safe.

    Attributes:
        positions: by rank, the newest answer to "where".
        heard: the same of the ranks that answered when they were asked last.
        gradient_bytes: by rank, sharded gradients it had when it was last heard of.
    """

    def __init__(self) -> None:
        self.positions: dict[int, dict[str, Any]] = {}
        self.heard: dict[int, dict[str, Any]] = {}
        self.gradient_bytes: dict[int, int] = {}
        self._builder = TraceBuilder()
        self._versions: dict[int, int] = {}
        self._next_seq: dict[int, int] = {}
        self._lock = threading.Lock()
        self._drained_at = float("-inf")

    @property
    def next_seq(self) -> dict[int, int]:
        """By rank, how many rows it had recorded when it was last heard of."""
        return dict(self._next_seq)

    @property
    def trace(self) -> Trace:
        """What was collected so far."""
        return self._builder.snapshot()

    def drain(self, door: SideDoor, ranks: Iterable[int], *, timeout_s: float, max_age_s: float = 0.0) -> None:
        """Take what ``ranks`` recorded since the last time; one that does not answer in time is left out.

        Args:
            door: their side doors.
            ranks: who is asked.
            timeout_s: how long each may take.
            max_age_s: nobody is asked if that was done less than so many seconds ago, by whichever thread.
        """
        with self._lock:
            if time.monotonic() - self._drained_at < max_age_s:
                return
            self._drained_at = time.monotonic()
            # one request for all ranks: each finds in it what we know of itself, and an answer that came too late
            # for the last request comes again
            known = {str(r): [self._next_seq.get(r, 0), self._versions.get(r, 0)] for r in ranks}
            replies = door.ask({"op": "drain", "known": known}, ranks, timeout_s=timeout_s).items()
            answered = {rank: reply for rank, reply in replies if isinstance(reply, Reply)}
            for rank, reply in answered.items():
                self._take(rank, reply)
            self.heard = {rank: self.positions[rank] for rank in answered}

    def _take(self, rank: int, reply: Reply) -> None:
        content = reply.content
        if content["header"] is not None:
            self._builder.update_header(header_from_dict(content["header"]), rank=rank)
        self._versions[rank] = content["header_version"]
        key_frame = key_frame_from_dict(content["key_frame"])
        self._next_seq[rank] = key_frame.seq
        self._builder.append(rank, from_wire(b"".join(reply.buffers)), lost=content["lost"], key_frame=key_frame)
        self.positions[rank] = content["position"]
        self.gradient_bytes[rank] = key_frame.bytes_by_category[Category.SHARDED_GRADS]
