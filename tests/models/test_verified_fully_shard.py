"""``verify`` of models that torch's ``fully_shard`` runs: right steps of every policy, what stays, what is refused."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_module

from tests.helpers.booted_ranks import execute, namespace, run
from tests.runtime.test_verify_faults import make, prepare, report_of, train, verified
from tests.runtime.test_verify_recipes import SETUP
from workbench.base.codec import decode
from workbench.engine import classic
from workbench.errors import UsageError
from workbench.protocol.commands import Step, Verify, VerifyReply
from workbench.reports.verify_report import verify_report
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


def one_mesh_is_refused():
    ns, dims = namespace(), {"dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = distribute_module(make(), mesh)
    ns["model"], ns["train_step"] = fully_shard(model, mesh=mesh, **dims), train
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


def copies_that_torch_leaves_unaveraged_are_refused():
    """The workbench's wrapper, in the place of torch's, would train otherwise."""
    ns, hybrid = namespace(), {"sharding_strategy": classic.ShardingStrategy.HYBRID_SHARD}
    mesh = init_device_mesh("cpu", (2, 1))
    ns["model"] = classic.FullyShardedDataParallel(make(), device_mesh=mesh, **hybrid)
    ns["train_step"] = train
    rank_module._after_cell(None)
    with mock.patch.object(fsdp, "FullyShardedDataParallel", classic.FullyShardedDataParallel):
        return refusal()


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (copies_that_torch_leaves_unaveraged_are_refused, "makes NO_SHARD of a hybrid strategy"),
        (one_mesh_is_refused, "pass fully_shard the data-parallel part of the mesh, such as mesh['dp']"),
        (other_gradients_are_refused, "hold gradients or optimizer state of different parameters"),
    ],
)
def test_what_cannot_be_verified_is_refused(refused, words):
    for text in run(2, refused):
        assert words in text


# ---- split by tensor parallelism too

TWO_D = """
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from {engine} import MixedPrecisionPolicy, fully_shard
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    def normed(self, x):
        return self.norm(x)
    def forward(self, x):
        return x + self.down(F.relu(self.up(self.normed(x))))
class Gained(Block):
    # each rank scales half of the rows by a gain, of which all have a copy
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
    def normed(self, x):
        mine = DTensor.from_local(self.norm(x), tp, [Replicate()]).redistribute(placements=[Shard(0)]).to_local()
        gain = self.gain.to_local(**({{"grad_placements": [Partial()]}} if SUMS else {{}}))
        return DTensor.from_local(mine * gain, tp, [Shard(0)]).full_tensor()
SUMS, kinds, shape, mixed = True, (Block, Block), (2, 2), {{}}
plan = {{"up": ColwiseParallel(), "down": RowwiseParallel()}}
{before}
names = ("dp", "tp") if len(shape) == 2 else ("copies", "dp", "tp")
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
tp, dp = mesh["tp"], mesh["dp"] if len(shape) == 2 else mesh["copies", "dp"]
torch.manual_seed(0)
model = nn.Sequential(*(kind() for kind in kinds), nn.Linear(8, 4))
stale = list(model[0].parameters())
for block in model[:-1]:
    parallelize_module(block, tp, plan)
    if hasattr(block, "gain"):
        block.gain = nn.Parameter(distribute_tensor(block.gain.data, tp, [Replicate()]))
    fully_shard(block, mesh=dp, **mixed)
fully_shard(model, mesh=dp, **mixed)
params = list(model.parameters())
opt = torch.optim.AdamW(params, lr=1e-2)
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank // 2))
scale = 1.0
def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
{after}
def train_step():
    loss = scale * model(x).float().square().mean()
    loss.backward()
    {step}
    opt.zero_grad()
    return loss.item()
"""
SOUND = {
    "columns and rows": {},
    "a copied parameter": {"before": "kinds = (Block, Gained)"},
    "bfloat16": {"before": "mixed = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"},
    "copies": {"before": "shape = (2, 1, 2)"},
    "SGD": {"after": "opt = torch.optim.SGD(params, 0.1, momentum=0.9)"},
    "rows alone": {"before": "plan = {'down': RowwiseParallel(input_layouts=Replicate())}"},
}
FAULTY = {
    "lr": ({"after": "opt.param_groups[0]['lr'] *= 1 + (rank == 1)"}, "other-settings", "lr is 0.02 on rank 1"),
    "stale": ({"after": "opt = torch.optim.AdamW(params[len(stale):], 1e-2)"}, "stale-optimizer", "unit 0"),
    "negated": (
        {"step": "if rank == 1: local(list(model.parameters())[2].grad).neg_()\n    opt.step()"},
        "other-gradients",
        "rank 1",
    ),
    "lr of one copy": (
        {"before": "shape = (1, 4)", "after": "opt.param_groups[0]['lr'] *= 1 + (rank == 1)"},
        "other-settings",
        "lr is 0.02 on rank 1",
    ),
    "a missing sum": (
        {"before": "kinds, SUMS = (Block, Gained), False"},
        "uneven-copies",
        "copies of 1.gain on ranks 0-3",
    ),
}


def split_in_two_ways(engine, rows):
    found = []
    for row in rows:
        exec(
            SETUP + TWO_D.format(engine=engine, **{"before": "", "after": "", "step": "opt.step()"} | row), namespace()
        )
        rank_module._after_cell(None)
        execute(Step(count=2))
        found.append(execute(Verify()))
    return found


@pytest.mark.parametrize(
    "engine", ["torch.distributed.fsdp", pytest.param("workbench.engine", marks=pytest.mark.thorough)]
)
def test_tensor_parallelism_with_fully_shard(engine):
    rows = [*SOUND.values(), *(row for row, *_ in FAULTY.values())]
    by_rank = zip(*run(4, split_in_two_ways, engine, rows, timeout_s=600), strict=True)
    reports = [verify_report([decode(VerifyReply, reply, "reply") for reply in replies]) for replies in by_rank]
    for name, report in zip(SOUND, reports[: len(SOUND)], strict=True):
        assert report.ok and report.faults == (), (name, str(report))  # noqa: PT018
    for (name, (_, rule, words)), report in zip(FAULTY.items(), reports[len(SOUND) :], strict=True):
        assert [fault.rule for fault in report.faults] == [rule], (name, str(report))
        assert words in report.faults[0].verdict, (name, str(report))
