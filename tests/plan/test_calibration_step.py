"""The trainings of a calibration are what the calibrator names, and each takes a step."""

import pytest
import torch

from tests.helpers.forked_ranks import on_one_rank
from workbench.plan.calibration_step import MEASURED, STEPS, Training
from workbench.script.calibrator import FITTED, HELD_OUT

TRAININGS = [
    Training(width=32, num_tokens=8),
    Training(width=32, num_tokens=8, is_bf16=True),
    Training(width=32, blocks=0),
]


def test_the_calibrator_names_them():
    assert tuple(STEPS) == (FITTED, *HELD_OUT)
    assert all(training.is_sharded for training in STEPS.values())
    assert not any(training.is_sharded for training in MEASURED.values())
    assert not set(STEPS.values()) & set(MEASURED.values())


@pytest.mark.parametrize("training", [*TRAININGS, Training(width=32, num_tokens=8, is_sharded=True, is_bf16=True)])
@on_one_rank
def test_each_takes_a_step(training):
    step = training.make(torch.device("cpu"))
    step()
    step()
