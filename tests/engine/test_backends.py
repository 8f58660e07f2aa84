"""One backend class per kind of device: the existing ones, and a new kind that needs only its class."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from tests.helpers.forked_ranks import run_on_gpus, run_ranks
from tests.helpers.parity import check_parity, shard_net
from tests.helpers.simulated_device import ByRows, FakeDevice, computing_on
from tests.helpers.small_models import make_net
from workbench.engine import CollectiveFailed, StepAborted, backends
from workbench.engine.backends import backend_of
from workbench.engine.backends.base import Backend
from workbench.engine.backends.cpu import Cpu
from workbench.engine.backends.cuda import Cuda
from workbench.engine.backends.full_memory import ResizedMemory
from workbench.engine.backends.page_pool import SparePages
from workbench.engine.backends.stream_order import Streams
from workbench.engine.backends.streams import StreamBackend
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.comm import CommPair, DefaultAllGather, DefaultReduceScatter
from workbench.engine.shard_layout import ShardLayout


@pytest.mark.parametrize(("kind", "backend"), [("cpu", Cpu), ("cuda:1", Cuda), ("meta", Backend)])
def test_each_kind_of_device_has_its_backend(kind, backend):
    device = torch.device(kind)
    assert type(backend_of(device)) is backend
    assert backend_of(device) is backend_of(torch.device(kind))
    assert backend_of(device).device == device


def test_each_rank_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert backends.counts() == {"cuda": 3}
    assert [backends.kind(name).of_rank(2) for name in ("cpu", "cuda")] == [torch.device("cpu"), torch.device("cuda:2")]


@pytest.mark.parametrize(
    ("accelerator", "c10d", "usual"),
    [
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),  # its collectives would need NCCL
        ("mps", "cpu:gloo,cuda:gloo", "cpu"),  # the engine has no backend for it
        (None, "cpu:gloo,cuda:nccl", "cpu"),
    ],
)
def test_a_rank_uses_an_available_device_if_it_can_communicate(accelerator, c10d, usual, monkeypatch):
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(dist, "get_backend_config", lambda: c10d)
    assert backends.usual_kind() == usual
    assert backends.can_pin() == (accelerator == "cuda")


def test_resized_memory_exists_only_while_used():
    memory, spare = ResizedMemory(8, torch.float32, torch.device("cpu")), SparePages()

    def num_bytes() -> int:
        return memory.tensor.untyped_storage().nbytes()

    assert num_bytes() == 0
    with memory.present():
        assert num_bytes() == 32
    for _ in range(2):
        memory.fill(spare)
        memory.tensor.fill_(1)
        assert num_bytes() == 32
        memory.empty(spare)
        assert num_bytes() == 0


num_calls: Counter[str] = Counter()


class NotedStreams(Streams):
    """Streams that count the calls to them."""

    are_there = True

    def gathering(self):
        num_calls["gathering"] += 1
        return super().gathering()

    def reducing(self, *, after_compute: bool):
        num_calls["reducing"] += 1
        return super().reducing(after_compute=after_compute)

    def join(self) -> None:
        num_calls["join"] += 1


class Simulated(Backend):
    """A device that the engine knows only by this class; it computes on the host."""

    is_host = True

    def full_memory(self, numel: int, dtype: torch.dtype) -> ResizedMemory:
        num_calls["memory"] += 1
        return super().full_memory(numel, dtype)

    def pair(self) -> CommPair:
        num_calls["pair"] += 1
        return CommPair(DefaultAllGather(), DefaultReduceScatter(), "simulated")

    def streams(self) -> Streams:
        return NotedStreams()


def train() -> tuple[list[float], dict[str, int]]:
    with computing_on(Simulated(torch.device("cpu"))):
        losses = check_parity(make_net, shard_net, 3)
    return losses, dict(num_calls)


def test_a_simulated_device_takes_one_class(monkeypatch):
    monkeypatch.delenv("WORKBENCH_COMM", raising=False)
    losses, asked_of = run_ranks(2, train)[0]
    assert len(losses) == 3
    assert set(asked_of) == {"memory", "pair", "gathering", "reducing", "join"}


# ---- the contract of all backends


def on_cuda() -> Backend:
    return Cuda(torch.device("cuda", torch.cuda.current_device()))


GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # warnings of torch's engine
]
KINDS = {
    "host": lambda: Cpu(torch.device("cpu")),
    "no more is known": lambda: Backend(torch.device("cpu")),
    "simulated": lambda: Simulated(torch.device("cpu")),
    "lags behind its host": FakeDevice,
    "cuda": on_cuda,
}


@pytest.fixture(params=[pytest.param(make, id=kind, marks=GPU * (kind == "cuda")) for kind, make in KINDS.items()])
def backend(request):
    return request.param()


def test_memory_is_there_between_fill_and_empty_and_its_views_last(backend):
    memory, spare = backend.full_memory(6, torch.float32), SparePages()
    with memory.present():
        view = memory.tensor[2:4]
    for number in (1, 2):
        memory.fill(spare)
        memory.tensor.fill_(number)
        assert view.tolist() == [number, number]
        memory.empty(spare)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_out_restores_what_copy_in_wrote(backend, dtype):
    layouts = [ShardLayout(torch.Size(shape), dim, 3) for shape, dim in (((7, 2), 0), ((2, 6), 1), ((3,), 0))]
    grads = [torch.rand(layout.shape, device=backend.device) for layout in layouts]
    for some in ([0, 1, 2], [0, 2]):  # if all shards are along dim 0, a device may copy them with one kernel
        of, full = [layouts[i] for i in some], [[grads[i]] for i in some]
        by_rows = [ByRows(layout) for layout in of]
        chunks = torch.empty(3, sum(la.slot_numel for la in of), dtype=dtype, device=backend.device)
        backend.copy_in(by_rows, full, chunks)
        parts = torch.full_like(chunks, torch.nan)
        backend.copy_in(by_rows, full, parts[:1])
        backend.copy_in(by_rows, full, parts[1:], 1)
        assert torch.equal(parts, chunks)
        fulls = [torch.empty(3 * la.slot_numel, device=backend.device) for la in of]
        backend.copy_out(chunks, [la.by_rank(padded) for la, padded in zip(of, fulls, strict=True)])
        for la, padded, grad in zip(of, fulls, full, strict=True):
            assert torch.equal(la.full_view(padded), grad[0].to(dtype).float())


def test_work_that_waits_for_an_event_runs_after_it(backend):
    streams, values = backend.streams(), torch.zeros(1, device=backend.device)
    streams.shards_changed(None)
    with streams.gathering():
        values += 1
        read = backend.record_event()
    streams.was_read()
    backend.wait_event(read)
    with streams.reducing(after_compute=True):
        values *= 3
        with streams.trailing(values):
            values += 4
            ended = backend.record_event()
    streams.join()
    streams.join_all()
    backend.wait_on_host(ended)
    assert values.item() == 7
    backend.synchronize()


def test_only_asynchronous_devices_have_a_clock(backend):
    assert (backend.clock() is not None) == isinstance(backend, StreamBackend)


class EndedWork:
    """A collective that has ended, with ``error`` if given."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(None)
        return future

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def check_waits(make) -> None:
    transport = make().transport(dist.group.WORLD)
    pending = transport.pending(EndedWork(), "all-gather")
    pending.wait()
    pending.finish()
    assert pending.has_ended
    failed = transport.pending(EndedWork("gone"), "all-gather")
    with pytest.raises(CollectiveFailed, match="all-gather failed: gone"):
        (failed.wait(), failed.finish())
    cancellation.cancel("enough")
    with pytest.raises(StepAborted, match="enough"):
        transport.pending(EndedWork(), "all-gather").wait()
    cancellation.reset()


@pytest.mark.parametrize("make", [pytest.param(make, id=k, marks=GPU * (k == "cuda")) for k, make in KINDS.items()])
def test_waits_end_with_the_collective_with_its_failure_or_with_an_abort(make):
    (run_on_gpus if make is on_cuda else run_ranks)(1, check_waits, make)
