"""The evaluation of samples of steps on GPUs."""

from bench import compare
from bench.__main__ import _cases
from bench.cases import ALONE, GPU_CASES, OURS, TORCH
from bench.compare import Effort
from bench.gpu import compare_gpu
from bench.processes import RankFailure
from bench.training import Sample
from workbench.base.devices import DEVICES

CASE = GPU_CASES["gpu-2ranks"]
NEEDS = {ALONE: (2, 10), TORCH: (8, 40), OURS: (6, 30)}  # milliseconds, MB


def on_ranks(num_ranks, _, case, name, num_steps, *, seats, device):
    assert (num_ranks, device) == (2, "cuda")
    ms, mb = NEEDS[name]
    return [([Sample(ms * 1_000_000, 0, 0)] * num_steps, mb * 1_000_000), ([Sample(1_000_000, 0, 0)] * num_steps, 1)]


def test_the_slowest_rank_and_the_largest_one_count(monkeypatch):
    monkeypatch.setattr(compare, "on_ranks", on_ranks)
    found = compare_gpu(CASE, Effort(rounds=2, steps=3, pairs=1))
    assert found["steps_ms"] == {name: ms for name, (ms, _) in NEEDS.items()}
    assert found["peak_mb"] == {name: mb for name, (_, mb) in NEEDS.items()}
    assert (found["to_torch"], found["peak_to_torch"], found["failed"]) == (0.75, 0.75, {})


def test_an_implementation_that_fails_is_left_out(monkeypatch):
    def fails(num_ranks, function, case, name, *args, **where):
        if name == TORCH:
            raise RankFailure("no such luck")
        return on_ranks(num_ranks, function, case, name, *args, **where)

    monkeypatch.setattr(compare, "on_ranks", fails)
    found = compare_gpu(CASE, Effort(rounds=1, steps=1, pairs=1))
    assert set(found["steps_ms"]) == {ALONE, OURS}
    assert "to_torch" not in found
    assert found["failed"] == {f"steps of {TORCH}": "no such luck"}


def test_nothing_is_measured_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(type(DEVICES["cuda"]), "may_be_here", lambda _: False)
    assert _cases("gpu", []) == []
