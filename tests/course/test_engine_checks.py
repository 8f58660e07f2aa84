"""The findings about an FSDP behind CS336's adapters: the right one passes, each wrong one fails with its reason."""

import pytest

from tests.helpers.package_source import REPO
from tests.helpers.student_fsdp import SOLUTIONS, trained
from tests.helpers.watched import watch
from workbench.course import engine_findings
from workbench.course.engine_checks import least_padding, same_units
from workbench.trace.columns import Trace

RIGHT = "solution"
WRONG = {
    "gathers_for_ever": "ranks 0-1 issued 0 all-gathers in step 3, not 18: FSDP gathers each unit for forward and "
    "again for backward; these are never freed, and were unsharded when the step began: blocks.0-3 and (root)",
    "keeps_after_forward": "ranks 0-1 issued 10 all-gathers in step 3, not 18: FSDP gathers each unit again for "
    "backward; these keep their full parameters after forward: blocks.0-3 (peak 92.1 KiB, by formula 75.5 KiB "
    "without them)",
    "sums": "they are the sum over 2 ranks instead of the mean: divide by the number of ranks",
    "reduces_each_micro_batch": "ranks 0-1 issued 10 reduce-scatters in step 3, not 5: your engine reduces after"
    " each of 2 micro-batches: let gradients accumulate, and reduce once, after the "
    "last one",
    "reduces_in_another_order": "ranks 0-1 part: rank 0 issued reduce-scatter of blocks.0, rank 1 reduce-"
    "scatter of blocks.3: each rank must issue the same collectives in the same order",
    "forgets_the_last_block": "the units are blocks.0-2 and (root); blocks.3 is missing: parameters in no unit "
    "are not sharded, and nothing reduces their gradients: the ranks part",
    "waits_for_each_gather": "ranks 0-1 issue 0 of 18 all-gathers ahead in step 3, not at least 1: the all-"
    "gather of each unit is waited for before anything else runs; issue it with "
    "async_op=True before another unit runs",
    "pads_too_much": "an all-gather of blocks.0 has 8,520 B, not 8,512, and so on for blocks.1-3 and "
    "(root): a flat parameter is padded to the next multiple of the number of ranks: "
    "by -length % world_size elements",
    "updates_the_full_copy": "they are those from before training: the optimizer has to update the shards, as "
    "the next all-gather overwrites the full parameters",
    "frees_on_paper": "units that reshard in step 3 while their full parameters stay in memory: blocks.0-3 and (root): "
    "reshard() only announces it; then empty the storage",
    "keeps_own_weights": "no broadcast precedes the first step, and each rank keeps its part of other "
    "weights: send those of rank 0",
}
BUSY = 100.0
"""Ratio of exposed communication that no noise reaches: ``test_overlap_checks`` has tests of its limit."""


def values_of(seen):
    found = seen.results[0]
    names = {"initial weights": "initial", "gradients": "gradients", "losses": "losses", "weights": "weights"}
    return {name: (found[key], found["expected"][key]) for name, key in names.items()}


@pytest.fixture(scope="module")
def right():
    return watch(2, trained, RIGHT)


def test_each_solution_has_its_sentence():
    files = {path.stem for path in (REPO / SOLUTIONS.replace(".", "/")).glob("[a-z]*.py")}
    assert files == {RIGHT, *WRONG}
    assert len(WRONG) == 11


def test_the_right_solution_passes(right):
    findings = list(engine_findings(right.trace, right.trace, values_of(right), exposed_ratio=BUSY))
    assert [finding.sentence for finding in findings if not finding.ok] == []
    assert len(findings) == 12
    peak, overlap, exposed = (finding.sentence for finding in findings[-3:])
    assert "1.00 times the reference's" in peak
    assert "14 of 18 all-gathers ahead" in overlap
    assert "1.00 times the" in exposed


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_solution_fails_with_its_reason(name, right):
    seen = watch(2, trained, name)
    found = [
        each.sentence
        for each in engine_findings(seen.trace, right.trace, values_of(seen), exposed_ratio=BUSY)
        if not each.ok
    ]
    assert [sentence for sentence in found if WRONG[name] in sentence], found


def test_only_the_peak_and_the_calls_of_an_engine_that_keeps_after_forward_are_wrong(right):
    seen = watch(2, trained, "keeps_after_forward")
    wrong = [
        each for each in engine_findings(seen.trace, right.trace, values_of(seen), exposed_ratio=BUSY) if not each.ok
    ]
    assert len(wrong) == 2
    assert "1.22 times the reference's 75.5 KiB, more than 1.1 (backward of blocks.3: 5 units unsharded)" in str(
        wrong[1]
    )


def test_a_run_without_a_step_is_one_finding(right):
    nothing = Trace(right.trace.header)
    (mine,) = engine_findings(nothing, right.trace)
    assert mine.sentence.startswith("the run has no recorded step: train at least one")
    (other,) = engine_findings(right.trace, nothing)
    assert other.sentence.startswith("the reference run has no recorded step")


def test_units_that_the_reference_lacks_are_named(right):
    less = watch(2, trained, "forgets_the_last_block").trace
    assert same_units(right.trace, 3, less, 3).sentence.endswith("the reference has no blocks.3")


def test_padding_of_parameters_that_are_not_flat_is_that_of_their_rows():
    from tests.helpers.simulated_job import Setup, simulate

    assert least_padding(simulate(Setup(num_ranks=3)), 1).ok
