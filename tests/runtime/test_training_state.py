"""The state of a training on two ranks: captured, trained away from, restored, and trained on with the same bits."""

import functools
import random
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.booted_ranks import execute, namespace, prepare, run
from workbench.errors import UsageError
from workbench.protocol.commands import Shard, Step
from workbench.runtime.rank import this_rank
from workbench.runtime.training_state import TrainingObjects, capture, restore, unreached


class Counting:
    """A loader that knows its position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def add_all_kinds(ns):
    """Let the step depend on a scheduler, a loader and every kind of random number generator."""
    ns["sched"] = torch.optim.lr_scheduler.StepLR(ns["opt"], 1, 0.5)
    ns["loader"], ns["rows"] = Counting(), DataLoader([1, 2])
    ns["draws"] = random.Random(1), np.random.default_rng(2)
    ns["draw"], ns["numbers"] = ns["draws"]
    inner = ns["train_step"]

    def train_step():
        loss = inner()
        namespace()["sched"].step()
        namespace()["loader"].position += 1
        drawn = (random.random(), np.random.rand(), torch.rand(()).item(), ns["draw"].random(), ns["numbers"].random())
        return loss + sum(drawn) + namespace()["loader"].position

    ns["train_step"] = train_step


def losses_after_restore(engine, api):
    """Return the losses after a capture, and those after it was restored: here, and with a new optimizer."""
    ns = prepare()
    execute(Shard(model="model", wrap=("Block",), engine=engine, api=api))
    params = [param for param in ns["model"].parameters() if param.requires_grad]
    ns["opt"] = torch.optim.AdamW(params, lr=1e-2)
    add_all_kinds(ns)
    execute(Step(count=2))

    def resharded():
        for each in this_rank().watch.models_in(ns["model"]):
            each.reshard()
        return TrainingObjects.among(ns)

    objects = resharded()
    assert (list(objects.models), list(objects.optimizers), objects.loaders) == (["model"], ["opt"], ("rows",))
    state = capture(objects, 2)
    found = [execute(Step(count=3))["losses"]]
    again = capture(resharded(), 5, capture(resharded(), 2))
    assert not any(torch.equal(state.tensors[name], again.tensors[name]) for name in state.tensors if "weight" in name)
    restore(resharded(), state)
    found.append(execute(Step(count=3))["losses"])
    ns["opt"] = torch.optim.AdamW(params, lr=3.0)
    ns["sched"] = torch.optim.lr_scheduler.StepLR(ns["opt"], 1, 0.5)
    restore(resharded(), state)
    found.append(execute(Step(count=3))["losses"])
    ns["other"] = Counting()
    with pytest.raises(UsageError, match="are sched, loader, other, and the snapshot has sched, loader"):
        restore(resharded(), state)
    del ns["other"]
    return found


@pytest.mark.parametrize("engine", ["workbench", "torch"])
@pytest.mark.parametrize("api", ["fully_shard", "classic"])
def test_a_training_goes_on_from_a_copy_with_the_same_bits(engine, api):
    for after, restored, renewed in run(2, losses_after_restore, engine, api):
        assert after == restored == renewed


class OwnSchedule(torch.optim.lr_scheduler.StepLR):
    """A class of which no other test leaves an instance."""


class Slots:
    __slots__ = ("sched",)


class Owner:
    sched = None


def in_slots(sched):
    made = Slots()
    made.sched = sched
    return made


def in_generator(sched):
    yield sched.last_epoch


def in_module(sched):
    """Return a function of an imported module, which has the scheduler in a global."""
    module = types.ModuleType("imported_recipe")
    exec("def train_step():\n    sched.step()", vars(module))
    sys.modules[module.__name__], module.sched = module, sched
    return module.train_step


PLACES = {
    "closure": lambda sched: lambda: (sched, sched.step()),
    "default": lambda sched: lambda sched=sched: sched.step(),
    "method": lambda sched: sched.step,
    "partial": lambda sched: functools.partial(print, sched),
    "slots": in_slots,
    "class attribute": lambda sched: type("Recipe", (Owner,), {"sched": sched, "__module__": "__main__"})(),
    "global of a module": in_module,
    "generator": in_generator,
    "set": lambda sched: {sched},
    "five lists": lambda sched: [[[[[sched]]]]],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_scheduler_is_found_or_named(place):
    opt = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
    sched = OwnSchedule(opt, 1)
    ns = {"opt": opt, "place": PLACES[place](sched)}
    is_found = any(each is sched for each in TrainingObjects.among(ns).others.values())
    named = [each for each in unreached(ns) if OwnSchedule.__name__ in each]
    sys.modules.pop("imported_recipe", None)
    assert is_found == (place not in {"generator", "set", "five lists"})
    assert named == ([] if is_found else ["an instance of OwnSchedule that no public variable reaches"])
