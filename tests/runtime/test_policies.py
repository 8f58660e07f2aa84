"""Policies on real ranks: ``shard`` and ``reshard`` with each option, their records, and ``verify``."""

import functools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn
from torch.distributed.tensor import DTensor

from tests.helpers.booted_ranks import assert_refused, drain, execute, models_here, namespace, prepare, run
from tests.helpers.pairwise import quick, quick_rows
from workbench.engine import FSDPModule
from workbench.errors import UsageError
from workbench.events import Category, Kind
from workbench.models.ours import unit_of
from workbench.models.sharded_model import in_order
from workbench.protocol.commands import Reshard, Shard, Step, Unshard, Verify
from workbench.protocol.policy import ModelPolicy, mesh_words
from workbench.replay.collectives import compare
from workbench.replay.memory import not_split
from workbench.replay.shards import at_rest
from workbench.runtime import shard_planning, sharding
from workbench.trace import header_from_dict
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.invariants import check
from workbench.trace.schema import ROW_DTYPE, KeyFrame

POLICIES = {
    "plain": {},
    "copies": {"mesh": (2, 2)},
    "whole copies": {"mesh": (4, 1)},
    "few ranks after forward": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": "false"},
    "mixed precision": {"mp": "bf16,reduce=fp32,output=fp32"},
    "norms in their own dtype": {"mp": "bf16,reduce=fp32,keep=*.norm*"},
    "copies, all in bfloat16": {"mesh": (2, 2), "mp": "bf16"},
    "offload": {"offload": True},
    "prefetch": {"prefetch": 2},
}


def ranks_for(*policies):
    """Return 4 ranks if a policy makes two groups of them, otherwise 2."""
    return 4 if any("mesh" in policy or policy.get("reshard_after_forward") == 2 for policy in policies) else 2


def trace_here():
    content, buffers = drain()
    rows = np.frombuffer(buffers[0], ROW_DTYPE)
    return Trace(
        header=header_from_dict(content.header),
        ranks=(RankTrace(rank=content.position.rank, rows=rows, start=KeyFrame()),),
    )


def train(policy):
    ns = prepare(clip=1.0)
    command = Shard(model="model", wrap=("Block",), **policy)
    out = {
        "plan": shard_planning.plan(command, ns["world_size"]),
        "models": models_here(),
    }
    out["shard"] = execute(command)
    out["losses"] = execute(Step(count=3))["losses"]
    trace = trace_here()
    out["rules"] = check(trace)
    out["units"] = trace.header.units
    out["forms"] = [(row.unit, row.kind, row.num_ranks, row.calls, row.differs) for row in compare(trace, 2)]
    (rank,) = trace.ranks
    live = rank.cut(rank.end_seq, rank.end_seq).start.bytes_by_category
    out["live"] = {category: live[category] for category in Category}
    out["not split"] = not_split(trace.header, rank.rows)
    out["at rest"] = at_rest(trace.header, rank.rank % trace.header.units[0].shard_size)
    out["verify"] = execute(Verify())
    return out


def planned(unit):
    """Return a unit with only the fields known before it is made."""
    return replace(unit, index=0, root=-1, comm="", since_step=-1, earlier=())


@functools.cache
def trained(name):
    return run(ranks_for(POLICIES[name]), train, POLICIES[name])


@functools.cache
def plainly(num_ranks):
    return trained("plain") if num_ranks == ranks_for({}) else run(num_ranks, train, {})


@pytest.mark.parametrize("name", quick(POLICIES, ["plain", "kept", "mixed precision", "offload"]))
def test_a_policy_trains_matches_its_closed_form_and_verifies(name):
    policy = POLICIES[name]
    num_ranks = ranks_for(policy)
    results = trained(name)
    for out in results:
        assert out["rules"] == []
        assert out["verify"]["ok"], out["verify"]
        assert not [row for row in out["forms"] if row[-1]], out["forms"]
        assert out["live"][Category.SHARDED_PARAMS] == out["at rest"].params == out["shard"]["bytes_at_rest"]
        assert out["live"][Category.OPTIMIZER_STATE] == out["at rest"].adam
        assert sorted(map(planned, out["plan"]), key=str) == sorted(map(planned, out["units"]), key=str)
        (model,) = out["models"]
        assert (model.name, model.is_sharded, model.num_params) == ("model", False, out["shard"]["num_params"])
        assert (model.num_elements, model.num_bytes) == (out["shard"]["num_elements"], out["shard"]["bytes_unsharded"])
        assert "Block" in {offered.name for offered in model.classes}
    kinds = Counter(kind for unit, kind, *_ in results[0]["forms"] if unit >= 0)  # the norm of gradients is of none
    copies, size = policy.get("mesh", (1, num_ranks))
    assert {unit.replicate_size for unit in results[0]["units"]} == {copies}
    assert {unit.shard_size for unit in results[0]["units"]} == {size}
    assert bool(kinds[Kind.ALL_REDUCE]) == (copies > 1)
    assert bool(kinds[Kind.REDUCE_SCATTER]) == (size > 1)
    assert [out["not split"] for out in results] == [0 if size > 1 else out["at rest"].adam for out in results]
    if not policy.get("mp"):
        for out, other in zip(results, plainly(num_ranks), strict=True):
            assert out["losses"] == pytest.approx(other["losses"], rel=1e-4)


