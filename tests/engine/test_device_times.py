"""Steps of real ranks with the streams of a lagging device: its operations and their times."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.simulated_device import COLLECTIVE_NS, FakeDevice, computing_on
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import probe
from workbench.engine.backends.device_clock import COMMUNICATION
from workbench.events import BESIDE, COLLECTIVES, COMPUTE_STREAM, Edge, Kind
from workbench.replay.collectives import table
from workbench.replay.device import on_device
from workbench.replay.spans import of_kind, spans
from workbench.runtime.recorder import Recorder
from workbench.trace import RankTrace, Trace, check
from workbench.trace.schema import ROW_DTYPE, Header, KeyFrame, RankInfo

LAG_NS = 20_000_000  # device time of each forward, far more than its host time


def rows_of(drained):
    return np.frombuffer(drained.rows, ROW_DTYPE)


def run(num_steps: int, drains: bool = False) -> tuple[Header, np.ndarray, list[str]]:
    """Train; return the header, the recorded rows, and the threads that waited for the device within a step."""
    device, waited = FakeDevice(time.monotonic_ns), []
    recorder = Recorder(Header(world_size=dist.get_world_size()))
    recorder.device_clock = clock = device.clock()
    info = RankInfo(rank=dist.get_rank(), host="h", device="cuda:0", pid=1, device_error_ns=clock.error_ns)
    recorder.set_run(info, mesh_shape=(2,), mesh_axes=("shard",))
    wait_until = device.wait_until

    def wait(t_ns):
        if recorder.step >= 0:
            waited.append(threading.current_thread().name)
        wait_until(t_ns)

    device.wait_until = wait
    rows, at = [], 0
    with pytest.MonkeyPatch.context() as patch, computing_on(device):
        patch.setenv("WORKBENCH_COMM", "default")  # the works of c10d itself
        probe.active = recorder
        try:
            model = shard_net(make_net(num_blocks=2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(num_steps):
                recorder.begin_step()
                loss = loss_of(model, batch(dist.get_rank(), step))
                device.give(LAG_NS)
                loss.backward()
                if drains:
                    rows.append(rows_of(recorder.drain(at)))
                    at += len(rows[-1])
                recorder.optimizer_edge(Edge.BEGIN)
                optimizer.step()
                recorder.optimizer_edge(Edge.END)
                optimizer.zero_grad()
                recorder.end_step()
            recorder.wait_for_device(device.synchronize)
        finally:
            probe.active = None
    rows.append(rows_of(recorder.drain(at)))
    return recorder.header, np.concatenate(rows), waited


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, run, 3)


def device_times(header, rows):
    """Return ``(row, stream, time)`` for each device time, in the order of issue."""
    device_rows = rows[rows["kind"] == Kind.DEVICE]
    found = [(rows[int(row["value"])], header.strings[row["module"]], int(row["t_ns"])) for row in device_rows]
    return sorted(found, key=lambda each: each[0]["seq"])


def of_device(header, rows):
    whole = RankTrace(header.ranks[0].rank, rows)
    return on_device(whole, RankTrace(whole.rank, rows, KeyFrame()), header)


def test_device_times_are_reported_once_and_after_their_issue(ranks):
    for header, rows, _ in ranks:
        assert check(Trace(header, (RankTrace(header.ranks[0].rank, rows),))) == []  # neither early nor twice
        events = rows["seq"][~of_kind(rows, BESIDE)]
        assert [row["seq"] for row, _, _ in device_times(header, rows)] == events.tolist()
        assert rows["step"].max() == 2


def test_each_stream_is_in_its_own_order(ranks):
    for header, rows, _ in ranks:
        by_stream: dict[str, list[int]] = {}
        for _, stream, t_ns in device_times(header, rows):
            by_stream.setdefault(stream, []).append(t_ns)
        assert set(by_stream) >= {COMPUTE_STREAM, "copy-in", "reduce", COMMUNICATION}
        for stream, times in by_stream.items():
            assert stream == COMMUNICATION or times == sorted(times), stream


def test_work_is_where_the_engine_puts_it(ranks):
    for header, rows, _ in ranks:
        where = {(Kind(row["kind"]), Edge(row["edge"])): set() for row, _, _ in device_times(header, rows)}
        for row, stream, _ in device_times(header, rows):
            where[Kind(row["kind"]), Edge(row["edge"])].add(stream)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.STEP, Kind.UNSHARD):
            assert where[kind, Edge.BEGIN] == where[kind, Edge.END] == {COMPUTE_STREAM}
        assert where[Kind.ALL_GATHER, Edge.BEGIN] == {"copy-in"}
        assert where[Kind.REDUCE_SCATTER, Edge.BEGIN] == {"reduce"}
        assert where[Kind.ALL_GATHER, Edge.END] == where[Kind.REDUCE_SCATTER, Edge.END] == {COMMUNICATION}
        assert where[Kind.COPY_IN, Edge.BEGIN] == {"reduce"}  # float32 shards are gathered in place


def test_collectives_pair_and_compute_waits_for_each_of_them(ranks):
    pairs = []
    for header, rows, _ in ranks:
        found = of_device(header, rows)
        assert found.end_seq == len(rows)
        collectives = table(found.part)
        assert (collectives.end_ns - collectives.issue_ns >= COLLECTIVE_NS - 1_000).all()  # 32-bit milliseconds round
        assert (collectives.wait_begin_ns >= 0).sum() >= len(collectives) - 1  # each reduce-scatter where it is joined
        kinds = {Kind(kind) for kind in collectives.kind[collectives.wait_begin_ns >= 0]}
        assert kinds == {Kind.ALL_GATHER, Kind.REDUCE_SCATTER}
        pairs.append([collectives.kind.tolist(), collectives.comm_seq.tolist()])
    assert pairs[0] == pairs[1]


def test_the_device_runs_behind_and_its_host_does_not_wait_within_a_step(ranks):
    for header, rows, waited in ranks:
        assert waited == []
        step = spans(rows, (Kind.STEP,))
        device = spans(of_device(header, rows).part.rows, (Kind.STEP,))
        assert (device.end_ns - device.begin_ns >= LAG_NS).all()
        assert device.end_ns[-1] > step.end_ns[-1]  # the host finished first


def test_a_drain_in_the_middle_of_a_step_loses_nothing():
    for header, rows, _ in run_ranks(2, run, 2, True):
        assert rows["seq"].tolist() == list(range(len(rows)))
        events = rows["seq"][~of_kind(rows, BESIDE)]
        assert [row["seq"] for row, _, _ in device_times(header, rows)] == events.tolist()


def test_ranks_without_a_device_report_no_times_and_wait_as_often():
    for rows in run_ranks(2, on_the_host):
        assert Kind.DEVICE not in rows["kind"]
        waits = spans(rows, (Kind.WAIT,))
        assert len(waits) == len(spans(rows, COLLECTIVES))


def on_the_host() -> np.ndarray:
    recorder = Recorder(Header(world_size=2))
    probe.active = recorder
    try:
        model = shard_net(make_net(num_blocks=2))
        loss_of(model, batch(dist.get_rank(), 0)).backward()
    finally:
        probe.active = None
    return rows_of(recorder.drain())
