"""``workbench lint``: its arguments, its exit status, and that it leaves no process."""

import subprocess

import pytest

from tests.helpers import json_schema
from tests.helpers.warm_python import WarmPython
from workbench.base.fault import Fault
from workbench.cli import lint_script
from workbench.cli import main as cli
from workbench.cluster import Output
from workbench.errors import ClusterError, Interrupted, UsageError
from workbench.reports.failures import Failure, to_error
from workbench.reports.lint_report import LintReport


def lint_as(monkeypatch, outcome):
    """Let ``workbench lint`` end in a report or an error; return the arguments that it gets."""
    given = []

    def run(*args, on_output, **how):
        given.append((*args, how))
        on_output(Output("stdout", text="loss 1.5\n"))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(lint_script, "run", run)
    return given


STALE = Fault(rule="optimizer-before-shard", verdict="opt is stale", evidence=("6 parameters",), fix="make it again")


AGAIN = "nothing was checked: correct train.py and run workbench lint again"


def found(*faults):
    return LintReport(models=("model",), faults=faults, num_checks=28)


@pytest.mark.parametrize(
    ("argv", "script", "args", "how"),
    [
        (["train.py"], "train.py", [], {"module": False, "num_ranks": 2}),
        (["train.py", "-n", "4", "--lr", "1e-3", "data"], "train.py", ["--lr", "1e-3", "data"], {"num_ranks": 4}),
        (["-m", "package.train", "--n", "3"], "package.train", ["--n", "3"], {"module": True, "num_ranks": 2}),
        (["train.py", "--", "-n", "8", "--json", "--"], "train.py", ["-n", "8", "--json", "--"], {"num_ranks": 2}),
    ],
)
def test_lint_passes_other_arguments_to_the_script(argv, script, args, how, monkeypatch, capsys):
    given = lint_as(monkeypatch, found())
    assert cli.main(["lint", *argv]) == 0
    ((to_script, to_args, to_how),) = given
    assert (to_script, to_args) == (script, args)
    assert to_how == {"module": False, "num_ranks": 2, **how}
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("model: no faults found by 28 checks\n", "loss 1.5\n")


@pytest.mark.parametrize(
    ("outcome", "status"), [(found(), 0), (found(STALE), 1), (UsageError("nothing was checked"), 2)]
)
def test_the_status_of_lint_says_whether_there_are_faults_also_as_json(outcome, status, monkeypatch, capsys):
    lint_as(monkeypatch, outcome)
    assert cli.main(["lint", "train.py"]) == status
    printed = capsys.readouterr()
    assert ("opt is stale" in printed.out) == (status == 1)
    assert ("nothing was checked" in printed.err) == (status == 2)
    assert cli.main(["lint", "train.py", "--json"]) == status
    document = json_schema.read(capsys.readouterr().out)
    assert (document["type"] == "LintReport") == (status < 2)
    assert (document["error"] is None) == (status < 2)


RAISED = "\x1b[31mTraceback\x1b[0m (most recent call last):\n  open(data)"


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (
            to_error([Failure(rank=1, ename="OSError", evalue="no data", traceback=RAISED)], {}, next_thing=""),
            ["Traceback (most recent call last):", "  open(data)", "", "rank 1 raised OSError: no data", AGAIN],
        ),
        (to_error([Failure(rank=0, evalue="rank 0 died", died=True)], {}, next_thing=""), ["rank 0 died", AGAIN]),
        (Interrupted("Interrupted. The ranks are idle again."), ["interrupted: nothing was checked"]),
        (ClusterError("no rank answers"), ["no rank answers"]),
    ],
)
def test_a_script_that_failed_is_told_what_to_do_in_a_shell(error, lines, monkeypatch, capsys):
    """No word of the session of ranks, which has ended."""
    lint_as(monkeypatch, error)
    assert cli.main(["lint", "train.py"]) == 2
    assert capsys.readouterr().err.splitlines() == ["loss 1.5", *lines]


WARM = WarmPython(is_inherited=True)

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)


def main(before):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    if "read" in sys.argv:  # by every rank
        model = nn.Sequential(*(nn.Linear(16, 16), nn.Linear(16, 50_000)))
        torch.save(model.state_dict(), f"{dist.get_rank()}.pt")
        dist.barrier()
        model.load_state_dict(torch.load("0.pt"))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if not before:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 16)).sum().backward()
    opt.step()


if "raise" in sys.argv:
    raise OSError("no data")
if "plain" not in sys.argv:
    main("before" in sys.argv)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ((), 0, "model: no faults found by 31 checks"),
        (("before",), 1, "opt was made before model was sharded, so its steps do not train the model"),
        (("read",), 1, "ranks of one host each read the whole checkpoint of model into memory"),
        (("raise",), 2, "OSError: no data"),
        (("plain",), 2, "nor of a function of it that steps an optimizer, holds a sharded model"),
    ],
)
def test_lint_runs_a_script_and_leaves_no_process(args, status, text, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [WARM.executable(), "-m", "workbench.cli.main", "lint", str(script), "-n", "2", *args]
    done = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == status, done.stdout
    assert text in done.stdout
    assert "idle again" not in done.stdout
    assert WARM.forks() == []
