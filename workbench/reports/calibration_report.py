"""The report of a calibration: how far plans of steps that were not measured are off, and the main figures."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base.machines import Calibration
from workbench.base.text_formats import format_bytes, format_duration, format_share, plural
from workbench.reports.report import Report


@dataclass(frozen=True, kw_only=True)
class CalibrationReport(Report):
    """A machine that was measured.

    Attributes:
        file: the file.
        calibration: its contents.
    """

    computed = ("headline",)

    file: str
    calibration: Calibration

    @property
    def headline(self) -> str:
        """What was measured, and how far plans of held-out steps are off."""
        found = self.calibration
        ranks = f"{plural(found.num_ranks, 'rank')} on {plural(found.cores, 'core')} of {found.host}"
        return f"wrote {self.file}: {ranks}; a step that is planned with it is off by up to {error_words(found)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the held-out steps and the main figures."""
        found = self.calibration
        steps = [
            (
                each.what,
                f"planned {format_duration(round(each.planned_ns))}, measured "
                f"{format_duration(round(each.measured_ns))}: {_signed(each.error_percent)}",
            )
            for each in found.held_out
        ]
        links = [
            (
                f"{each.kind.replace('_', '-')} on {each.num_ranks}",
                f"{format_duration(round(each.latency_ns))} and {format_bytes(round(each.bytes_per_s))}/s",
            )
            for each in found.collectives
        ]
        return [
            *steps,
            (
                "matrix products",
                ", ".join(f"{dtype} {rate / 1e9:.3g} GFLOP/s" for dtype, rate in found.flops_per_s.items()),
            ),
            ("memory", f"{format_bytes(round(found.memory_bytes_per_s))}/s"),
            ("host", f"{found.op_ns / 1e3:.1f} us an operation, {found.unit_ns / 1e3:.0f} us a unit's collective"),
            *links,
            ("repeated steps", f"differ by {format_share(found.spread_percent / 100)} (quartiles)"),
            ("plan with it", f"workbench plan --ranks {found.num_ranks} --device {self.file} train.py"),
        ]


def error_words(calibration: Calibration) -> str:
    """Return the error of a calibration in words."""
    error = calibration.error_percent
    return "an unknown amount" if error is None else format_share(error / 100, 1)


def _signed(percent: float) -> str:
    return f"{'+' * (percent >= 0)}{format_share(percent / 100, 1)}"
