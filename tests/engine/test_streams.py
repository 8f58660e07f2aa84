"""The order of work on a device, from streams that only log their waits."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.helpers.forked_ranks import on_one_rank, run_ranks
from tests.helpers.parity import shard_net
from tests.helpers.recording_probe import recording
from tests.helpers.small_models import batch, loss_of, make_net
from workbench.engine import unit_collectives
from workbench.engine.backends import backend_of
from workbench.engine.backends.stream_order import Streams
from workbench.engine.backends.streams import StreamBackend
from workbench.engine.comm_context import FSDPCommContext
from workbench.engine.reduction import AllReducePlan, GradientSync, PartialSum, ReductionQueue, ShardSum
from workbench.engine.unit_collectives import UnitId
from workbench.events import Category, Edge, Kind

COMPUTE = "compute"


class Device(StreamBackend):
    """A device whose streams are names; logs the work of each in order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.names = iter(["copy_in", "reduce", "trail"])
        self.now = Stream(self, COMPUTE)
        self.done: list[str] = []

    def make_stream(self, *, is_urgent: bool) -> "Stream":
        assert is_urgent
        return Stream(self, next(self.names))

    def current_stream(self) -> "Stream":
        return self.now

    @contextmanager
    def on(self, stream: "Stream"):
        before, self.now = self.now, stream
        yield
        self.now = before

    def event(self):
        raise NotImplementedError

    def used_here(self, *_tensors: torch.Tensor) -> None:
        pass

    def reading(self):
        raise NotImplementedError

    def runs(self, _process_group) -> bool:
        return True

    def do(self, what: str) -> None:
        self.done.append(f"{self.now.name}: {what}")


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: "Stream") -> None:
        self.device.done.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def device() -> Device:
    return Device()


class Step:
    """A collective of a reduction that logs where its end runs."""

    pending = SimpleNamespace(span=None)

    def __init__(self, device: Device, name: str, *, replicas: bool = False) -> None:
        self.device, self.name = device, name
        reducer = SimpleNamespace(
            mesh_info=SimpleNamespace(replicate_group=object() if replicas else None),
            finish=lambda _total: device.do(f"{name} set"),
            sync=GradientSync(),
            unit=UnitId(0, name),
        )
        self.summed = ShardSum(AllReducePlan(reducer, (), False, None), PartialSum([], torch.ones(1), None))


class Scattered(Step):
    def finish(self) -> ShardSum:
        self.device.do(f"{self.name} scattered")
        return self.summed


class AllReduced(Step):
    def finish(self) -> None:
        self.device.do(f"{self.name} all-reduced")
        self.summed.then.reducer.finish(self.summed.part)


def test_work_after_a_reduce_scatter_does_not_block_compute(device, monkeypatch):
    def all_reduce(reducer, _total, _group, _unused) -> AllReduced:
        device.do(f"{reducer.unit.name} begins all-reduce")
        return AllReduced(device, reducer.unit.name)

    monkeypatch.setattr("workbench.engine.reduction.all_reduce", all_reduce)
    streams = device.streams()
    queue = ReductionQueue(streams)
    for name in ("b", "a"):
        with streams.reducing(after_compute=True):
            queue.make_room()
            device.do(f"{name} copied in")
            queue.add(Scattered(device, name, replicas=True))
        streams.join()
    in_backward = len(device.done)
    with streams.reducing(after_compute=False):
        queue.finish()
    streams.join_all()
    assert device.done == [
        "reduce waits for compute", "reduce: b copied in", "compute waits for reduce",
        "reduce waits for compute", "reduce: b scattered", "trail waits for reduce", "trail: b begins all-reduce",
        "reduce: a copied in", "compute waits for reduce",
        "reduce: a scattered", "trail waits for reduce", "trail: a begins all-reduce",
        "trail waits for reduce", "trail: b all-reduced", "trail: b set",
        "trail waits for reduce", "trail: a all-reduced", "trail: a set",
        "compute waits for reduce", "compute waits for trail",
    ]  # fmt: skip
    assert not any("waits for trail" in done for done in device.done[:in_backward])


