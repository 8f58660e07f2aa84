"""Plans beside measured steps: bytes by class, collectives and times of each policy, on calibrated CPU ranks.

Measured on ranks with c10d's own collectives (``WORKBENCH_COMM=default``), which are those of other machines: a plan is
not for the shared memory of ranks on one host.

A machine that others use is at times faster than at others: beside each policy a reference step is run, and a plan's
time is that of the machine at the speed which it had then.

``python -m bench.plan`` writes the table of docs/plan.md from build/bench.json.
"""

import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.planned import MODELS, POLICIES, STEPS, train
from tests.helpers.forked_ranks import POOL
from tests.helpers.watched import watch
from workbench.events import Category
from workbench.models.engines import ACTIVATIONS
from workbench.protocol.commands import Plan
from workbench.protocol.planning import CALLED, PlannedRanks, planned_ranks
from workbench.replay.training import summary
from workbench.reports.plan_report import PlanReport, described
from workbench.script.calibrator import HELD_OUT, CalibratingRanks, calibrate
from workbench.script.planner import PlannedRank, plan_script
from workbench.trace import Trace

Tree = dict[str, Any]
ENVIRONMENT = {"WORKBENCH_COMM": "default", ACTIVATIONS: "1"}
REFERENCE = HELD_OUT[0]


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
        """Bytes at the peak, planned and measured, of the classes in which they differ.

        The peak does not include what the pools of CPU ranks keep unused, which a plan does not have.
        """
        planned, measured = self.planned.peak_bytes_by_category, self.measured.peak_bytes_by_category
        pairs = {
            key: (planned.get(key, 0), measured.get(key, 0)) for key in {*planned, *measured} - {Category.RESERVED}
        }
        return {key.words: pair for key, pair in pairs.items() if pair[0] != pair[1]}


@contextmanager
def measuring() -> Iterator[None]:
    """In the body, :func:`compare` runs every policy on the same ranks, which are forked once."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    was_open, POOL.is_open = POOL.is_open, True
    POOL.end()  # ranks without this environment
    try:
        yield
    finally:
        POOL.end()
        POOL.is_open = was_open
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def compare(rank: PlannedRank, ranks: PlannedRanks, device: str, model: str, policy: str, steps: int) -> Compared:
    """Plan a policy's second step, and run some steps of it; within :func:`measuring`."""
    command = Plan(CALLED, ranks=ranks.num_ranks, device=device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = os.path.join(folder, "plan.trace")
        planned = plan_script("bench.planned", (model, policy), command, out, rank, module=True)
    trace = watch(ranks.num_ranks, train, model, policy, steps).trace
    measured = described(replace(trace, ranks=(trace.rank(0),)), ranks, "")
    return Compared(planned=planned, measured=replace(measured, step_ns=_step_ns(trace)))


def _step_ns(trace: Trace) -> int:
    """Return the median of rank 0's steps but the first, in which the optimizer makes its state."""
    times = summary(trace).step_times
    return int(statistics.median(times.high[1:]))


def compare_all(num_ranks: int, *, quick: bool, say: Callable[[str], object] = print) -> Tree:
    """Calibrate this machine, then return each policy's comparison, and a summary."""
    names = [(model, policy) for model in MODELS for policy in POLICIES][: 2 if quick else None]
    rows = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        PlannedRank(lambda _: None) as rank,
        CalibratingRanks(num_ranks, "cpu") as calibrated,
        measuring(),
    ):
        device = os.path.join(folder, "machine.json")
        calibration = calibrate(num_ranks, "cpu", device, lambda _: None).calibration
        (usual_ns,) = (step.measured_ns for step in calibration.held_out if step.what == REFERENCE)
        ranks = planned_ranks(device, num_ranks, None)
        before_ns = calibrated.train(REFERENCE)
        for done, (model, policy) in enumerate(names, 1):
            found = compare(rank, ranks, device, model, policy, STEPS)
            after_ns = calibrated.train(REFERENCE)
            rows[f"{model}, {policy}"] = _row(found, (before_ns + after_ns) / 2 / usual_ns)
            before_ns = after_ns
            say(f"  {done} of {len(names)}: {model}, {policy}")
    return {"calibration_error_percent": calibration.error_percent, **_summary(rows), "rows": rows}


def _row(found: Compared, slowdown: float) -> Tree:
    """Return a comparison as data.

    Args:
        found: the comparison.
        slowdown: time of the reference step then, relative to that when the machine was calibrated.
    """
    planned_ns = found.planned.step_ns * slowdown
    return {
        "calls_equal": found.are_calls_equal,
        "differing_bytes": found.differing_bytes,
        "peak_planned": found.planned.peak_bytes,
        "peak_measured": found.measured.peak_bytes,
        "slowdown": slowdown,
        "planned_ms": planned_ns / 1e6,
        "measured_ms": found.measured.step_ns / 1e6,
        "time_error_percent": 100 * (planned_ns / found.measured.step_ns - 1),
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


DOCUMENT = Path(__file__).parents[1] / "docs" / "plan.md"
_PLACE = re.compile(r"(?<=<!-- from build/bench.json -->\n).*?(?=<!-- end -->)", re.DOTALL)


def document(found: Mapping[str, Tree]) -> str:
    """Return the table of docs/plan.md: of each policy, its comparison on each number of ranks.

    Args:
        found: the part ``plan`` of build/bench.json, by number of ranks: ``"2 ranks"``.
    """
    titles = " | ".join(f"{num}: peak | step | planned" for num in found)
    lines = [f"| model and policy | {titles} |", f"|---|{'---:|' * 3 * len(found)}"]
    first, *_ = found.values()
    for name in first["rows"]:
        cells = " | ".join(_cells(each["rows"][name]) for each in found.values())
        lines.append(f"| {name} | {cells} |")
    said = "; ".join(
        f"{num}: bytes equal in {each['bytes_equal']} of {each['compared']}, collectives in {each['calls_equal']}, "
        f"median error of a step's time {each['median_time_error_percent']:.0f}%, largest "
        f"{each['largest_time_error_percent']:.0f}% ({each['calibration_error_percent']:.0f}% when calibrated)"
        for num, each in found.items()
    )
    return "\n".join(["", *lines, "", f"{said}.", ""])


def _cells(row: Tree) -> str:
    peak = f"{row['peak_measured'] / 2**20:.2f} MiB"
    if row["differing_bytes"]:
        peak += f", planned {row['peak_planned'] / 2**20:.2f}"
    return f"{peak} | {row['measured_ms']:.0f} ms | {row['planned_ms']:.0f} ms, {row['time_error_percent']:+.0f}%"


def main() -> None:
    """Write the table of docs/plan.md from build/bench.json."""
    found = json.loads(Path("build/bench.json").read_text("utf-8"))["plan"]
    DOCUMENT.write_text(_PLACE.sub(lambda _: document(found), DOCUMENT.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
