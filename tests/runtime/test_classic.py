"""The classic wrapper on real ranks: ``shard --api classic``, its record, its plan and its reports."""

import io
import warnings
from contextlib import nullcontext, redirect_stderr, suppress
from fnmatch import fnmatch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.booted_ranks import execute, models_here, namespace, prepare, run
from tests.helpers.pairwise import quick
from tests.helpers.small_models import Block, adamw, loss_of
from tests.helpers.stopped_step import Channel, beside
from tests.runtime.test_policies import planned, trace_here
from workbench.engine import StepAborted
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.classic import CPUOffload, FullyShardedDataParallel, ModuleWrapPolicy
from workbench.errors import UsageError
from workbench.events import Category
from workbench.protocol.commands import Reshard, Shard, Step, Unshard, Verify
from workbench.replay.collectives import compare
from workbench.replay.memory import not_split
from workbench.replay.shards import at_rest
from workbench.runtime import rank as rank_module
from workbench.runtime import shard_planning, sharding
from workbench.runtime.inspection import inspect
from workbench.trace.invariants import check

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
    patterns = policy.get("ignore", ())
    ignored = [p for name, p in ns["model"].named_parameters() if any(fnmatch(name, each) for each in patterns)]
    command = shard(**policy)
    out = {
        "plan": shard_planning.plan(command, ns["world_size"]),
        "before": models_here(),
    }
    out["shard"] = execute(command)
    out["ignored"] = sum(param.nbytes for param in ignored)
    out["their state"] = sum(2 * param.nbytes + 4 for param in ignored)
    out["after"] = models_here()
    out["losses"] = execute(Step(count=3))["losses"]
    trace = trace_here()
    out["rules"], out["units"] = check(trace), trace.header.units
    out["forms"] = [(row.unit, row.kind, row.calls, row.differs) for row in compare(trace, 2)]
    (rank,) = trace.ranks
    live = rank.cut(rank.end_seq, rank.end_seq).start.bytes_by_category
    out["live"] = {category: live[category] for category in Category}
    out["not split"] = not_split(trace.header, rank.rows)
    out["at rest"] = at_rest(trace.header, rank.rank % trace.header.units[0].shard_size)
    return out


def plainly():
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    return execute(Step(count=3))["losses"]


@pytest.mark.parametrize("name", quick(POLICIES, ["full", "grad, pieces", "offload"]))
def test_it_trains_as_fully_shard_and_matches_its_closed_form(name):
    policy = POLICIES[name]
    num_ranks = 4 if "mesh" in policy else 2
    results = run(num_ranks, train, policy)
    for out in results:
        assert out["rules"] == []
        assert not [row for row in out["forms"] if row[-1]], out["forms"]
        assert bool(out["ignored"]) == ("ignore" in policy)
        assert out["live"][Category.SHARDED_PARAMS] == out["at rest"].params
        assert out["shard"]["bytes_at_rest"] == out["at rest"].params + out["ignored"]
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
        assert out["shard"]["policy"][0] == "classic: one flat parameter per unit"
        assert out["live"][Category.OPTIMIZER_STATE] == out["at rest"].adam + out["their state"]
        is_whole = policy.get("strategy") == "none"
        assert out["not split"] == (out["at rest"].adam if is_whole else out["their state"])
    if "mp" not in policy and "ignore" not in policy:
        for out, losses in zip(results, run(num_ranks, plainly), strict=True):
            assert out["losses"] == pytest.approx(losses, rel=1e-4)


