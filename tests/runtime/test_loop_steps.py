"""Steps of a loop that announces none, and those of them that are recorded."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.helpers.forked_ranks import run_ranks
from workbench.events import Category, Comm, Edge, Kind, Phase, UnitState
from workbench.runtime import loop_steps
from workbench.runtime.loop_steps import LoopSteps, SampledSteps, state_bytes
from workbench.runtime.recorder import NO_STEP, Recorder
from workbench.trace import check
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, RankInfo


@pytest.fixture
def loop():
    """Make a recorder, and an optimizer whose steps end the loop's."""
    handles = []

    def make(every=None):
        recorder = Recorder(Header(world_size=1))
        recorder.set_run(RankInfo(rank=0, host="here", device="cpu", pid=1), mesh_shape=(1,), mesh_axes=("rank",))
        recorder.comm_group(5, (0,))
        steps = LoopSteps(recorder) if every is None else SampledSteps(recorder, every)
        handles.extend(steps.install())
        weight = torch.nn.Parameter(torch.zeros(4))
        weight.grad = torch.ones(4)
        return recorder, steps, torch.optim.SGD([weight], lr=1.0, momentum=0.5)

    yield make
    for handle in handles:
        handle.remove()


def trace_of(recorder):
    drained = recorder.drain()
    return Trace(recorder.header, (RankTrace(0, np.frombuffer(drained.rows, ROW_DTYPE)),))


def work(recorder, optimizer, *, allocates=0):
    recorder.phase(Phase.FORWARD)
    recorder.event(Kind.FORWARD, Edge.BEGIN, -1, 0, None, None)
    if allocates:
        recorder.memory(Category.SNAPSHOTS, -1, allocates)
    recorder.event(Kind.FORWARD, Edge.END, -1, 0, None, None)
    recorder.phase(Phase.IDLE)
    optimizer.step()


def test_a_step_begins_with_a_forward_and_ends_with_the_optimizer(loop):
    recorder, steps, optimizer = loop()
    for _ in range(2):
        work(recorder, optimizer)
    with torch.no_grad():
        recorder.phase(Phase.FORWARD)  # an evaluation
    rows = trace_of(recorder).rank(0).rows
    assert rows["step"].tolist() == [0] * 7 + [1] * 6  # the first step makes the optimizer's state
    assert steps.optimizer_steps == 2
    assert recorder.next_step == 2


@pytest.mark.parametrize(("every", "recorded"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (4, [0, 4]), (100, [0])])
def test_every_nth_step_is_recorded_with_its_number(loop, every, recorded):
    recorder, steps, optimizer = loop(every)
    for _ in range(5):
        work(recorder, optimizer)
    trace = trace_of(recorder)
    assert trace.rank(0).steps.tolist() == recorded
    assert check(trace) == []
    assert recorder.next_step == steps.optimizer_steps == 5
    assert recorder.is_recording


def test_lasting_effects_of_a_step_that_is_left_out_are_recorded(loop):
    recorder, steps, optimizer = loop(2)
    recorder.event(Kind.UNSHARD, Edge.BEGIN, -1, 0, None, None)
    recorder.event(Kind.UNSHARD, Edge.END, -1, 0, None, None)
    work(recorder, optimizer)
    for allocates in (100, 30):
        work(recorder, optimizer, allocates=allocates)
    assert recorder.drain().key_frame.bytes_by_category[Category.SNAPSHOTS] == 130
    rows = trace_of(recorder).rank(0).rows
    moves = rows[(rows["kind"] == Kind.ALLOC) & (rows["category"] == Category.SNAPSHOTS)]
    assert list(zip(moves["step"].tolist(), moves["num_bytes"].tolist(), strict=True)) == [(-1, 100), (2, 30)]
    assert steps.optimizer_steps == 3


def test_a_collective_that_is_in_flight_from_one_kind_of_step_to_the_other_keeps_its_rows_in_pairs(loop):
    recorder, _, optimizer = loop(2)
    for number in range(4):
        recorder.phase(Phase.FORWARD)
        if number:
            recorder.event(Kind.ALL_REDUCE, Edge.END, -1, 8, Comm(group=5, seq=number - 1), None)
        recorder.event(Kind.ALL_REDUCE, Edge.BEGIN, -1, 8, Comm(group=5, seq=number), None)
        recorder.phase(Phase.IDLE)
        optimizer.step()
    trace = trace_of(recorder)
    assert check(trace) == []
    rows = trace.rank(0).rows
    rows = rows[rows["kind"] == Kind.ALL_REDUCE]
    assert list(zip(rows["comm_seq"].tolist(), rows["edge"].tolist(), strict=True)) == [
        (0, Edge.BEGIN),
        (0, Edge.END),
        (2, Edge.BEGIN),
        (2, Edge.END),
    ]


