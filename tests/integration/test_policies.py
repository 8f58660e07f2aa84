"""Two real ranks whose policy changes after an aborted step and to the classic wrapper: what a dashboard shows."""

import time

import numpy as np
import pytest

from tests.helpers.live_view import DashboardView
from workbench import Workbench
from workbench.live.live_steps import Steps
from workbench.live.messages import AskFeed
from workbench.replay import training

pytestmark = [pytest.mark.thorough, pytest.mark.cluster]

CELL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1))
"""
TRAIN = """
opt = torch.optim.Adam(model.parameters())
def train_step():
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()
"""


def change(answers, wb):
    answer, _ = answers.answer(AskFeed(), wb.pulse(), time.monotonic)
    return answer["change"]


def test_a_policy_change_is_reported_with_its_step_and_averages_do_not_mix_policies():
    early = DashboardView()
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL)
        wb.shard("model", wrap=["Linear"], reshard_after_forward="true")
        wb.run_cell(TRAIN)
        wb.step(5)
        wb.step(1, until="wait")  # step 5
        wb.abort()
        assert change(early, wb) is None
        wb.reshard("model", reshard_after_forward="false")
        wb.step(4)  # 6 to 9
        first, late = change(early, wb), change(DashboardView(), wb)
        for found in (first, late):
            assert found["what"].startswith("reshard after forward: true \u2192 false")
            assert (found["at_step"], found["before"]["num_steps"], found["after"]["num_steps"]) == (6, 4, 3)
        wb.reshard("model", api="classic")
        wb.step(3)  # 10 to 12
        for answers in (early, DashboardView()):
            found = change(answers, wb)
            assert found["what"].startswith("api: fully_shard \u2192 classic")
            assert (found["at_step"], found["before"]["num_steps"], found["after"]["num_steps"]) == (10, 3, 2)
        steps = Steps().take(wb.trace)
    assert change(DashboardView(), wb) == found, "a dashboard first shown after a stop reports it too"
    assert steps["step"].tolist() == [0, 1, 2, 3, 4, *range(6, 13)]
    assert len(np.unique(steps["model"])) == 1, "it is the same model, so its curve goes on"
    assert training.summary(wb.trace).cuts == ()
