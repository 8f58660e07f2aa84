"""What a plan says: whether it fits, of what the peak consists, and what is left out."""

from dataclasses import replace

import pytest

from tests.helpers.calibrations import CALIBRATION
from workbench.events import Category
from workbench.protocol.planning import PlannedRanks
from workbench.reports.plan_report import NOT_COUNTED, PlanReport, error_of

GIB = 2**30
REPORT = PlanReport(
    device="h100-80gb",
    num_ranks=512,
    num_hosts=64,
    step=1,
    peak_bytes=81 * GIB,
    peak_bytes_by_category={Category.OPTIMIZER_STATE: 60 * GIB, Category.SHARDED_PARAMS: 21 * GIB},
    peak_unit="blocks.3",
    memory_bytes=80 * GIB,
    host_bytes=0,
    step_ns=1_500_000_000,
    collectives=(),
    trace="run.plan.trace",
)


def test_what_does_not_fit_is_said_with_the_class_that_is_the_most():
    assert str(REPORT).splitlines()[:2] == [
        "rank 0 of 512 needs 81.0 GiB of the 80.0 GiB on h100-80gb; a step takes at least 1.50 s",
        "it does not fit: the largest class is optimizer state, 60.0 GiB",
    ]
    assert not REPORT.fits


def test_what_fits_has_no_problem_and_says_what_is_not_counted():
    report = replace(REPORT, memory_bytes=90 * GIB, num_ranks=1)
    assert (report.fits, report.problem) == (True, "")
    assert report.headline.startswith("one rank needs 81.0 GiB of the 90.0 GiB")
    facts = dict(report.facts())
    assert facts["at the peak"] == "optimizer state 60.0 GiB, sharded params 21.0 GiB, while blocks.3 is at work"
    assert facts["not counted"] == NOT_COUNTED
    assert facts["see it"] == "workbench view run.plan.trace, or %fsdp compare run.plan.trace last"
    assert dict(replace(report, trace="plan").facts())["see it"] == "%fsdp compare plan last"


@pytest.mark.parametrize(
    ("calibration", "num_ranks", "error"),
    [
        (None, 4, ""),
        (CALIBRATION, 4, "off by up to 10.0% in 2 steps when calibrated"),
        (CALIBRATION, 2, "measured figures of 4 ranks; the error on 2 is not known"),
        (replace(CALIBRATION, held_out=()), 4, "measured figures, whose error is not known"),
    ],
)
def test_a_time_says_how_far_it_may_be_off(calibration, num_ranks, error):
    machine = replace(CALIBRATION.machine("here"), calibration=calibration)
    assert error_of(PlannedRanks(machine=machine, num_ranks=num_ranks)) == error
    report = replace(REPORT, time_error=error)
    assert f"a step takes about 1.50 s ({error})" in report.headline or not error
    assert dict(report.facts())["time"] == error or "peak rates" in dict(report.facts())["time"]
