"""What a step function returns."""

import asyncio
import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import execute, namespace, run
from workbench.base.codec import decode
from workbench.protocol.commands import Shard, Step, StepReply
from workbench.reports.step_reports import step_report
from workbench.runtime.trainer import loss_of


async def coroutine():
    return 1.0


def generator():
    yield 1.0


async def async_generator():
    yield 1.0


@pytest.mark.parametrize("train_step", [coroutine, generator, async_generator])
def test_a_step_function_of_which_nothing_ran_is_named(train_step):
    with pytest.raises(TypeError, match=r"returned an? (async generator|coroutine|generator), so nothing of it ran"):
        loss_of(train_step())


def test_a_future_is_no_loss():
    loop = asyncio.new_event_loop()
    with pytest.raises(TypeError, match="returned a Future"):
        loss_of(loop.create_future())
    loop.close()


def exhausted():
    batches = iter([])
    namespace()["train_step"] = lambda: next(batches)
    with pytest.raises(RuntimeError) as caught:
        execute(Step())
    return str(caught.value), caught.traceback[-1].path.name


def test_an_iterator_without_more_batches_is_named():
    words = "the iterator batches has no more batches: make another one when it ends"
    assert run(1, exhausted) == [(words, "test_trainer.py")]


# ---- steps without a collective


def plain(ns):
    """Train a model that is not sharded."""


def wrapped(ns):
    ns["model"] = DistributedDataParallel(ns["model"])


def sharded(ns):
    execute(Shard(model="model"))


def uneven(ns):
    sharded(ns)
    rows = iter([2, 2 + ns["rank"]])
    ns["batch"] = lambda: torch.ones(next(rows), 4)


def beside_a_sharded_one(ns):
    execute(Shard(model="model"))
    ns["model2"] = torch.nn.Linear(4, 1)
    ns["opt"], ns["trained"] = torch.optim.SGD(ns["model2"].parameters(), lr=0.1), "model2"


def averaged_by_hand(ns):
    ns["after_backward"] = lambda: [dist.all_reduce(p.grad) for p in ns["model"].parameters()]


def averaged_in_a_later_step(ns):
    turns = iter([False, True])
    ns["after_backward"] = lambda: next(turns) and dist.barrier()


def not_a_variable(ns):
    ns["held"] = [ns.pop("model")]
    ns["trained"] = lambda: ns["held"][0]


def without_an_optimizer(ns):
    ns["opt"] = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


CASES = [
    plain,
    wrapped,
    sharded,
    uneven,
    beside_a_sharded_one,
    averaged_by_hand,
    averaged_in_a_later_step,
    not_a_variable,
    without_an_optimizer,
]


def steps_of_cases():
    ns, replies = namespace(), {}
    before = dict(ns)
    for case in CASES:
        ns["model"] = torch.nn.Linear(4, 1)
        ns["opt"] = torch.optim.SGD(ns["model"].parameters(), lr=0.1)
        ns["trained"], ns["after_backward"], ns["batch"] = "model", lambda: None, lambda: torch.ones(2, 4)
        case(ns)

        def train_step():
            ns["opt"].zero_grad()
            model = ns["trained"]() if callable(ns["trained"]) else ns[ns["trained"]]
            model(ns["batch"]()).sum().backward()
            ns["after_backward"]()
            ns["opt"].step()

        ns["train_step"] = train_step
        replies[case.__name__] = execute(Step(count=2))
        for name in ns.keys() - before.keys():
            del ns[name]
    return replies


def test_a_model_that_nothing_averages_is_named_and_ranks_with_more_rows():
    by_rank = run(2, steps_of_cases)
    replies = {name: [decode(StepReply, own[name], "reply") for own in by_rank] for name in by_rank[0]}
    notes = {name: step_report(own).notes for name, own in replies.items()}
    (note,) = notes.pop("uneven")
    assert re.match(r"batches had unequal rows in 1 of 2 steps \(step \d+: 2 on rank 0, 3 on rank 1\), ", note)
    assert notes == {case.__name__: () for case in CASES if case is not uneven} | {
        "plain": ("no collective was issued: model is not sharded; %fsdp shard model",),
        "beside_a_sharded_one": ("no collective was issued: model2 is not sharded; %fsdp shard model2",),
    }
    assert step_report(replies["plain"][:1]).notes == ()  # one rank has nothing to average
