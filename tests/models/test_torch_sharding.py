"""``shard --engine torch`` on real ranks: each option, optimizers, refusals, and what is said of the model."""

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.helpers.booted_ranks import execute, namespace, prepare, run
from tests.helpers.pairwise import quick_rows
from tests.runtime.test_policies import planned, trace_here
from workbench.errors import UsageError
from workbench.events import OWN_ENGINE, TORCH_CLASSIC, TORCH_FULLY_SHARD, Category, Edge, Kind
from workbench.protocol.commands import Shard, Step
from workbench.protocol.policy import CLASSIC, FULLY_SHARD, TORCH, WORKBENCH
from workbench.protocol.rank_messages import ListModels
from workbench.replay.collectives import compare
from workbench.replay.differences import differences
from workbench.replay.memory import not_split
from workbench.runtime import rank as rank_module
from workbench.runtime import shard_planning
from workbench.trace.invariants import check
from workbench.views import draw
from workbench.views.theme import title_and_subtitle

POLICIES = {
    FULLY_SHARD: {
        "plain": {},
        "copies": {"mesh": (2, 2)},
        "few ranks after forward": {"reshard_after_forward": 2},
        "kept": {"reshard_after_forward": "false"},
        "mixed precision": {"mp": "bf16,reduce=fp32,output=fp32"},
        "offload": {"offload": True},
        "prefetch": {"prefetch": 2},
        "ignored": {"ignore": ("*.bias",)},
    },
    CLASSIC: {
        "plain": {},
        "kept": {"strategy": "grad"},
        "whole copies": {"strategy": "none"},
        "copies": {"strategy": "hybrid", "mesh": (2, 2)},
        "originals": {"orig_params": True},
        "mixed precision": {"mp": "bf16,reduce=fp32"},
        "prefetch": {"prefetch": 1},
        "ignored": {"ignore": ("*.bias",)},
    },
}
ROWS = [(api, name) for api, policies in POLICIES.items() for name in policies]
QUICK = [(FULLY_SHARD, "plain"), (FULLY_SHARD, "few ranks after forward"), (CLASSIC, "plain"), (CLASSIC, "originals")]


