"""Nothing may be left over by a test of the engine: no rank, no process group, no probe, no cancellation."""

import multiprocessing
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.helpers.forked_ranks import ON_GPUS, POOL
from workbench.engine import cancellable_waits, probe, process_groups


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What two ranks show is left to CI on four: these cost twice as much."""
    sizes: dict[str, set[int]] = {}
    on_ranks = [item for item in items if isinstance(item, pytest.Function) and _world_size(item)]
    for item in on_ranks:
        sizes.setdefault(item.nodeid.partition("[")[0], set()).add(_world_size(item))
    for item in on_ranks:
        if _world_size(item) > 2 in sizes[item.nodeid.partition("[")[0]]:
            item.add_marker(pytest.mark.thorough)


def _world_size(item: pytest.Function) -> int:
    """Return on how many ranks a test runs that is parametrized by it, else 0."""
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
    """Tests share the ranks that stay, but for those that patch something here, which only a fork sees."""
    POOL.is_open = "monkeypatch" not in request.fixturenames and request.node.get_closest_marker("fresh_ranks") is None
    yield
    POOL.is_open = False


@pytest.fixture(autouse=True)
def over_gloo() -> Iterator[None]:
    """Tests say themselves when ranks are to use shared memory: there, staging and its bytes are others."""
    with patch.dict(os.environ, WORKBENCH_COMM="gloo"):
        yield
