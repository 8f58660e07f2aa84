"""A rank that fails or is aborted: the others are free within a second, and all go on afterwards."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.runtime.job import execute, prepare, run
from workbench.commands import Shard, Step
from workbench.engine import StepAborted
from workbench.runtime import rank as rank_module
from workbench.session.watch import SHUT_AFTER_S


def abort_soon(delay_s=0.3):
    """Do what the notebook's side does: tell this rank to give up, and a little later shut its sockets."""

    def abort():
        rank_module.side_door({"op": "abort", "reason": "rank 1 raised KeyError"})
        later.start()

    later = threading.Timer(SHUT_AFTER_S, rank_module.side_door, [{"op": "shut"}])
    timer = threading.Timer(delay_s, abort)
    timer.start()
    return timer, later


def blocked_in_engine(ns):
    execute(Step(count=1))


def blocked_in_barrier(ns):
    ns["train_step"] = dist.barrier
    execute(Step(count=1))


def blocked_in_clip(ns):
    model = ns["model"]
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    ns["train_step"] = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    execute(Step(count=1))


def fail_and_go_on(blocked):
    ns = prepare()
    execute(Shard(model="model"))
    first = execute(Step(count=1))["losses"]
    step = ns["train_step"]
    freed_in, reason = 0.0, ""
    if ns["rank"] != 1:
        timers = abort_soon()
        begin = time.monotonic()
        try:
            blocked(ns)
        except StepAborted as error:
            freed_in, reason = time.monotonic() - begin - 0.3, str(error)
        for timer in timers:
            timer.join()
    ns["train_step"] = step
    ns["opt"].zero_grad()
    rank_module.recover(1)
    ns["generator"].manual_seed(ns["rank"])
    after = execute(Step(count=2))["losses"]
    total = torch.ones(1)
    dist.all_reduce(total)
    return first, freed_in, reason, after, total.item()


@pytest.mark.parametrize("blocked", [blocked_in_engine, blocked_in_barrier, blocked_in_clip])
def test_blocked_ranks_are_freed_and_training_goes_on(blocked):
    results = run(3, fail_and_go_on, blocked)
    for rank, (_, freed_in, reason, after, total) in enumerate(results):
        if rank != 1:
            assert reason == "rank 1 raised KeyError"
            assert freed_in < 1
        assert len(after) == 2
        assert total == 3


def undisturbed():
    ns = prepare()
    execute(Shard(model="model"))
    execute(Step(count=1))
    ns["generator"].manual_seed(ns["rank"])
    return execute(Step(count=2))["losses"]


def test_an_abandoned_step_leaves_no_trace_in_the_numbers():
    disturbed = [result[3] for result in run(3, fail_and_go_on, blocked_in_engine)]
    assert disturbed == run(3, undisturbed)
