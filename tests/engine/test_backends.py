"""One class for each kind of device: which there are, and that a new one is all that another kind needs."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from tests.engine.models import make_net
from tests.engine.parity import check_parity, shard_net
from tests.engine.ranks import run_ranks
from workbench.engine import backends
from workbench.engine.backends import backend_of
from workbench.engine.backends.base import Backend, ResizedMemory, Streams
from workbench.engine.backends.cuda import Cuda
from workbench.engine.backends.host import Host
from workbench.engine.backends.pages import SparePages
from workbench.engine.comm import CommPair, DefaultAllGather, DefaultReduceScatter


@pytest.mark.parametrize(("kind", "backend"), [("cpu", Host), ("cuda:1", Cuda), ("meta", Backend)])
def test_each_kind_of_device_has_its_backend(kind, backend):
    device = torch.device(kind)
    assert type(backend_of(device)) is backend
    assert backend_of(device) is backend_of(torch.device(kind))
    assert backend_of(device).device == device


def test_memory_that_is_resized_is_there_only_while_it_is_used():
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


asked: Counter[str] = Counter()


class NotedStreams(Streams):
    """Streams that note what they are asked."""

    are_there = True

    def gathering(self):
        asked["gathering"] += 1
        return super().gathering()

    def reducing(self, *, after_compute: bool):
        asked["reducing"] += 1
        return super().reducing(after_compute=after_compute)

    def join(self) -> None:
        asked["join"] += 1


class Simulated(Backend):
    """A device of which the engine knows nothing but this class: it computes on the host."""

    is_host = True

    def full_memory(self, numel: int, dtype: torch.dtype) -> ResizedMemory:
        asked["memory"] += 1
        return super().full_memory(numel, dtype)

    def pair(self) -> CommPair:
        asked["pair"] += 1
        return CommPair(DefaultAllGather(), DefaultReduceScatter(), "simulated")

    def streams(self) -> Streams:
        return NotedStreams()


@contextmanager
def simulated():
    backends.KINDS["cpu"] = Simulated
    backend_of.cache_clear()
    try:
        yield
    finally:
        backends.KINDS["cpu"] = Host
        backend_of.cache_clear()


def train() -> tuple[list[float], dict[str, int]]:
    with simulated():
        losses = check_parity(make_net, shard_net, 3)
    return losses, dict(asked)


def test_a_simulated_device_takes_one_class(monkeypatch):
    monkeypatch.delenv("WORKBENCH_COMM", raising=False)
    losses, asked_of = run_ranks(2, train)[0]
    assert len(losses) == 3
    assert set(asked_of) == {"memory", "pair", "gathering", "reducing", "join"}
