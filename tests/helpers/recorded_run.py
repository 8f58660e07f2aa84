"""The recording of a run of two ranks, as `workbench.record` writes it."""

import time

from tests.helpers.trace_strategies import example_trace
from workbench.trace.recording import FrameKind, Heartbeat, RecordingWriter, RunStart

UP_NS = 24 * 3600 * 10**9
"""The clock of the recorded host: it was started a day ago."""


def record(folder, *, ranks=(0, 1), ago_s=0, end=None):
    """Record ``ranks`` of a run of two ranks that still runs; its newest row is ``ago_s`` seconds old."""
    trace = example_trace(num_ranks=2, num_units=2, steps=2)
    now_ns, wall_ns = UP_NS, time.time_ns()
    newest_ns = int(trace.rank(0).rows["t_ns"][-1])
    for rank in ranks:
        rows = trace.rank(rank).rows.copy()
        rows["t_ns"] += now_ns - ago_s * 10**9 - newest_ns
        begin_ns = int(rows["t_ns"][0])
        start = RunStart(rank=rank, world_size=2, clock="one", t_ns=begin_ns, wall_ns=wall_ns - now_ns + begin_ns)
        writer = RecordingWriter(folder, start, trace.header, 1 << 30)
        writer.append(rows.tobytes(), trace.rank(rank).state_before(len(rows)))
        writer.write(FrameKind.HEARTBEAT, Heartbeat(t_ns=now_ns, wall_ns=wall_ns, event_ns=begin_ns))
        if end is not None:
            writer.end(end)
        writer.close()
    return trace