WORDS = {
    "copies": ["HSDP 2x2: 2 replicas, each sharded over 2 ranks"],
    "whole copies": ["4 replicas, none of them sharded"],
    "few ranks after forward": ["on 2 ranks after forward"],
    "mixed precision": ["compute in bfloat16", "reduce in float32"],
    "prefetch": ["gathers 2 units ahead"],
}


@pytest.mark.parametrize("name", WORDS)
def test_the_text_of_a_policy(name):
    assert trained(name)[0]["shard"]["policy"][: len(WORDS[name])] == WORDS[name]


def repeat_policy():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), reshard_after_forward="false"))
    execute(Step(count=1))
    params, before = list(ns["model"].parameters()), trace_here().header
    again = {"api": "fully_shard", "wrap": ("Block",), "mesh": (ns["world_size"],), "reshard_after_forward": "false"}
    again |= {"mp": "off", "offload": False, "prefetch": 0}
    out = {"again": [execute(Reshard(model="model", **given)) for given in ({}, again)]}
    out["again"] += [execute(Reshard(model="model.blocks.1", reshard_after_forward="false", mp="off", offload=False))]
    out["same"] = list(map(id, params)) == list(map(id, ns["model"].parameters())) and trace_here().header == before
    others = [{"reshard_after_forward": "auto"}, {"mp": "bf16"}, {"wrap": ("Linear",)}, {"prefetch": 1}]
    out["others"] = [execute(Reshard(model="model", **given))["is_changed"] for given in others]
    out["others"] += [execute(Reshard(model="model", api="classic"))["is_changed"]]
    wrapper = ns["model"]
    out["again"] += [execute(Reshard(model="model", **given)) for given in ({}, {"strategy": "full", "mp": "bf16"})]
    out["same"] = out["same"] and ns["model"] is wrapper
    out["others"] += [execute(Reshard(model="model", strategy="grad"))["is_changed"]]
    out["loss"] = execute(Step(count=1))["losses"]
    return out


def test_the_current_policy_changes_nothing():
    for out in run(2, repeat_policy):
        assert [reply["is_changed"] for reply in out["again"]] == [False] * 5
        assert out["again"][2]["units"] == ["blocks.1"]
        assert out["same"]
        assert out["others"] == [True] * 6
        assert math.isfinite(out["loss"][0])


def change(first, second, clip):
    """Return losses and state of two steps, a reshard, two steps, an unshard, a step."""
    ns = prepare(clip=clip)
    execute(Shard(model="model", wrap=("Block",), **first))
    losses = execute(Step(count=2))["losses"]
    report = execute(Reshard(model="model", **second))
    losses += execute(Step(count=2))["losses"]
    state = ns["opt"].state
    carried = [state[p]["step"].item() for p in ns["model"].parameters()]
    kinds = {type(state[p]["exp_avg"]) for p in ns["model"].parameters()}
    verified = execute(Verify())
    execute(Unshard(model="model"))
    losses += execute(Step(count=1))["losses"]
    trace = trace_here()
    return (
        losses,
        report,
        carried,
        kinds,
        verified["ok"],
        check(trace),
        [u for u in trace.header.units if not u.retired],
    )


CHANGES = [
    ({}, {"reshard_after_forward": "false"}),
    ({"reshard_after_forward": "false"}, {"reshard_after_forward": "auto", "prefetch": 1}),
    ({}, {"mesh": (2, 2)}),
    ({"mesh": (2, 2)}, {"mesh": (4,), "wrap": ("Linear",)}),
    ({}, {"offload": True}),
    ({"offload": True, "prefetch": 2}, {"offload": False}),
    ({}, {"reshard_after_forward": 2}),
]


