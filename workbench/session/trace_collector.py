"""Collecting the ranks' recorded rows through their control channels into one growing trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from workbench.cluster.channel_protocol import ControlChannel, answers
from workbench.events import Category, Edge, Kind
from workbench.protocol.rank_messages import Drain, DrainReply, Position, RecordSummary
from workbench.protocol.starting import RankPast
from workbench.session.clock_sync import ClockSync
from workbench.session.snapshot import ActivePolicy
from workbench.trace import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict
from workbench.trace.builder import TraceBuilder
from workbench.trace.columns import Trace
from workbench.trace.row_compression import from_wire
from workbench.trace.schema import Header, KeyFrame, Rows

LEISURE = 0.75
"""Back-off: after polling n busy ranks, wait LEISURE * n * reply time before polling again.

The more ranks share the cores, the less CPU time each has to answer. With 8 ranks on 2 cores, which answer within
40 ms, polling takes 3% of a step's CPU time; with a third of the wait it takes 4 to 6%.
"""

MAX_LEISURE_S = 0.25
"""Limit of the back-off in seconds, unless the replies took longer: a rank may run code that blocks its control
thread."""


class TraceCollector:
    """The trace of one cluster so far, and the last known position of each rank. Thread-safe.

    Args:
        clocks: converts the times of all ranks to rank 0's clock; None: all ranks share a clock.

    Attributes:
        positions: last known position, by rank.
        heard: positions of the ranks that answered the last drain.
        gradient_bytes: last known bytes of sharded gradients, by rank.
        policies: sharding policies so far, with their first steps.
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
        self._ends: dict[int, KeyFrame] = {}
        self._lock = threading.Lock()
        self._drained_at, self._leisure_s = float("-inf"), 0.0

    @property
    def next_seq(self) -> dict[int, int]:
        """Number of rows that each rank had recorded at its last answer."""
        return dict(self._next_seq)

    def pasts(self, num_ranks: int) -> dict[int, RankPast]:
        """Return what each rank would continue now; a new recorder's header is then its first one."""
        with self._lock:
            self._versions.clear()
            trace, positions = self.trace, self.positions.values()
            next_step = max((int(rank.rows["step"].max(initial=-1)) + 1 for rank in trace.ranks), default=0)
            header = Header(world_size=num_ranks, comm_groups=trace.header.comm_groups, strings=trace.header.strings)
            return {
                rank: RankPast(
                    header=header_to_dict(header),
                    key_frame=key_frame_to_dict(self._ends.get(rank, KeyFrame())),
                    next_step=next_step,
                    next_unit=max((unit.index + 1 for unit in trace.header.units), default=0),
                    optimizer_steps=max((at.optimizer_steps for at in positions), default=0),
                )
                for rank in range(num_ranks)
            }

    @property
    def trace(self) -> Trace:
        """The trace collected so far."""
        return self._builder.snapshot()

    def drain(
        self, channel: ControlChannel, ranks: Iterable[int], *, timeout_s: float, max_age_s: float = 0.0
    ) -> Mapping[int, Position]:
        """Collect the rows that ``ranks`` recorded since the last drain, except from ranks that do not answer in time.

        Ranks whose clock was not compared with rank 0's yet are skipped; they keep their rows until a later drain.

        Args:
            channel: their control channels.
            ranks: ranks to drain.
            timeout_s: timeout of the replies, in seconds.
            max_age_s: no-op if the last drain, by any thread, is less than this many seconds ago, or within the
                back-off (:data:`LEISURE`). 0: drain always.

        Returns:
            The positions of the ranks that answered.
        """
        with self._lock:
            begin = time.monotonic()
            if max_age_s and begin - self._drained_at < max(max_age_s, self._leisure_s):
                return self.heard
            ranks = tuple(ranks)
            if self._clocks.compare(channel, ranks, timeout_s=timeout_s):
                self._builder.set_clocks(self._clocks.readings)
            begin = time.monotonic()
            # one request for all ranks with what is known of each, so a rank whose last reply came too late repeats it
            known = {
                r: RecordSummary(next_seq=self._next_seq.get(r, 0), header_version=self._versions.get(r, 0))
                for r in ranks
                if self._clocks.knows(r)
            }
            drained = answers(channel, Drain(known=known), known, timeout_s=timeout_s)
            for rank, recorded in drained.items():
                self._add_reply(rank, recorded)
            if any(recorded.header is not None for recorded in drained.values()):
                self._note_policy(self.trace)
            self.heard = {rank: recorded.position for rank, recorded in drained.items()}
            self._drained_at = time.monotonic()
            took_s = self._drained_at - begin
            self._leisure_s = max(min(LEISURE * len(known) * took_s, MAX_LEISURE_S), took_s)
            return self.heard

    def _note_policy(self, trace: Trace) -> None:
        """Record the units in use if they have changed.

        A command ends with a drain. After a command that changes the policy, ``trace`` thus has all steps before it and
        none after it.
        """
        units = tuple(unit for unit in trace.header.units if unit.in_use)
        if units == (self.policies[-1].units if self.policies else ()):
            return
        from_step = max((_next_step(rank_trace.rows) for rank_trace in trace.ranks), default=0)
        before = tuple(policy for policy in self.policies if policy.from_step < from_step)
        self.policies = (*before, ActivePolicy(from_step=from_step, units=units))

    def _add_reply(self, rank: int, recorded: DrainReply) -> None:
        if recorded.header is not None:
            self._builder.update_header(header_from_dict(recorded.header), rank=rank)
        self._versions[rank] = recorded.header_version
        key_frame = key_frame_from_dict(recorded.key_frame)
        self._next_seq[rank], self._ends[rank] = key_frame.seq, key_frame
        packed = self._clocks.on_rank_0s(rank, from_wire(recorded.rows))
        self._builder.append(rank, packed, lost=recorded.lost, key_frame=key_frame)
        self.positions[rank] = recorded.position
        self.gradient_bytes[rank] = key_frame.bytes_by_category[Category.SHARDED_GRADS]


def _next_step(rows: Rows) -> int:
    """Return the step of the last row if it is under way, else the number of the next step."""
    if not len(rows):
        return 0
    kind, edge, step = (int(rows[name][-1]) for name in ("kind", "edge", "step"))
    is_under_way = step >= 0 and (kind, edge) != (Kind.STEP, Edge.END)
    return step if is_under_way else int(rows["step"].max()) + 1
