"""Nothing may be left over by a test of the engine: no rank, no process group, no probe, no cancellation."""

import multiprocessing
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from workbench.engine import groups, probe, waits


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []
    assert not dist.is_initialized()
    assert groups.num_unfinished() == 0
    assert probe.active is None
    waits.cancellation.check()


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests say themselves when ranks are to use shared memory: there, staging and its bytes are others."""
    monkeypatch.setenv("WORKBENCH_COMM", "gloo")