def wrapped_in_a_cell():
    """Train a model that the user wrapped: units have their names before the first step, and training works."""
    ns = prepare()
    ns["model"] = model = FullyShardedDataParallel(
        ns["model"],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    ns["opt"] = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    before = [unit.name for unit in trace_here().header.units]
    found = execute(Verify())
    execute(Step(count=1))
    return before, found["ok"], [unit.name for unit in trace_here().header.units]


def test_a_model_wrapped_in_a_cell_has_its_names_before_the_first_step():
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    for before, ok, after in run(2, wrapped_in_a_cell):
        assert sorted(before) == sorted(after) == names
        assert ok


def warned(command):
    """Return the lines that a rank prints as warnings."""
    texts = io.StringIO()
    with warnings.catch_warnings(), redirect_stderr(texts):
        warnings.simplefilter("always")
        execute(command)
    return texts.getvalue().splitlines()


def alone():
    prepare()
    return warned(shard(strategy="grad")), warned(Unshard(model="model")), warned(shard(strategy="none"))


def test_one_rank_gets_one_warning_that_nothing_is_sharded():
    ((split, plain, whole),) = run(1, alone)
    assert split == [
        "FullyShardedDataParallel: on one rank, SHARD_GRAD_OP is the same as NO_SHARD; start several ranks, or pass "
        "a process_group= or device_mesh= of several"
    ]
    assert plain == whole == []


def partly_frozen():
    ns = prepare()
    for name, param in ns["model"].named_parameters():
        param.requires_grad_(name.endswith("bias"))
    command = shard(orig_params=True)
    plan = shard_planning.plan(command, ns["world_size"])
    lines = warned(command)
    assert len(lines) == len(set(lines)) > 0
    assert all("is frozen in one unit: its reduction allocates gradients" in line for line in lines)
    execute(Step(count=2))
    trace = trace_here()
    (rank,) = trace.ranks
    live = rank.cut(rank.end_seq, rank.end_seq).start.bytes_by_category
    return plan, trace.header.units, live[Category.OPTIMIZER_STATE], at_rest(trace.header, rank.rank).adam


def test_an_optimizer_has_state_only_for_trained_pieces():
    for plan, units, live, expected in run(2, partly_frozen):
        assert sorted(map(planned, plan), key=str) == sorted(map(planned, units), key=str)
        assert live == expected
        assert {part.trainable for unit in units for param in unit.params for part in param.parts} == {False, True}


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


def inspected(orig_params, strategy):
    prepare()
    execute(shard(orig_params=orig_params, strategy=strategy))
    execute(Step(count=2))
    recorder = rank_module.this_rank().recorder
    return inspect("blocks.0.mlp.0.weight", recorder), inspect("model.blocks.0._flat_param", recorder)


@pytest.mark.parametrize("orig_params", [False, True])
def test_a_parameter_is_inspected_by_its_own_name_and_a_flat_one_as_well(orig_params):
    results = run(2, inspected, orig_params, "full")
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
        assert piece.full.why == "not needed now: only this rank's elements are in memory"


def inspected_in_forward(orig_params, strategy):
    prepare()
    execute(shard(orig_params=orig_params, strategy=strategy))
    Channel().break_at({"event": "forward", "unit": "blocks.1"})

    def held(channel):
        channel.until_held()
        return channel.inspect("blocks.1._flat_param"), channel.inspect("blocks.1.mlp.0.weight")

    return beside(held, Step())[1]


@pytest.mark.parametrize(("orig_params", "strategy"), [(False, "full"), (True, "full"), (False, "none")])
def test_a_flat_parameter_is_whole_where_those_in_it_are(orig_params, strategy):
    for flat, weight in run(2, inspected_in_forward, orig_params, strategy):
        assert flat.full.why == weight.full.why == "its forward is about to run (requested in forward of step 0)"
        assert flat.full.values.shape == flat.global_shape == (2 * 16 + 49 * 17 + 16 * 50,)
        assert flat.full.values.norm > weight.full.values.norm > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_sharding_a_shard_is_the_whole(num_ranks):
    for piece, flat in run(num_ranks, inspected, False, "none"):
        assert (piece.shard.first_row, piece.shard.num_rows, piece.shard.of_rows) == (0, 49 * 16, 49 * 16)
        assert flat.shard.num_rows == flat.shard.of_rows
        assert piece.full.why == "not needed now; with one shard rank, the shard is the full parameter"


@pytest.mark.parametrize("name", quick(["full", "grad, pieces", "copies", "half precision", "hybrid"], ["full"]))
def test_verify_matches_an_unsharded_copy_and_does_not_disturb_training(name):
    num_ranks = 4 if "mesh" in POLICIES[name] else 2
    for with_it, without in zip(
        run(num_ranks, verified, POLICIES[name], True), run(num_ranks, verified, POLICIES[name], False), strict=True
    ):
        assert with_it["verify"]["ok"], with_it["verify"]
        assert with_it["verify"]["num_params"] == 21
        assert with_it["losses"] == without["losses"]


def verified(policy, verify):
    prepare()
    execute(shard(**policy))
    execute(Step(count=2))
    found = execute(Verify()) if verify else None
    return {"verify": found, "losses": execute(Step(count=2))["losses"]}


def with_the_wrappers_own(strategy):
    ns = prepare()
    execute(shard(strategy=strategy))

    def train_step():
        for micro in range(2):
            model, tokens = ns["model"], torch.randint(7, (4, 6), generator=ns["generator"])
            with model.no_sync() if micro == 0 else nullcontext():
                loss = loss_of(model, tokens)
                loss.backward()
        norm = ns["model"].clip_grad_norm_(0.1)
        assert norm > 0.2
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    execute(Step(count=1))
    return execute(Verify())


@pytest.mark.parametrize("strategy", ["full", "none"])
def test_a_step_that_accumulates_and_clips_with_the_wrappers_own_methods_is_verified(strategy):
    for found in run(2, with_the_wrappers_own, strategy):
        assert found["ok"], found


def there_and_back(orig_params):
    ns = prepare()
    plain, losses = ns["model"], []

    def train():
        losses.extend(execute(Step(count=2))["losses"])

    execute(shard(orig_params=orig_params))
    train()
    out = execute(Reshard(model="model", api="fully_shard"))
    assert ns["model"] is plain
    assert out["units"] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert out["policy"] == []
    train()
    assert execute(Verify())["ok"]
    out = execute(Reshard(model="model", api="classic", strategy="grad", orig_params=orig_params))
    assert ns["model"].module is plain
    pieces = ["optimizers have a shard of each parameter"] if orig_params else []
    assert out["policy"] == ["classic: one flat parameter per unit", *pieces, "unsharded from forward to backward"]
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


RESHARDS = [
    (("fully_shard", "full", "4", "auto", False), {"api": "classic"}),
    (("classic", "full", "4", "auto", False), {"strategy": "hybrid"}),
    (("classic", "full", "4", "auto", False), {"strategy": "grad"}),
    (("classic", "grad", "4", "false", False), {"strategy": "none"}),
    (("classic", "none", "4x1", "auto", False), {"strategy": "hybrid", "mesh": (2, 2), "orig_params": True}),
    (("classic", "hybrid", "2x2", "auto", True), {"strategy": "hybrid2"}),
    (("classic", "hybrid2", "2x2", "false", True), {"wrap": ("Linear",), "mp": "bf16,reduce=fp32"}),
    (("classic", "hybrid2", "2x2", "false", True), {"api": "fully_shard"}),
    (("fully_shard", "hybrid2", "2x2", "false", False), {"api": "classic"}),
    (("classic", "hybrid2", "2x2", "false", False), {"mesh": (4,), "mp": "off"}),
    (("classic", "grad", "4", "false", False), {"offload": True}),
    (("classic", "grad", "4", "false", False), {"api": "fully_shard", "wrap": ("Block",)}),
    (("fully_shard", "grad", "4", "false", False), {"mesh": (4, 1), "reshard_after_forward": "auto"}),
    (("fully_shard", "none", "4x1", "auto", False), {"api": "classic", "prefetch": 1}),
    (("classic", "none", "4x1", "auto", False), {"api": "fully_shard"}),
    (("fully_shard", "none", "4x1", "auto", False), {"mesh": (4,), "reshard_after_forward": 2}),
    (("fully_shard", "", "4", 2, False), {"api": "classic"}),
    (("fully_shard", "", "4", 2, False), {"api": "classic", "strategy": "full"}),
    (("classic", "full", "4", "auto", False), {}),
]
"""The policy that a model reports, with the other API's equivalents, and the change made next; in sequence."""

REFUSED = (1, 16)
"""Indices of refused changes: there is no mesh of copies, and no equivalent strategy."""


def outcome(job, *args):
    """Return a job's result, or the text of its UsageError."""
    try:
        return job(*args)
    except UsageError as error:
        return str(error)


def reshards_by_plan():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), ignore=("scale",)))
    found = []
    for _, changes in RESHARDS:
        command = Reshard(model="model", **changes)
        (model,) = models_here()
        before, done = outcome(shard_planning.plan, command, ns["world_size"]), outcome(execute, command)
        after = done if isinstance(done, str) else [u for u in trace_here().header.units if not u.retired]
        found.append((model.policy, before, after))
    execute(Step(count=1))
    return found


