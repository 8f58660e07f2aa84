"""A session on real ranks, exported and started by torchrun: the same losses, bit for bit."""

import pytest

from tests.helpers.notebook_model import CELL
from tests.helpers.warm_python import torchrun
from workbench import Workbench
from workbench.errors import RankError

pytestmark = pytest.mark.cluster

FIXED = (
    CELL
    + """
def train_step():  # the same data in every step, so that aborted steps leave no trace
    opt.zero_grad()
    loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))).square().mean()
    loss.backward()
    opt.step()
    return loss.item()
"""
)


def printed(path, num_ranks):
    """Run a script; return the losses that it prints."""
    done = torchrun(path, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    return tuple(float(line.partition(": loss ")[2]) for line in done.stdout.splitlines() if ": loss " in line)


def check(wb, losses, folder, engines=("workbench", "torch")):
    """Check that the scripts of a session print its losses."""
    assert len(losses) > 2
    for engine in engines:
        path = folder / f"train_{engine}.py"
        wb.export(path, engine=engine)
        assert printed(path, wb.num_ranks) == losses, path.read_text()


def test_cells_a_failure_and_aborted_steps(tmp_path):
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(FIXED)
        with pytest.raises(RankError):
            wb.run_cell("print(1 / 0)")
        wb.run_cell("print(rank)", ranks=[1])
        wb.shard("model", wrap=["Block"])  # after the optimizer was made
        losses = wb.step(2).losses
        wb.step(3, until="backward")
        wb.abort()
        losses += wb.step(2).losses
        wb.reshard("model", reshard_after_forward="false")
        wb.verify()
        losses += wb.step().losses
    check(wb, losses, tmp_path)
    assert "1 / 0" not in (tmp_path / "train_torch.py").read_text()


def test_the_classic_api_and_a_change_of_the_api(tmp_path):
    model, optimizer = CELL.split("opt =")
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(model)
        wb.shard("model", wrap=["Block"], api="classic", mp="bf16,reduce=fp32", orig_params=True)
        wb.run_cell(f"opt ={optimizer}".replace("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "pass"))
        losses = wb.step(3).losses
        check(wb, losses, tmp_path)
        wb.reshard("model", api="fully_shard", mesh=2)
        losses += wb.step(2).losses
        wb.unshard("model")
        wb.shard("model", offload=True, ignore=["head.bias"], mp="bf16,output=fp32", prefetch=1)
        check(wb, losses, tmp_path, engines=["workbench"])
