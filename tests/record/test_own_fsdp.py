"""A script with an FSDP of its own, under torchrun: recorded with its units and its logged loss."""

import pytest

from tests.helpers.own_fsdp import FSDP, source_of
from tests.helpers.scripts import written
from tests.helpers.warm_python import torchrun
from workbench import Workbench
from workbench.replay import training
from workbench.replay.collectives import compare
from workbench.trace import check, steps

START = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""

LOOP = """
for _ in range(3):
    loss = train_step()
    watch.log_metric("loss", loss)
    print(f"{rank} {loss.hex()}\\n", end="", flush=True)  # one write: two ranks share the output
dist.destroy_process_group()
"""


@pytest.mark.cluster
def test_its_units_and_its_loss_are_in_the_recording(tmp_path):
    script = written(tmp_path, "\n".join((START, *map(source_of, FSDP), LOOP)))
    done, plain = torchrun("-m", "workbench.record", "--out", tmp_path / "out", script), torchrun(script)
    assert done.returncode == plain.returncode == 0, done.stderr + plain.stderr
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    trace = Workbench.open(tmp_path / "out").trace
    assert check(trace) == []
    assert [unit.name for unit in trace.header.units] == [*(f"blocks.{i}" for i in range(4)), ""]
    assert steps(trace) == [0, 1, 2]
    assert not [row for step in steps(trace) for row in compare(trace, step) if row.differs]
    for rank in trace.ranks:
        logged = training.advance(training.start(), rank.rows).values
        losses = [float.fromhex(line.split()[1]) for line in plain.stdout.splitlines() if line[0] == str(rank.rank)]
        assert logged["step"].tolist() == [0, 1, 2]
        assert logged["value"].tolist() == losses