@pytest.mark.thorough
def test_a_reshard_from_and_to_classic_is_previewed():
    for found in run(4, reshards_by_plan):
        for (reported, changes), (policy, before, after) in zip(RESHARDS, found, strict=True):
            is_told = (policy.api, policy.strategy, policy.mesh, policy.reshard_after_forward, policy.orig_params)
            assert is_told == reported, changes
            if isinstance(after, str):
                assert before == after, changes
            else:
                assert sorted(map(planned, before), key=str) == sorted(map(planned, after), key=str), changes
        assert tuple(place for place, (*_, after) in enumerate(found) if isinstance(after, str)) == REFUSED


def straight():
    prepare()
    execute(Shard(model="model", wrap=("Block",)))
    return execute(Step(count=8))["losses"]


def given_up_when_plain():
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",)))
    undo = sharding._undo

    def undo_and_give_up(*args):
        plain = undo(*args)
        cancellation.cancel("given up")  # every wait raises from now on
        return plain

    sharding._undo = undo_and_give_up
    with suppress(StepAborted):
        execute(Reshard(model="model", api="classic", strategy="hybrid", mesh=(2, 2)))
    cancellation.reset()
    policy = sharding.policy_of(ns["model"])
    return policy.api, policy.mesh


def test_an_interrupted_conversion_leaves_the_model_sharded_on_every_rank():
    assert run(4, given_up_when_plain) == [("classic", "2x2")] * 4


