"""A search of the policies that can be typed: each is planned by the engine itself, unless it cannot fit.

Of two values of an option, one is leaner, all else equal: full parameters that are freed after forward, blocks that
keep only their inputs, one copy over all ranks, a unit for each block. At each moment, the other value keeps what the
leaner one keeps, except what gathering again and padding add to the leaner one: buffers of all-gathers in backward, and
rows that make parameters divide. So a policy is not planned if a leaner one exceeds the limit by more than its own
:func:`slack_bytes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from workbench.errors import UsageError
from workbench.events import Category, Unit
from workbench.protocol.commands import Plan, to_text
from workbench.protocol.planning import PlannedPolicy, most_ranks, planned_ranks
from workbench.protocol.policy import HOSTS
from workbench.reports.fit_report import FitReport, with_best
from workbench.reports.plan_report import PlanReport

HALF_PRECISION = "bf16,reduce=fp32"
_GAIN = 0.005
"""A smaller relative decrease of the peak, with twice the ranks, means that more ranks do not help."""

_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
DEVICE = "device"
"""The size of ``--fit`` that is the memory of the device."""


def read_size(text: str) -> int:
    """Return a number of bytes: ``"80GB"`` -> ``80 * 10**9``; 0 for ``"device"``.

    Raises:
        ValueError: ``text`` is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", text.strip().lower())
    if text == DEVICE:
        return 0
    if found is None or not float(found[1]):
        raise ValueError(f"fit takes a size such as 80GB or 74.5GiB, or {DEVICE} for the device's memory, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True)
class _Axis:
    """An option with two values.

    Attributes:
        lean: the value that needs no more memory, but for :func:`slack_bytes`, as fields of :class:`Plan`.
        other: the other one.
    """

    lean: Mapping[str, Any]
    other: Mapping[str, Any]


@dataclass
class FitSearch:
    """A search.

    Attributes:
        plan: plans one policy.
        line: returns the line that plans one.
        on_plan: called with the words for each policy before it is planned.
    """

    plan: Callable[[Plan], PlanReport]
    line: Callable[[Plan], str]
    on_plan: Callable[[str], object]
    _limit: int = 0
    _planned: dict[Plan, PlanReport] = field(default_factory=dict)

    def run(self, own: Plan) -> FitReport:
        """Return what fits: options that ``own`` gives stay as they are.

        Raises:
            ValueError: the size is none.
            UsageError, RankError, RankDied, Interrupted: the program cannot be planned.
        """
        own = replace(own, fit="", out="")
        first = self._report(own)
        self._limit = self._limit or first.memory_bytes
        skipped: list[Plan] = []
        for precision in self._precisions(own, first):
            self._try(replace(own, **precision), _axes(own, first), skipped)
        has_fit = any(self._fits(report) for report in self._planned.values())
        if not has_fit and own.offload is None and _shards(first):
            for precision in self._precisions(own, first):
                self._try(replace(own, **precision, offload=True), _axes(own, first), skipped)
        here = [self._policy(own, plan) for plan in self._planned]
        leanest = min(self._planned, key=lambda plan: self._need(own, plan))
        searched = [self._fewest(own, plan) for plan in dict.fromkeys([own, leanest])]
        tried = [(plan, fits) for plan, fits in searched if plan is not None]
        return FitReport(
            device=first.device,
            num_ranks=first.num_ranks,
            num_hosts=first.num_hosts,
            limit_bytes=self._limit,
            time_error=first.time_error,
            policies=with_best(here),
            skipped=tuple(_options(own, plan) for plan in skipped),
            least=tuple(self._policy(own, plan) for plan, fits in tried if fits),
            never=tuple(self._policy(own, plan) for plan, fits in tried if not fits),
        )

    def limit(self, size: str) -> FitSearch:
        """Return the search with the most bytes that fit.

        Raises:
            UsageError: it is no size.
        """
        try:
            return replace(self, _limit=read_size(size))
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _try(self, base: Plan, axes: list[_Axis], skipped: list[Plan]) -> None:
        """Plan all choices, leaner ones first, except those that need no less than one that does not fit."""
        unfit: set[tuple[bool, ...]] = set()
        for choice in sorted(product((False, True), repeat=len(axes)), key=sum):
            fields_ = [axis.other if is_other else axis.lean for axis, is_other in zip(axes, choice, strict=True)]
            plan = base
            for values in fields_:
                plan = replace(plan, **values)
            if any(_leaner(choice, place) in unfit for place, is_other in enumerate(choice) if is_other):
                unfit.add(choice)
                skipped.extend([plan] if plan not in self._planned else [])
            elif report_exceeds(self._report(plan), self._limit):
                unfit.add(choice)

    def _fewest(self, own: Plan, plan: Plan) -> tuple[Plan | None, bool]:
        """Return a policy on the fewest ranks on which it fits, by halves and doubles, and True.

        If it fits on none, return it on the most that were planned, and False; None if it needs these ranks.
        """
        if plan.mesh and plan.mesh != HOSTS:
            return None, False
        per_host = planned_ranks(own.device, own.ranks, own.hosts).ranks_per_host
        fits, most = self._fits(self._report(plan)), most_ranks(own.device)
        while True:
            ranks = plan.ranks // 2 if fits else plan.ranks * 2
            if (fits and plan.ranks % 2) or ranks > most:
                return plan, fits
            other = replace(plan, ranks=ranks, hosts=max(1, ranks // per_host))
            report = self._report(other)
            if fits and not self._fits(report):
                return plan, True
            if not fits:
                if self._fits(report):
                    return other, True
                if report.peak_bytes > (1 - _GAIN) * self._planned[plan].peak_bytes:
                    return other, False
            plan = other

    def _need(self, own: Plan, plan: Plan) -> tuple[bool, bool, int]:
        """Return how little a policy needs; one in the program's own precision, and without offload, comes first."""
        return plan.mp != own.mp, plan.offload != own.offload, self._planned[plan].peak_bytes

    def _fits(self, report: PlanReport) -> bool:
        return report.peak_bytes <= self._limit

    def _report(self, plan: Plan) -> PlanReport:
        if plan not in self._planned:
            self.on_plan(to_text(plan))
            self._planned[plan] = self.plan(plan)
        return self._planned[plan]

    def _policy(self, own: Plan, plan: Plan) -> PlannedPolicy:
        report = self._planned[plan]
        return PlannedPolicy(
            options=_options(own, plan),
            line=self.line(plan),
            num_ranks=report.num_ranks,
            peak_bytes=report.peak_bytes,
            peak_bytes_by_category=report.peak_bytes_by_category,
            step_ns=report.step_ns,
            fits=self._fits(report),
        )

    @staticmethod
    def _precisions(own: Plan, first: PlanReport) -> Iterator[Mapping[str, Any]]:
        """Yield the precisions to plan: the program's own, and half precision if it computes in single."""
        yield {}
        if not own.mp and _shards(first) and any(unit.compute_dtype == "float32" for unit in first.units):
            yield {"mp": HALF_PRECISION}


_PADDED = (
    Category.SHARDED_PARAMS,
    Category.UNSHARDED_PARAMS,
    Category.SHARDED_GRADS,
    Category.UNSHARDED_GRADS,
    Category.OPTIMIZER_STATE,
)
_GATHERED = (Category.ALL_GATHER_BUFFERS, Category.REDUCE_SCATTER_BUFFERS)


def report_exceeds(report: PlanReport, limit_bytes: int) -> bool:
    """Whether neither a policy, nor one that is less lean, fits."""
    return report.peak_bytes - slack_bytes(report) > limit_bytes


def slack_bytes(report: PlanReport) -> int:
    """Return the bytes at a policy's peak that a less lean policy may do without.

    Buffers of collectives, and the padding in what consists of parameters.
    """
    at_peak = report.peak_bytes_by_category
    of_params = sum(at_peak.get(category, 0) for category in _PADDED)
    padding = of_params * max(map(_padding_share, report.units), default=0.0)
    return sum(at_peak.get(category, 0) for category in _GATHERED) + math.ceil(padding)


def _padding_share(unit: Unit) -> float:
    """Return how much of a unit's full parameters is padding, from 0 to 1."""
    params = [param for param in unit.params if math.prod(param.shape)]
    whole = sum(math.prod(param.shape) for param in params)
    padded = sum(
        math.prod(param.shape) * param.padded_rows * unit.shard_size / param.shape[param.shard_dim] for param in params
    )
    return max(1 - whole / padded, 0.0) if padded else 0.0


def _axes(own: Plan, first: PlanReport) -> list[_Axis]:
    """Return the options to search: those that the user has not given, and that the program can have."""
    axes = []
    if not own.reshard_after_forward and _shards(first):
        axes.append(_Axis({"reshard_after_forward": "true"}, {"reshard_after_forward": "false"}))
    if not own.checkpoint and first.blocks:
        axes.append(_Axis({"checkpoint": first.blocks}, {"checkpoint": ()}))
    if not own.mesh and first.num_hosts > 1 and _shards(first):
        axes.append(_Axis({"mesh": ()}, {"mesh": HOSTS}))
    if not own.wrap and first.blocks and len(first.units) == 1 and _shards(first):
        axes.append(_Axis({"wrap": first.blocks}, {"wrap": ()}))
    return axes


def _shards(report: PlanReport) -> bool:
    """Whether the program's engine shards parameters; else only what is checkpointed can be changed."""
    return all(unit.runner.splits for unit in report.units)


def _leaner(choice: tuple[bool, ...], place: int) -> tuple[bool, ...]:
    """Return a choice with the lean value at one place."""
    return (*choice[:place], False, *choice[place + 1 :])


def _options(own: Plan, plan: Plan) -> str:
    """Return the options in which a policy differs from the program's own."""
    given = {f.name: getattr(plan, f.name) for f in fields(plan) if getattr(plan, f.name) != getattr(own, f.name)}
    kept = {name: value for name, value in given.items() if name not in {"ranks", "hosts"}}
    return to_text(Plan(own.model, **kept)).removeprefix(f"{Plan.word} {own.model}").strip()
