"""A sample of what the benchmark compares: bytes by class, and collectives, of plans and of CPU ranks."""

import pytest

from bench.plan import DOCUMENT, compare, document, measuring
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
    with measuring():
        found = compare(rank, planned_ranks(device, num_ranks, None), device, model, policy, 2)
    assert found.differing_bytes == {}
    assert found.planned.collectives == found.measured.collectives
    assert found.planned.step_ns > 0
    peaks = documented(f"{model}, {policy}")[::3]
    assert peaks[num_ranks // 4] == f"{found.planned.peak_bytes / 2**20:.2f} MiB"


def documented(name):
    """Return the cells of a row of the table in the documents."""
    (row,) = [line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_the_table_has_every_policy_of_every_model_on_both_numbers_of_ranks():
    rows = [documented(f"{model}, {policy}") for model in MODELS for policy in POLICIES]
    assert {len(row) for row in rows} == {6}


def test_the_table_shows_what_differs():
    row = {"peak_planned": 2**20, "peak_measured": 2**21, "differing_bytes": {"activations": (1, 2)}}
    times = {"planned_ms": 2.0, "measured_ms": 1.0, "time_error_percent": 100.0}
    totals = {"bytes_equal": 0, "calls_equal": 1, "compared": 1, "calibration_error_percent": 9.0}
    errors = {"median_time_error_percent": 100.0, "largest_time_error_percent": 100.0}
    text = document({"2 ranks": {"rows": {"m, p": row | times}, **totals, **errors}})
    assert "| m, p | 2.00 MiB, planned 1.00 | 1 ms | 2 ms, +100% |" in text
    assert "bytes equal in 0 of 1, collectives in 1" in text
