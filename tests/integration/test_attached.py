"""Ranks that train on engines which somebody else started: left, found again with all they have, and let go."""

import pytest

from tests.cluster.test_attached import profile as running_profile
from tests.integration.model import CELL
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.workbench import Workbench

pytestmark = pytest.mark.cluster

profile = running_profile


def optimizer_rows(bench):
    """How often each rank recorded that an optimizer began or ended."""
    return [int((rank.rows["kind"] == Kind.OPTIMIZER).sum()) for rank in bench.trace.ranks]


def test_a_model_goes_on_training_after_its_ranks_were_left(profile):
    with Workbench.attach(2, profile="running", device="cpu") as first:
        first.run_cell(CELL)
        first.shard("model", wrap="Block")
        losses = list(first.step(2).losses)
        num_rows = first.trace.num_rows
        first.detach()
        assert not first.running
        assert first.trace.num_rows >= num_rows
    with Workbench.attach(profile="running", device="cpu") as again:
        assert set(again.status().units) == {"", "blocks.0", "blocks.1", "blocks.2"}
        assert again.trace.num_rows >= num_rows
        losses += again.step(2).losses
        recorded = optimizer_rows(again)
    with Workbench.attach(2, profile="running", device="cpu") as anew:  # they were let go
        assert anew.status().units == ()
        anew.run_cell(CELL)
        anew.shard("model", wrap="Block")
        assert list(anew.step(4).losses) == pytest.approx(losses)
        assert optimizer_rows(anew) == recorded  # nothing of the ranks that they were still listens


def test_ranks_at_work_are_not_left(profile):
    with Workbench.attach(2, profile="running", device="cpu") as bench:
        bench.run_cell(CELL)
        bench.shard("model", wrap="Block")
        bench.step(1, until="forward")
        with pytest.raises(UsageError, match=r"%fsdp step --until forward is under way .* then %fsdp detach"):
            bench.detach()
        bench.abort()


def test_what_was_started_here_is_not_left():
    bench = Workbench(1, device="cpu")
    with pytest.raises(UsageError, match="there are no ranks"):
        bench.detach()