def unchanged(policy, clip):
    """Return the losses of as many steps with the first policy alone."""
    prepare(clip=clip)
    execute(Shard(model="model", wrap=("Block",), **policy))
    return execute(Step(count=5))["losses"]


@functools.cache
def losses_unchanged(num_ranks, clip, **policy):
    return run(num_ranks, unchanged, policy, clip)


@pytest.mark.parametrize(("first", "second"), quick_rows(CHANGES, CHANGES[:1]), ids=str)
def test_a_live_model_gets_another_policy_and_continues(first, second):
    num_ranks, clip = ranks_for(first, second), 1.0 if "mesh" in second else None  # the norm is summed over the mesh
    for unchanged, (losses, report, carried, kinds, ok, broken, units) in zip(
        losses_unchanged(num_ranks, clip, **first), run(num_ranks, change, first, second, clip), strict=True
    ):
        assert losses == pytest.approx(unchanged, rel=1e-5)
        assert report["optimizers"] == 1
        assert carried == [4.0] * 21
        assert kinds == {DTensor}
        assert ok
        assert broken == []
        assert units == []


RESHARDS = [
    *({"reshard_after_forward": "false"}, {"reshard_after_forward": "auto"}, {"reshard_after_forward": 2}),
    *({"mesh": (2, 2), "reshard_after_forward": "true"}, {"wrap": ("Linear",), "mp": "bf16,reduce=fp32"}),
    *({"mesh": (4,), "reshard_after_forward": "auto"}, {"wrap": ("Block",)}, {"mp": "off", "offload": True}, {}),
]


def reshards_by_plan():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), ignore=("scale",)))
    found = []
    for changes in RESHARDS:
        command = Reshard(model="model", **changes)
        before = shard_planning.plan(command, ns["world_size"])
        execute(command)
        found.append((before, [unit for unit in trace_here().header.units if not unit.retired]))
    (model,) = models_here()
    return found, model


def policies_told():
    """Return the model's policy after each of RESHARDS, and the plans for setting the same policy again."""
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), prefetch=2))
    found = []
    for changes in [{}, *RESHARDS, {"prefetch": 0}]:
        execute(Reshard(model="model", **changes))
        (model,) = models_here()
        reported = vars(model.policy) | {"strategy": ""}  # a field of the other API
        again, kept = Reshard(model="model", **reported), Reshard(model="model")
        found.append((model.policy, [shard_planning.plan(command, ns["world_size"]) for command in (again, kept)]))
    return found


def kept_dtypes():
    """Return the policy and the dtypes of compute after each command for a model whose norms keep their dtype."""
    prepare()
    commands = [
        Shard(model="model", wrap=("Block",), mp="bf16,keep=*.norm*"),
        *(Reshard(model="model", **changes) for changes in ({"mp": "fp16"}, {"mesh": (2, 1)}, {"mp": "off"})),
    ]
    found = []
    for command in commands:
        execute(command)
        (model,) = models_here()
        live = [unit for unit in trace_here().header.units if not unit.retired]
        norms = {unit.compute_dtype for unit in live for param in unit.params if "norm" in param.fqn}
        found.append((model.policy.mp, norms, {unit.compute_dtype for unit in live}))
    with pytest.raises(UsageError, match=r"--mp keep=\*\.nrm\* matches no parameter"):
        sharding.kept_dtypes(nn.Linear(1, 1), "bf16,keep=*.nrm*")
    return found


def test_parameters_keep_their_dtype_until_the_precision_is_off():
    f32 = {"float32"}
    assert (
        run(2, kept_dtypes)
        == [
            [
                ("bf16,keep=*.norm*", f32, {"bfloat16", "float32"}),
                ("fp16,keep=*.norm*", f32, {"float16", "float32"}),
                ("fp16,keep=*.norm*", f32, {"float16", "float32"}),
                ("off", f32, f32),
            ]
        ]
        * 2
    )


def test_the_policy_of_a_sharded_model_is_shown_as_reshard_options():
    for found in run(4, policies_told):
        assert found[0][0] == ModelPolicy(
            api="fully_shard",
            strategy="full",
            orig_params=False,
            wrap=("Block",),
            mesh="4",
            reshard_after_forward="auto",
            mp="off",
            offload=False,
            prefetch=2,
        )
        for changes, (policy, (again, kept)) in zip([{}, *RESHARDS, {"prefetch": 0}], found, strict=True):
            for name, value in changes.items():
                assert getattr(policy, name) == (mesh_words(*(1, *value)[-2:]) if name == "mesh" else value), changes
            assert sorted(map(planned, again), key=str) == sorted(map(planned, kept), key=str), changes


