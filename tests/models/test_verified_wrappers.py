"""``verify`` of models in torch's classic wrapper and in ``DistributedDataParallel``: right steps, and what stays."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.booted_ranks import execute, namespace, run
from tests.helpers.known_warnings import NO_SHARD, ignoring_warnings
from tests.runtime.test_verify_faults import Block, make, report_of
from workbench.base.codec import decode
from workbench.errors import UsageError
from workbench.protocol.commands import Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
from workbench.runtime import rank as rank_module

CPU = torch.device("cpu")
OWN_PRECISION = ("Both mixed precision and an auto_wrap_policy were specified", UserWarning)
LOW = fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)


class Net(nn.Module):
    """Blocks with statistics, a block that only some batches use, a parameter with two names, and random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.BatchNorm1d(8)
        self.extra, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x, uses_extra=False):
        x = self.norm(self.blocks(x))
        x = x + self.norm.running_mean.to(x.dtype)  # what a rank computes depends on its buffers
        return self.last(torch.relu(self.first(self.drop(self.extra(x) if uses_extra else x))))


def wrap(way):
    """Return :class:`Net` wrapped in a way, and whether its batches may use the extra block."""
    net = Net()
    if way.startswith("ddp"):
        options = {
            "ddp": {},
            "ddp-views": {"gradient_as_bucket_view": True},
            "ddp-unused": {"find_unused_parameters": True},
            "ddp-static": {"static_graph": True},
        }[way]
        if way in {"ddp", "ddp-views"}:
            del net.extra
            net.extra = nn.Identity()
        return DistributedDataParallel(net, **options), way == "ddp-unused"
    strategy, *more = way.split("-")
    options = {"mesh": {}, "bf16": {"mixed_precision": LOW}}.get(more[-1] if more else "", {})
    with ignoring_warnings(*NO_SHARD, OWN_PRECISION):
        model = fsdp.FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=fsdp.ShardingStrategy[strategy],
            device_id=CPU,
            use_orig_params="pieces" in more,
            ignored_states=[] if "bf16" in more else [net.extra.bias],
            **({"device_mesh": torch.distributed.init_device_mesh("cpu", (2, 2))} if "HYBRID" in strategy else {}),
            **options,
        )
    return model, "bf16" in more  # torch gives a weight that is not used the gradient 0, and AdamW then decays it


def train(micro=2):
    """Train one step, with two micro-batches that are reduced together."""
    ns = namespace()
    total = 0.0
    for number in range(micro):
        defers = ns["no_sync"] and number + 1 < micro
        with ns["model"].no_sync() if defers else nullcontext():
            x = torch.randn(4, 8, generator=ns["generator"])
            loss = ns["model"](x, uses_extra=ns["uses_extra"] and ns["rank"] <= ns["last_extra"]).square().mean()
            loss.backward()
        total += loss.item()
    if hasattr(ns["model"], "clip_grad_norm_"):
        ns["model"].clip_grad_norm_(0.5)
    ns["opt"].step()
    ns["opt"].zero_grad()
    return total


def prepare(way):
    ns = namespace()
    ns["model"], ns["uses_extra"] = wrap(way)
    params = [param for param in ns["model"].parameters() if param.requires_grad]
    ns["opt"] = torch.optim.AdamW(params, 1e-2)
    ns["generator"] = torch.Generator().manual_seed(ns["rank"])
    ns["last_extra"] = 0 if way == "ddp-unused" else 1
    ns["no_sync"] = way != "ddp-static"  # torch's static graph refuses it in its first iteration
    ns["train_step"] = train
    torch.manual_seed(ns["rank"])
    rank_module._after_cell(None)
    return ns


def is_right(way, steps):
    prepare(way)
    if steps:
        execute(Step(count=steps))
    return execute(Verify())


QUICK = ["ddp", "ddp-unused", "FULL_SHARD", "FULL_SHARD-pieces"]
WAYS = [
    *QUICK,
    *("ddp-views", "ddp-static", "SHARD_GRAD_OP", "SHARD_GRAD_OP-pieces", "NO_SHARD", "NO_SHARD-pieces"),
    *("HYBRID_SHARD", "HYBRID_SHARD-pieces", "FULL_SHARD-bf16", "FULL_SHARD-pieces-bf16"),
]


@pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.thorough) for way in WAYS]
)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_right_step_has_no_fault(way, steps):
    report = report_of(4 if "HYBRID" in way else 2, is_right, way, steps)
    assert report.ok, report
    assert (report.faults, report.first_differences) == ((), ())
    assert ("in no unit" in str(report)) == (not way.startswith("ddp") and "bf16" not in way)


def state():
    """Return all that verify must leave: classes and hooks, and values of all kinds."""
    ns = namespace()
    model = ns["model"]
    modules = [
        (
            type(m).__name__,
            sorted(vars(m)),
            [len(h) for h in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)],
        )
        for m in model.modules()
    ]
    values = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in ns["opt"].state.values()]
    return modules, [values, grads, buffers, optimizer, [torch.get_rng_state(), ns["generator"].get_state()]]


def stays(way, ends):
    ns = prepare(way)
    execute(Step(count=2))
    if ends == "gradients":  # a step that leaves its gradients
        ns["opt"].zero_grad = lambda: None
        execute(Step(count=1))
        del ns["opt"].zero_grad
    elif ends == "evaluation":  # a root that stays gathered
        with torch.no_grad():
            ns["model"](torch.randn(4, 8))
    objects = [id(param) for param in ns["model"].parameters()]
    if ends == "evaluation":
        execute(Verify())  # reshards it
    before = state()
    assert execute(Verify())["ok"]
    after = state()
    return before, after, objects == [id(param) for param in ns["model"].parameters()]


