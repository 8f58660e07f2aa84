"""Models whose parts are sharded separately, without a module around them: one model to every command."""

import copy

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.nn import functional

from tests.helpers.booted_ranks import assert_refused, execute, models_here, namespace, run
from tests.runtime.test_policies import trace_here
from workbench import engine
from workbench.engine import classic
from workbench.engine.classic import FullyShardedDataParallel
from workbench.errors import UsageError
from workbench.protocol.commands import Reshard, Shard, Step, Unshard, Verify
from workbench.reports.status_report import sharded_models
from workbench.runtime import rank as rank_module
from workbench.runtime.inspection import inspect
from workbench.trace.invariants import check

CPU = torch.device("cpu")
APIS = ("classic", "fully_shard")
UNITS = {"classic": ["decoder", "encoder"], "fully_shard": ["decoder", "encoder", "encoder.0"]}


class Coder(nn.Module):
    """Two parts with equal parameter names, and a parameter outside both."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return self.scale * self.decoder(self.encoder(x))


def make():
    torch.manual_seed(0)
    return Coder()


def shard_parts(model, api, of=None):
    """Shard each part; ``of``: torch's API to use instead of ours."""
    if api == "classic":
        wrap = (of or classic).FullyShardedDataParallel
        model.encoder, model.decoder = wrap(model.encoder, device_id=CPU), wrap(model.decoder, device_id=CPU)
    else:
        for part in (model.encoder[0], model.encoder, model.decoder):
            (of or engine).fully_shard(part)
    return model


def train(model, opt, generator):
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def prepare(api):
    """Prepare as a cell does: of the modules, only the model is a variable."""
    ns = namespace()
    ns["model"] = model = shard_parts(make(), api)
    ns["opt"] = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    ns["generator"] = torch.Generator().manual_seed(ns["rank"])
    ns["train_step"] = lambda: train(ns["model"], ns["opt"], ns["generator"])
    return ns


def refused(command):
    before = trace_here().header.units
    with pytest.raises(UsageError) as error:
        execute(command)
    assert trace_here().header.units == before
    return f"UsageError: {error.value}"


def commanded(api):
    ns = prepare(api)
    out = {"losses": execute(Step(count=2))["losses"]}
    trace = trace_here()
    out["names"] = [(unit.name, [p.fqn for p in unit.params]) for unit in trace.header.units]
    out["rules"] = check(trace)
    out["status"] = [str(model) for model in sharded_models(trace.header, models_here())]
    out["model"] = models_here()
    out["verify"] = [execute(Verify()), execute(Verify(model="model"))]
    recorder = rank_module.this_rank().recorder
    out["inspect"] = inspect("encoder.0.weight", recorder).unit, inspect("model.decoder.0.weight", recorder).unit
    other = "fully_shard" if api == "classic" else "classic"
    out["refused"] = [refused(Reshard(model="model", api=other)), refused(Shard(model="model", api=api))]
    part = ns["model"].encoder
    ns["part"] = part
    unsharded = execute(Unshard(model="model"))
    assert not isinstance(ns["part"], (engine.FSDPModule, FullyShardedDataParallel))
    assert ns["part"] is ns["model"].encoder
    out["unsharded"] = unsharded["num_params"], unsharded["optimizers"]
    assert [name for name, _ in ns["model"].named_parameters()] == [name for name, _ in make().named_parameters()]
    return out


def of_torch(api):
    """Return the losses of torch's API for the same training."""
    ns = namespace()
    model = shard_parts(make(), api, theirs)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    generator = torch.Generator().manual_seed(ns["rank"])
    return [train(model, opt, generator) for _ in range(2)]