def test_a_reshard_can_be_previewed():
    for found, model in run(4, reshards_by_plan):
        for changes, (before, after) in zip(RESHARDS, found, strict=True):
            assert sorted(map(planned, before), key=str) == sorted(map(planned, after), key=str), changes
        assert (model.is_sharded, model.suggested) == (True, ("Block",))


def reshards_that_cannot_be():
    ns = prepare()
    texts = []

    def tried(**changes):
        try:
            shard_planning.plan(Reshard(model="model", **changes), ns["world_size"])
        except Exception as error:  # noqa: BLE001 - the test checks which one
            texts.append(f"{type(error).__name__}: {error}")

    tried()
    ns["model"].blocks[1].mlp[0].weight = ns["model"].blocks[0].mlp[0].weight
    execute(Shard(model="model", wrap=("LayerNorm",)))
    tried(wrap=("Blok",))
    tried(mesh=(3,))
    tried(wrap=("Block",))
    return texts


def test_the_preview_of_an_impossible_reshard_is_an_error():
    for texts in run(1, reshards_that_cannot_be):
        parts = ["'model' is not sharded; shard it first", "the model has no module of class Blok; its classes are: "]
        parts += [
            "mesh 3 does not match the number of ranks, 1",
            "mlp.0.weight' of 'blocks.0' is tied to a parameter of another unit",
        ]
        assert_refused(texts, parts)


UNITS = [
    ({"reshard_after_forward": "false"}, (False, "float32", False)),
    ({"mp": "bf16,output=fp32"}, (False, "bfloat16", False)),
    ({"reshard_after_forward": "auto", "mp": "off"}, (True, "float32", False)),
    ({"offload": True, "reshard_after_forward": "false"}, (False, "float32", True)),
]
"""Changes of one unit, and its policy afterwards."""


def reshards_of_a_unit():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",)))
    ns["trainer"] = SimpleNamespace(model=ns["model"])
    execute(Step(count=1))
    found = []
    for changes, _ in UNITS:
        command = Reshard(model="trainer.model.blocks.1", **changes)
        before = shard_planning.plan(command, ns["world_size"])
        report = execute(command)
        losses = execute(Step(count=1))["losses"]
        found.append((before, [unit for unit in trace_here().header.units if not unit.retired], report, losses))
    (model,) = models_here()
    return found, model, check(trace_here())


def test_one_unit_gets_its_own_policy_and_the_others_keep_theirs():
    for found, model, broken in run(2, reshards_of_a_unit):
        plain = None
        for (changes, wanted), (before, units, report, losses) in zip(UNITS, found, strict=True):
            assert sorted(map(planned, before), key=str) == sorted(map(planned, units), key=str), changes
            others = [unit for unit in units if unit.name != "blocks.1"]
            plain = plain or others
            assert others == plain
            (unit,) = (unit for unit in units if unit.name == "blocks.1")
            assert (unit.reshard_after_forward, unit.compute_dtype, unit.offload) == wanted
            assert (report["model"], report["units"]) == ("trainer.model.blocks.1", ["blocks.1"])
            assert report["num_elements"] == sum(math.prod(param.global_shape) for param in unit.params)
            assert len(losses) == 1
        assert sorted(model.units) == sorted(unit.index for unit in units)
        assert model.policy.reshard_after_forward == ""  # units differ
        assert broken == []


PRECISIONS = [
    (
        "model.blocks.1",
        {"mp": "bf16,reduce=fp32,output=fp32"},
        ["bf16,output=fp32", "bf16", "bf16,reduce=fp32,output=fp32"],
    ),
    ("model.blocks.1", {"mp": "fp16"}, ["bf16,output=fp32", "bf16", "fp16,reduce=fp32,output=fp32"]),
    (
        "model",
        {"mp": "reduce=fp64"},
        ["bf16,reduce=fp64,output=fp32", "bf16,reduce=fp64", "fp16,reduce=fp64,output=fp32"],
    ),
    (
        "model",
        {"wrap": ("Block", "Linear")},
        ["bf16,reduce=fp64,output=fp32", "bf16,reduce=fp64", "fp16,reduce=fp64,output=fp32", "fp16,reduce=fp64"],
    ),
    (
        "model.blocks.1",
        {"mp": "reduce=off"},
        ["bf16,reduce=fp64,output=fp32", "bf16,reduce=fp64", "fp16,output=fp32", "fp16,reduce=fp64"],
    ),
    (
        "model",
        {"mp": "bf16,output=fp64"},
        ["bf16,reduce=fp64,output=fp64", "bf16,reduce=fp64", "bf16", "bf16,reduce=fp64"],
    ),
    ("model", {"mp": "off"}, ["off"] * 4),
]
"""Changes of the model or a unit, and the precision afterwards of the model, ``blocks.0``, ``blocks.1``, a layer."""


