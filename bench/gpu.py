"""Steps on GPUs, ours and torch's: times, and the allocator's peak."""

from typing import Any

import torch

from bench.cases import ALONE, OURS, TORCH, Case
from bench.compare import Effort, Runs, in_rounds, row
from bench.training import Sample, measure

NAMES = (ALONE, TORCH, OURS)


def compare_gpu(case: Case, effort: Effort) -> dict[str, Any]:
    """Measure one case under compute alone, torch's engine and ours; a step ends when the device has finished it."""
    runs = Runs(device=case.device)
    found = in_rounds(runs, case, NAMES, effort, _measure_both)
    whole = {name: starts for name, starts in found.items() if starts and all(starts)}
    steps_ms = {
        name: row([[samples for samples, _ in ranks] for ranks in starts])["wall_ms"]["median"]
        for name, starts in whole.items()
    }
    peak_mb = {name: max(peak for ranks in starts for _, peak in ranks) / 1e6 for name, starts in whole.items()}
    ratios = {}
    if {OURS, TORCH} <= whole.keys():
        ratios = {"to_torch": steps_ms[OURS] / steps_ms[TORCH], "peak_to_torch": peak_mb[OURS] / peak_mb[TORCH]}
    return {"steps_ms": steps_ms, "peak_mb": peak_mb, **ratios, "failed": runs.failed}


def _measure_both(case: Case, name: str, num_steps: int) -> tuple[list[Sample], int]:
    """Return the samples of this rank, and its allocator's peak in bytes."""
    return measure(case, name, num_steps), torch.cuda.max_memory_allocated()
