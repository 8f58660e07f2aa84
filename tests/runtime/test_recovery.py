"""A rank that fails or is aborted: the others are freed, and all continue afterwards."""

import threading

import pytest
import torch
import torch.distributed as dist

from tests.helpers.booted_ranks import execute, prepare, run
from tests.helpers.stopped_step import Channel, Meeting, beside
from workbench.engine import StepAborted
from workbench.protocol.commands import Shard, Step
from workbench.protocol.rank_messages import GiveUp, Shut
from workbench.runtime import rank as rank_module

REASON = "rank 1 raised KeyError"


def in_the_engine(ns):
    """Wait in the step's first all-gather: an abort is enough."""
    return lambda channel: channel.until(lambda where: where.waiting), False


def in_a_barrier(ns):
    return blocked_in_torch(ns, dist.barrier)


def in_clipping(ns):
    model = ns["model"]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return blocked_in_torch(ns, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())


def blocked_in_torch(ns, call):
    """Make ``call``, which no flag can interrupt, the step; return a wait for its begin, and True."""
    ns["begun"] = False

    def train_step():
        ns["begun"] = True
        call()

    ns["train_step"] = train_step
    return lambda channel: channel.until(lambda where: ns["begun"]), True


def free(channel, until_blocked, is_in_torch, others):
    """Free a rank as the notebook's side does after rank 1 failed: abort the others, then shut those that still run."""
    until_blocked(channel)
    channel(GiveUp(reason=REASON))
    others.wait()  # a rank that is not aborted yet would take the end of the others for a failure
    if is_in_torch:
        channel(Shut())
    channel.until(lambda where: where.doing == "")


def fail_and_go_on(blocked, others, everyone):
    ns = prepare()
    execute(Shard(model="model"))
    first = execute(Step(count=1))["losses"]
    step, error = ns["train_step"], None
    if ns["rank"] != 1:
        how = blocked(ns)
        error, _ = beside(lambda channel: free(channel, *how, others), Step(count=1))
    everyone.wait()  # groups are rebuilt once no rank uses the old ones
    ns["train_step"] = step
    ns["opt"].zero_grad()
    rank_module.recover(1)
    ns["generator"].manual_seed(ns["rank"])
    after = execute(Step(count=2))["losses"]
    total = torch.ones(1)
    dist.all_reduce(total)
    return first, (type(error), str(error)), after, total.item()


def failed_and_gone_on(blocked):
    return run(3, fail_and_go_on, blocked, Meeting(2), Meeting(3))


@pytest.mark.parametrize("blocked", [in_the_engine, in_a_barrier, in_clipping])
def test_blocked_ranks_are_freed_and_training_continues(blocked):
    for rank, (_, error, after, total) in enumerate(failed_and_gone_on(blocked)):
        assert rank == 1 or error == (StepAborted, REASON)
        assert len(after) == 2
        assert total == 3


def undisturbed():
    ns = prepare()
    execute(Shard(model="model"))
    execute(Step(count=1))
    ns["generator"].manual_seed(ns["rank"])
    return execute(Step(count=2))["losses"]


def test_an_abandoned_step_leaves_no_trace_in_the_numbers():
    disturbed = [after for _, _, after, _ in failed_and_gone_on(in_the_engine)]
    assert disturbed == run(3, undisturbed)


def recover_twice(everyone):
    """Recover after a recovery that rank 1 did not take part in, and that the notebook's side ended."""
    ns = prepare()
    execute(Shard(model="model"))
    execute(Step(count=1))
    mesh = ns["mesh"]
    if ns["rank"] != 1:
        channel, has_ended = Channel(), threading.Event()

        def end_it():
            while not has_ended.wait(0.1):  # it may not wait for rank 1 yet
                channel(GiveUp(reason=REASON))
                channel(Shut())

        thread = threading.Thread(target=end_it)
        thread.start()
        with pytest.raises(RuntimeError):
            rank_module.recover("first")
        has_ended.set()
        thread.join()
    everyone.wait()
    rank_module.recover("second")
    total = torch.ones(1)
    dist.all_reduce(total, group=mesh.get_group())
    return total.item(), len(execute(Step(count=2))["losses"])


def test_a_recovery_that_failed_is_tried_again():
    assert run(2, recover_twice, Meeting(2)) == [(2.0, 2)] * 2
