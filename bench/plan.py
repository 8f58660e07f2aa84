"""Plans beside measured steps: bytes by class, collectives and times of each policy, on calibrated CPU ranks.

Measured on ranks with c10d's own collectives (``WORKBENCH_COMM=default``), which are those of other machines: a plan is
not for the shared memory of ranks on one host.
"""

import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.planned import MODELS, POLICIES, STEPS, train
from tests.helpers.watched import watch
from workbench.models.engines import ACTIVATIONS
from workbench.protocol.commands import Plan
from workbench.protocol.planning import CALLED, PlannedRanks, planned_ranks
from workbench.replay.training import summary
from workbench.reports.plan_report import PlanReport, described
from workbench.script.calibrator import calibrate
from workbench.script.planner import PlannedRank, plan_script
from workbench.trace import Trace

Tree = dict[str, Any]
ENVIRONMENT = {"WORKBENCH_COMM": "default", ACTIVATIONS: "1"}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A policy that was planned and run.

    Attributes:
        planned, measured: of rank 0.
    """

    planned: PlanReport
    measured: PlanReport

    @property
    def are_calls_equal(self) -> bool:
        """Whether collectives, their number and their payloads are equal."""
        return self.planned.collectives == self.measured.collectives

    @property
    def differing_bytes(self) -> dict[str, tuple[int, int]]:
        """Bytes at the peak, planned and measured, of the classes in which they differ."""
        planned, measured = self.planned.peak_bytes_by_category, self.measured.peak_bytes_by_category
        pairs = {key: (planned.get(key, 0), measured.get(key, 0)) for key in {*planned, *measured}}
        return {key.words: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def time_error_percent(self) -> float:
        """How far the planned time is from the measured one; negative: below."""
        return 100 * (self.planned.step_ns / self.measured.step_ns - 1)


def run(num_ranks: int, model: str, policy: str, steps: int) -> Trace:
    """Return the trace of a run on ranks of this machine."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        return watch(num_ranks, train, model, policy, steps).trace
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def compare(rank: PlannedRank, ranks: PlannedRanks, device: str, model: str, policy: str, steps: int) -> Compared:
    """Plan a policy, and run it."""
    command = Plan(CALLED, ranks=ranks.num_ranks, device=device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = os.path.join(folder, "plan.trace")
        planned = plan_script("bench.planned", (model, policy), command, out, rank, module=True, steps=steps)
    trace = run(ranks.num_ranks, model, policy, steps)
    measured = described(replace(trace, ranks=(trace.rank(0),)), ranks, "")
    return Compared(planned=planned, measured=replace(measured, step_ns=_step_ns(trace)))


def _step_ns(trace: Trace) -> int:
    """Return the median of rank 0's steps but the first, in which the optimizer makes its state."""
    times = summary(trace).step_times
    return int(statistics.median(times.high[1:]))


def compare_all(num_ranks: int, *, quick: bool) -> Tree:
    """Calibrate this machine, then return each policy's comparison, and a summary."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, PlannedRank(lambda _: None) as rank:
        device = os.path.join(folder, "machine.json")
        calibration = calibrate(num_ranks, "cpu", device, lambda _: None).calibration
        ranks = planned_ranks(device, num_ranks, None)
        rows = {
            f"{model}, {policy}": _row(compare(rank, ranks, device, model, policy, STEPS))
            for model in list(MODELS)[: 1 if quick else None]
            for policy in list(POLICIES)[: 2 if quick else None]
        }
    return {"calibration_error_percent": calibration.error_percent, **_summary(rows), "rows": rows}


def _row(found: Compared) -> Tree:
    return {
        "calls_equal": found.are_calls_equal,
        "differing_bytes": found.differing_bytes,
        "peak_planned": found.planned.peak_bytes,
        "peak_measured": found.measured.peak_bytes,
        "planned_ms": found.planned.step_ns / 1e6,
        "measured_ms": found.measured.step_ns / 1e6,
        "time_error_percent": found.time_error_percent,
    }


def _summary(rows: Mapping[str, Tree]) -> Tree:
    errors = sorted(abs(row["time_error_percent"]) for row in rows.values())
    return {
        "compared": len(rows),
        "calls_equal": sum(row["calls_equal"] for row in rows.values()),
        "bytes_equal": sum(not row["differing_bytes"] for row in rows.values()),
        "median_time_error_percent": statistics.median(errors),
        "largest_time_error_percent": errors[-1],
    }
