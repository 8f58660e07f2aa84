"""The classic wrapper on real ranks: ``shard --api classic``, what is recorded, planned and said of it."""

import pytest

from tests.runtime.job import execute, namespace, prepare, run
from tests.runtime.test_policies import planned, trace_here
from workbench.engine.classic import FullyShardedDataParallel
from workbench.errors import UsageError
from workbench.events import Category
from workbench.protocol.commands import Reshard, Shard, Step, Unshard, Verify
from workbench.replay.collectives import compare
from workbench.replay.shards import at_rest
from workbench.runtime import planning
from workbench.runtime import rank as rank_module
from workbench.runtime.inspection import inspect
from workbench.trace.rules import check

POLICIES = {
    "full": {},
    "grad, pieces": {"strategy": "grad", "orig_params": True},
    "copies": {"strategy": "none"},
    "half precision": {"mp": "bf16,reduce=fp32", "prefetch": 1},
    "offload": {"offload": True, "orig_params": True},
    "ignored": {"ignore": ("*.bias",)},
    "hybrid": {"strategy": "hybrid", "mesh": (2, 2)},
    "hybrid2": {"strategy": "hybrid2", "mesh": (2, 2)},
}


def shard(**policy):
    return Shard(model="model", api="classic", wrap=("Block",), **policy)


def train(policy):
    ns = prepare()
    command = shard(**policy)
    out = {"plan": planning.plan(command, ns["world_size"]), "before": planning.models()}
    out["shard"] = execute(command)
    out["after"] = planning.models()
    out["losses"] = execute(Step(count=3))["losses"]
    trace = trace_here()
    out["rules"], out["units"] = check(trace), trace.header.units
    out["forms"] = [(row.unit, row.kind, row.calls, row.differs) for row in compare(trace, 2)]
    (rank,) = trace.ranks
    live = rank.cut(rank.end_seq, rank.end_seq).start.bytes_by_category
    out["live"] = {category: live[category] for category in Category}
    out["at rest"] = at_rest(trace.header, rank.rank % trace.header.units[0].shard_size)
    return out


def plainly():
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    return execute(Step(count=3))["losses"]


@pytest.mark.parametrize("name", POLICIES)
def test_it_trains_as_fully_shard_and_is_recorded_as_its_closed_form_says(name):
    policy = POLICIES[name]
    num_ranks = 4 if "mesh" in policy else 2
    results = run(num_ranks, train, policy)
    for out in results:
        assert out["rules"] == []
        assert not [row for row in out["forms"] if row[-1]], out["forms"]
        assert out["live"][Category.SHARDED_PARAMS] == out["at rest"].params == out["shard"]["bytes_at_rest"]
        assert sorted(map(planned, out["plan"]), key=str) == sorted(map(planned, out["units"]), key=str)
        (before,), (after,) = out["before"], out["after"]
        assert (before.is_sharded, after.is_sharded) == (False, True)
        for known in (before, after):
            assert known.num_params == out["shard"]["num_params"]
            assert (known.num_elements, known.num_bytes) == (
                out["shard"]["num_elements"],
                out["shard"]["bytes_unsharded"],
            )
            assert known.class_name == "Net"
            assert known.classes == before.classes
        assert out["shard"]["units"] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        assert out["shard"]["policy"][0] == "classic: one flat parameter for each unit"
        if not policy.get("orig_params") and "ignore" not in policy:
            assert out["live"][Category.OPTIMIZER_STATE] == out["at rest"].adam
    if "mp" not in policy and "ignore" not in policy:
        for out, losses in zip(results, run(num_ranks, plainly), strict=True):
            assert out["losses"] == pytest.approx(losses, rel=1e-4)


def names():
    ns = prepare()
    ns["same"] = model = ns["model"]
    ns["tree"] = type("Tree", (), {})()
    ns["tree"].net = model
    with pytest.raises(UsageError, match="--ignore nothing matches no parameter"):
        execute(shard(ignore=("nothing",)))
    execute(shard())
    assert ns["model"] is ns["same"]
    assert isinstance(ns["model"], FullyShardedDataParallel)
    assert ns["tree"].net is ns["model"].module is model
    with pytest.raises(UsageError, match="is sharded already; change how"):
        execute(shard())
    prepare()
    execute(Shard(model="model.blocks.1", api="classic", wrap=("Linear",)))
    blocks = namespace()["model"].blocks
    assert [isinstance(block, FullyShardedDataParallel) for block in blocks] == [False, True, False]


def test_its_variables_and_the_attribute_of_that_name_are_the_wrapper():
    run(2, names)


def inspected(orig_params):
    prepare()
    execute(shard(orig_params=orig_params))
    execute(Step(count=2))
    recorder = rank_module._this_rank().recorder
    return inspect("blocks.0.mlp.0.weight", recorder), inspect("model.blocks.0._flat_param", recorder)


