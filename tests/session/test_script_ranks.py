"""Ranks of the command line: a script's output, models and errors, and the end of all processes."""

import signal
import subprocess
import sys

import pytest

from tests.helpers.waiting import wait_until
from tests.helpers.warm_python import WarmPython
from workbench.errors import RankError, UsageError
from workbench.session.script_ranks import ScriptRanks

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
print("café", sys.argv[1:], flush=True)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.ones(2, 4)

def train_step():
    optimizer.zero_grad()
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    return loss

def raises():
    raise OSError("no data")

if "raise" in sys.argv and rank == 1:
    raises()
train_step()
"""


WARM = WarmPython(is_inherited=True)


@pytest.fixture(autouse=True)
def warm(monkeypatch):
    """Let ranks begin in forks."""
    monkeypatch.setattr(sys, "executable", WARM.executable())


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_script_leaves_its_models_to_be_checked(script):
    written = []
    with ScriptRanks(2, lambda output: written.append(output.text)) as ranks:
        assert len(WARM.forks()) == 2
        ranks.take_our_engine()
        ranks.run_script(script, ["--lr", "1"])
        assert [[model.name for model in models] for models in ranks.models().values()] == [["model"], ["model"]]
        assert ranks.lint().models == ("model",)
        assert ranks.verify("", "train_step", repeat=False).ok
        assert ranks.verify("model", "train_step", repeat=True).ok
        with pytest.raises(UsageError, match="mdoel"):
            ranks.verify("mdoel", "train_step", repeat=False)
    assert WARM.forks() == []
    assert "".join(written) == "café ['--lr', '1']\n--- 2 ranks agree\n"


def test_a_failed_script_is_told_with_its_rank_and_its_line(script):
    with pytest.raises(RankError, match="no data") as raised, ScriptRanks(2, lambda _: None) as ranks:
        ranks.run_script(script, ["raise"])
    assert (raised.value.rank, raised.value.ename) == (1, "OSError")
    assert 'raise OSError("no data")' in raised.value.traceback


@pytest.mark.parametrize(
    ("num_ranks", "script", "text"), [(0, "train.py", "at least 1, not 0"), (1, "none.py", "none.py")]
)
def test_what_cannot_run_is_refused(num_ranks, script, text):
    with pytest.raises(UsageError, match=text), ScriptRanks(num_ranks, lambda _: None) as ranks:
        ranks.run_script(script, [])


WAITS = """
import os, signal, threading

print("begun", flush=True)
if os.environ["RANK"] == {dies!r}:
    os.kill(os.getpid(), signal.SIGKILL)
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("dies", "sent", "status", "text"),
    [
        ("1", None, 2, "rank 1 died: the process was killed by SIGKILL"),
        ("", signal.SIGINT, 2, "interrupted: nothing was checked"),
        ("", signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_ranks_end_with_a_rank_that_died_with_ctrl_c_and_with_the_command(dies, sent, status, text, tmp_path):
    (tmp_path / "train.py").write_text(WAITS.format(dies=dies))
    command = [sys.executable, "-m", "workbench.cli.main", "lint", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr.readline() == "begun\n"
        if sent is not None:
            process.send_signal(sent)
        assert text in process.stderr.read()
    assert process.returncode == status
    wait_until(lambda: not WARM.forks())
