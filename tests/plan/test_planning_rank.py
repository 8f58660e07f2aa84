"""A planned rank does what a real one does: the same events, with the same bytes, in the same sequence."""

import numpy as np
import pytest
import torch.distributed as dist

from tests.helpers.forked_ranks import run_ranks
from tests.helpers.package_source import REPO
from tests.helpers.planned_models import DATA_PARALLEL, POLICIES, STEPS, train
from tests.helpers.simulated_device import FakeDevice, computing_on
from tests.helpers.watched import watch
from workbench.base.codec import encode
from workbench.base.machines import DEFAULT, MACHINES
from workbench.engine import process_groups
from workbench.events import Category, Edge, Kind
from workbench.models.engines import ACTIVATIONS
from workbench.plan import planning_rank
from workbench.protocol.commands import Reshard
from workbench.protocol.planning import CALLED, PlannedRun, planned_ranks
from workbench.replay.training import summary
from workbench.reports.plan_report import described
from workbench.trace import check, load


def run_plan(script, out, num_ranks, change, checkpoint):
    """Plan a script in this process, which has no group."""
    process_groups.forget_all()
    dist.destroy_process_group()
    try:
        return planning_rank.plan(
            encode(
                PlannedRun(
                    script=str(script),
                    device=DEFAULT,
                    num_ranks=num_ranks,
                    num_hosts=1,
                    steps=STEPS,
                    out=str(out),
                    change=Reshard(CALLED, **change),
                    checkpoint=checkpoint,
                )
            )
        )
    finally:
        planning_rank.rank.shutdown()
        dist.init_process_group("fake", rank=0, world_size=1)


def planned(folder, text, num_ranks, checkpoint=(), **change):
    script, out = folder / "script.py", folder / "planned.trace"
    script.write_text(f"import sys\nsys.path.insert(0, {str(REPO)!r})\n{text}")
    run_ranks(1, run_plan, script, out, num_ranks, change, checkpoint, fresh=True)
    return load(out)


def train_on_device(policy):
    with computing_on(FakeDevice()):
        train(policy)


def events(trace):
    """Return what rank 0 announced until its last step ended: kind, edge, unit, bytes, class."""
    rows = trace.rank(0).rows
    end = np.flatnonzero((rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END))[STEPS - 1]
    rows = rows[: end + 1][~np.isin(rows["kind"][: end + 1], [Kind.DEVICE, Kind.METRIC, Kind.RESIDENT])]
    columns = (rows[name].tolist() for name in ("kind", "edge", "phase", "unit", "num_bytes", "category"))
    return [(Kind(kind).name, *rest) for kind, *rest in zip(*columns, strict=True)]


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Return the traces of a policy's plan, and of a real run by ``run``."""

    def traces(policy, num_ranks, run):
        plan = planned(tmp_path, f"from tests.helpers.planned_models import train\ntrain({policy!r}, 9)", num_ranks)
        monkeypatch.setenv(ACTIVATIONS, "1")
        return plan, watch(num_ranks, run, policy).trace

    return traces


@pytest.mark.parametrize("policy", POLICIES)
def test_a_planned_rank_announces_what_a_real_one_does(policy, both):
    plan, real = both(policy, POLICIES[policy][0], train_on_device)
    assert events(plan) == events(real)


@pytest.mark.parametrize("policy", DATA_PARALLEL)
def test_a_planned_rank_has_the_buckets_and_calls_of_distributed_data_parallel(policy, both):
    plan, real = both(policy, DATA_PARALLEL[policy][0], train)
    assert check(plan) == []
    found, expected = ([row for row in events(trace) if not is_late(row)] for trace in (plan, real))
    assert found == expected
    assert plan.header.units == real.header.units


def is_late(row):
    """Whether a row is the end of a call for which C++ waits: real ranks learn of it at different events."""
    kind, edge, *_ = row
    return Kind[kind].info.is_collective and edge == Edge.END


MODEL = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
{before}
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
for step in range(5):
    x = torch.randn(4, 8)
    loss = model(x).sum()
    loss.backward()
    {inside}
    optimizer.step()
    optimizer.zero_grad()
"""


IN_FORWARD = """
class Block(nn.Linear):
    def forward(self, x):
        return super().forward({})
