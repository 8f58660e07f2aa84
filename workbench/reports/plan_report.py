"""The report of a plan: what one rank needs and sends, and how long a step takes at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from workbench.base.text_formats import format_bytes, format_duration, plural
from workbench.events import OFFLOADED, Category, Kind, Unit
from workbench.protocol.planning import PlannedRanks
from workbench.replay.training import summary
from workbench.reports.calibration_report import error_words
from workbench.reports.report import Report
from workbench.reports.view_numbers import CollectiveTotal, CommsReport, MemoryReport, numbers
from workbench.trace.columns import RankTrace, Trace

NOT_COUNTED = "a device's context, buffers of its communicators, and what its allocator rounds up"


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report):
    """What a program would need and take on a cluster, by rank 0 of it.

    Attributes:
        device: name of the device.
        num_ranks: number of ranks.
        num_hosts: number of hosts.
        step: the step that is described.
        peak_bytes: most bytes in use at once.
        peak_bytes_by_category: bytes of each class at that moment.
        peak_unit: the unit at work; None: none.
        memory_bytes: memory of the device.
        host_bytes: bytes of offloaded shards, gradients and optimizer state, which are in the host's memory.
        step_ns: duration of the step: the least at the published peaks of the device, or as measured.
        time_error: how far that is off, in words, on a machine that was measured; empty: it is the least.
        collectives: the collectives of the step, by kind.
        trace: the trace file.
        units: the units of the model.
        blocks: class of the model's repeated block, if it has one.
    """

    computed = ("headline", "fits")
    internal = ("units", "blocks")

    device: str
    num_ranks: int
    num_hosts: int
    step: int
    peak_bytes: int
    peak_bytes_by_category: Mapping[Category, int]
    peak_unit: str | None
    memory_bytes: int
    host_bytes: int
    step_ns: int
    collectives: tuple[CollectiveTotal, ...]
    trace: str
    time_error: str = ""
    units: tuple[Unit, ...] = ()
    blocks: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the bytes at the peak fit into the device."""
        return self.peak_bytes <= self.memory_bytes

    @property
    def problem(self) -> str:
        """Say that it does not fit, and which class is the largest; empty if it fits."""
        if self.fits:
            return ""
        largest = max(self.peak_bytes_by_category, key=lambda category: self.peak_bytes_by_category[category])
        share = format_bytes(self.peak_bytes_by_category[largest])
        return f"it does not fit: the largest class is {largest.words}, {share}"

    @property
    def headline(self) -> str:
        """The bytes beside the device's memory, and the time of a step."""
        ranks = f"rank 0 of {self.num_ranks}" if self.num_ranks > 1 else "one rank"
        needs = (
            f"{ranks} needs {format_bytes(self.peak_bytes)} of the {format_bytes(self.memory_bytes)} on {self.device}"
        )
        found = f"{needs}; a step takes {time_words(self.step_ns, self.time_error)}"
        return f"{found}\n{self.problem}" if self.problem else found

    def facts(self) -> list[tuple[str, str]]:
        """Return the classes at the peak, the collectives, and what the figures leave out."""
        classes = sorted(self.peak_bytes_by_category.items(), key=lambda item: -item[1])
        at_work = f", while {self.peak_unit} is at work" if self.peak_unit else ""
        held = ", ".join(f"{category.words} {format_bytes(size)}" for category, size in classes if size)
        sent = "; ".join(
            f"{plural(total.calls, total.kind.words)} of {format_bytes(total.num_bytes)}" for total in self.collectives
        )
        view = f"workbench view {self.trace}, or " if Path(self.trace).suffix else ""
        return [
            ("at the peak", f"{held}{at_work}"),
            *([("on the host", format_bytes(self.host_bytes))] if self.host_bytes else []),
            ("collectives", sent or "none"),
            ("not counted", NOT_COUNTED),
            ("time", self.time_error or "at the peak rates that the vendor publishes, which no program reaches"),
            ("see it", f"{view}%fsdp compare {self.trace} last"),
        ]


def time_words(step_ns: int, error: str) -> str:
    """Return the time of a step with what is known of its error."""
    time = format_duration(step_ns)
    return f"about {time} ({error})" if error else f"at least {time}"


def error_of(ranks: PlannedRanks) -> str:
    """Return how far a time may be off, in words: as calibrate has measured; empty if the figures are published."""
    measured = ranks.machine.calibration
    if measured is None:
        return ""
    if measured.error_percent is None:
        return "measured figures, whose error is not known"
    if ranks.num_ranks != measured.num_ranks:
        return f"measured figures of {plural(measured.num_ranks, 'rank')}; the error on {ranks.num_ranks} is not known"
    return f"off by up to {error_words(measured)} in {plural(len(measured.held_out), 'step')} when calibrated"


def _on_host(trace: Trace) -> tuple[Category, ...]:
    """Return the classes that are in the host's memory: none, unless all units offload."""
    units = [unit for unit in trace.header.units if not (unit.retired or unit.gone)]
    return OFFLOADED if units and all(unit.offload for unit in units) else ()


def _on_device(trace: Trace) -> Trace:
    """Return a trace without the memory of the host."""
    hosts = _on_host(trace)
    if not hosts:
        return trace

    def kept(rank: RankTrace) -> RankTrace:
        moves = np.isin(rank.rows["kind"], [Kind.ALLOC, Kind.FREE])
        return replace(rank, rows=rank.rows[~(moves & np.isin(rank.rows["category"], hosts))])

    return replace(trace, ranks=tuple(map(kept, trace.ranks)))


def _held(trace: Trace) -> Mapping[Category, int]:
    """Return the bytes of each class at the end of a planned trace."""
    (rank,) = cast("MemoryReport", numbers("memory", trace)).ranks
    return rank.last_bytes_by_category


def described(trace: Trace, ranks: PlannedRanks, path: str) -> PlanReport:
    """Return the report of a planned trace: of its last step."""
    memory = cast("MemoryReport", numbers("memory", _on_device(trace)))
    host = sum(_held(trace)[category] for category in _on_host(trace))
    comms = cast("CommsReport", numbers("comms", trace))
    (rank,) = memory.ranks
    times = summary(trace).step_times
    return PlanReport(
        device=ranks.machine.name,
        num_ranks=ranks.num_ranks,
        num_hosts=ranks.num_hosts,
        step=memory.last_step,
        peak_bytes=rank.peak_bytes,
        peak_bytes_by_category=rank.peak_bytes_by_category,
        peak_unit=rank.peak_unit,
        memory_bytes=ranks.machine.memory_bytes,
        step_ns=int(times.high[-1]) if len(times.steps) else 0,
        collectives=comms.totals,
        host_bytes=host,
        trace=path,
        time_error=error_of(ranks),
        units=tuple(trace.header.units),
    )
