"""Emptying the ranks' recorders through their side doors into one growing trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from workbench.events import Category, Edge, Kind
from workbench.protocol.rank_messages import Drain, DrainReply, Position, RecordSummary
from workbench.session.channel_protocol import ControlChannel, answers
from workbench.session.clock_sync import ClockSync
from workbench.session.snapshot import ActivePolicy
from workbench.trace import header_from_dict, key_frame_from_dict
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import Trace
from workbench.trace.row_compression import from_wire
from workbench.trace.schema import Rows

LEISURE = 0.75
"""While ranks work, each of them adds so many times as long as it takes them to answer to how long they are left alone.

The more ranks share the cores, the less of a core each of them has to answer with. Of 8 ranks on 2 cores, which answer
within 40 ms, watching takes 3 % of a step's CPU time then, and 4 to 6 % where they are left alone a third of that time.
"""

MAX_LEISURE_S = 0.25
"""But not for longer, in seconds, unless to answer took longer: a rank may be in code that lets nobody answer."""


class TraceCollector:
    """The trace of one cluster so far, and where each rank was when it was last heard of. Thread-safe.

    Args:
        clocks: bring the times of all ranks to rank 0's clock; None: it is the clock of all.

    Attributes:
        positions: by rank, the newest answer to "where".
        heard: the same of the ranks that answered when they were asked last.
        gradient_bytes: by rank, sharded gradients it had when it was last heard of.
        policies: how models were sharded, and since when.
    """

    def __init__(self, clocks: ClockSync | None = None) -> None:
        self._clocks = ClockSync() if clocks is None else clocks
        self.positions: dict[int, Position] = {}
        self.heard: dict[int, Position] = {}
        self.gradient_bytes: dict[int, int] = {}
        self.policies: tuple[ActivePolicy, ...] = ()
        self._builder = TraceBuilder()
        self._versions: dict[int, int] = {}
        self._next_seq: dict[int, int] = {}
        self._lock = threading.Lock()
        self._drained_at, self._leisure_s = float("-inf"), 0.0

    @property
    def next_seq(self) -> dict[int, int]:
        """By rank, how many rows it had recorded when it was last heard of."""
        return dict(self._next_seq)

    @property
    def trace(self) -> Trace:
        """What was collected so far."""
        return self._builder.snapshot()

    def drain(self, door: ControlChannel, ranks: Iterable[int], *, timeout_s: float, max_age_s: float = 0.0) -> None:
        """Take what ``ranks`` recorded since the last time; one that does not answer in time is left out.

        So is one whose clock could not be compared with rank 0's yet: what it recorded stays with it.

        Args:
            door: their side doors.
            ranks: who is asked.
            timeout_s: how long each may take.
            max_age_s: nobody is asked if that was done less than so many seconds ago, by whichever thread, nor, unless
                it is 0, before the ranks had their leisure: many ranks on few cores pay for every question with time
                in which they would compute.
        """
        with self._lock:
            begin = time.monotonic()
            if max_age_s and begin - self._drained_at < max(max_age_s, self._leisure_s):
                return
            ranks = tuple(ranks)
            if self._clocks.compare(door, ranks, timeout_s=timeout_s):
                self._builder.set_clocks(self._clocks.readings)
            begin = time.monotonic()
            # one request for all ranks: each finds in it what we know of itself, and an answer that came too late
            # for the last request comes again
            known = {
                r: RecordSummary(next_seq=self._next_seq.get(r, 0), header_version=self._versions.get(r, 0))
                for r in ranks
                if self._clocks.knows(r)
            }
            drained = answers(door, Drain(known=known), known, timeout_s=timeout_s)
            for rank, recorded in drained.items():
                self._take(rank, recorded)
            if any(recorded.header is not None for recorded in drained.values()):
                self._note_policy(self.trace)
            self.heard = {rank: recorded.position for rank, recorded in drained.items()}
            self._drained_at = time.monotonic()
            took_s = self._drained_at - begin
            self._leisure_s = max(min(LEISURE * len(known) * took_s, MAX_LEISURE_S), took_s)

    def _note_policy(self, trace: Trace) -> None:
        """Keep which units are in use, if others are than before or as others.

        A command ends with a drain: of one that changes the policy, all steps before it are in ``trace``, and none of
        those after it is.
        """
        units = tuple(unit for unit in trace.header.units if unit.in_use)
        if units == (self.policies[-1].units if self.policies else ()):
            return
        from_step = max((_next_step(rank_trace.rows) for rank_trace in trace.ranks), default=0)
        before = tuple(policy for policy in self.policies if policy.from_step < from_step)
        self.policies = (*before, ActivePolicy(from_step=from_step, units=units))

    def _take(self, rank: int, recorded: DrainReply) -> None:
        if recorded.header is not None:
            self._builder.update_header(header_from_dict(recorded.header), rank=rank)
        self._versions[rank] = recorded.header_version
        key_frame = key_frame_from_dict(recorded.key_frame)
        self._next_seq[rank] = key_frame.seq
        packed = self._clocks.on_rank_0s(rank, from_wire(recorded.rows))
        self._builder.append(rank, packed, lost=recorded.lost, key_frame=key_frame)
        self.positions[rank] = recorded.position
        self.gradient_bytes[rank] = key_frame.bytes_by_category[Category.SHARDED_GRADS]


def _next_step(rows: Rows) -> int:
    """Return the step that is under way at the last row; that of the next one if none is."""
    if not len(rows):
        return 0
    kind, edge, step = (int(rows[name][-1]) for name in ("kind", "edge", "step"))
    is_under_way = step >= 0 and (kind, edge) != (Kind.STEP, Edge.END)
    return step if is_under_way else int(rows["step"].max()) + 1
