"""A rank on a GPU that stops in its backward, in autograd's own thread: its device has no work left.

The same on the CPU, which has no device to wait for, checks the test itself.
"""

import json
import subprocess
import sys
import threading

import pytest
import torch

from tests.helpers.booted_ranks import boot_of, execute, namespace
from tests.helpers.package_source import REPO
from tests.helpers.small_models import Block
from tests.helpers.stopped_step import Channel, beside
from workbench.base.codec import encode
from workbench.protocol.commands import Shard, Step
from workbench.protocol.starting import Address, Connect
from workbench.runtime import rank as rank_module

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        pytest.mark.filterwarnings("ignore"),  # any warnings of NCCL and torch
    ],
)
WIDTH = 64


def prepare(device):
    ns = namespace()
    ns["torch"] = torch
    ns["model"] = torch.nn.Sequential(*(Block(WIDTH) for _ in range(3))).to(device)

    def train_step():
        loss = ns["model"](torch.randn(256, WIDTH, device=device)).square().mean()
        loss.backward()
        return loss.item()

    ns["train_step"] = train_step


def script(channel):
    held = channel.until_held()
    ident = channel.evaluate("__import__('threading').get_ident()")
    is_idle = channel.evaluate("not torch.cuda.is_available() or torch.cuda.current_stream().query()")
    event = channel.inspect("1.mlp.0.weight").unit
    return held.synchronised, ident == str(threading.main_thread().ident), is_idle, event, channel.where().held.kind.key


def main(device):
    """Run that rank, and print what it saw."""
    address = Address(**rank_module.boot(encode(boot_of(0, 1, device))))
    rank_module.connect(encode(Connect(address=address)))
    try:
        prepare(device)
        execute(Shard(model="model", wrap=("Block",)))
        Channel().break_at({"event": "backward", "unit": "1", "once": True})
        done, reported = beside(script, Step(count=2))
        sys.stdout.write(json.dumps([done["steps_done"], *reported]))
    finally:
        rank_module.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_rank_that_stops_in_backward_has_waited_for_its_device(device):
    code = f"from tests.runtime.test_gate_cuda import main; main({device!r})"  # a forked child cannot use CUDA
    command = [sys.executable, "-c", code]
    child = subprocess.run(command, check=False, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    steps, is_synchronised, in_main, is_idle, unit, kind = json.loads(child.stdout)
    assert (steps, unit, kind) == (2, "1", "backward")
    assert is_synchronised == (device != "cpu")
    assert in_main == (device == "cpu")
    assert is_idle == "True"
