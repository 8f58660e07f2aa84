"""The report of a search: the policies under which a program fits into a device, and how many ranks it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workbench.base.text_formats import format_bytes, format_duration, plural
from workbench.events import Category
from workbench.protocol.planning import PlannedPolicy
from workbench.reports.plan_report import time_words
from workbench.reports.report import Report


@dataclass(frozen=True, kw_only=True)
class FitReport(Report):
    """The policies that were planned.

    Attributes:
        device: name of the device.
        num_ranks: number of ranks.
        num_hosts: number of hosts.
        limit_bytes: the most bytes that fit.
        policies: the policies on these ranks, the program's own first, then the fastest first.
        skipped: options of policies that need at least as much as one that does not fit, and were not planned.
        least: on how few ranks a policy fits, one for each policy that was tried on other numbers of ranks.
        never: policies that fit on no number of ranks, at the largest number that was tried.
        time_error: how far times are off, in words, on a machine that was measured; empty: they are the least.
    """

    device: str
    num_ranks: int
    num_hosts: int
    limit_bytes: int
    policies: tuple[PlannedPolicy, ...]
    skipped: tuple[str, ...]
    least: tuple[PlannedPolicy, ...]
    never: tuple[PlannedPolicy, ...]
    time_error: str = ""

    @property
    def best(self) -> list[PlannedPolicy]:
        """The policies that fit and are no worse than any other in bytes and in time, the fastest first."""
        return [policy for policy in self.policies if policy.is_best]

    @property
    def problem(self) -> str:
        """Say that no policy fits, what is the most, and on how many ranks one fits; empty if one fits."""
        if self.best:
            return ""
        return f"no policy fits: {broken_by(min(self.policies, key=lambda policy: policy.peak_bytes))}{self._elsewhere}"

    @property
    def _elsewhere(self) -> str:
        if not self.least:
            return ""
        fewest = min(self.least, key=lambda policy: policy.num_ranks)
        return f"; on {plural(fewest.num_ranks, 'rank')} it fits, {fewest.words}"

    @property
    def headline(self) -> str:
        """Whether the program fits as it is, and the fastest policy that does."""
        own = self.policies[0]
        limit = format_bytes(self.limit_bytes)
        needs = f"as it is, rank 0 of {self.num_ranks} needs {format_bytes(own.peak_bytes)} of {limit} on {self.device}"
        if self.problem:
            return f"{needs}\n{self.problem}"
        fastest = self.best[0]
        time = time_words(fastest.step_ns, self.time_error)
        if fastest == own:
            return f"{needs}: it fits, and nothing that fits is faster (a step takes {time})"
        fits = "it fits" if own.fits else f"it does not fit; {broken_by(own)}"
        return (
            f"{needs}: {fits}; fastest of what fits: {fastest.words} "
            f"({format_bytes(fastest.peak_bytes)}; a step takes {time})"
        )

    def facts(self) -> list[tuple[str, str]]:
        """Return the best policies with the lines that plan them, the fewest ranks, and what was not planned."""
        shown = [(policy.words, described(policy)) for policy in self.best]
        if not self.policies[0].is_best:
            shown.insert(0, (self.policies[0].words, described(self.policies[0])))
        fewest = [(f"fits on {plural(policy.num_ranks, 'rank')}", policy.words) for policy in self.least]
        never = [("fits on no number", f"{policy.words}: {broken_by(policy)}") for policy in self.never]
        rest = [("not planned", f"{len(self.skipped)} policies: none needs less than one that does not fit")]
        lines = [("type", self.best[0].line)] if self.best else []
        return [*shown, *fewest, *never, *(rest if self.skipped else []), *lines]


def described(policy: PlannedPolicy) -> str:
    """Return a policy's peak with its largest classes, and the time of its step."""
    parts = ", ".join(f"{category.words} {format_bytes(size)}" for category, size in largest(policy)[:3])
    fits = "" if policy.fits else " (does not fit)"
    return f"{format_bytes(policy.peak_bytes)}{fits}, {format_duration(policy.step_ns)} a step; {parts}"


def largest(policy: PlannedPolicy) -> list[tuple[Category, int]]:
    """Return the classes at a policy's peak, the largest first."""
    sizes: Mapping[Category, int] = policy.peak_bytes_by_category
    return sorted(((category, size) for category, size in sizes.items() if size), key=lambda item: -item[1])


def broken_by(policy: PlannedPolicy) -> str:
    """Say which class is the most at a policy's peak."""
    category, size = largest(policy)[0]
    return f"the largest class is {category.words}, {format_bytes(size)} of {format_bytes(policy.peak_bytes)}"


def with_best(policies: Sequence[PlannedPolicy]) -> tuple[PlannedPolicy, ...]:
    """Return the first policy, then the others by time, each marked if it is one of the best."""

    def is_best(policy: PlannedPolicy) -> bool:
        return policy.fits and not any(
            (other.peak_bytes, other.step_ns) != (policy.peak_bytes, policy.step_ns)
            and other.peak_bytes <= policy.peak_bytes
            and other.step_ns <= policy.step_ns
            for other in policies
        )

    own, *others = [replace(policy, is_best=is_best(policy)) for policy in policies]
    return (own, *sorted(others, key=lambda policy: policy.step_ns))