def interrupted_when_plain(api):
    prepare()
    execute(Shard(model="model", wrap=("Block",), **({"api": "classic"} if api == "classic" else {"prefetch": 1})))
    losses = execute(Step(count=2))["losses"]

    def interrupt(*_):
        raise KeyboardInterrupt

    name = "_apply" if api == "classic" else "_shard_classic"
    made, _ = getattr(sharding, name), setattr(sharding, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        execute(Reshard(model="model", api="fully_shard" if api == "classic" else "classic"))
    setattr(sharding, name, made)
    (model,) = models_here()
    losses += execute(Step(count=6))["losses"]
    return losses, model.policy.api, model.policy.prefetch


@pytest.mark.parametrize(("api", "prefetch"), [("fully_shard", 1), ("classic", 0)])
def test_a_reshard_that_is_interrupted_leaves_the_model_sharded_as_before(api, prefetch):
    for (losses, *policy), expected in zip(run(2, interrupted_when_plain, api), run(2, straight), strict=True):
        assert policy == [api, prefetch]
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("orig_params", quick([False, True], [False]))
def test_a_model_goes_from_one_api_to_the_other_and_trains_as_if_it_had_not(orig_params):
    for losses, expected in zip(run(2, there_and_back, orig_params), run(2, straight), strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)


def without_values(strategy, orig_params):
    ns = prepare()
    with torch.device("meta"):
        ns["model"] = nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False))
    ns["opt"] = torch.optim.Adam(ns["model"].parameters(), foreach=False)
    torch.manual_seed(ns["rank"])
    execute(Shard(model="model", api="classic", wrap=("Linear",), strategy=strategy, orig_params=orig_params))
    model = ns["model"]
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    ns["train_step"] = lambda: train_on(model, ns["opt"], torch.randint(7, (4, 6), generator=ns["generator"]))
    execute(Step(count=1))
    return begun, dict(model.state_dict())