def precisions_field_by_field():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), mp="bf16,output=fp32"))
    found = []
    for name, changes, expected in PRECISIONS:
        command = Reshard(model=name, **changes)
        before = shard_planning.plan(command, ns["world_size"])
        execute(command)
        units = [unit for unit in trace_here().header.units if not unit.retired]
        model = ns["model"]
        modules = [model, *model.blocks[:2], model.blocks[1].mlp[0]][: len(expected)]
        found.append(
            (before, units, [sharding._precision_words(module._get_fsdp_state().mp_policy) for module in modules])
        )
    return found


def test_unnamed_parts_of_a_precision_are_kept():
    for found in run(2, precisions_field_by_field):
        for (name, changes, expected), (before, units, precisions) in zip(PRECISIONS, found, strict=True):
            assert precisions == expected, (name, changes)
            assert sorted(map(planned, before), key=str) == sorted(map(planned, units), key=str), (name, changes)


def wrong_units():
    prepare()
    texts = []

    def refuse(**given):
        try:
            execute(Reshard(**given))
        except Exception as error:  # noqa: BLE001 - the test checks which one
            texts.append(f"{type(error).__name__}: {error}")

    refuse(model="model.blocks.1", reshard_after_forward="false")
    execute(Shard(model="model", wrap=("Block",)))
    before = trace_here().header.units
    refuse(model="model.blocks.9")
    refuse(model="model.blocks", mp="bf16")
    refuse(model="model.blocks.1", mesh=(2, 1), prefetch=2)
    refuse(model="model.blocks.1", wrap=("Linear",), mp="bf16")
    refuse(model="model.blocks.1", reshard_after_forward=4)
    same = before == trace_here().header.units
    execute(Unshard(model="model"))
    execute(Shard(model="model", wrap=("Block",), api="classic"))
    refuse(model="model.blocks.1", strategy="grad")
    return texts, same


def test_an_option_that_a_unit_cannot_have_is_refused():
    for texts, same in run(2, wrong_units):
        parts = [
            "'model.blocks.1' is not sharded; shard it first",
            "there is no unit 'blocks.9'; the units, nearest first: blocks.",
            "there is no unit 'blocks'; the units, nearest first: blocks.",
            "for --mesh, --prefetch reshard the model: %fsdp reshard model",
            "for --wrap reshard the model: %fsdp reshard model",
            "these fit: no number; auto, true, false",
            "'model.blocks.1' is part of a classic model",
        ]
        assert_refused(texts, parts)
        assert same


def precision_back_and_forth():
    prepare()
    execute(Shard(model="model", mp="bf16"))
    first = execute(Reshard(model="model", mp="off"))["policy"]
    second = execute(Reshard(model="model", mp="fp16,reduce=fp32"))["policy"]
    return first, second, execute(Step(count=1))["steps_done"]


def test_precision_can_be_switched_off_and_on():
    assert run(2, precision_back_and_forth)[0] == ([], ["compute in float16", "reduce in float32"], 1)


def keeps_prefetch():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), prefetch=2))
    texts = [execute(Reshard(model="model", **changes))["policy"] for changes in ({"wrap": ("Linear",)}, {})]
    lists = [len(m._get_fsdp_state().forward_prefetch) for m in ns["model"].modules() if isinstance(m, FSDPModule)]
    execute(Reshard(model="model", prefetch=0))
    emptied = [m._get_fsdp_state().forward_prefetch for m in ns["model"].modules() if isinstance(m, FSDPModule)]
    return texts, lists, emptied


def test_prefetch_lists_follow_the_units_until_removed():
    texts, lists, emptied = run(1, keeps_prefetch)[0]
    assert texts == [["gathers 2 units ahead"]] * 2
    assert lists == [2, 2, 2, 2, 2, 2, 1, 0]
    assert emptied == [None] * 8  # the engine's own order again


def orders():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block", "Linear")))
    names = {m: name or "root" for name, m in ns["model"].named_modules()}
    return [[names[m] for m in in_order(ns["model"], unit_of, set(), backward=last)] for last in (False, True)]


