"""Nothing may be left over by a test of the engine: no rank, no process group, no probe, no cancellation."""

import multiprocessing
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.engine.ranks import ON_GPUS, POOL
from workbench.engine import cancellable_waits, probe, process_groups


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
