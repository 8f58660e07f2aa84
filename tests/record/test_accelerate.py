"""Accelerate trains unchanged under ``python -m workbench.record``, with either version of torch's FSDP."""

import pytest

from tests.helpers.warm_python import torchrun
from workbench.replay.collectives import compare
from workbench.trace import check, steps
from workbench.trace.read_recording import read

SCRIPT = """
import sys, torch
from torch import nn
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

version = int(sys.argv[1])
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=version,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
    reshard_after_forward=True if version == 2 else "FULL_SHARD",
)
accelerator = Accelerator(cpu=True)
accelerator.state.distributed_type = DistributedType.FSDP  # Accelerate would choose this path only on GPUs
accelerator.state.device, accelerator.state.fsdp_plugin = torch.device("cpu"), plugin
torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if version == 2:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
torch.manual_seed(accelerator.process_index)
for _ in range(3):
    loss = model(torch.randn(8, 16)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    sys.stdout.write(f"loss {accelerator.process_index} {loss.item().hex()}\\n")
    sys.stdout.flush()
"""


def losses(done):
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if line.startswith("loss"))
    assert len(found) == 6
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1", "2"])
def test_accelerate_trains_as_before_and_its_units_are_recorded(version, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    plain = losses(torchrun(str(tmp_path / "train.py"), version))
    recorded = torchrun("-m", "workbench.record", "--out", str(tmp_path / "out"), str(tmp_path / "train.py"), version)
    assert losses(recorded) == plain
    recording = read(tmp_path / "out")
    assert recording.notes == ()
    trace = recording.trace
    assert check(trace) == []
    assert steps(trace) == [0, 1, 2]
    assert [unit.name for unit in trace.header.units] == ["", "0", "1"]
    found = compare(trace, 2)
    assert {row.unit for row in found} == {0, 1, 2}
    assert all((row.calls, row.num_bytes) == (row.expected.calls, row.expected.num_bytes) for row in found)
