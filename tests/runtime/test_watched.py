"""Models that torch's own FSDP shards, in the cells of a notebook: stopped, inspected, given up and continued."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import drain, execute, namespace, run
from tests.helpers.stopped_step import Channel, Meeting, beside
from tests.helpers.watched import make_blocks, shard_by_torch
from tests.runtime.test_gate import trace_of
from workbench import engine
from workbench.engine.classic import FullyShardedDataParallel as OwnWrapper
from workbench.errors import UsageError
from workbench.events import Edge, Kind
from workbench.models._torch_private import HAS_HOOKS
from workbench.protocol.commands import Continue, Next, Reshard, Shard, Step, Unshard
from workbench.protocol.rank_messages import GiveUp
from workbench.runtime import rank as rank_module
from workbench.runtime.inspection import inspect
from workbench.trace import check


def wrap_by_torch(model):
    policy, cpu = ModuleWrapPolicy([nn.Sequential]), torch.device("cpu")
    return FullyShardedDataParallel(
        model, device_mesh=namespace()["mesh"], auto_wrap_policy=policy, device_id=cpu, use_orig_params=True
    )


def replicate_by_torch(model):
    return DistributedDataParallel(model, process_group=namespace()["mesh"].get_group())


def prepare(shard=shard_by_torch):
    ns = namespace()
    ns["model"] = shard(make_blocks())
    ns["optimizer"] = torch.optim.AdamW(ns["model"].parameters(), 1e-2)
    ns["data"] = torch.Generator().manual_seed(ns["rank"])

    def train_step():
        loss = ns["model"](torch.randn(8, 16, generator=ns["data"])).square().mean()
        loss.backward()
        ns["optimizer"].step()
        ns["optimizer"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    rank_module._after_cell(None)
    return ns


def undisturbed(count):
    prepare()
    return execute(Step(count=count))["losses"]


def stopped(meeting):
    prepare()
    units = [unit.name for unit in rank_module.this_rank().recorder.header.units]
    Channel().break_at({"event": "all_gather", "unit": "2"})

    def script(channel):
        found = []
        for _ in range(2):  # in forward and in backward
            held = channel.until_held()
            inspected = channel.inspect("2.0.weight")
            found.append(
                (
                    held.kind,
                    held.edge,
                    held.phase.key,
                    (inspected.shard.num_rows, inspected.shard.of_rows),
                    channel.evaluate("1 + 1"),
                )
            )
            meeting.wait()
            channel(Continue())
            channel.until(lambda where, held=held: where.held is None or where.held.place != held.place)
        channel.until_held()
        channel.break_at()
        meeting.wait()
        channel(Next(what="collective"))
        after = channel.until_held()
        meeting.wait()
        return found, after.kind

    done, reported = beside(script, Step(count=3))
    return done["losses"], units, reported, check(trace_of(*drain()))


def test_a_step_is_stopped_at_an_all_gather_and_goes_on_with_the_same_losses():
    expected = run(2, undisturbed, 3)
    for rank, (losses, units, (found, after), broken) in enumerate(run(2, stopped, Meeting(2))):
        assert losses == expected[rank]
        assert units == ["", "0", "1", "2", "3"]
        assert found == [
            (Kind.ALL_GATHER, Edge.BEGIN, "forward", (16, 32), "2"),
            (Kind.ALL_GATHER, Edge.BEGIN, "pre_backward", (16, 32), "2"),
        ]
        assert after is Kind.ALL_GATHER
        assert broken == []


def given_up(shard, event, meeting, unit="1"):
    ns = prepare(shard)
    first = execute(Step())["losses"]
    Channel().break_at({"event": event, "unit": unit})

    def script(channel):
        channel.until_held()
        meeting.wait()
        channel(GiveUp(reason="the user gave up"))
        channel.until(lambda where: where.doing == "")

    error, _ = beside(script, Step())
    meeting.wait()
    rank_module.recover("1")
    ns["optimizer"].zero_grad()
    ns["data"].manual_seed(ns["rank"])
    after = execute(Step(count=2))["losses"]
    return first, str(error), after, check(trace_of(*drain()))


NUM_CALLS = 200_000  # many seconds


def given_up_while_it_runs():
    """Give up a step that nothing blocks: no socket is shut, and this rank alone would never wait for others."""

    def train_step():
        for _ in range(NUM_CALLS):
            torch.distributed.all_reduce(torch.ones(1))

    namespace()["train_step"] = train_step

    def script(channel):
        channel.until(lambda where: where.doing != "")
        channel(GiveUp(reason="the user gave up"))
        channel.until(lambda where: where.doing == "")

    error, _ = beside(script, Step())
    return str(error)


def test_a_running_rank_that_is_given_up_begins_no_further_collective():
    assert run(1, given_up_while_it_runs) == ["the user gave up"]


def restarted(shard):
    ns = prepare(shard)
    first = execute(Step())["losses"]
    ns["data"].manual_seed(ns["rank"])
    return first + execute(Step(count=2))["losses"]


@pytest.mark.parametrize("event", ["all_gather", "backward", "reduce_scatter"])
@pytest.mark.parametrize("shard", [shard_by_torch, wrap_by_torch])
def test_a_step_that_is_given_up_leaves_a_model_that_trains_on(shard, event):
    expected = run(2, restarted, shard)
    for rank, (first, error, after, broken) in enumerate(run(2, given_up, shard, event, Meeting(2))):
        assert first + after == expected[rank]
        assert "the user gave up" in error
        assert broken == []


def test_a_step_of_replicas_that_is_given_up_leaves_a_model_that_trains_on():
    expected = run(2, restarted, replicate_by_torch)
    event = "all_reduce" if HAS_HOOKS else "backward"
    for rank, (first, error, after, broken) in enumerate(run(2, given_up, replicate_by_torch, event, Meeting(2), None)):
        assert first + after == expected[rank]
        assert "the user gave up" in error
        assert broken == []


def shard_by_ours(model):
    for module in (*list(model)[:-1], model):
        engine.fully_shard(module, mesh=namespace()["mesh"])
    return model


def wrap_by_ours(model):
    policy = ModuleWrapPolicy([nn.Sequential])
    return OwnWrapper(model, device_mesh=namespace()["mesh"], auto_wrap_policy=policy, use_orig_params=True)


def not_yet_run(_):
    return []


def run_once(_):
    return execute(Step())["losses"]


def inside_a_step(ns):
    whole = ns["train_step"]

    def train_step():
        ns["model"](torch.randn(8, 16, generator=ns["data"])).square().mean()
        raise ZeroDivisionError

    ns["train_step"] = train_step
    with pytest.raises(ZeroDivisionError):
        execute(Step())
    ns["train_step"] = whole
    return []


SHARDED = (shard_by_ours, wrap_by_ours, shard_by_torch, wrap_by_torch, replicate_by_torch)


def named_inside_checkpoints(shard):
    """Shard blocks that recompute their activations; return names: of units, keys, of what was inspected."""
    ns = namespace()
    model = make_blocks()
    for index, block in enumerate(list(model)[:-1]):
        model[index] = checkpoint_wrapper(block)
    ns["model"] = shard(model)
    rank_module._after_cell(None)
    recorder = rank_module.this_rank().recorder
    keys = list(make_blocks().state_dict())
    return [unit.name for unit in recorder.header.units], keys, [inspect(key, recorder).fqn for key in keys]


@pytest.mark.parametrize("shard", SHARDED[:-1])
def test_names_are_those_of_the_state_dict_also_within_checkpoints(shard):
    for units, keys, inspected in run(2, named_inside_checkpoints, shard):
        assert set(units) == {"", "0", "1", "2", "3"}
        assert inspected == keys


def renewed_at_any_time():
    wrong = []
    for shard, reach in itertools.product(SHARDED, (not_yet_run, run_once, inside_a_step)):
        losses = []
        for is_renewed in (False, True):
            ns = prepare(shard)
            first = reach(ns)
            if is_renewed:
                rank_module.recover(f"{shard.__name__} {reach.__name__}")
            ns["data"].manual_seed(ns["rank"])
            losses.append(first + execute(Step(count=2))["losses"])
        if losses[0] != losses[1]:
            wrong.append((shard.__name__, reach.__name__, losses))
    return wrong


def test_every_kind_of_model_trains_on_after_an_abort_run_or_not():
    assert run(2, renewed_at_any_time) == [[], []]


def refused(shard):
    prepare(shard)
    errors = []
    for command in (Shard(model="model"), Reshard(model="model", offload=True), Unshard(model="model")):
        with pytest.raises(UsageError) as caught:
            execute(command)
        errors.append(str(caught.value))
    return errors, execute(Step())["losses"]


@pytest.mark.parametrize("shard", [shard_by_torch, wrap_by_torch])
def test_commands_that_need_our_engine_are_refused_and_nothing_has_changed(shard):
    expected = run(2, restarted, shard)
    for rank, (errors, losses) in enumerate(run(2, refused, shard)):
        for error in errors:
            assert error.startswith("'model' is run by torch.")
            assert error.endswith("%fsdp shard model")
        assert losses == expected[rank][:1]
