"""The measurement of a trace, on one that is short."""

from tests.bench.traces import measure_trace
from workbench.views import VIEWS


def test_everything_is_measured():
    found = measure_trace(repeats=1, num_states=3, num_steps=2)
    assert set(found["figures_ms"]) == set(VIEWS)
    assert found["figure_ms"] == max(found["figures_ms"].values())
    assert found["state_ms"] >= found["first_state_ms"] > 0
    assert 0 < found["file_mb"] < 1
    assert all(ms > 0 for ms in found["others_ms"].values())
