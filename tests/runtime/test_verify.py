"""``verify`` does not count as part of the run: no view, count or curve shows it."""

import copy
import functools
import os
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.booted_ranks import drain, execute, namespace, prepare, run
from tests.helpers.pairwise import quick
from tests.helpers.small_models import adamw, loss_of
from workbench.engine import MixedPrecisionPolicy, fully_shard
from workbench.events import Category, Kind, UnitState
from workbench.protocol.commands import Shard, Step, Verify
from workbench.replay import memory, training
from workbench.runtime import rank as rank_module
from workbench.trace import header_from_dict, key_frame_from_dict
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.invariants import check
from workbench.trace.schema import ROW_DTYPE
from workbench.views import VIEWS, draw

LEAVES = (Kind.ALLOC, Kind.FREE, Kind.RESHARD, Kind.UNSHARD)
"""Kinds of rows that record the changes that verify leaves."""


def recorded():
    """Return what this rank recorded so far, as plain data, and the state after it."""
    content, (rows,) = drain()
    return content.header, rows, key_frame_from_dict(content.key_frame)


def joined(results):
    """Join the results of ``recorded`` on each rank into one trace."""
    parts = [RankTrace(rank, np.frombuffer(rows, ROW_DTYPE)) for rank, (_, rows, _) in enumerate(results)]
    return Trace(header_from_dict(results[0][0]), tuple(parts))


def with_and_without_verify(reshard, warm):
    """Run steps, a verify, and steps; return the record before verify, after it, and at the end."""
    prepare()
    execute(Shard(model="model", wrap=("Block",), reshard_after_forward=reshard))
    if warm:
        execute(Step(count=3))
    before = recorded()
    assert execute(Verify())["ok"]
    after = recorded()
    execute(Step(count=3))
    return before, after, recorded()


def without_verify(reshard, warm):
    prepare()
    execute(Shard(model="model", wrap=("Block",), reshard_after_forward=reshard))
    execute(Step(count=6 if warm else 3))
    return recorded()


@pytest.mark.parametrize("reshard", ["true", "false"])
@pytest.mark.parametrize("warm", quick([True, False], [False]))
def test_verify_changes_no_view(reshard, warm):
    results = run(2, with_and_without_verify, reshard, warm)
    before, after, end = (joined([result[place] for result in results]) for place in range(3))
    results_without = run(2, without_verify, reshard, warm)
    plain = joined(results_without)
    assert check(end) == []
    for old, new in zip(before.ranks, after.ranks, strict=True):
        reported = new.rows[len(old.rows) :]
        assert np.isin(reported["kind"], LEAVES).all()
        assert (reported["step"] == -1).all()
    if warm:
        assert [len(r.rows) for r in after.ranks] == [len(r.rows) for r in before.ranks], "a second step leaves nothing"
        for name in VIEWS:
            assert draw(name, after).to_json() == draw(name, before).to_json()
    for with_it, without in zip(end.ranks, plain.ranks, strict=True):
        assert memory.peak(with_it).num_bytes == memory.peak(without).num_bytes
        assert sorted(_events(with_it)) == sorted(_events(without))  # the engine prefetches from its second step on
    assert _losses(end) == _losses(plain)
    for (*_, (*_, frame)), (*_, expected) in zip(results, results_without, strict=True):
        assert frame.bytes_by_category == expected.bytes_by_category
        assert frame.unit_states == expected.unit_states


def _losses(trace):
    return training.summary(trace).losses.tolist()


def _events(rank_trace):
    """Return a rank's events within steps, without times and collective numbers."""
    rows = rank_trace.rows
    rows = rows[(rows["step"] >= 0) & ~np.isin(rows["kind"], (Kind.ALLOC, Kind.FREE, Kind.RESIDENT, Kind.READERS))]
    return rows[["kind", "edge", "unit", "num_bytes", "step", "phase"]].tolist()


def verify_of_unsharded_units():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), reshard_after_forward="false"))
    step = ns["train_step"]
    execute(Step(count=1))
    ns["opt"].zero_grad = lambda: None  # gradients stay
    execute(Step(count=1))
    ns["model"].unshard()
    params = ns["opt"].param_groups[0]["params"]
    grads = [p.grad for p in params]
    values = [(p.to_local().clone(), p.grad.to_local().clone()) for p in params]
    before = recorded()[2]
    assert execute(Verify())["ok"]
    after = recorded()[2]
    same = all(
        p.grad is g and torch.equal(p.to_local(), value) and torch.equal(g.to_local(), grad_value)
        for p, g, (value, grad_value) in zip(params, grads, values, strict=True)
    )
    assert namespace()["train_step"] is step
    return before, after, same


