"""What a plan says: whether it fits, of what the peak consists, and what is left out."""

from dataclasses import replace

from workbench.events import Category
from workbench.reports.plan_report import NOT_COUNTED, PlanReport

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
        "it does not fit: 60.0 GiB of optimizer state alone are the most",
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