def train_on(model, optimizer, tokens):
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(("strategy", "orig_params"), [("full", False), ("full", True), ("none", False)])
def test_a_model_on_the_meta_device_starts_equal_on_all_ranks_and_trains(strategy, orig_params):
    (begun, then), *others = run(2, without_values, strategy, orig_params)
    torch.manual_seed(0)  # rank 0 draws the values unit by unit, from the innermost on
    inner, outer = nn.Linear(4, 7, bias=False), nn.Embedding(7, 4)
    torch.testing.assert_close((begun["2.weight"], begun["0.weight"]), (inner.weight.data, outer.weight.data))
    assert all(not torch.equal(before, then[name]) for name, before in begun.items())
    for other in others:
        torch.testing.assert_close(other, (begun, then), rtol=0, atol=0)


def refused():
    ns = prepare()
    plain, opt = ns["model"], ns["opt"]
    params = list(plain.parameters())
    opt.param_groups[0]["params"] = params[::2]
    opt.add_param_group({"params": params[1::2]})
    assert_refused(shard(), ValueError, "use_orig_params=True")
    assert ns["model"] is plain
    assert not any(isinstance(m, FullyShardedDataParallel) for m in plain.modules())
    assert list(plain.parameters()) == params
    execute(Shard(model="model", wrap=("Block",)))
    assert_refused(Reshard(model="model", strategy="grad"), UsageError, "strategy is for --api classic")
    assert_refused(Reshard(model="model", api="classic"), ValueError, "use_orig_params=True")
    execute(Step(count=1))
    execute(Reshard(model="model", prefetch=2))
    assert_refused(Reshard(model="model", api="classic"), UsageError, "gathers at most one unit ahead; give 1")
    execute(Reshard(model="model", api="classic", orig_params=True, prefetch=1))
    assert_refused(Reshard(model="model", orig_params=False), ValueError, "use_orig_params=True")
    assert_refused(
        Reshard(model="model", strategy="hybrid"), UsageError, "needs a mesh of replicas x shard ranks: --mesh 2x2"
    )
    execute(Step(count=1))
    assert_refused(
        Reshard(model="model", reshard_after_forward="false"),
        UsageError,
        "is for --api fully_shard; with classic give --strategy",
    )
    plain.head.weight.requires_grad_(False)
    assert_refused(
        Reshard(model="model", api="fully_shard", mesh=(3,)), UsageError, "mesh 3 does not match the number of"
    )
    execute(Reshard(model="model", api="fully_shard"))
    assert_refused(Reshard(model="model", api="classic"), ValueError, "is trained and 'head.weight' is frozen")


def assert_refused(command, error, message):
    """Check that the plan of a command and the command itself are refused with the same text."""
    with pytest.raises(error, match=message) as before:
        shard_planning.plan(command, namespace()["world_size"])
    with pytest.raises(error, match=message) as done:
        execute(command)
    assert str(before.value) == str(done.value)


def test_an_impossible_conversion_is_refused_and_changes_nothing():
    run(2, refused)


# ---- on parameters that tensor parallelism has sharded


def train_in_parallel(orig_params, clips):
    """Train with tensor parallelism in each block, and wrappers made in a cell over the other axis."""
    ns = namespace()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(8) for _ in range(2)))
    for block in model:
        block.mlp[0], block.mlp[2] = nn.Linear(8, 24), nn.Linear(24, 8)
        parallelize_module(block.mlp, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ns["model"] = FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig_params
    )
    ns["opt"] = adamw(ns["model"].parameters())
    seed = mesh.get_local_rank("dp")

    def train_step():
        loss = ns["model"](torch.full((3, 8), 1.0 + seed)).pow(2).mean()
        loss.backward()
        if clips:
            assert ns["model"].clip_grad_norm_(0.5) > 0.5
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    return ns