def test_parameters_and_gradients_stay_and_the_position_is_reported():
    for before, after, same in run(2, verify_of_unsharded_units):
        assert same
        assert before.bytes_by_category[Category.SHARDED_GRADS] > 0
        assert after.bytes_by_category[Category.SHARDED_GRADS] == before.bytes_by_category[Category.SHARDED_GRADS]
        assert UnitState.UNSHARDED in before.unit_states.values()
        assert after.unit_states == {}


def accumulates_without_sync():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), mesh=(2, 1)))
    model, opt = ns["model"], ns["opt"]

    def train_step():
        handle = ns["model"].blocks[0].unshard(async_op=True)
        handle.wait()
        for is_last in (False, True):
            ns["model"].set_requires_gradient_sync(is_last)
            ns["model"].set_requires_all_reduce(is_last, recurse=True)
            ns["model"].set_is_last_backward(is_last)
            loss = loss_of(ns["model"], torch.randint(7, (4, 6), generator=ns["generator"]))
            loss.backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    execute(Step(count=1))
    verified = execute(Verify())
    assert ns["model"] is model
    assert ns["opt"] is opt
    return verified, execute(Step(count=1))["steps_done"]


def test_a_step_that_calls_fsdp_methods_is_verified():
    for verified, steps in run(2, accumulates_without_sync):
        assert verified["ok"]
        assert verified["max_abs_diff"] < 1e-6
        assert steps == 1


def a_verify_that_raises():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",)))
    execute(Step(count=2))
    sharded = (ns["model"],)

    def breaks():
        loss = ns["train_step"]()
        if ns["model"] in sharded:
            ns["log_metric"]("never", 1.0)
            raise ArithmeticError("in the sharded step")
        return loss

    ns["breaks"] = breaks
    with pytest.raises(ArithmeticError):
        execute(Verify(fn="breaks"))
    rank_module.recover(1)
    execute(Step(count=1))
    return recorded()


def test_a_verify_that_raised_leaves_a_valid_record():
    trace = joined(run(2, a_verify_that_raises))
    assert check(trace) == []
    assert trace.header.strings == ("sharding", "loss")
    assert training.summary(trace).step_times.steps.tolist() == [0, 1, 2]


def verify_with(*, api, nan):
    ns = prepare()
    model = ns["model"]
    model.generator, model.lock, model.files = torch.Generator().manual_seed(1), threading.Lock(), [open(os.devnull)]  # noqa: SIM115 - what deepcopy refuses
    model.kept = [torch.ones(1, requires_grad=True) * 2]
    execute(Shard(model="model", wrap=("Block",), api=api))
    if nan:
        with torch.no_grad():
            next(p for p in ns["opt"].param_groups[0]["params"]).mul_(float("nan"))
        model.register_buffer("bad", torch.full((1,), float("nan")))
        model.register_buffer("mask", torch.full((1,), -float("inf")))  # is right
        return execute(Step(count=2)), execute(Verify()), model.generator.initial_seed()
    execute(Step(count=1))
    return execute(Verify())


@pytest.mark.parametrize("api", ["fully_shard", "classic"])
def test_a_model_with_uncopyable_attributes_is_verified(api):
    for verified in run(2, functools.partial(verify_with, api=api, nan=False)):
        assert verified["ok"]
        assert verified["not_finite"] == []
        assert verified["since"] is None


def train_in_parallel(dim, mp_policy):
    """Use tensor parallelism in each block, ``fully_shard`` over the other axis, and a leftover loop variable."""
    ns = namespace()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    layers = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
    ns["model"] = model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(3)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], mp_policy=mp_policy)
        ns["block"] = block
    fully_shard(model, mesh=mesh["dp"], mp_policy=mp_policy)
    ns["opt"] = adamw(model.parameters())
    seed = mesh.get_local_rank("dp")

    def train_step():
        loss = ns["model"](torch.full((3, dim), 1.0 + seed)).pow(2).mean()
        loss.backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    execute(Step(count=2))
    right = execute(Verify())
    assert right == execute(Verify(model="model"))  # everything is unchanged
    losses = execute(Step(count=2))["losses"]
    return right, losses


@pytest.mark.thorough
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_a_tensor_parallel_model_is_verified(mp_policy):
    for right, losses in run(4, train_in_parallel, 8, mp_policy):
        assert right["ok"], right
        assert right["num_params"] == 3 * 6
        assert losses[1] < losses[0]


def test_nan_in_both_is_reported_and_not_a_difference():
    for stepped, verified, _ in run(2, functools.partial(verify_with, api="fully_shard", nan=True)):
        assert stepped["first_step"] == 0
        assert verified["ok"]
        assert len(verified["not_finite"]) > 1
        assert verified["buffers_not_finite"] == ["bad"]
        assert verified["since"] == 0
