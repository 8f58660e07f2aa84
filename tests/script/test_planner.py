"""Plans of scripts from the command line: the report, and what is refused."""

from dataclasses import replace

import pytest

from tests.helpers import json_schema
from tests.plan.test_planning_rank import MODEL
from workbench.cli.main import main
from workbench.errors import UsageError
from workbench.events import Category, Kind
from workbench.protocol.commands import Plan, Reshard, Shard, Step
from workbench.protocol.policy import ModelPolicy
from workbench.protocol.rank_messages import ModelInfo
from workbench.script.planner import PlannedRank, plan_program, planned_shard
from workbench.session.program import CompletedCell, CompletedCommand, Program


def test_the_command_says_what_a_rank_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(MODEL.format(before="import sys", inside="assert sys.argv[1:] == ['--lr', '1']"))
    assert main(["plan", "--json", "--ranks", "16", "--hosts", "2", "train.py", "--lr", "1"]) == 0
    document = json_schema.read(capsys.readouterr().out)
    report = document["report"]
    assert report["num_ranks"] == 16
    assert report["step"] == 1
    assert report["fits"]
    padded = (-(-8 // 16) * 16) * 8 + 16 + 16 * 8 + 16  # each parameter's rows, in equal parts
    gathered = {total["kind"]: total["num_bytes"] for total in report["collectives"]}
    assert gathered == {"all_gather": 4 * padded, "reduce_scatter": 4 * padded}
    assert report["peak_bytes"] == sum(report["peak_bytes_by_category"].values())
    assert (tmp_path / "train.plan.trace").exists()


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [
        (["--device", "h100"], 1, "no figures of a device 'h100'"),
        (["--ranks", "0"], 1, "a plan is for at least 1 rank, not 0"),
        (["--ranks", "10", "--hosts", "4"], 1, "10 ranks do not divide into 4 hosts"),
        (["--steps", "0"], 2, "a plan needs at least 1 step, not 0"),
        (
            ["--fit", "much"],
            2,
            "fit takes a size such as 80GB or 74.5GiB, or device",
        ),
        (["--checkpoint", "3"], 1, "checkpoint takes names of module classes such as Block, not '3'"),
        (["--ranks", "6", "--mesh", "4"], 2, "mesh 4"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, status, sentence, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('no step')")
    assert main(["plan", *options, "--out", str(tmp_path / "x.trace"), str(script)]) == status
    assert sentence in capsys.readouterr().err


def test_a_script_without_a_step_and_one_that_fails_are_told(tmp_path, capsys):
    script = tmp_path / "train.py"
    for text, sentence in (("x = 1", "train.py took no training step"), ("[][0]", "IndexError: list index")):
        script.write_text(text)
        assert main(["plan", "--out", str(tmp_path / "x.trace"), str(script)]) == 2
        assert sentence in capsys.readouterr().err


CELL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters())
def train_step():
    loss = model(torch.randn(4, 8, device=device)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""

PLAIN = ModelInfo(
    name="model",
    class_name="Sequential",
    is_sharded=False,
    num_params=4,
    num_elements=81,
    num_bytes=324,
    classes=(),
    suggested=("Linear",),
)
NOW = ModelPolicy(
    api="fully_shard",
    strategy="full",
    orig_params=False,
    wrap=("Linear",),
    mesh="2",
    reshard_after_forward="false",
    mp="bf16",
    offload=False,
    prefetch=0,
)
SHARDED = replace(PLAIN, is_sharded=True, policy=NOW)


@pytest.mark.parametrize(
    ("model", "change", "num_ranks", "planned"),
    [
        (PLAIN, Reshard("model"), 64, Shard("model", wrap=("Linear",))),
        (PLAIN, Reshard("model", wrap=("Block",), offload=True), 64, Shard("model", wrap=("Block",), offload=True)),
        (SHARDED, Reshard("model"), 64, Shard("model", wrap=("Linear",), reshard_after_forward="false", mp="bf16")),
        (
            SHARDED,
            Reshard("model", mesh="8x8", mp="off"),
            64,
            Shard("model", wrap=("Linear",), reshard_after_forward="false", mesh=(8, 8)),
        ),
        (
            replace(SHARDED, policy=replace(NOW, mesh="2x2", mp="off", reshard_after_forward="auto")),
            Reshard("model"),
            4,
            Shard("model", wrap=("Linear",), mesh=(2, 2)),
        ),
    ],
)
def test_what_is_not_given_stays_as_it_is(model, change, num_ranks, planned):
    assert planned_shard(model, change, num_ranks) == planned


CLASSIC_NOW = replace(NOW, api="classic", strategy="grad", reshard_after_forward="false", orig_params=True, mp="off")


@pytest.mark.parametrize(
    ("policy", "change", "planned"),
    [
        (
            CLASSIC_NOW,
            Reshard("model"),
            Shard("model", api="classic", strategy="grad", orig_params=True, wrap=("Linear",)),
        ),
        (
            CLASSIC_NOW,
            Reshard("model", api="fully_shard"),
            Shard("model", wrap=("Linear",), reshard_after_forward="false"),
        ),
        (
            replace(NOW, reshard_after_forward=""),
            Reshard("model", reshard_after_forward="true"),
            Shard("model", wrap=("Linear",), reshard_after_forward="true", mp="bf16"),
        ),
    ],
)
def test_a_policy_of_either_api_is_planned(policy, change, planned):
    assert planned_shard(replace(SHARDED, policy=policy), change, 8) == planned


def test_ignored_parameters_stay_so_and_units_that_differ_are_refused():
    assert planned_shard(SHARDED, Reshard("model"), 8, ("*.bias",)).ignore == ("*.bias",)
    model = replace(SHARDED, policy=replace(NOW, reshard_after_forward="", offload=None))
    with pytest.raises(UsageError, match=r"units of model differ, .* add --reshard-after-forward and --offload"):
        planned_shard(model, Reshard("model"), 8)


def test_copies_that_do_not_fit_are_refused():
    model = replace(SHARDED, policy=replace(NOW, mesh="2x2"))
    with pytest.raises(UsageError, match=r"mesh 2x2 = 4 does not match .* 64; .* \(the plan is for 64 ranks\)"):
        planned_shard(model, Reshard("model"), 64)


def test_a_model_that_a_cell_wraps_is_planned_as_it_is(tmp_path):
    wrapped = CELL.replace("optimizer =", "model = nn.parallel.DistributedDataParallel(model)\noptimizer =")
    program = Program(device="cpu", ranks_per_host=(2,), entries=(CompletedCell(code=wrapped),))
    model = replace(PLAIN, class_name="DistributedDataParallel", units=(0,))
    with PlannedRank(lambda _: None) as rank:
        report = plan_program(program, model, Plan("model", ranks=8), tmp_path, rank)
        with pytest.raises(UsageError, match="DistributedDataParallel"):
            plan_program(program, model, Plan("model", ranks=8, mp="bf16"), tmp_path, rank)
    assert [(total.kind, total.num_bytes) for total in report.collectives if total.kind is Kind.ALL_REDUCE] == [
        (Kind.ALL_REDUCE, PLAIN.num_bytes)
    ]


def test_a_program_is_planned_without_its_steps_and_with_one_sharding(tmp_path):
    entries = [
        CompletedCell(code=CELL),
        CompletedCommand(command=Shard("model"), reply=None),
        CompletedCommand(command=Step(500), reply=None),
        CompletedCommand(command=Reshard("model", mp="bf16"), reply=None),
    ]
    program = Program(device="cpu", ranks_per_host=(2,), entries=tuple(entries))
    command = Plan("model", mp="off", ranks=8, device="a100-40gb")
    with PlannedRank(lambda _: None) as rank:
        report = plan_program(program, SHARDED, command, tmp_path, rank)
        again = plan_program(program, SHARDED, replace(command, mp="bf16"), tmp_path, rank)
    assert again.peak_bytes < report.peak_bytes  # the second of the same process is not of the first's state
    assert (report.num_ranks, report.num_hosts, report.step) == (8, 1, 1)
    kept = 4 * (64 + 8 + 64 + 8)  # both layers, each row of the second padded to eight
    assert report.peak_bytes_by_category[Category.UNSHARDED_PARAMS] == kept
    assert "fully_shard" in (tmp_path / "planned.py").read_text()
