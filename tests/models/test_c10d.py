"""Every collective of a c10d program is an event, on every rank the same, with its bytes and its end."""

import gc
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.waiting import wait_until
from tests.helpers.watched import make_blocks, recorded, train, watch
from workbench.engine import fully_shard, probe
from workbench.engine.backends.async_work import FutureWork
from workbench.events import COLLECTIVES, GROUP_INDICES, Edge, Kind
from workbench.models import c10d
from workbench.models._torch_private import HAS_HOOKS
from workbench.models.c10d import sees_all_collectives
from workbench.models.engines import Watch
from workbench.runtime.recorder import Recorder
from workbench.trace.begin_end import partners
from workbench.trace.schema import ROW_DTYPE, Header

ONE, FOUR = torch.ones(1), torch.ones(4)


def every_call():
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty(4) for _ in range(size)]
    dist.broadcast(FOUR.clone(), 1)
    dist.all_reduce(FOUR.clone())
    dist.reduce(FOUR.clone(), 1)
    dist.all_gather(parts, FOUR)
    dist.all_gather_single(torch.empty(4 * size), FOUR)
    dist.gather(FOUR, parts if rank == 0 else None)
    dist.scatter(torch.empty(4), parts if rank == 0 else None)
    dist.reduce_scatter(torch.empty(4), parts)
    dist.reduce_scatter_single(torch.empty(4 // size), torch.ones(4))
    dist.all_to_all_single(torch.empty(4), FOUR)
    dist.barrier()
    if rank == 0:
        dist.send(FOUR, 1)
    elif rank == 1:
        dist.recv(torch.empty(4), 0)


CALLS = [
    (Kind.BROADCAST, 16),
    (Kind.ALL_REDUCE, 16),
    (Kind.REDUCE, 16),
    (Kind.ALL_GATHER, 32),
    (Kind.ALL_GATHER, 32),
    (Kind.REDUCE_SCATTER, 32),
    (Kind.REDUCE_SCATTER, 16),
    (Kind.ALL_TO_ALL, 16),
]


ROOT = {Kind.BROADCAST: 1, Kind.REDUCE: 1, Kind.GATHER: 0, Kind.SCATTER: 0}


def test_every_call_has_a_kind_its_payload_a_number_and_an_end():
    trace = watch(2, every_call).trace
    group, pair = trace.header.comm_groups
    assert (group.name, group.ranks) == ("c10d group 0", (0, 1))
    assert (pair.name, pair.ranks) == ("c10d group 0 from rank 0 to rank 1", (0, 1))
    for rank in trace.ranks:
        collectives = rank.rows[np.isin(rank.rows["kind"], COLLECTIVES)]
        begins, ends = (collectives[collectives["edge"] == edge] for edge in (Edge.BEGIN, Edge.END))
        assert begins["comm_seq"].tolist() == ends["comm_seq"].tolist() == list(range(11))
        assert begins["kind"].tolist() == ends["kind"].tolist()
        rows = [(Kind(kind), num_bytes) for kind, num_bytes in begins[["kind", "num_bytes"]].tolist()]
        assert [row for row in rows if row[0] not in (Kind.GATHER, Kind.SCATTER, Kind.BARRIER)] == CALLS
        assert [kind for kind, _ in rows[5:7]] == [Kind.GATHER, Kind.SCATTER]
        assert rows[-1][0] == Kind.BARRIER
        assert begins["value"].tolist() == pytest.approx([ROOT.get(kind, np.nan) for kind, _ in rows], nan_ok=True)
        assert {trace.header.strings[at] for at in begins["module"][:-1]} == {"float32"}
        own = Kind.SEND if rank.rank == 0 else Kind.RECV
        peer = rank.rows[rank.rows["kind"] == own]
        assert peer["edge"].tolist() == [Edge.BEGIN, Edge.END]
        assert set(peer["num_bytes"].tolist()) == {16}
        assert np.isnan(peer["value"]).all()  # no rank is the root of a message
        assert set(peer[["comm_group", "comm_seq"]].tolist()) == {(1, 0)}
        begin, end = np.flatnonzero(rank.rows["kind"] == own)
        assert partners(rank.rows)[begin] == end


def between_pairs():
    rank = dist.get_rank()
    of_three = dist.new_group([1, 2, 3])
    if rank == 1:
        for _ in range(2):
            dist.send(ONE, 3, group=of_three)
        dist.send(ONE, 2)
        dist.recv(ONE.clone(), 3)
    elif rank == 3:
        for _ in range(2):
            dist.irecv(ONE.clone(), 1, group=of_three).wait()
        dist.send(ONE, 1)
    elif rank == 2:
        dist.recv(ONE.clone())  # from any rank: from which is unknown until it is over


def test_calls_between_two_ranks_are_numbered_in_each_direction_of_each_group():
    trace = watch(4, between_pairs).trace
    names = [group.name for group in trace.header.comm_groups]

    def calls_of(number):
        rows = trace.rank(number).rows
        rows = rows[np.isin(rows["kind"], (Kind.SEND, Kind.RECV)) & (rows["edge"] == Edge.BEGIN)]
        of = [names[index].partition(" from ")[2] if index >= 0 else "" for index in rows["comm_group"]]
        return list(zip(map(Kind, rows["kind"]), of, rows["comm_seq"].tolist(), strict=True))

    there = "rank 1 to rank 3"
    assert calls_of(1) == [
        (Kind.SEND, there, 0),
        (Kind.SEND, there, 1),
        (Kind.SEND, "rank 1 to rank 2", 0),
        (Kind.RECV, "rank 3 to rank 1", 0),
    ]
    assert calls_of(3) == [(Kind.RECV, there, 0), (Kind.RECV, there, 1), (Kind.SEND, "rank 3 to rank 1", 0)]
    assert calls_of(2) == [(Kind.RECV, "", -1)]


def from_a_rank_of_a_group():
    group = dist.new_group([2, 1])
    if dist.get_rank():
        dist.broadcast(FOUR.to(torch.float16), src=2, group=group)
        dist.broadcast(FOUR.clone(), group_src=0, group=group)
        funcol.broadcast(FOUR.clone(), 0, group).tolist()


def test_the_source_is_a_rank_of_the_job():
    trace = watch(3, from_a_rank_of_a_group).trace
    for number in (1, 2):
        rows = trace.rank(number).rows
        rows = rows[(rows["kind"] == Kind.BROADCAST) & (rows["edge"] == Edge.BEGIN)]
        first = min(trace.header.comm_groups[rows["comm_group"][0]].ranks)
        assert rows["value"].tolist() == [2, first, first]
        assert [trace.header.strings[at] for at in rows["module"]] == ["float16", "float32", "float32"]


def asynchronous():
    work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
    other = dist.all_gather_single(torch.empty(8), FOUR, async_op=True)
    other.wait()
    work.wait()
    dropped = dist.all_reduce(torch.ones(1), async_op=True)
    while not dropped.is_completed():
        pass
    dist.barrier()
    dist.barrier()


def test_a_collective_ends_when_it_ends_not_when_it_is_waited_for():
    trace = watch(2, asynchronous).trace
    for rank in trace.ranks:
        rows = rank.rows
        ends = rows[np.isin(rows["kind"], COLLECTIVES) & (rows["edge"] == Edge.END)]
        assert sorted(ends["comm_seq"].tolist()) == [0, 1, 2, 3, 4]
        waits = rows[(rows["kind"] == Kind.WAIT) & (rows["edge"] == Edge.BEGIN)]
        assert waits["comm_seq"].tolist() == [1, 0, 3, 4]
        begins = rows[np.isin(rows["kind"], COLLECTIVES) & (rows["edge"] == Edge.BEGIN)]
        began = dict(begins[["comm_seq", "t_ns"]].tolist())
        ended = dict(ends[["comm_seq", "t_ns"]].tolist())
        assert all(began[seq] <= ended[seq] for seq in ended)
        assert ended[2] <= began[3]


@pytest.mark.parametrize("error", ["", "Connection closed by peer"])
def test_a_call_that_failed_has_no_end(error, monkeypatch):
    recorder, watch, future = Recorder(Header()), c10d.CollectiveWatch(), torch.futures.Future()
    monkeypatch.setattr(probe, "active", recorder)
    call = c10d.Call(Kind.ALL_REDUCE, -1, 4, None, is_async=True, on_device=False)
    work = FutureWork()
    work._future = future
    watch.issued(call, work)
    future.set_exception(RuntimeError(error)) if error else future.set_result(None)
    assert watch.has_settled()
    last = recorder.last_event()
    assert (last is None) if error else (last["t_ns"] == call.ended_ns)


def in_groups_made_later():
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(ONE.clone(), group=pairs[rank // 2])
    dist.all_reduce(ONE.clone())
    dist.destroy_process_group(pairs[rank // 2])
    dist.all_reduce(ONE.clone(), group=dist.new_group(list(range(4))))


def test_groups_made_later_are_seen_too_each_with_its_ranks():
    trace = watch(4, in_groups_made_later).trace
    groups = trace.header.comm_groups
    for rank in trace.ranks:
        begins = rank.rows[(rank.rows["kind"] == Kind.ALL_REDUCE) & (rank.rows["edge"] == Edge.BEGIN)]
        pair = (0, 1) if rank.rank < 2 else (2, 3)
        assert [groups[index].ranks for index in begins["comm_group"]] == [pair, (0, 1, 2, 3), (0, 1, 2, 3)]
        assert begins["comm_seq"].tolist() == [0, 0, 0]


def with_our_engine():
    model = make_blocks(2)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    return train(model, 1)


def test_what_our_engine_issues_is_announced_once(monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMM", "gloo")
    trace = watch(2, with_our_engine).trace
    rows = trace.ranks[0].rows
    begins = Counter(Kind(kind) for kind in rows[rows["edge"] == Edge.BEGIN]["kind"].tolist())
    assert (begins[Kind.ALL_GATHER], begins[Kind.REDUCE_SCATTER], begins[Kind.ALL_TO_ALL]) == (6, 3, 0)


def data_parallel():
    torch.manual_seed(0)
    model = DistributedDataParallel(make_blocks(2), bucket_cap_mb=0.001)
    losses = train(model, 2)
    if c10d.active is not None:  # the transport may report an end after the wait in C++ has returned
        wait_until(c10d.active.has_settled)
    return losses


def num_transport_threads():
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo" in (task / "comm").read_text() for task in tasks)


def groups_that_come_and_go():
    counts = []
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(num_transport_threads())
    return counts


def test_a_destroyed_group_ends_with_its_threads():
    for counts in watch(2, groups_that_come_and_go).results:
        assert len(set(counts)) == 1


@pytest.mark.skipif(not HAS_HOOKS, reason="before torch 2.14, what C++ calls is invisible")
def test_what_cpp_calls_is_seen_where_torch_has_hooks():
    seen = watch(2, data_parallel)
    assert seen.results == run_ranks(2, data_parallel)
    for rank in seen.trace.ranks:
        rows = rank.rows[rank.rows["kind"] == Kind.ALL_REDUCE]
        begins, ends = (rows[rows["edge"] == edge] for edge in (Edge.BEGIN, Edge.END))
        assert begins["num_bytes"].sum() >= 2 * 4 * sum(p.numel() for p in make_blocks(2).parameters())
        assert sorted(ends["comm_seq"].tolist()) == begins["comm_seq"].tolist()


def redistributed():
    """Redistribute a DTensor in every way, and train a model that tensor parallelism splits; return torch's counts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    rows = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
    with CommDebugMode() as counted:
        columns = rows.redistribute(placements=[Shard(1)])
        whole = rows.full_tensor()
        parts = DTensor.from_local(torch.ones(8, 8), mesh, [Partial()])
        summed = [parts.redistribute(placements=[to]).to_local().sum().item() for to in (Replicate(), Shard(0))]
        model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        funcol.all_to_all_single(FOUR, None, None, dist.group.WORLD).tolist()
    calls = {str(call).rpartition(".")[2]: count for call, count in counted.get_comm_counts().items()}
    grad = model[0].weight.grad.full_tensor().sum().item()
    return calls, columns.to_local().tolist(), whole.tolist(), summed, grad


OPERATORS = {
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "all_reduce": Kind.ALL_REDUCE,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "all_to_all_single": Kind.ALL_TO_ALL,
}


def test_functional_collectives_are_seen_as_often_as_torch_counts_them():
    seen = watch(2, redistributed)
    assert seen.results == run_ranks(2, redistributed)
    for (counted, *_), rank in zip(seen.results, seen.trace.ranks, strict=True):
        collectives = rank.rows[np.isin(rank.rows["kind"], COLLECTIVES)]
        begins, ends = (collectives[collectives["edge"] == edge] for edge in (Edge.BEGIN, Edge.END))
        kinds = Counter({OPERATORS[name]: count for name, count in counted.items() if count})
        assert set(kinds) == set(OPERATORS.values())
        kinds[Kind.ALL_GATHER] += 1  # of the gradient, after the count
        begun = Counter(map(Kind, begins["kind"].tolist()))
        assert {kind: begun[kind] for kind in kinds} == kinds
        assert sorted(ends["comm_seq"].tolist()) == begins["comm_seq"].tolist()
        waits = rank.rows[(rank.rows["kind"] == Kind.WAIT) & (rank.rows["edge"] == Edge.BEGIN)]
        assert 0 < len(waits) <= len(begins)
        whole = 8 * 8 * 4
        assert whole in begins[begins["kind"] == Kind.ALL_GATHER]["num_bytes"].tolist()


def waited_for_by_a_view():
    summed = funcol.all_reduce(FOUR.clone(), "sum", dist.group.WORLD)
    return summed.view(2, 2).sum().item()


def test_a_functional_collective_ends_when_a_view_of_its_result_is_used():
    """A view of a result that is under way is itself under way: torch waits for the view, not for the result."""
    expected = [
        (Kind.ALL_REDUCE, Edge.BEGIN),
        (Kind.WAIT, Edge.BEGIN),
        (Kind.WAIT, Edge.END),
        (Kind.ALL_REDUCE, Edge.END),
    ]
    for rank in watch(2, waited_for_by_a_view).trace.ranks:
        rows = rank.rows[np.isin(rank.rows["kind"], (Kind.ALL_REDUCE, Kind.WAIT))]
        assert list(zip(rows["kind"], rows["edge"], strict=True)) == expected


def compiled():
    step = torch.compile(lambda x: funcol.all_reduce(x, "sum", dist.group.WORLD) * 2, backend="eager")
    return step(ONE.clone()).item()


def test_what_is_compiled_computes_the_same():
    assert watch(2, compiled).results == [4.0, 4.0]


def test_operators_are_the_originals_again():
    packet = torch.ops._c10d_functional.all_reduce
    watching = Watch().begin()
    assert torch.ops._c10d_functional.all_reduce.default is packet.default
    watching.end()
    assert torch.ops._c10d_functional.all_reduce is packet


def test_whether_all_collectives_are_seen_is_known():
    assert sees_all_collectives() == HAS_HOOKS == (int(torch.__version__.split(".")[1]) >= 14)


def refused():
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_gather_single(torch.empty(3), FOUR)
    dist.barrier()


def test_a_call_that_raises_has_no_end_and_the_next_is_seen():
    trace = watch(2, refused).trace
    rows = trace.ranks[0].rows
    ends = [Kind(kind) for kind in rows["kind"][rows["edge"] == Edge.END].tolist()]
    assert Kind.ALL_GATHER not in ends
    assert ends[-1] == Kind.BARRIER


def test_nothing_is_left_when_watching_ends():
    ((before, after),) = run_ranks(1, watched_and_after)
    assert after == before


def watched_and_after():
    names = ("allreduce", "barrier", "_set_group_name")
    before = [getattr(dist.ProcessGroup, name).__qualname__ for name in names], dist.Work.wait.__qualname__
    recorded(dist.barrier)
    after = [getattr(dist.ProcessGroup, name).__qualname__ for name in names], dist.Work.wait.__qualname__
    return before, after


def in_another_order():
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (first, second) if rank else (second, first):
        dist.all_reduce(ONE.clone(), group=group, async_op=True)
    dist.barrier()
    dist.destroy_process_group(first)


def test_a_group_is_the_same_on_all_ranks_in_whatever_order_they_meet_it():
    trace = watch(2, in_another_order).trace
    names = {group.name for group in trace.header.comm_groups}
    assert len(names) == len(trace.header.comm_groups) == 3
    used = [
        [trace.header.comm_groups[index].name for index in rows["comm_group"][rows["edge"] == Edge.BEGIN]][:2]
        for rows in (rank.rows[rank.rows["kind"] == Kind.ALL_REDUCE] for rank in trace.ranks)
    ]
    assert used[0] == used[1][::-1]


def in_a_new_world():
    dist.barrier()
    probe.active.comm_group(next(GROUP_INDICES), (0, 1), "c10d group 0")
    return [group.name for group in probe.active.header.comm_groups]


def test_a_group_with_the_name_of_an_earlier_one_is_another():
    assert watch(2, in_a_new_world).results == [["c10d group 0", "c10d group 0 (rebuild 1)"]] * 2


def again():
    recorder, before = Recorder(Header()), probe.active
    probe.active, watch = recorder, Watch()
    try:
        for _ in range(2):
            watch.begin()
            dist.all_reduce(ONE.clone())
            watch.end()
    finally:
        probe.active = before
    rows = np.frombuffer(recorder.drain().rows, ROW_DTYPE)
    return rows["kind"][rows["edge"] == Edge.BEGIN].tolist()


def test_a_watch_that_has_ended_can_begin_again():
    assert run_ranks(2, again) == [[Kind.ALL_REDUCE, Kind.WAIT] * 2] * 2


def own_and_others(watch):
    with watch.paused(), watch.paused():
        dist.barrier()
    dist.all_reduce(ONE.clone())


def paused():
    recorder, before = Recorder(Header()), probe.active
    probe.active, watch = recorder, Watch()
    watch.begin()
    try:
        own_and_others(watch)
    finally:
        watch.end()
        probe.active = before
    rows = np.frombuffer(recorder.drain().rows, ROW_DTYPE)
    return rows["kind"][rows["edge"] == Edge.BEGIN].tolist()


def test_collectives_of_the_workbench_itself_are_not_announced():
    assert run_ranks(2, paused) == [[Kind.ALL_REDUCE, Kind.WAIT]] * 2


def beside_a_unit():
    probe.active, watch, told = Recorder(Header()), c10d.CollectiveWatch(), []
    watch.on_two_threads = lambda *names: told.append(names)

    def issue():
        watch.begin(dist.group.WORLD, Kind.BARRIER, (), (), is_async=False)

    with c10d.Within(watch, 3):
        issue()
        for name in ("Dummy-1", "monitor", "another"):  # the first as one of autograd
            beside = threading.Thread(target=issue, name=name)
            beside.start()
            beside.join()
    return np.frombuffer(probe.active.drain().rows, ROW_DTYPE)["unit"].tolist(), told


def test_what_another_thread_issues_is_of_no_unit_and_said_once():
    ((units, told),) = run_ranks(1, beside_a_unit, fresh=True)
    assert units == [3, *[probe.NO_UNIT] * 3]
    assert told == [("MainThread", "monitor", "barrier on c10d group 0")]


def test_of_many_results_that_are_not_waited_for_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(c10d, "_MAX_FILLING", 2)
    watch, tensors = c10d.CollectiveWatch(), [torch.ones(1) for _ in range(4)]
    for tensor in [*tensors, tensors[1]]:
        watch.fills(c10d.Call(Kind.ALL_REDUCE, 0, 4, None, is_async=True, on_device=False), (tensor,))
    assert [len(list(watch.wait_for_tensor(tensor))) for tensor in tensors] == [0, 1, 0, 1]


class Unfinished:
    """A work of c10d without futures."""

    def get_future(self):
        raise RuntimeError


@pytest.mark.parametrize(
    "walk",
    [
        lambda watch, tensor: list(watch.wait_for_tensor(tensor)),
        lambda watch, _: watch._end_synchronous(),
        lambda watch, _: watch.abandon(),
    ],
    ids=["a wait", "the next call", "the end of watching"],
)
def test_another_thread_may_announce_ends_between_any_two_instructions(walk):
    watch, tensors = c10d.CollectiveWatch(), torch.ones(200).split(1)
    for tensor in tensors:
        call = c10d.Call(Kind.ALL_REDUCE, 0, 4, None, is_async=True, on_device=False)
        watch.fills(call, (tensor,))
        watch.issued(call, Unfinished())
    calls = iter(list(watch._in_flight.values()))

    def announce_one(frame, event, _arg):
        frame.f_trace_opcodes = True
        if frame.f_code.co_filename == c10d.__file__ and event == "opcode":
            if (ended := next(calls, None)) is not None:
                ended.ended_ns = 1
            watch.settle()
        return announce_one

    before = sys.gettrace()
    sys.settrace(announce_one)
    try:
        walk(watch, tensors[-1])
    finally:
        sys.settrace(before)
