"""Findings about what overlaps, and about the time that compute waits for communication."""

import pytest

from tests.helpers.simulated_job import Setup, simulate
from workbench.course import exposed, overlaps, waited
from workbench.errors import UsageError
from workbench.events import Kind
from workbench.trace.columns import RankTrace, Trace


@pytest.fixture(scope="module")
def ahead():
    return simulate(Setup())


@pytest.fixture(scope="module")
def waits():
    return simulate(Setup(prefetch=False))


def test_a_gather_that_spans_the_work_of_another_unit_is_ahead(ahead, waits):
    assert overlaps(ahead).sentence == "each rank issues 6 of 7 all-gathers ahead of another unit's work, in step 2"
    finding = overlaps(waits, "all-gather")
    assert finding.sentence.startswith(
        "ranks 0-3 issue 0 of 7 all-gathers ahead in step 2, not at least 1: the all-gather of"
    )
    assert overlaps(waits, "reduce_scatter").ok


def test_the_number_that_is_wanted_is_a_limit(ahead):
    assert overlaps(ahead, at_least=6).ok
    assert overlaps(ahead, at_least=7).sentence == (
        "ranks 0-3 issue 6 of 7 all-gathers ahead in step 2, not at least 7"
    )


def test_a_wait_before_the_last_work_is_found(ahead):
    assert overlaps(ahead, to_end=True).sentence.startswith(
        "ranks 0-3 wait for 7 all-gathers in step 2 while units still have work to do: issue them while units work"
    )
    assert overlaps(ahead, "broadcast", at_least=0, to_end=True).ok


def test_without_any_collective_no_reason_is_given(ahead):
    assert overlaps(ahead, "broadcast").sentence == "ranks 0-3 issue 0 of 0 broadcasts ahead in step 2, not at least 1"


def without(trace, unit, chosen):
    """Return a trace without the chosen rows of a unit."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows[~(chosen(rank.rows) & (rank.rows["unit"] == unit))].copy()
        rows["seq"] = range(len(rows))
        ranks.append(RankTrace(rank.rank, rows, rank.start))
    return Trace(trace.header, tuple(ranks))


def test_a_unit_that_computes_before_its_gather_was_waited_for_is_named(ahead):
    assert waited(ahead).sentence == "each unit waits for its all-gather before it computes, in step 2"
    never = without(ahead, 1, lambda rows: rows["kind"] == Kind.WAIT)
    assert waited(never).sentence.startswith(
        "ranks 0-3 compute with blocks.1 in step 2 before their all-gathers were waited for: the right numbers are luck"
    )


def test_a_reference_gives_the_limit_of_exposed_communication(ahead, waits):
    assert exposed(ahead, reference=ahead, ratio=1).ok
    finding = exposed(waits, reference=ahead)
    assert not finding.ok
    assert (
        "times the 625 µs of the reference, more than 1.5: the all-gather of each unit is waited for"
        in finding.sentence
    )
    assert exposed(waits, reference=ahead, ratio=4).ok


def test_a_difference_within_the_noise_of_a_step_passes(ahead):
    late = simulate(Setup(reshard_root=True))
    assert exposed(late, reference=ahead, ratio=1).ok, "0.09 ms of a step of 6.9 ms"


def test_a_limit_in_nanoseconds(ahead):
    assert exposed(ahead, at_most_ns=625_001).ok
    assert exposed(ahead, at_most_ns=1_000).sentence.endswith("for communication, more than 1.00 µs")


def test_exposed_needs_exactly_one_limit(ahead):
    for limits in ({}, {"at_most_ns": 1, "reference": ahead}):
        with pytest.raises(UsageError, match="exposed needs a limit"):
            exposed(ahead, **limits)


def test_a_run_without_steps_is_a_finding(ahead):
    nothing = Trace(ahead.header)
    assert "no recorded step" in exposed(nothing, at_most_ns=1).sentence
    assert "the reference run has no recorded step" in exposed(ahead, reference=nothing).sentence
    assert "no recorded step" in overlaps(nothing).sentence
