"""The measurement of a trace, with a short one."""

from bench.traces import measure_scale_of, measure_trace
from tests.helpers.many_ranks import Scale
from workbench.views import VIEWS


def test_everything_is_measured():
    found = measure_trace(repeats=1, num_states=3, num_steps=2)
    assert set(found["figures_ms"]) == set(VIEWS)
    assert found["figure_ms"] == max(found["figures_ms"].values())
    assert found["state_ms"] >= found["first_state_ms"] > 0
    assert found["explain_ms"] > 0
    assert 0 < found["file_mb"] < 1
    assert all(ms > 0 for ms in found["others_ms"].values())


def test_of_many_ranks_everything_is_measured_too():
    few = Scale(num_ranks=24, num_units=3, steps=2, late=20, ended=5, larger=9)
    found = measure_scale_of(few, repeats=1, num_states=3)
    assert set(found["figures_ms"]) == set(found["first_figures_ms"]) == set(VIEWS)
    assert found["figure_ms"] == max(found["figures_ms"].values())
    assert all(found[name] > 0 for name in ("load_ms", "save_ms", "state_ms", "first_answer_ms", "loaded_mb"))