@pytest.mark.parametrize("api", APIS)
def test_parts_are_called_by_their_path_and_commands_take_the_model(api):
    results = run(2, commanded, api)
    for out, losses in zip(results, run(2, of_torch, api), strict=True):
        assert out["losses"] == pytest.approx(losses, rel=1e-4)
        assert sorted(name for name, _ in out["names"]) == UNITS[api]
        for name, params in out["names"]:
            assert all(param.startswith(f"{name}.") for param in params)
        assert out["rules"] == []
        (status,) = out["status"]
        assert status.startswith(f"model, {len(UNITS[api])} units: {', '.join(UNITS[api])}")
        (known,) = out["model"]
        assert (known.name, known.is_sharded, known.policy.api, len(known.units)) == (
            "model",
            True,
            api,
            len(UNITS[api]),
        )
        for found in out["verify"]:
            assert (found["ok"], found["num_params"]) == (True, 9)
        assert out["inspect"] == ("encoder.0" if api == "fully_shard" else "encoder", "decoder")
        assert_refused(out["refused"], ["%fsdp reshard model.encoder", "unshard first: %fsdp unshard model"])
        assert out["unsharded"] == (8, 1)


def one_by_one(api):
    """Reshard single parts, one to the other API; they keep their names, and the step continues undisturbed."""
    ns = prepare(api)
    ns["opt"] = torch.optim.AdamW(ns["model"].parameters(), lr=1e-2, foreach=False)  # in the end it has both kinds
    execute(Step(count=1))
    options = {"strategy": "grad"} if api == "classic" else {"reshard_after_forward": "false"}
    execute(Reshard(model="model.encoder", **options))
    execute(Step(count=1))
    names = {unit.name for unit in trace_here().header.units if unit.in_use}
    other = "fully_shard" if api == "classic" else "classic"
    execute(Reshard(model="model.decoder", api=other))
    mixed = [refused(Verify()), refused(Unshard(model="model"))]
    losses = execute(Step(count=1))["losses"]
    return names, mixed, losses


def three_steps(api):
    prepare(api)
    return execute(Step(count=3))["losses"]


@pytest.mark.parametrize("api", APIS)
def test_a_part_is_resharded_by_its_path_and_keeps_its_name(api):
    for (names, mixed, losses), plainly in zip(run(2, one_by_one, api), run(2, three_steps, api), strict=True):
        assert sorted(names) == UNITS[api]
        assert_refused(mixed, ["with the classic wrapper in"] * 2)
        assert losses == pytest.approx(plainly[2:], rel=1e-4)


class Tied(Coder):
    """Reads a part's parameter outside of that part's forward."""

    def forward(self, x):
        return functional.linear(x, self.encoder[0].weight)


def reads_another_part():
    ns = prepare("fully_shard")
    ns["model"].__class__ = Tied
    execute(Step(count=1))


def test_errors_name_a_unit_by_its_path():
    reported = r"parameter 'encoder\.0\.weight' is sharded; unit 'encoder\.0' is sharded: "
    with pytest.raises(AssertionError, match=reported):
        run(1, reads_another_part)


def around_on_one_rank(api):
    """Train while one rank has a module around the model, as for an evaluation: names differ, training continues."""
    ns = prepare(api)
    execute(Step(count=1))
    if ns["rank"] == 0:
        ns["scored"] = nn.Sequential(ns["model"], nn.Sigmoid())
    execute(Step(count=1))
    names = {unit.name for unit in trace_here().header.units}
    execute(Unshard(model="model"))
    return names


@pytest.mark.parametrize("api", APIS)
def test_compared_texts_do_not_depend_on_unit_names(api):
    first, second = run(2, around_on_one_rank, api)
    assert first == {f"0.{name}" for name in second}
    assert sorted(second) == UNITS[api]


def inner_variables(api):
    """Train with a step that calls a part through its own variable."""
    ns = prepare(api)
    ns["encode"], ns["decode"] = ns["model"].encoder, ns["model"].decoder

    def train_step():
        loss = ns["decode"](ns["encode"](torch.randn(4, 8, generator=ns["generator"]))).square().mean()
        loss.backward()
        ns["opt"].step()
        ns["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    execute(Step(count=1))
    before = copy.copy(ns["encode"].__dict__)
    found = execute(Verify(model="model"))
    assert ns["encode"] is ns["model"].encoder
    assert ns["encode"].__dict__.keys() == before.keys()
    return found["ok"], found["equal_bits"]


@pytest.mark.parametrize("api", APIS)
def test_a_step_may_use_variables_of_parts(api):
    assert run(2, inner_variables, api) == [(True, 9)] * 2
