"""The simulated hours: the ranks' doors answer with a trace as real ranks would record it."""

import pytest

from bench.soak import NUM_RANKS, STEP_S, LongRun, growth_mb
from workbench.replay import training
from workbench.trace import check, steps


def test_the_hours_pass_look_by_look_and_end():
    run = LongRun(hours=10 * STEP_S / 3600, seconds_a_look=4 * STEP_S)
    seen = []
    while not run.is_over.is_set():
        trace = run.pulse().trace
        seen.append(len(steps(trace)))
    assert seen == [5, 9, 11]  # the part before is not repeated
    assert check(trace) == []
    assert run.facts() == {
        "hours": 10 * STEP_S / 3600,
        "steps": 10,
        "rows": trace.num_rows,
        "rows_kept": trace.num_rows,
        "looks": 3,
    }
    assert run.pulse().trace == trace


def test_a_step_takes_as_long_as_it_should_on_every_rank():
    trace = LongRun(hours=5 * STEP_S / 3600, seconds_a_look=5 * STEP_S).pulse().trace
    for rank in range(NUM_RANKS):
        ends = training.advance(training.start(), trace.rank(rank).rows).steps["end_ns"]
        assert list(ends[2:] - ends[1:-1]) == pytest.approx([STEP_S * 1e9] * 4, rel=0.02)


def test_growth_is_to_the_most_there_was():
    assert growth_mb([5_000_000, 4_000_000, 12_000_000, 6_000_000]) == 7.0