@pytest.mark.parametrize("way", ["ddp", "ddp-views", "FULL_SHARD", "FULL_SHARD-pieces"])
@pytest.mark.parametrize("ends", ["gradients", pytest.param("evaluation", marks=pytest.mark.thorough)])
def test_nothing_is_left_behind(way, ends):
    for before, after, same_objects in run(2, stays, way, ends):
        assert after[0] == before[0]
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
        assert same_objects or ends == "evaluation"


def losses(way, verify):
    prepare(way)
    before = execute(Step(count=2))["losses"]
    if verify:
        assert execute(Verify())["ok"]
    return before + execute(Step(count=3))["losses"]


@pytest.mark.parametrize("way", ["ddp", "FULL_SHARD", "FULL_SHARD-pieces"])
def test_training_goes_on_as_if_there_had_been_no_verify(way):
    assert run(2, losses, way, True) == run(2, losses, way, False)


# ---- faults that only these models have


def is_never_averaged(way):
    """Verify a step that calls the module in the wrapper, or leaves ``no_sync`` on; then a right one."""
    ns = prepare("ddp")

    def step():
        model = namespace()["model"]
        x = torch.randn(4, 8, generator=ns["generator"])
        with model.no_sync() if way == "no_sync" else nullcontext():
            (model.module if way == "module" else model)(x).square().mean().backward()
        namespace()["opt"].step()
        namespace()["opt"].zero_grad()

    ns["train_step"] = step
    wrong = execute(Verify())
    ns["train_step"] = train
    return wrong, execute(Verify())


@pytest.mark.parametrize("way", ["module", "no_sync", "right"])
def test_gradients_that_are_never_averaged(way):
    replies = run(2, is_never_averaged, way)
    report, after = (verify_report([decode(VerifyReply, reply[i], "reply") for reply in replies]) for i in range(2))
    assert after.ok
    assert [fault.rule for fault in report.faults] == ([] if way == "right" else ["no-sync-left-on"])
    if way != "right":
        assert "were never averaged: each rank steps with those of its own batch" in report.headline


def drifts(drifted):
    ns = prepare("ddp")
    execute(Step(count=1))
    if drifted and ns["rank"] == 1:
        with torch.no_grad():
            ns["model"].module.first.weight[3] += 0.01
    return execute(Verify())


@pytest.mark.parametrize("drifted", [True, False])
def test_replicas_that_drift(drifted):
    report = report_of(2, drifts, drifted)
    assert report.ok != drifted
    assert [fault.rule for fault in report.faults] == ["drifting-replica"] * drifted
    if drifted:
        assert report.faults[0].evidence == ("(root): the values of rank 0 differ from those of rank 1",)


def steps_on_rank_0_only():
    ns = prepare("ddp")

    def step():
        namespace()["model"](torch.randn(4, 8, generator=ns["generator"])).square().mean().backward()
        if ns["rank"] == 0:
            namespace()["opt"].step()
        namespace()["opt"].zero_grad()

    ns["train_step"] = step
    execute(Step(count=2))
    return execute(Verify())


def test_a_rank_that_has_never_stepped_has_no_state_and_is_named():
    report = report_of(2, steps_on_rank_0_only)
    assert [fault.rule for fault in report.faults] == ["drifting-replica", "rank-not-stepped"]


def is_infinite(way):
    ns = prepare(way)
    inner = ns["model"].module.blocks[1]
    is_original = [ns["model"]]
    inner.register_forward_hook(
        lambda module, _, out: out * float("nan") if ns["rank"] == 1 and ns["model"] is is_original[0] else out
    )
    return execute(Verify())


@pytest.mark.parametrize("way", ["ddp", "FULL_SHARD", pytest.param("FULL_SHARD-pieces", marks=pytest.mark.thorough)])
def test_a_module_with_nan_and_its_ranks_are_named(way):
    report = report_of(2, is_infinite, way)
    (fault,) = report.faults
    assert fault.rule == "not-finite"
    assert "is NaN or infinite on rank 1, and not in the unsharded copy" in fault.verdict


# ---- refusals


def refusal():
    try:
        execute(Verify())
    except UsageError as error:
        return str(error)


def unreduced_gradients():
    ns = prepare("FULL_SHARD")
    with ns["model"].no_sync():
        ns["model"](torch.randn(4, 8)).sum().backward()
    return refusal()


def other_gradients():
    ns = prepare("FULL_SHARD")
    if ns["rank"]:
        first = next(ns["model"].parameters())
        first.grad = torch.zeros_like(first)
    return refusal()


def two_engines():
    ns = prepare("ddp")
    ns["model"] = nn.Sequential(ns["model"], fsdp.FullyShardedDataParallel(make(), device_id=CPU))
    rank_module._after_cell(None)
    return refusal()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (unreduced_gradients, "'model' holds gradients that were accumulated in no_sync() and are not reduced yet"),
        (other_gradients, "hold gradients or optimizer state of different parameters"),
        (two_engines, "parts of 'model' are run by"),
    ],
)
def test_what_cannot_be_verified_is_refused(refused, words):
    for text in run(2, refused):
        assert words in text
