"""The command ``lint`` on real ranks: which models it checks, what it refuses, and what ``shard`` says unasked."""

import functools

import torch
from torch import nn

from tests.helpers.booted_ranks import assert_refused, execute, namespace, prepare, run
from tests.helpers.small_models import make_net
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.models.own import OwnParam, OwnUnits
from workbench.protocol.commands import Lint, Reshard, Shard, ShardReply, Unshard, Verify
from workbench.protocol.lint_reply import LintReply
from workbench.protocol.policy import APIS, ENGINES
from workbench.reports.sharding_reports import shard_report

WIDE = 160  # three blocks of this width are no toy


def refused(command):
    try:
        execute(command)
    except UsageError as error:
        return f"UsageError: {error}"
    return "accepted"


def refusals():
    ns = prepare()
    found = [refused(Lint()), refused(Lint("model")), refused(Lint("opt")), refused(Lint("missing"))]
    execute(Shard(model="model", wrap=("Block",)))
    execute(Unshard(model="model"))
    ns["part"] = ns["model"].blocks[0]
    found.append(refused(Lint("part")))
    ns["unit"] = OwnUnits("mine").add("", [OwnParam("w", (4,), torch.ones(2))])
    return [*found, refused(Lint()), refused(Verify())]


def test_a_model_that_is_not_sharded_is_refused_with_what_to_type():
    for messages in run(2, refusals):
        assert_refused(
            messages,
            [
                "no model is sharded, so there is nothing to lint; shard one first: %fsdp shard MODEL",
                "'model' is not sharded; shard it first: %fsdp shard model",
                "'opt' is a AdamW, not a torch.nn.Module",
                "there is no variable 'missing' on this rank",
                "'part' is not sharded; shard it first: %fsdp shard part",
                "no model is sharded (the units that mine announces belong to no known model), so there is nothing",
                "no model is sharded (the units that mine announces belong to no known model); shard one first",
            ],
        )


def models():
    ns = prepare()
    ns["other"], ns["plain"] = make_net(dim=8), nn.Linear(2, 2)
    execute(Shard(model="model", wrap=("Block",)))
    execute(Shard(model="other", wrap=("Block",), engine="torch"))
    ns["again"], ns["block"] = ns["model"], ns["model"].blocks[1]
    return [execute(Lint()), execute(Lint("other"))]


def test_all_sharded_models_are_checked_or_the_named_one():
    for every, one in run(2, models):
        assert (every["models"], one["models"]) == (["again", "other"], ["other"])
        assert every["faults"] == one["faults"] == []


def shards_whole():
    """Shard a model that is one unit, with each engine and API, and split it again; return the notes."""
    notes = {}
    for engine in ENGINES:
        for api in APIS:
            ns = namespace()
            ns["model"] = make_net(dim=WIDE)
            reply = execute(Shard(model="model", wrap=("Embedding",), engine=engine, api=api))
            notes[engine, api] = [reply]
            if engine == "workbench":
                notes[engine, api].append(execute(Reshard("model", wrap=("Block",))))
    return notes


@functools.cache
def noted():
    return run(2, shards_whole)


def notes_of(replies):
    return shard_report([decode(ShardReply, reply, "reply") for reply in replies]).notes


def test_shard_and_reshard_name_a_fault_unasked_whatever_runs_the_model():
    for engine in ENGINES:
        for api in APIS:
            whole, *split = zip(*(rank[engine, api] for rank in noted()), strict=True)
            (note,) = notes_of(whole)
            assert note.startswith("unit (root) holds 100% of model, so sharding saves little memory. ")
            assert "--wrap Block" in note
            assert [notes_of(replies) for replies in split] == [()] * (engine == "workbench")


def sharded_on_meta():
    ns = namespace()
    with torch.device("meta"):
        ns["model"] = make_net(dim=16)
    sharded = execute(Shard(model="model", wrap=("Block",)))
    return sharded["lint"], execute(Lint())


def test_shard_is_silent_on_a_model_on_meta_which_is_how_large_ones_begin():
    for sharded, linted in run(2, sharded_on_meta):
        assert decode(LintReply, sharded, "reply").faults == ()
        assert "still-on-meta" not in sharded["rules"]
        assert [fault["rule"] for fault in linted["faults"]] == ["still-on-meta"]


def unchanged():
    """Check a model between two steps; return whether anything differs from before."""
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",)))
    before = [param.to_local().clone() for param in ns["model"].parameters()]
    state, grads = torch.get_rng_state(), [param.grad for param in ns["model"].parameters()]
    execute(Lint())
    params = list(ns["model"].parameters())
    return (
        all(torch.equal(old, new.to_local()) for old, new in zip(before, params, strict=True))
        and torch.equal(state, torch.get_rng_state())
        and all(old is new.grad for old, new in zip(grads, params, strict=True))
    )


def test_lint_changes_nothing():
    assert run(2, unchanged) == [True, True]