def one_step_then_shard(engine, api, policy):
    """Take a step with the plain model, so that the optimizer has state, then three with the sharded one."""
    ns = prepare()
    if "ignore" in policy:  # a fused optimizer takes no mix of parameters that are sharded and that are not
        ns["opt"] = torch.optim.AdamW(ns["model"].parameters(), 1e-2, foreach=False)
    ns["train_step"]()
    command = Shard(model="model", wrap=("Block",), engine=engine, api=api, **policy)
    out = {
        "plan": shard_planning.plan(command, ns["world_size"]),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's words on NO_SHARD
        out["reply"] = execute(command)
    out["losses"] = execute(Step(count=3))["losses"]
    trace = trace_here()
    (rank,) = trace.ranks
    out["rules"], out["units"] = check(trace), trace.header.units
    out["differs"] = [row for row in compare(trace, 2) if row.differs]
    live = rank.cut(rank.end_seq, rank.end_seq).start.bytes_by_category
    kept = not_split(trace.header, rank.rows)
    out["bytes"] = live[Category.SHARDED_PARAMS], live[Category.OPTIMIZER_STATE], kept
    out["said"] = [title_and_subtitle(draw(view, trace))[1] for view in ("layout", "memory", "comms")]
    out["trace"] = trace
    (out["model"],) = rank_module.this_rank().answer(ListModels())
    out["is"] = isinstance(ns["model"], FSDPModule), isinstance(ns["model"], FullyShardedDataParallel)
    return out


def in_any_order(unit):
    """Return what is planned of a unit; torch lists its parameters in another order."""
    return replace(planned(unit), params=tuple(sorted(unit.params, key=lambda param: param.fqn)))


@functools.cache
def trained(engine, api, name):
    policy = POLICIES[api][name]
    num_ranks = 4 if "mesh" in policy or policy.get("reshard_after_forward") == 2 else 2
    return run(num_ranks, one_step_then_shard, engine, api, policy)


@pytest.mark.parametrize(("api", "name"), quick_rows(ROWS, QUICK))
def test_torchs_engine_trains_as_ours_with_each_option(api, name):
    for out, ours in zip(trained(TORCH, api, name), trained(WORKBENCH, api, name), strict=True):
        assert out["rules"] == []
        assert out["differs"] == []
        assert out["is"] == (api == FULLY_SHARD, api == CLASSIC)
        told, expected = out["reply"], ours["reply"]
        engine = TORCH_CLASSIC if api == CLASSIC else TORCH_FULLY_SHARD
        assert told["policy"] == [f"run by {engine}", *expected["policy"]]
        same = ("units", "num_params", "num_elements", "bytes_unsharded", "optimizers")
        assert {field: told[field] for field in same} == {field: expected[field] for field in same}
        assert told["lint"]["faults"] == expected["lint"]["faults"]
        if name == "originals":  # torch aligns the parameters inside a flat one
            assert out["losses"] == pytest.approx(ours["losses"], rel=1e-3)
            continue
        assert out["losses"] == pytest.approx(ours["losses"], rel=1e-6)  # four ranks sum in another order
        assert told["bytes_at_rest"] == expected["bytes_at_rest"]
        assert out["bytes"] == ours["bytes"]
        assert sorted(map(in_any_order, out["plan"]), key=str) == sorted(map(in_any_order, out["units"]), key=str)


@pytest.mark.parametrize("api", POLICIES)
def test_status_and_views_say_which_engine_runs_a_model(api):
    (out, *_), (ours, *_) = trained(TORCH, api, "plain"), trained(WORKBENCH, api, "plain")
    engine = TORCH_CLASSIC if api == CLASSIC else TORCH_FULLY_SHARD
    assert (out["model"].name, out["model"].class_name) == ("model", ours["model"].class_name)
    assert out["model"].units == tuple(unit.index for unit in out["units"])
    assert {unit.engine for unit in out["units"]} == {engine}
    assert all(f"run by {engine}" in said.lower().replace(engine.lower(), engine) for said in out["said"])
    assert not any("run by" in said for said in ours["said"])


@pytest.mark.parametrize("api", POLICIES)
def test_a_step_of_torchs_engine_is_compared_with_one_of_ours_unit_by_unit(api):
    for out, ours in zip(trained(TORCH, api, "plain"), trained(WORKBENCH, api, "plain"), strict=True):
        found = differences(out["trace"], ours["trace"])
        assert found.engines == (TORCH_CLASSIC if api == CLASSIC else TORCH_FULLY_SHARD, OWN_ENGINE)
        assert found.num_steps == (3, 3)
        assert not [change for change in found.collectives if change.differs]
        costs = {(change.kind, change.unit) for change in found.slower}
        assert {unit for _, unit in costs} <= {"", *out["reply"]["units"]}
        torchs, shared = found.aligned.a, (found.aligned.in_a >= 0) & (found.aligned.in_b >= 0)
        rows = torchs.rows[torchs.place[found.aligned.in_a[shared]]]
        forwards = rows[(rows["kind"] == Kind.FORWARD) & (rows["edge"] == Edge.BEGIN)]
        assert len(forwards) == found.num_steps[0] * len(out["units"])  # side by side in the picture


def content(model, optimizer):
    """Return what a refused command must leave as it was."""
    modules = [
        (path, type(module), list(vars(module)), list(module._modules), len(module._forward_pre_hooks))
        for path, module in model.named_modules()
    ]
    params = [(name, id(param), param.detach().clone()) for name, param in model.named_parameters()]
    held = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
    return modules, [each[:2] for each in params], held, list(map(id, optimizer.state)), [each[2] for each in params]


def refused(change, options):
    ns = prepare()
    ns["train_step"]()
    change(ns)
    model, before = ns["model"], content(ns["model"], ns["opt"])
    with pytest.raises((UsageError, ValueError, AttributeError)) as caught:
        execute(Shard(model="model", engine=TORCH, **options))
    *after, values = content(namespace()["model"], ns["opt"])
    assert namespace()["model"] is model
    assert after == list(before[:-1])
    assert all(torch.equal(*pair) for pair in zip(values, before[-1], strict=True))
    ns["opt"].state.clear()
    ns["train_step"]()
    return str(caught.value)


def nothing(ns):
    pass


def tie(ns):
    ns["model"].blocks[0].extra = next(ns["model"].blocks[1].parameters())


def two_groups(ns):
    params = list(ns["model"].parameters())
    ns["opt"] = torch.optim.SGD([{"params": params[::2]}, {"params": params[1::2]}], 0.1)


def strange_state(ns):
    ns["opt"] = torch.optim.SGD(ns["model"].parameters(), 0.1, momentum=0.9)
    ns["train_step"]()
    ns["opt"].state[ns["model"].scale] = None


def one_that_torch_refuses(ns):
    ns["model"].extra = nn.Parameter(torch.randn(4, 3).t())


REFUSED = {
    "a parameter of two units": (tie, {"wrap": ("Block",)}, "is tied to a parameter of another unit"),
    "a container, after its blocks": (nothing, {"wrap": ("Block", "ModuleList")}, "containers that do not implement"),
    "a flat parameter of two groups": (two_groups, {"api": CLASSIC, "wrap": ("Block",)}, "in several groups"),
    "state that has no parts": (strange_state, {"wrap": ("Block",)}, "NoneType"),
    "offload without an accelerator": (nothing, {"api": CLASSIC, "offload": True}, "leave out --offload"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_model_and_optimizer_as_they_were(case):
    change, options, said = REFUSED[case]
    for message in run(2, refused, change, options):
        assert said in message


def chosen_without_wrap(engine):
    prepare()
    return execute(Shard(model="model", engine=engine))


def test_the_classes_chosen_have_their_own_names():
    for told, ours in zip(run(2, chosen_without_wrap, TORCH), run(2, chosen_without_wrap, WORKBENCH), strict=True):
        assert told["chosen"] == ours["chosen"] == ["Block"]
        assert told["units"] == ours["units"]


def test_an_unknown_engine_is_refused_before_ranks_are_asked():
    with pytest.raises(ValueError, match="engine is one of workbench, torch, not 'jax'"):
        Shard(model="model", engine="jax")