def in_parallel(orig_params):
    train_in_parallel(orig_params, clips=True)
    losses = execute(Step(count=2))["losses"]
    verified = execute(Verify())
    losses += execute(Step(count=2))["losses"]
    recorder = rank_module.this_rank().recorder
    trace = trace_here()
    assert check(trace) == []
    (model,) = models_here()
    found = inspect("model.0.mlp.0.weight", recorder), inspect("model.0._flat_param", recorder)
    return losses, verified, found, model, trace.header.units[0]


@pytest.mark.thorough
@pytest.mark.parametrize("orig_params", [False, True])
def test_tensor_parallel_parameters_are_verified_and_shown_as_parts(orig_params):
    own, whole = 2 * 8 + 12 * 8 + 12 + 8 * 12 + 8, 2 * 8 + 24 * 8 + 24 + 8 * 24 + 8
    for losses, verified, (weight, flat), model, unit in run(4, in_parallel, orig_params):
        assert losses[3] < losses[2] < losses[0]
        assert verified["ok"], verified
        assert verified["num_params"] == 12
        assert (weight.global_shape, weight.shard.of_rows) == ((24, 8), 12 * 8)
        assert flat.global_shape == (whole,)
        assert flat.shard.values.shape == (own // 2,)
        assert (model.num_params, model.num_elements) == (12, 2 * whole)
        (param,) = unit.params
        assert (param.shape, param.global_shape) == ((own,), (whole,))
        shapes = {part.fqn.removeprefix("0."): (part.shape, part.global_shape) for part in param.parts}
        assert shapes["mlp.0.weight"] == ((12, 8), (24, 8))
        assert shapes["mlp.2.bias"] == shapes["norm.bias"] == ((8,), (8,))


PARALLEL = [
    {"orig_params": True},
    {"strategy": "grad"},
    {"api": "fully_shard"},
    {"api": "classic", "orig_params": False},
    {"strategy": "none", "mp": "bf16"},
    {"strategy": "full", "mp": "off"},
]


def changed_in_parallel(changes):
    ns = train_in_parallel(orig_params=False, clips=False)
    losses, planned_and_made = execute(Step(count=1))["losses"], []
    for change in changes:
        command = Reshard(model="model", **change)
        before = shard_planning.plan(command, ns["world_size"])
        execute(command)
        made = [unit for unit in trace_here().header.units if not unit.retired]
        planned_and_made.append((change, before, made))
        if "mp" not in change:
            losses += execute(Step(count=1))["losses"]
    assert_refused(Reshard(model="model", mesh=(4,), api="fully_shard"), UsageError, "so its mesh of shape 2")
    assert_refused(Reshard(model="model", strategy="hybrid", mesh=(2, 2)), UsageError, "so its mesh of shape 2")
    execute(Unshard(model="model"))
    with pytest.raises(ValueError, match="cannot be combined with the mesh"):
        execute(Shard(model="model", api="classic", wrap=("Block",)))
    return losses, planned_and_made, [type(param).__name__ for param in ns["model"].parameters()]


@pytest.mark.thorough
def test_a_model_that_tensor_parallelism_has_split_is_sharded_in_another_way_over_the_same_mesh():
    for losses, planned_and_made, kinds in run(4, changed_in_parallel, PARALLEL):
        assert losses == sorted(losses, reverse=True)
        assert len(losses) == 1 + 4
        for change, before, made in planned_and_made:
            assert sorted(map(planned, before), key=str) == sorted(map(planned, made), key=str), change
        assert kinds == ["Parameter", "Parameter", *["DTensor"] * 4] * 2