def test_units_are_entered_outer_first_and_backward_the_other_way_round():
    forward, backward = run(1, orders)[0]
    assert forward[:4] == ["root", "blocks.0", "blocks.0.mlp.0", "blocks.0.mlp.2"]
    assert backward[:5] == ["root", "head", "blocks.2", "blocks.2.mlp.2", "blocks.2.mlp.0"]
    assert sorted(forward) == sorted(backward)


def wrong_policies():
    ns = prepare()
    texts = []

    def refuse(command):
        try:
            execute(command)
        except Exception as error:  # noqa: BLE001 - the test checks which one
            texts.append(f"{type(error).__name__}: {error}")

    refuse(Reshard(model="model"))
    refuse(Shard(model="model", mesh=(3,)))
    refuse(Shard(model="model", reshard_after_forward=2))
    plain = not any(isinstance(m, FSDPModule) for m in ns["model"].modules())
    execute(Shard(model="model"))
    before = [type(m).__name__ for m in ns["model"].modules()], [p.data_ptr() for p in ns["model"].parameters()]
    refuse(Reshard(model="model", mesh=(3, 1)))
    refuse(Reshard(model="model", wrap=("Blok",)))
    refuse(Reshard(model="model", reshard_after_forward=4))
    after = [type(m).__name__ for m in ns["model"].modules()], [p.data_ptr() for p in ns["model"].parameters()]
    return texts, plain, before == after


def test_a_policy_that_does_not_fit_lists_those_that_do():
    for texts, plain, same in run(2, wrong_policies):
        parts = [
            "'model' is not sharded; shard it first: %fsdp shard model",
            "mesh 3 does not match the number of ranks, 2; these fit: 2, 2x1",
            "these fit: no number; auto, true, false",
            "mesh 3x1 = 3 does not match the number of ranks, 2",
            "the model has no module of class Blok; its classes are: ",
            "these fit: no number; auto, true, false",
        ]
        assert_refused(texts, parts)
        assert plain
        assert same


def trains_on_other_data(mp):
    ns = prepare()
    execute(Shard(model="model", mp=mp))
    step = ns["train_step"]

    def train_step():
        if isinstance(ns["model"], FSDPModule):
            ns["generator"].manual_seed(99)
        return step()

    ns["train_step"] = train_step
    return execute(Verify())


@pytest.mark.parametrize("mp", ["off", "bf16", "fp16,reduce=fp32"])
def test_verify_notices_a_step_that_differs(mp):
    for found in run(2, trains_on_other_data, mp):
        assert not found["ok"]


def coarse_verify():
    prepare()
    execute(Shard(model="model", mp="bf16,reduce=fp32"))
    execute(Step(count=2))
    return execute(Verify())


def test_verify_states_the_tolerance_of_the_coarsest_dtype():
    for found in run(2, coarse_verify):
        assert found["ok"]
        assert found["tolerance"] == "25% of the size of each parameter's update (bfloat16)"
        assert found["num_params"] == 21
        assert found["loss_sharded"] == pytest.approx(found["loss_reference"], rel=1e-2)


def recover_with_copies():
    from workbench.runtime import rank as rank_module

    ns = prepare()
    execute(Shard(model="model", mesh=(2, 2)))
    first = execute(Step(count=1))["losses"]
    rank_module.recover(1)
    again = execute(Step(count=1))["losses"]
    verified = execute(Verify())["ok"]
    execute(Reshard(model="model", mesh=(4,)))
    return first, again, verified, execute(Step(count=1))["losses"], type(namespace()["model"]).__name__, ns["rank"]


def test_copies_outlive_a_rebuild_of_all_groups():
    for first, again, verified, last, name, _ in run(4, recover_with_copies):
        assert len(first) == len(again) == len(last) == 1
        assert verified
        assert name == "FSDPNet"


class Tower(nn.Module):
    def __init__(self, num_blocks, num_experts=0):
        super().__init__()
        self.blocks = nn.ModuleList(Routed(num_experts) for _ in range(num_blocks))


class Routed(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(num_experts))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([Tower(6), Tower(6)])


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda: Tower(3), {"Routed"}),
        (lambda: Tower(3, num_experts=8), {"Routed"}),  # not the experts of its blocks
        (Pair, {"Routed"}),  # not its two towers
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.ReLU())), {"Linear"}),
        (lambda: nn.Linear(2, 2), set()),
    ],
)
def test_the_class_that_is_wrapped_by_default(model, found):
    assert sharding.repeated_class(model()) == found
