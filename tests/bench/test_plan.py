"""A sample of what the benchmark compares: bytes by class, and collectives, of plans and of CPU ranks."""

import pytest

from bench.plan import compare
from bench.planned import MODELS, POLICIES
from tests.helpers.calibrations import CALIBRATION
from workbench.base.machines import write_calibration
from workbench.protocol.planning import planned_ranks
from workbench.script.planner import PlannedRank

SAMPLE = [
    ("GPT of width 144, tied", "default", 2),
    ("layers of width 384", "checkpoint", 2),
    ("GPT of width 256", "bf16", 4),
]


@pytest.fixture(scope="module")
def rank():
    with PlannedRank(lambda _: None) as process:
        yield process


def test_there_are_twelve_policies_of_three_models():
    assert (len(POLICIES), len(MODELS)) == (12, 3)


@pytest.mark.parametrize(("model", "policy", "num_ranks"), SAMPLE)
def test_a_plan_has_the_bytes_and_collectives_of_a_run(model, policy, num_ranks, rank, tmp_path):
    device = str(tmp_path / "machine.json")
    write_calibration(CALIBRATION, device)
    found = compare(rank, planned_ranks(device, num_ranks, None), device, model, policy, 2)
    assert found.differing_bytes == {}
    assert found.planned.collectives == found.measured.collectives
    assert found.planned.step_ns > 0
