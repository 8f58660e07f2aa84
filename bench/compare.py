"""One case under all implementations: the schedule of the runs, and the evaluation of the samples.

Times on a shared machine drift. So each of several rounds starts every implementation in new processes, and each round
begins with a different one; the results are ratios of medians over all rounds. A second run has only torch's engine and
compute alone; its rounds alternate with those of the first. Its ratio is a ratio of ratios, (ours / alone) : (torch /
alone), each from its own run, so that a machine that becomes faster in between favours neither.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from bench import sharding
from bench.cases import (
    ALONE,
    CLASSIC,
    CLASSIC_TORCH,
    CLASSICS,
    DDP,
    IMPLEMENTATIONS,
    OF_OURS,
    OURS,
    TORCH,
    WITHOUT_OURS,
    Case,
    num_params,
)
from bench.memory import Bytes, measure_bytes
from bench.parts import MeteredStep, budget, measure_parts
from bench.processes import RankFailure, on_ranks
from bench.recording import Recording, measure_recording
from bench.stats import median_interval, rotated, spread
from bench.training import Sample, measure
from tests.helpers.ranks_on_hosts import Seat

Tree = dict[str, Any]
Step = TypeVar("Step")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured.

    Attributes:
        rounds: starts of each implementation.
        steps: steps measured per start, after a warm-up.
        pairs: number of recorded steps, and of plain ones.
        blocks: blocks of watched steps, and of each other kind.
        block_s: approximate duration of a block, in seconds.
        starts: starts of a cluster.
        repeats: repetitions of short operations.
        many_ranks: numbers of ranks at which the cost of a command per rank is measured.
        many_units: numbers of units, likewise.
    """

    rounds: int
    steps: int
    pairs: int
    blocks: int = 2
    block_s: float = 1.0
    starts: int = 1
    repeats: int = 20
    many_ranks: tuple[int, ...] = (2, 4)
    many_units: tuple[int, ...] = (10, 40)