@pytest.mark.parametrize("orig_params", [False, True])
def test_a_parameter_is_inspected_by_its_own_name_and_a_flat_one_as_well(orig_params):
    results = run(2, inspected, orig_params)
    pieces, flats = zip(*results, strict=True)
    assert sum(piece.shard.num_rows for piece in pieces) == 49 * 16
    assert {(piece.fqn, piece.model, piece.unit) for piece in pieces} == {
        ("blocks.0.mlp.0.weight", "model", "blocks.0")
    }
    assert {piece.global_shape for piece in pieces} == {(49, 16)}
    assert [piece.shard.dim for piece in pieces] == [None, None]
    assert {flat.shard.values.shape for flat in flats} == {((2 * 16 + 49 * 17 + 16 * 50 + 1) // 2,)}
    for piece in pieces:
        assert piece.shard.values.shape == (piece.shard.num_rows,)
        (optimizer,) = piece.optimizers
        assert optimizer.name == "opt"
        if piece.shard.num_rows:
            assert optimizer.state["exp_avg"].shape == (piece.shard.num_rows,)


@pytest.mark.parametrize("name", ["full", "grad, pieces", "copies", "half precision", "hybrid"])
def test_a_step_is_that_of_an_unsharded_copy_and_training_goes_on_as_if_there_was_none(name):
    num_ranks = 4 if "mesh" in POLICIES[name] else 2
    for with_it, without in zip(
        run(num_ranks, verified, POLICIES[name], True), run(num_ranks, verified, POLICIES[name], False), strict=True
    ):
        assert with_it["verify"]["ok"], with_it["verify"]
        assert with_it["verify"]["params"] == 21
        assert with_it["losses"] == without["losses"]


def verified(policy, verify):
    prepare()
    execute(shard(**policy))
    execute(Step(count=2))
    found = execute(Verify()) if verify else None
    return {"verify": found, "losses": execute(Step(count=2))["losses"]}


def there_and_back(orig_params):
    ns = prepare()
    plain, losses = ns["model"], []

    def train():
        losses.extend(execute(Step(count=2))["losses"])

    execute(shard(orig_params=orig_params))
    train()
    with pytest.raises(UsageError, match="is seen once it is done"):
        planning.plan(Reshard(model="model", api="fully_shard"), ns["world_size"])
    out = execute(Reshard(model="model", api="fully_shard"))
    assert ns["model"] is plain
    assert out["units"] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert out["policy"] == []
    train()
    assert execute(Verify())["ok"]
    out = execute(Reshard(model="model", api="classic", strategy="grad", orig_params=orig_params))
    assert ns["model"].module is plain
    assert out["policy"] == ["classic: one flat parameter for each unit", "unsharded from forward to backward"]
    train()
    execute(Reshard(model="model", strategy="full", wrap=("Linear",)))
    train()
    unsharded = execute(Unshard(model="model"))
    assert ns["model"] is plain
    assert unsharded == {"model": "model", "num_params": 21, "optimizers": 1}
    assert {id(p) for p in plain.parameters()} == {id(p) for g in ns["opt"].param_groups for p in g["params"]}
    steps = {float(state["step"]) for state in ns["opt"].state.values()}
    assert steps == {8.0}
    return losses


def straight():
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    return execute(Step(count=8))["losses"]


@pytest.mark.parametrize("orig_params", [False, True])
def test_a_model_goes_from_one_api_to_the_other_and_trains_as_if_it_had_not(orig_params):
    for losses, expected in zip(run(2, there_and_back, orig_params), run(2, straight), strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)


def refused():
    ns = prepare()
    plain, opt = ns["model"], ns["opt"]
    params = list(plain.parameters())
    opt.param_groups[0]["params"] = params[::2]
    opt.add_param_group({"params": params[1::2]})
    with pytest.raises(ValueError, match="use_orig_params=True"):
        execute(shard())
    assert ns["model"] is plain
    assert not any(isinstance(m, FullyShardedDataParallel) for m in plain.modules())
    assert list(plain.parameters()) == params
    execute(Shard(model="model", wrap=("Block",)))
    with pytest.raises(UsageError, match="strategy is for --api classic"):
        execute(Reshard(model="model", strategy="grad"))
    with pytest.raises(ValueError, match="use_orig_params=True"):
        execute(Reshard(model="model", api="classic"))
    execute(Step(count=1))
    execute(Reshard(model="model", prefetch=2))
    with pytest.raises(UsageError, match="one unit is gathered ahead at most; give 1"):
        execute(Reshard(model="model", api="classic"))
    execute(Reshard(model="model", api="classic", orig_params=True, prefetch=1))
    execute(Step(count=1))
    with pytest.raises(UsageError, match="is for --api fully_shard; with classic give --strategy"):
        execute(Reshard(model="model", reshard_after_forward="false"))


def test_what_an_optimizer_or_the_other_api_cannot_have_is_refused_and_all_is_as_it_was():
    run(2, refused)