model = nn.Sequential(Block(8, 8), nn.Linear(8, 1))
"""
CUSTOM = """
library = torch.library.Library("mine", "DEF")
library.define("scale(Tensor x) -> Tensor")
library.impl("scale", lambda x: 2 * x, "CPU")
"""


@pytest.mark.parametrize(
    ("before", "inside", "sentence"),
    [
        (IN_FORWARD.format("x[x > 0]"), "", r"aten.nonzero.default in 0 \(Block\) returns as many elements as"),
        (IN_FORWARD.format("x if x.mean() > 0 else -x"), "", r"decides in 0 \(Block\) by the value of a tensor"),
        (
            CUSTOM + IN_FORWARD.format("torch.ops.mine.scale(x)"),
            "",
            r"mine::scale in 0 \(Block\) is an operation without a fake",
        ),
        ("", "loss.detach().cpu().numpy()", "the program takes the values of a tensor as an array, and"),
        ("", "if loss > 1: break", "the program decides by the value of a tensor"),
        ("", "if loss.item() > 1: break", "the program decides by the value of a tensor"),
        ("", "range(int(loss))", "the program decides by the value of a tensor"),
        ("", "open('log.txt', 'w')", "a plan changes nothing, and the program wants to write log.txt"),
        ("import os", "os.remove('x')", "a plan changes nothing, and the program wants to remove x"),
        ("import subprocess", "subprocess.run(['true'])", "the program wants to run true"),
    ],
)
def test_what_a_plan_cannot_know_or_may_not_do_is_refused(before, inside, sentence, tmp_path):
    with pytest.raises(AssertionError, match=sentence):
        planned(tmp_path, MODEL.format(before=before, inside=inside), 4)


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("model.to('cuda').cuda(0)", "torch.save(model.state_dict(), 'x.pt')"),
        ("model.to(torch.bfloat16).to(torch.float32)", "x.to('cuda:0', non_blocking=True).cuda()"),
        ("model = nn.Linear(8, 1, device='meta').to_empty(device='cuda')", ""),
        ("torch.cuda.set_device(3)", "torch.zeros(3, device='cuda') + loss.item()"),
        (
            "from torch.utils.data import DataLoader",
            "next(iter(DataLoader(torch.randn(9, 2), 3, shuffle=True, num_workers=2)))",
        ),
        ("import torch.distributed as dist", "dist.all_reduce(loss.detach()); dist.barrier()"),
        ("model = nn.parallel.DistributedDataParallel(model, device_ids=[0]); fully_shard = id", ""),
        ("import torch.distributed as dist; all = [0] * 4", "dist.all_gather_object(all, 3); assert all == [3] * 4"),
        (
            "cast = torch.autocast('cuda', torch.bfloat16)",
            "with cast: assert (x @ x.T).dtype == torch.bfloat16",
        ),
        ("", "assert f'{loss:.2f}' == 'nan'"),
        ("torch.cuda.reset_peak_memory_stats()", "f'{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB'"),
        ("model = torch.compile(model)", "torch.compile(fullgraph=True)(model)"),
    ],
)
def test_what_scripts_for_gpus_do_is_planned_without_one(before, inside, tmp_path):
    trace = planned(tmp_path, MODEL.format(before=before, inside=inside), 4)
    assert [step for step in trace.rank(0).steps if step >= 0] == [0, 1]
    assert not list(tmp_path.glob("*.pt"))


IN_A_FUNCTION = """
def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""


def test_an_optimizer_in_a_function_goes_on_with_the_parameters_of_another_mesh(tmp_path):
    text = MODEL.partition("model =")[0] + IN_A_FUNCTION
    report = described(planned(tmp_path, text, 4, mesh=(2, 2)), planned_ranks(DEFAULT, 4, 1), "")
    size = 2 * (64 + 8) // 2  # elements of a shard, one of two
    assert report.peak_bytes_by_category[Category.OPTIMIZER_STATE] == 4 * (2 * size + 4)
    assert report.peak_bytes_by_category[Category.SHARDED_PARAMS] == 4 * size


CHANGES = {
    "reshard_after_forward": ({"reshard_after_forward": "true"}, {"reshard_after_forward": "false"}),
    "checkpoint": ({"checkpoint": ("Block",)}, {}),
    "offload": ({"offload": True}, {}),
    "mesh": ({}, {"mesh": (2, 2)}),
    "wrap": ({}, {"wrap": ("Linear",)}),
    "mp": ({"mp": "bf16"}, {}),
}


@pytest.mark.parametrize("option", CHANGES)
def test_a_script_is_planned_with_another_policy(option, tmp_path):
    script = "from tests.helpers.planned_models import train\ntrain('default', 9)"
    lean, other = (
        described(planned(tmp_path, script, 4, **change), planned_ranks(DEFAULT, 4, 1), "")
        for change in CHANGES[option]
    )
    policies = [
        {(unit.reshard_after_forward, unit.offload, unit.replicate_size) for unit in live(report)}
        for report in (lean, other)
    ]
    calls, payloads = (
        [{total.kind: getattr(total, name) for total in report.collectives} for report in (lean, other)]
        for name in ("calls", "num_bytes")
    )
    changed = {
        "reshard_after_forward": policies == [{(True, False, 1)}, {(False, False, 1)}] and exceeds(*calls),
        "checkpoint": lean.peak_bytes_by_category[Category.ACTIVATIONS] < other.peak_bytes,
        "offload": [report.host_bytes > 0 for report in (lean, other)] == [True, False],
        "mesh": [{size for *_, size in each} for each in policies] == [{1}, {2}],
        "wrap": len(live(lean)) < len(live(other)),
        "mp": payloads[0][Kind.ALL_GATHER] * 2 == payloads[1][Kind.ALL_GATHER],
    }
    assert changed[option]
    assert option in {"wrap", "mp"} or lean.peak_bytes <= other.peak_bytes
    if option == "mp":  # and the gradients are reduced in their own dtype, or in half
        assert not exceeds(*payloads)


def exceeds(first, second):
    """Whether no number of the first is smaller, and one is larger."""
    return first.keys() == second.keys() and first != second and all(first[key] >= second[key] for key in first)


def live(report):
    return [unit for unit in report.units if not (unit.retired or unit.gone)]


def test_a_step_takes_as_long_as_its_arithmetic(tmp_path):
    size = 4096
    model = f"model = nn.Sequential(nn.Linear({size}, {size}), nn.Linear({size}, {size}))"
    text = MODEL.format(before=model, inside="").replace("torch.randn(4, 8)", f"torch.randn({size}, {size})")
    times = summary(planned(tmp_path, text, 2)).step_times
    least_ns = 5 * 2 * size**3 / MACHINES[DEFAULT].flops["float32"] * 1e9  # two forwards, three products of backward
    assert least_ns < times.high[-1] < 1.5 * least_ns