@dataclass
class Runs:
    """Starts ranks and records failures: the failure of one implementation does not lose the others' results.

    Attributes:
        failed: traceback by measurement and implementation, such as ``steps of ours``.
        seats: the simulated host of each rank, if not this one.
        device: type of the ranks' devices.
    """

    failed: dict[str, str] = field(default_factory=dict)
    seats: Sequence[Seat] = ()
    device: str = "cpu"

    def on_ranks(self, what: str, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Like :func:`bench.processes.on_ranks`; return an empty list if a rank failed, now or before."""
        if what in self.failed:
            return []
        try:
            return on_ranks(num_ranks, function, *args, seats=self.seats, device=self.device)
        except RankFailure as error:
            self.failed[what] = str(error)
            return []


def compare(case: Case, effort: Effort, *, with_parts: bool) -> Tree:
    """Measure one case; :mod:`bench.report` describes the result."""
    runs = Runs()
    steps, torch_only = _steps(case, effort, runs)
    against_second_run(steps, torch_only)
    return {
        "what": case.describe(),
        "num_params": num_params(case.config),
        "num_ranks": case.num_ranks,
        "is_bf16": case.is_bf16,
        "steps": steps,
        "steps_torch_only": torch_only,
        "parts": _parts(case, effort, runs, steps) if with_parts else {},
        "bytes": _bytes(case, runs),
        "failed": runs.failed,
    }


def _steps(case: Case, effort: Effort, runs: Runs) -> tuple[Tree, Tree]:
    """Measure steps in all rounds; return the rows of the first run and of the second."""
    both = {"steps": tuple(IMPLEMENTATIONS), "steps in the second run": WITHOUT_OURS}
    # per run and implementation: samples [start][rank][step]
    samples: dict[str, dict[str, list[list[Sample]]]] = {what: {n: [] for n in names} for what, names in both.items()}
    for number in range(effort.rounds):
        for what, names in both.items():
            for name in rotated(names, number):
                ranks = runs.on_ranks(f"{what} of {name}", case.num_ranks, measure, case, name, effort.steps)
                samples[what][name].append(ranks)
    first, second = (
        with_ratios({name: row(starts) for name, starts in found.items() if all(starts)}) for found in samples.values()
    )
    return first, second


def row(starts: Iterable[Sequence[Sequence[Sample]]]) -> Tree:
    """Summarise the steps of one implementation, per start and rank: a step takes as long as its slowest rank."""
    steps = list(zip(*joined(starts), strict=True))
    columns = {
        "wall_ms": [max(s.wall_ns for s in step) / 1e6 for step in steps],
        "cpu_ms": [statistics.fmean(s.cpu_ns for s in step) / 1e6 for step in steps],
        "optimizer_ms": [statistics.fmean(s.optimizer_ns for s in step) / 1e6 for step in steps],
    }
    return {name: spread(values).as_dict() for name, values in columns.items()}


def with_ratios(rows: Tree) -> Tree:
    """Add each row's ratio to compute alone, to DDP and to torch's, if these were measured."""
    for name, other in (("to_alone", ALONE), ("to_ddp", DDP), ("to_torch", TORCH)):
        for each in rows.values() if other in rows else ():
            each[name] = each["wall_ms"]["median"] / rows[other]["wall_ms"]["median"]
    return rows


def against_second_run(rows: Tree, torch_only: Mapping[str, Any]) -> None:
    """Add each row's ratio to torch's of the second run, which excludes ours."""
    reference = torch_only.get(TORCH, {}).get("to_alone")
    for each in rows.values():
        if reference is not None and "to_alone" in each:
            each["to_torch_only"] = each["to_alone"] / reference


def _parts(case: Case, effort: Effort, runs: Runs, steps: Tree) -> Tree:
    medians = {name: {k: each[f"{k}_ms"]["median"] for k in ("wall", "optimizer")} for name, each in steps.items()}
    names = [name for name in OF_OURS if {name, ALONE} <= medians.keys()]
    starts: dict[str, list[list[list[MeteredStep]]]] = {name: [] for name in names}
    for _ in range(effort.rounds):
        for name in names:
            starts[name].append(
                runs.on_ranks(f"parts of {name}", case.num_ranks, measure_parts, case, name, effort.steps)
            )
    return {
        name: budget(joined(found), medians[name]["wall"], medians[ALONE])
        for name, found in starts.items()
        if all(found)
    }


def joined(starts: Iterable[Sequence[Sequence[Step]]]) -> list[list[Step]]:
    """Concatenate each rank's steps over the starts: ``[[[1], [2]], [[3], [4]]]`` -> ``[[1, 3], [2, 4]]``."""
    return [[step for steps in rank for step in steps] for rank in zip(*starts, strict=True)]


def _bytes(case: Case, runs: Runs) -> Tree:
    found = {}
    for name in (TORCH, *OF_OURS):
        ranks: list[Bytes] = runs.on_ranks(f"bytes of {name}", case.num_ranks, measure_bytes, case, name)
        if ranks:
            found[name] = asdict(max(ranks, key=lambda rank: rank.peak))
    if TORCH in found:
        for each in found.values():
            each["to_torch"] = each["peak"] / found[TORCH]["peak"]
    return found


def in_rounds(
    runs: Runs, case: Case, names: Sequence[str], effort: Effort, function: Callable[[Case, str, int], Step]
) -> dict[str, list[list[Step]]]:
    """Return what ``function`` measured of each implementation, per start and rank."""
    found: dict[str, list[list[Step]]] = {name: [] for name in names}
    for number in range(effort.rounds):
        for name in rotated(names, number):
            found[name].append(runs.on_ranks(f"steps of {name}", case.num_ranks, function, case, name, effort.steps))
    return found


def compare_classic(case: Case, effort: Effort) -> Tree:
    """Measure steps and bytes of one case under both wrappers, ours and torch's, and under our ``fully_shard``."""
    runs = Runs()
    samples = in_rounds(runs, case, tuple(CLASSICS), effort, measure)
    steps_ms = {name: row(starts)["wall_ms"]["median"] for name, starts in samples.items() if all(starts)}
    found: Tree = {"steps_ms": steps_ms, "peak_mb": {}, "rest_mb": {}}
    for name in (CLASSIC_TORCH, CLASSIC):
        ranks: list[Bytes] = runs.on_ranks(f"bytes of {name}", case.num_ranks, measure_bytes, case, name)
        if ranks:
            found["peak_mb"][name] = max(rank.peak for rank in ranks) / 1e6
            most = max(ranks, key=lambda rank: rank.rest)
            found["rest_mb"][name] = most.rest / 1e6
            found[f"rest_mb of {name}"] = {what: num_bytes / 1e6 for what, num_bytes in most.rest_of.items()}
    return {
        **found,
        **_ratio("to_torch", steps_ms, CLASSIC_TORCH),
        **_ratio("to_fully_shard", steps_ms, OURS),
        **_ratio("peak_to_torch", found["peak_mb"], CLASSIC_TORCH),
        **_ratio("rest_to_torch", found["rest_mb"], CLASSIC_TORCH),
        "failed": runs.failed,
    }


def _ratio(name: str, measured: Mapping[str, float], other: str) -> dict[str, float]:
    """Return the ratio of the wrapper's figure to another's under ``name``; empty if one was not measured."""
    return {name: measured[CLASSIC] / measured[other]} if {CLASSIC, other} <= measured.keys() else {}


def compare_sharding(effort: Effort) -> Tree:
    """Measure ``fully_shard`` itself: the first call of a process, and the median of later calls."""
    runs = Runs()
    times: dict[str, list[list[int]]] = {name: [] for name in (TORCH, OURS)}
    for number in range(effort.rounds):
        for name in rotated(tuple(times), number):
            times[name] += runs.on_ranks(name, 1, sharding.measure_sharding, name, 1 + effort.steps)
    found: Tree = {
        name: {
            "first_ms": spread([start[0] / 1e6 for start in starts]).as_dict(),
            "later_ms": spread([t / 1e6 for start in starts for t in start[1:]]).as_dict(),
        }
        for name, starts in times.items()
        if starts and name not in runs.failed
    }
    if len(found) == len(times):
        found["to_torch"] = found[OURS]["later_ms"]["median"] / found[TORCH]["later_ms"]["median"]
        found["first_to_torch"] = found[OURS]["first_ms"]["median"] / found[TORCH]["first_ms"]["median"]
    what = {"num_params": num_params(sharding.CONFIG), "num_ranks": sharding.WORLD_SIZE}
    return {**what, **found, "failed": runs.failed}


def compare_recording(case: Case, effort: Effort, engine: str) -> Tree:
    """Measure the cost of recording an engine, ours or torch's: ratios of pairs of neighbouring steps."""
    runs = Runs()
    ranks: list[Recording] = runs.on_ranks("recording", case.num_ranks, measure_recording, case, effort.pairs, engine)
    if not ranks:
        return {"failed": runs.failed}
    pairs = [on / off for r in ranks for on, off in zip(r.on_ns, r.off_ns, strict=True)]
    plain_ns = statistics.median(ns for r in ranks for ns in r.off_ns)
    low, high = median_interval(pairs)
    return {
        "cpu_ratio": statistics.median(pairs),
        "cpu_ratio_low": low,
        "cpu_ratio_high": high,
        "num_rows": ranks[0].num_rows,
        "row_ns": ranks[0].row_ns,
        "rows_percent": 100 * ranks[0].num_rows * ranks[0].row_ns / plain_ns,
        "plain_ms": plain_ns / 1e6,
        "failed": {},
    }
