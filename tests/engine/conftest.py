"""No test of the engine may leave behind a rank, process group, probe or cancellation."""

import multiprocessing
import os
from collections.abc import Iterator, MutableMapping
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.helpers.forked_ranks import ON_GPUS, POOL, shared_ranks
from workbench.engine import cancellable_waits, probe, process_groups


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the larger world sizes of a test that also runs on two ranks to CI: they cost twice as much."""
    sizes: dict[str, set[int]] = {}
    on_ranks = [item for item in items if isinstance(item, pytest.Function) and _world_size(item)]
    for item in on_ranks:
        sizes.setdefault(item.nodeid.partition("[")[0], set()).add(_world_size(item))
    for item in on_ranks:
        if _world_size(item) > 2 in sizes[item.nodeid.partition("[")[0]]:
            item.add_marker(pytest.mark.thorough)


def _world_size(item: pytest.Function) -> int:
    """Return the world size a test is parametrized with, else 0."""
    size = item.callspec.params.get("world_size", 0) if hasattr(item, "callspec") else 0
    return size if isinstance(size, int) else 0


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    assert {child.pid for child in multiprocessing.active_children()} == {
        rank.pid for rank in POOL.processes | ON_GPUS.processes
    }
    assert not dist.is_initialized()
    assert process_groups.num_unfinished() == 0
    assert probe.active is None
    cancellable_waits.cancellation.check()


@pytest.fixture(autouse=True)
def ranks_that_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    with shared_ranks(request):
        yield


@pytest.fixture(autouse=True)
def over_gloo() -> Iterator[None]:
    """Use gloo unless a test asks for shared memory, whose staging buffers and byte counts differ."""
    with patch.dict(os.environ, WORKBENCH_COMM="gloo"):
        yield


@pytest.fixture
def environ(over_gloo: None) -> Iterator[MutableMapping[str, str]]:
    """The environment, as a test may change it; long-lived ranks get it too."""
    with patch.dict(os.environ):
        yield os.environ