def test_closing_within_a_step_that_is_left_out_records_what_follows(loop):
    recorder, steps, optimizer = loop(2)
    work(recorder, optimizer)
    recorder.phase(Phase.FORWARD)
    recorder.memory(Category.SNAPSHOTS, -1, 7)
    assert not recorder.is_recording
    steps.close()
    steps.close()
    assert recorder.is_recording
    assert recorder.drain().key_frame.bytes_by_category[Category.SNAPSHOTS] == 7
    assert recorder.drain().key_frame.unit_states.get(0, UnitState.SHARDED) == UnitState.SHARDED


@pytest.mark.parametrize(("every", "recorded"), [(1, [1, 2]), (2, [2])])
def test_without_forwards_a_step_begins_where_the_last_one_ended(loop, every, recorded):
    """As in a program with DistributedDataParallel alone."""
    recorder, steps, optimizer = loop(every)
    for number in range(3):
        recorder.event(Kind.ALL_REDUCE, Edge.BEGIN, -1, 8, Comm(group=5, seq=number), None)
        recorder.event(Kind.ALL_REDUCE, Edge.END, -1, 8, Comm(group=5, seq=number), None)
        optimizer.step()
    steps.close()
    trace = trace_of(recorder)
    rows = trace.rank(0).rows
    calls = rows[(rows["kind"] == Kind.ALL_REDUCE) & (rows["edge"] == Edge.BEGIN)]
    assert calls["comm_seq"].tolist() == [number for number in range(3) if not number or number in recorded]
    assert calls["step"].tolist() == [-1, *recorded][: len(calls)]
    assert trace.rank(0).steps.tolist() == recorded
    assert check(trace) == []


@pytest.mark.parametrize("every", [None, 1, 2])
def test_a_program_without_forwards_leaves_no_step_open_at_its_end(loop, every):
    recorder, steps, optimizer = loop(every)
    with steps.whole_program() if every is None else nullcontext():
        for _ in range(5):
            optimizer.step()
    rows = trace_of(recorder).rank(0).rows
    by_edge = [rows["step"][(rows["kind"] == Kind.STEP) & (rows["edge"] == edge)].tolist() for edge in Edge]
    assert by_edge == [[1, 2, 3, 4][(every or 1) - 1 :: every]] * 2 + [[]]


def test_two_optimizers_of_a_model_with_forwards_end_one_step(loop):
    recorder, _, optimizer = loop(1)
    for _ in range(2):
        work(recorder, optimizer)
        optimizer.step()
    assert trace_of(recorder).rank(0).steps.tolist() == [0, 1]
    assert recorder.next_step == 2


def moves_of(recorder):
    rows = trace_of(recorder).rank(0).rows
    return rows["num_bytes"][rows["category"] == Category.OPTIMIZER_STATE].tolist()


def test_the_state_of_an_optimizer_counts_once_while_it_exists(loop, monkeypatch):
    recorder, steps, optimizer = loop()
    reads = []
    monkeypatch.setattr(loop_steps, "state_bytes", lambda each, split: reads.append(each) or state_bytes(each, split))
    for _ in range(3):
        work(recorder, optimizer)
    assert (moves_of(recorder), len(reads)) == ([16], 1)  # of 4 momenta; read once, not after each step
    optimizer.state.clear()
    steps.account(optimizer, changed=True)
    assert moves_of(recorder) == [16, -16]
    work(recorder, optimizer)
    reads.clear()
    del optimizer
    gc.collect()
    assert moves_of(recorder) == [16, -16, 16, -16]


def bytes_of_a_split_state():
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6), init_device_mesh("cpu", (2,)), [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    optimizer.step()
    assert isinstance(optimizer.state[weight]["momentum_buffer"], DTensor)
    return state_bytes(optimizer, lambda param: param is weight)


def test_of_a_state_that_is_split_this_rank_s_part_counts():
    assert run_ranks(2, bytes_of_a_split_state) == [{"": 12}, {"": 12}]


def test_a_loop_in_the_notebook_has_no_step_without_a_forward(loop):
    recorder, steps, optimizer = loop()
    optimizer.step()
    assert (recorder.step, steps.steps_of_program) == (NO_STEP, 0)
