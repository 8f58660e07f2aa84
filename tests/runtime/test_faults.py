"""Faults on two ranks: each is injected, named by the instrument that should, and leaves nothing behind."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.helpers.booted_ranks import execute, namespace, run
from tests.runtime.test_verify_faults import Block
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.protocol.commands import InjectFault, Lint, Shard, Step, Verify, VerifyReply
from workbench.protocol.fault_kinds import KINDS
from workbench.protocol.lint_reply import LintReply
from workbench.reports.lint_faults import lint_faults
from workbench.reports.verify_faults import faults_of
from workbench.runtime import rank as rank_module
from workbench.runtime.fault_injectors import INJECTORS, _gathered

ENGINES = ("workbench", "torch")
ASKED = {"lint": (Lint, LintReply, lint_faults), "verify": (Verify, VerifyReply, faults_of)}
STALLS = [kind.name for kind in KINDS.values() if kind.shown_by == "where"]


def prepare(engine, *, model=None, **options):
    ns = namespace()
    torch.manual_seed(0)
    ns["model"] = nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 3)) if model is None else model
    execute(Shard(model="model", wrap=("Block",), engine=engine, **options))
    ns["opt"] = torch.optim.AdamW(ns["model"].parameters(), 1e-2, foreach=False)
    rows = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    ns["loader"] = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
    (ns["x"],) = next(iter(ns["loader"]))

    def train_step():
        loss = namespace()["model"](namespace()["x"]).square().mean()
        loss.backward()
        namespace()["opt"].step()
        namespace()["opt"].zero_grad()
        return loss.item()

    ns["train_step"] = train_step
    execute(Step(count=2))
    return ns


def surroundings():
    """Return all that a fault may change, except values of parameters and optimizers, as comparable data."""
    ns = namespace()
    modules = {
        name: (
            type(module).__name__,
            len(module._forward_pre_hooks),
            len(module._forward_hooks),
            sorted(module._buffers),
            sorted(module._non_persistent_buffers_set),
        )
        for name, module in ns["model"].named_modules()
    }
    held = [id(p) for group in ns["opt"].param_groups for p in group["params"]]
    return (
        modules,
        held == [id(p) for p in ns["model"].parameters()],
        [(p.dtype, tuple(p.shape), p.grad is None) for p in ns["model"].parameters()],
        (id(ns["train_step"]), id(ns["loader"].sampler), id(ns["loader"].batch_sampler.sampler)),
        len(torch_optimizer._global_optimizer_pre_hooks),
    )


def values():
    ns = namespace()
    state = [value for each in ns["opt"].state.values() for value in each.values()]
    both = [*ns["model"].parameters(), *state]
    return [(value.to_local() if isinstance(value, DTensor) else value).detach().clone() for value in both]


def refusal(*args, **options):
    """Return the message with which a fault is refused."""
    before = surroundings()
    with pytest.raises(UsageError) as caught:
        execute(InjectFault(*args, **options))
    assert surroundings() == before
    return str(caught.value)


# ---- the table


def test_each_fault_has_an_injector():
    assert INJECTORS.keys() == KINDS.keys()


# ---- each fault, injected and removed


def every_fault(engine, mesh):
    """Return, for each fault, what its instrument replies; check that its removal leaves nothing behind."""
    prepare(engine, mesh=mesh)
    clean, replies = surroundings(), {}
    for name, kind in KINDS.items():
        try:
            execute(InjectFault(name, rank=1, ms=1))
        except UsageError as error:
            replies[name] = str(error)
            assert surroundings() == clean, name
            continue
        before = values()
        if name not in STALLS and not kind.shown_by.startswith("the "):
            if kind.shown_by in ASKED:
                replies[name] = execute(ASKED[kind.shown_by][0]())
            execute(Step(count=2))
        execute(InjectFault("off"))
        assert surroundings() == clean, name
        if kind.spoils and name not in {"bf16-master", "drifting-replica", "stale-optimizer"}:
            assert all(torch.equal(a, b) for a, b in zip(before, values(), strict=True)), name
    return replies, (execute(Lint()), execute(Verify()))


def told(by_rank, word):
    """Return the rules that a report of these replies names."""
    _, reply, faults = ASKED[word]
    return [fault.rule for fault in faults([decode(reply, each, "reply") for each in by_rank])]


@functools.cache
def of_ranks(engine, mesh=()):
    return run(2, every_fault, engine, mesh)


@pytest.mark.parametrize("engine", ENGINES)
def test_each_fault_is_named_and_leaves_nothing_behind(engine):
    by_rank = of_ranks(engine)
    refused = {name: reply for name, reply in by_rank[0][0].items() if isinstance(reply, str)}
    assert refused.keys() == {"drifting-replica"} | ({"bf16-master"} if engine == "torch" else set())
    asked = [name for name in by_rank[0][0] if name not in refused]
    assert len(asked) >= 7
    for name in asked:
        rules = told([replies[name] for replies, _ in by_rank], KINDS[name].shown_by)
        assert rules, name
        assert rules[0] in KINDS[name].rules, name
    assert told([after[0] for _, after in by_rank], "lint") == []
    assert told([after[1] for _, after in by_rank], "verify") == []


def drifts(engine):
    prepare(engine, mesh=(2, 1))
    before = values()
    execute(InjectFault("drifting-replica", rank=1))
    found = execute(Lint())
    execute(InjectFault("off"))
    assert all(torch.equal(a, b) for a, b in zip(before, values(), strict=True))
    return found, execute(Lint())


@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_drift_until_the_fault_is_removed(engine):
    by_rank = run(2, drifts, engine)
    assert told([during for during, _ in by_rank], "lint") == ["replicas-differ"]
    assert told([after for _, after in by_rank], "lint") == []


class Backwards(nn.Sequential):
    """Blocks that run in the opposite order of their definition."""

    def forward(self, x):
        for module in reversed(self):
            x = module(x)
        return x


def gathers_too_early(unit, prefetch):
    """Return the units in the order of gathering: without the fault, with it, and after its removal."""
    prepare("torch", prefetch=prefetch)

    def order():
        execute(Step(count=1))
        return _gathered(rank_module.this_rank())

    before = order()
    execute(InjectFault("wrong-order", rank=1, unit=unit))
    during = order()
    execute(InjectFault("off"))
    return before, during, order()


@pytest.mark.parametrize(("unit", "prefetch"), [("1", 0), ("1", 2), ("2", 2)])
def test_a_unit_is_gathered_too_early_after_steps_too(unit, prefetch):
    """Also one that the root gathers ahead anyway, with others before it."""
    (before, during, after), (_, during_there, after_there) = run(2, gathers_too_early, unit, prefetch)
    assert before == during == after == after_there
    assert during_there != before
    assert sorted(during_there) == sorted(before)


def gathered_first():
    prepare("torch", model=Backwards(*(Block() for _ in range(3))))
    return refusal("wrong-order", unit="2")


def test_the_unit_that_runs_first_is_gathered_first_whatever_is_defined_first():
    for message in run(2, gathered_first):
        assert message.endswith(": 2 is gathered first anyway; name another: --unit UNIT")


def gathered_first_after_a_fault():
    prepare("torch")
    execute(Step(count=1))
    execute(InjectFault("wrong-order", rank=1, unit="2"))
    execute(Step(count=1))
    execute(InjectFault("off"))
    refused, injected = refusal("wrong-order", unit="0"), execute(InjectFault("wrong-order", seed=2))
    return refused, (injected["rank"], injected["unit"])


def test_which_unit_is_gathered_first_is_not_read_off_steps_with_a_fault():
    """Each rank would otherwise find another one, and inject another fault."""
    here, there = run(2, gathered_first_after_a_fault)
    assert here == there
    message, _ = here
    assert ": 0 is gathered first anyway" in message


# ---- what is refused, and what is drawn


def refusals():
    ns = namespace()
    ns["model"] = nn.Sequential(Block(), nn.Linear(8, 3))
    ns["opt"], ns["train_step"] = torch.optim.SGD(ns["model"].parameters(), 0.1), int
    ns["loader"] = DataLoader([0])
    found = {"plain": refusal("nan"), "off": refusal("off")}
    execute(Shard(model="model", wrap=("Block",)))
    found |= {
        "rank": refusal("nan", rank=2),
        "unit": refusal("nan", unit="blocks"),
        "data": refusal("same-data"),
        "replicas": refusal("drifting-replica"),
        "order": refusal("wrong-order"),
    }
    ns["opt"] = torch.optim.SGD([torch.zeros(1)], 0.1)
    ns["opt"].param_groups[0]["params"] = [torch.zeros(1)]
    found["optimizer"] = refusal("wrong-scale")
    del ns["train_step"]
    with pytest.raises(UsageError) as caught:
        execute(InjectFault("uneven-batches"))
    found["step"] = str(caught.value)
    execute(InjectFault("straggler", rank=0, unit="0"))
    with pytest.raises(UsageError) as caught:
        execute(InjectFault("nan"))
    found["second"] = str(caught.value)
    execute(InjectFault("off"))
    execute(InjectFault("random", seed=5))
    with pytest.raises(UsageError) as caught:
        execute(InjectFault("nan"))
    found["hidden"] = str(caught.value)
    return found, [_drawn(seed) for seed in range(6)]


def _drawn(seed):
    """Return the fault that a seed draws."""
    if seed == 0:
        execute(InjectFault("off"))
    execute(InjectFault("random", seed=seed))
    removed = execute(InjectFault("off"))
    return removed["name"], removed["rank"], removed["unit"]


def test_what_is_not_possible_is_refused_and_draws_are_the_same_on_all_ranks():
    (found, drawn), other = run(2, refusals)
    assert (found, drawn) == other
    assert found["plain"].endswith("first %fsdp shard MODEL")
    assert found["off"].startswith("no fault is on; %fsdp faults lists them")
    assert found["rank"] == "there is no rank 2: the ranks are 0 to 1"
    assert "there is no unit 'blocks'" in found["unit"]
    assert "there is no DataLoader with a DistributedSampler" in found["data"]
    assert "has no replicas; shard it with --mesh 2x1" in found["replicas"]
    assert "is gathered first anyway; name another" in found["order"]
    assert "no optimizer among the variables trains model" in found["optimizer"]
    assert "there is no variable 'train_step'" in found["step"]
    assert found["second"].startswith(
        "straggler is on: rank 0 sleeps 200 ms in every forward of unit 0; remove it first"
    )
    assert found["hidden"] == "a drawn fault is on; remove it first: %fsdp fault off"
    assert len({name for name, *_ in drawn}) > 1
    assert {name for name, *_ in drawn} <= {name for name, kind in KINDS.items() if kind.is_drawn}
