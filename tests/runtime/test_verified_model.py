"""``verify`` of models that torch's ``fully_shard`` runs: right steps of every policy, what stays, what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.helpers.booted_ranks import execute, namespace, run
from tests.runtime.test_verify_faults import make, prepare, report_of, train, verified
from workbench.errors import UsageError
from workbench.protocol.commands import Step, Verify
from workbench.runtime import rank as rank_module

OPTIONS = {
    "true": {"reshard_after_forward": "true"},
    "false": {"reshard_after_forward": "false"},
    "bf16": {"mp": "bf16"},
    "offload": {"offload": True},
    "copies": {"mesh": (2, 1)},
    "ignore": {"ignore": ("2.bias",)},
}


def is_right(name, steps):
    prepare("adamw", engine="torch", **OPTIONS[name])
    return verified(steps=steps)


@pytest.mark.parametrize("name", ["true", *(pytest.param(n, marks=pytest.mark.thorough) for n in list(OPTIONS)[1:])])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_right_step_of_torchs_engine_has_no_fault(name, steps):
    report = report_of(2, is_right, name, steps)
    assert report.ok
    assert report.headline.startswith("sharded training is the same as unsharded: 10 parameters")
    assert report.faults == ()
    assert ("in no unit, so their gradients are not averaged: 2.bias" in str(report)) == (name == "ignore")


def losses(verify, steps):
    prepare("adamw", engine="torch")
    namespace()["train_step"] = train
    before = execute(Step(count=2))["losses"]
    if verify:
        execute(Verify())
    params = dict(namespace()["model"].named_parameters())
    assert all(isinstance(param, DTensor) and param.grad is None for param in params.values())
    return before + execute(Step(count=steps))["losses"]


def test_training_goes_on_as_if_there_had_been_no_verify():
    assert run(2, losses, True, 3) == run(2, losses, False, 3)


class Scaled(nn.Module):
    """A model with a method beside forward, and two names of one parameter."""

    def __init__(self):
        super().__init__()
        self.inner, self.again = make(), nn.Linear(3, 3, bias=False)
        self.again.weight = nn.Parameter(torch.eye(3))
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.again.weight

    def score(self, x):
        return self.last(self.again(self.inner(x)))


def calls_a_registered_method():
    ns = namespace()
    torch.manual_seed(0)
    model = Scaled()
    for block in model.inner[:2]:
        fully_shard(block)
    ns["model"] = fully_shard(model)
    model.inner[0].register_forward_hook(lambda *_: None)
    register_fsdp_forward_method(model, "score")
    ns["opt"] = torch.optim.AdamW(model.parameters(), 1e-2)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(ns["rank"]))

    def step():
        loss = namespace()["model"].score(data).square().mean()
        loss.backward()
        namespace()["opt"].step()
        namespace()["opt"].zero_grad()
        return loss.item()

    rank_module._after_cell(None)
    reply = verified(step, steps=0)
    ns["model"].score(data)  # the sharded model has its method and hooks again
    assert isinstance(next(model.inner[0].parameters()), DTensor)
    return reply


def test_registered_methods_and_shared_parameters():
    report = report_of(2, calls_a_registered_method)
    assert report.ok
    assert report.faults == ()


def refusal():
    try:
        execute(Verify())
    except UsageError as error:
        return str(error)


def split_parameters_are_refused():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = make()
    parallelize_module(model, mesh["tp"], {"0.up": ColwiseParallel()})
    namespace()["model"] = fully_shard(model, mesh=mesh["dp"])
    namespace()["train_step"] = train
    rank_module._after_cell(None)
    return refusal()


def other_gradients_are_refused():
    ns = prepare(engine="torch")
    ns["train_step"] = train
    execute(Step(count=1))
    if ns["rank"]:
        first = next(ns["model"].parameters())
        first.grad = torch.zeros_like(first)
    return refusal()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (split_parameters_are_refused, "'0.up.weight' of 'model' is split by tensor parallelism"),
        (other_gradients_are_refused, "hold gradients or optimizer state of different parameters"),
    ],
)
def test_what_cannot_be_verified_is_refused(refused, words):
    for text in run(2, refused):
        assert words in text
