"""Models in torch's DistributedDataParallel: one unit, its forward and backward, its all-reduces and its bytes."""

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.figure_checks import words
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.waiting import wait_until
from tests.helpers.watched import make_blocks, train, watch
from workbench.events import C10D, TORCH_DDP, Category, Edge, Kind
from workbench.models import c10d
from workbench.models._torch_private import HAS_HOOKS
from workbench.replay.collectives import compare
from workbench.reports.status_report import sharded_models
from workbench.views import draw
from workbench.views.theme import title_and_subtitle

BUCKET = 0.004  # MiB, so that gradients fill several
needs_hooks = pytest.mark.skipif(not HAS_HOOKS, reason="before torch 2.14, what C++ calls is invisible")


def replicate(num_steps, view=False):
    model = DistributedDataParallel(make_blocks(2), bucket_cap_mb=BUCKET, gradient_as_bucket_view=view)
    losses = train(model, num_steps)
    if c10d.active is not None:
        wait_until(c10d.active.has_settled)
    return losses


def begins(rank, kind, step=None):
    rows = rank.rows[(rank.rows["kind"] == kind) & (rank.rows["edge"] == Edge.BEGIN)]
    return rows if step is None else rows[rows["step"] == step]


def num_bytes():
    return sum(param.nbytes for param in make_blocks(2).parameters())


@pytest.mark.parametrize("view", [False, True])
def test_a_model_is_one_unit_and_trains_as_without_a_watch(view):
    seen = watch(2, replicate, 3, view)
    assert seen.results == run_ranks(2, replicate, 3, view)
    (unit,) = seen.trace.header.units
    assert (unit.name, unit.engine, unit.shard_size, unit.replicate_size) == ("", TORCH_DDP, 1, 2)
    assert {param.fqn for param in unit.params} == {name for name, _ in make_blocks(2).named_parameters()}
    for rank in seen.trace.ranks:
        work = rank.rows[np.isin(rank.rows["kind"], (Kind.FORWARD, Kind.BACKWARD))]
        assert work["kind"].tolist() == [Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD] * 3
        assert work["edge"].tolist() == [Edge.BEGIN, Edge.END] * 6


@pytest.mark.parametrize("view", [False, True])
def test_parameters_gradients_and_buckets_count_as_held_by_every_rank(view):
    trace = watch(2, replicate, 2, view).trace
    for rank in trace.ranks:
        moves = rank.rows[np.isin(rank.rows["kind"], (Kind.ALLOC, Kind.FREE))]
        held = {c: np.cumsum(moves["num_bytes"][moves["category"] == c]) for c in Category}
        assert held[Category.SHARDED_PARAMS].max() == num_bytes()
        assert held[Category.SHARDED_GRADS].max() == num_bytes()
        assert held[Category.SHARDED_GRADS][-1] == 0  # dropped by zero_grad, or with the model
        assert held[Category.REDUCE_SCATTER_BUFFERS].max(initial=0) == (0 if view else num_bytes())


@needs_hooks
def test_all_reduces_of_a_step_match_the_closed_form():
    trace = watch(2, replicate, 4).trace
    (unit,) = trace.header.units
    assert unit.num_reductions > 1
    assert unit.comm == C10D
    for rank in trace.ranks:
        for step, calls in ((0, 1), (1, unit.num_reductions), (3, unit.num_reductions)):
            rows = begins(rank, Kind.ALL_REDUCE, step)
            assert (len(rows), rows["num_bytes"].sum()) == (calls, num_bytes())
            assert set(rows["unit"].tolist()) == {unit.index}
    for step in range(4):
        (row,) = (row for row in compare(trace, step) if row.kind is Kind.ALL_REDUCE)
        assert row.expected is not None
        assert not row.differs
    assert "missing" not in title_and_subtitle(draw("comms", trace))[1]


@needs_hooks
def test_the_number_of_all_reduces_is_not_expected_before_the_buckets_are_known():
    trace = watch(2, replicate, 1).trace
    (row,) = (row for row in compare(trace, 0) if row.kind is Kind.ALL_REDUCE)
    assert (row.calls, row.expected) == (1, None)


@pytest.mark.skipif(HAS_HOOKS, reason="from torch 2.14 on, all-reduces of C++ are seen")
def test_views_say_that_all_reduces_of_cpp_are_not_seen():
    trace = watch(2, replicate, 2).trace
    for view in ("comms", "timeline"):
        assert "the all-reduces of DistributedDataParallel are missing" in words(draw(view, trace))
    assert not any(row.differs for row in compare(trace, 1))


def test_status_says_that_the_model_is_not_sharded():
    (model,) = sharded_models(watch(2, replicate, 2).trace.header)
    assert model.is_replicated
    assert "DistributedDataParallel, not sharded: every rank holds 8.57 KiB" in str(model)


def evaluate():
    model = DistributedDataParallel(make_blocks(2))
    with torch.no_grad():
        return model(torch.ones(2, 16)).sum().item()


def test_an_evaluation_has_a_forward_and_no_backward():
    for rank in watch(2, evaluate).trace.ranks:
        assert (len(begins(rank, Kind.FORWARD)), len(begins(rank, Kind.BACKWARD))) == (1, 0)


def accumulate():
    model = DistributedDataParallel(make_blocks(2))
    with model.no_sync():
        model(torch.ones(2, 16)).sum().backward()
    model(torch.ones(2, 16)).sum().backward()
    if c10d.active is not None:
        wait_until(c10d.active.has_settled)


def test_a_backward_without_reduction_has_none():
    for rank in watch(2, accumulate).trace.ranks:
        assert len(begins(rank, Kind.BACKWARD)) == 2
        assert len(begins(rank, Kind.ALL_REDUCE)) == (1 if HAS_HOOKS else 0)
