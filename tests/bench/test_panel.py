"""The arithmetic of the panel's measurements."""

import pytest

from bench.panel import delays, step_ends_ms
from tests.helpers.built_panel import bundle_bytes
from tests.helpers.simulated_job import example_trace


def test_a_step_was_shown_when_so_many_or_more_were():
    ends = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert delays(ends, [(1, 90.0), (3, 100.0), (4, 130.0)]) == [80.0, 70.0, 90.0]


def test_repeated_and_outdated_states_add_nothing():
    assert delays([10.0, 20.0], [(1, 15.0), (2, 25.0), (1, 30.0), (2, 35.0)]) == [5.0]


def test_a_step_ends_with_the_last_rank():
    trace = example_trace(num_ranks=2, steps=3)
    ends = step_ends_ms(trace)
    assert len(ends) == 3
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(max(rank.rows["t_ns"].max() for rank in trace.ranks) / 1e6, rel=0.1)


def test_a_bundle_is_its_scripts(tmp_path):
    (tmp_path / "static").mkdir()
    for name, size in (("a.js", 5), ("b.js", 7), ("a.js.map", 90)):
        (tmp_path / "static" / name).write_bytes(bytes(size))
    assert bundle_bytes(tmp_path) == 12