def test_a_single_rank_trails_as_well(device):
    streams = device.streams()
    with streams.reducing(after_compute=True):
        ReductionQueue(streams).add(Step(device, "a").summed)
    assert device.done == ["reduce waits for compute", "trail waits for reduce", "trail: a set"]


def test_the_input_of_a_reduce_scatter_is_freed_before_the_gradients_are_set(device):
    queue, scattered = ReductionQueue(device.streams()), Scattered(device, "a")
    alive, is_freed = weakref.ref(scattered), []
    reducer = SimpleNamespace(**vars(scattered.summed.then.reducer))
    reducer.finish = lambda _total: is_freed.append(alive() is None)
    scattered.summed = ShardSum(AllReducePlan(reducer, (), False, None), scattered.summed.part)
    queue.add(scattered)
    del scattered
    queue.finish()
    assert is_freed == [True]


def test_the_cpu_has_no_streams():
    streams = backend_of(torch.device("cpu")).streams()
    assert not streams.are_there
    with streams.trailing(torch.ones(1)):
        streams.join_all()


# ---- prefetched all-gathers


def order_of_a_forward() -> tuple[list[str], list[str]]:
    """Return the order of all-gathers and copies in the second forward, on the CPU and with streams."""
    orders = []
    for are_there in (False, True):
        with pytest.MonkeyPatch.context() as patch, recording() as record:
            patch.setattr(Streams, "are_there", are_there)
            model = shard_net(make_net(num_blocks=3))
            for step in range(2):
                record.clear()
                loss_of(model, batch(0, step)).backward()
            wanted = ((Kind.ALL_GATHER, Edge.BEGIN), (Kind.COPY_OUT, Edge.BEGIN))
            orders.append([f"{k.name} {record.name(u)}" for k, e, u, *_ in record.rows if (k, e) in wanted])
    return orders[0], orders[1]


def test_an_all_gather_ahead_does_not_wait_for_the_copy_before_it_on_a_device():
    for on_cpu, on_device in run_ranks(2, order_of_a_forward):
        assert sorted(on_cpu) == sorted(on_device)
        ahead, copied = "ALL_GATHER blocks.1", "COPY_OUT blocks.0"
        assert on_cpu.index(copied) < on_cpu.index(ahead)
        assert on_device.index(ahead) < on_device.index(copied)


# ---- a single rank with offloading


def test_a_flat_shard_goes_to_the_device_in_one_piece():
    shard, unit = torch.ones(6), UnitId(3, "a")
    with recording() as record:
        record.name = str
        state = unit_collectives.copy_to_device(shard, torch.bfloat16, torch.device("meta"), unit)
        assert record.live[Category.ALL_GATHER_BUFFERS] == 12
        assert record.events == ["OFFLOAD BEGIN 3", "OFFLOAD END 3"]
        (arrived,) = state.wait()
        assert (arrived.shape, arrived.device.type, arrived.dtype) == ((1, 6), "meta", torch.bfloat16)
        state.drop()
        assert record.live[Category.ALL_GATHER_BUFFERS] == 0


@on_one_rank
def test_a_single_rank_copies_from_the_device_copy():
    """Pretend that a unit's shards are on another device."""
    model = shard_net(make_net(num_blocks=1))
    loss_of(model, batch(0, 0))
    model.reset_iter_state()
    unit = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    assert isinstance(unit.comm_ctx, FSDPCommContext)
    brought: list[torch.Tensor] = []
    real = unit_collectives.copy_to_device

    def copy_to_device(shard: torch.Tensor, dtype: torch.dtype, device: torch.device, of: UnitId) -> object:
        state = real(shard, dtype, torch.device("cpu"), of)
        brought.append(state.output)
        return state

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(unit_collectives, "copy_to_device", copy_to_device)
        patch.setattr(unit.shards, "flat", SimpleNamespace(device="elsewhere", numel=unit.shards.flat.numel, flat=None))
        patch.setattr(unit_collectives, "_copy_shard", lambda target, _shard, _unit: target.fill_(7))
        model.blocks[0].unshard()
        assert len(brought) == 1
        assert all(bool((p == 7).all()) for p in nn.ParameterList(model.blocks[0].parameters()))
        model.blocks[0].reshard()
