"""After a step that failed on one rank: every command works, or all ranks report the same command to run first."""

import pytest

from workbench import Workbench
from workbench.errors import RankError

pytestmark = pytest.mark.thorough

MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 32, bias=False), nn.Linear(32, 1, bias=False))
x = torch.randn(4, 8)
fails = ""

def train_step():
    loss = model(x).pow(2).mean()
    loss.backward()
    if rank == 1 and fails == "before":
        raise ValueError("my bug")
    opt.step()
    if rank == 1 and fails == "first of all":
        opt.state.clear()
    if not fails:
        opt.zero_grad()
    return loss.item()
"""


@pytest.fixture(scope="module")
def bench():
    with Workbench(2, device="cpu") as wb:
        yield wb


COMMANDS = {
    "fully_shard": {
        "unshard": lambda wb: wb.unshard("model"),
        "verify": lambda wb: wb.verify(),
        "reshard --mesh": lambda wb: wb.reshard("model", mesh="2x1"),
        "reshard --api": lambda wb: wb.reshard("model", api="classic"),
    },
    "classic": {
        "unshard": lambda wb: wb.unshard("model"),
        "verify": lambda wb: wb.verify(),
        "reshard --api": lambda wb: wb.reshard("model", api="fully_shard"),
    },
}
TABLE = [(api, command) for api, commands in COMMANDS.items() for command in commands]


def values(wb):
    return wb.run_cell("print([p.detach().clone() for p in model.parameters()])").texts


@pytest.mark.parametrize(("api", "command"), TABLE)
def test_gradients_that_one_rank_has_left_are_named_and_nothing_is_changed(bench, api, command):
    bench.run_cell(MODEL)
    bench.shard("model", api=api, wrap=["Linear"])
    bench.run_cell('opt = torch.optim.Adam(model.parameters(), 1e-2); fails = "before"')
    with pytest.raises(RankError, match="my bug"):
        bench.step(1)
    bench.run_cell("opt.state.clear()\nif rank == 0: opt.zero_grad()")
    before = values(bench)
    with pytest.raises(RankError, match=r"ranks differ in the gradient of .* rank 0 has none; rank 1 has") as refused:
        COMMANDS[api][command](bench)
    assert "model.zero_grad() (in a notebook, in a %%fsdp cell)" in str(refused.value)
    assert refused.value.also == (1,)
    assert values(bench) == before
    assert bench.status().models
    bench.run_cell('model.zero_grad(); fails = ""')
    bench.step(1)
    COMMANDS[api][command](bench)
    if command == "unshard":
        bench.shard("model", api=api, wrap=["Linear"])
    bench.step(1)
    bench.run_cell("del model, opt")


@pytest.mark.parametrize("api", COMMANDS)
def test_state_that_one_rank_lacks_is_named(bench, api):
    bench.run_cell(MODEL)
    bench.shard("model", api=api, wrap=["Linear"])
    bench.run_cell('opt = torch.optim.Adam(model.parameters(), 1e-2); fails = "first of all"')
    bench.step(1)
    with pytest.raises(RankError, match=r"ranks differ in the optimizer state of .*: rank 0 has exp_avg") as refused:
        bench.unshard("model")
    assert "optimizer.state.clear() (in a notebook, in a %%fsdp cell)" in str(refused.value)
    bench.run_cell('opt.state.clear(); opt.zero_grad(); fails = ""')
    bench.unshard("model")
    bench.shard("model", api=api, wrap=["Linear"])
    bench.step(1)
    bench.run_cell("del model, opt")
