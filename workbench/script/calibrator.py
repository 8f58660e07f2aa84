"""Calibration of a machine: its ranks measure; steps that were not measured are planned and run; a file is written."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from statistics import median
from typing import Any

from workbench.base.codec import decode
from workbench.base.devices import DEVICES
from workbench.base.machines import VERSION, Calibration, CollectiveTime, HeldOutStep, OpTime, write_calibration
from workbench.errors import UsageError
from workbench.protocol.commands import Plan
from workbench.protocol.planning import CALLED
from workbench.reports.calibration_report import CalibrationReport
from workbench.reports.plan_report import PlanReport
from workbench.script.planner import PlannedRank, plan_script
from workbench.session.request import no_output
from workbench.session.script_ranks import ScriptRanks

_PROGRAM = "workbench.plan.calibration_step"
FITTED = "6 blocks of width 32"
HELD_OUT = ("3 blocks of width 192", "4 blocks of width 320, fused", "3 blocks of width 192, bf16")


class CalibratingRanks(ScriptRanks):
    """Ranks that measure their machine.

    Args:
        num_ranks: number of ranks.
        device: kind of their devices.
    """

    main = "workbench.plan.calibration_rank"

    def __init__(self, num_ranks: int, device: str) -> None:
        super().__init__(num_ranks, no_output)
        self.device = device

    def measure(self) -> list[dict[str, Any]]:
        """Return the figures of each rank."""
        return self._call("measure", None)

    def train(self, name: str) -> float:
        """Return the nanoseconds of a step of one of these trainings, the median of all ranks."""
        return float(median(self._call("train", name)))


def calibrate(num_ranks: int, device: str, out: str, on_progress: Callable[[str], object]) -> CalibrationReport:
    """Measure this machine, and write what was measured to ``out``.

    Args:
        num_ranks: number of ranks that measure at the same time.
        device: kind of their devices.
        out: the file, which ends with ``.json``.
        on_progress: called with a sentence about what is done next.

    Raises:
        UsageError: there are not so many devices, or the file cannot be written.
        RankError, RankDied, Interrupted: a rank failed, or the user interrupted.
    """
    if not out.endswith(".json"):
        raise UsageError(f"the file of a calibration ends with .json, as --device of plan takes it; not {out!r}")
    if not os.access(os.path.dirname(os.path.abspath(out)), os.W_OK):
        raise UsageError(f"cannot write {out}: there is no such folder, or it cannot be written")
    if not DEVICES[device].may_be_here():
        raise UsageError(f"this host has no {device} device")
    with CalibratingRanks(num_ranks, device) as ranks:
        on_progress(f"measuring operations and collectives on {num_ranks} {device} ranks")
        found = calibration(ranks.measure(), num_ranks, device)
        on_progress("running steps that the figures were not fitted to")
        measured = {name: ranks.train(name) for name in (FITTED, *HELD_OUT)}
    on_progress("planning them")
    with tempfile.TemporaryDirectory(prefix="workbench-calibrate-") as folder, PlannedRank(no_output) as rank:
        file = os.path.join(folder, "machine.json")
        write_calibration(found, file)

        def planned(name: str, figures: Calibration) -> PlanReport:
            write_calibration(figures, file)
            command = Plan(CALLED, ranks=num_ranks, device=file)
            return plan_script(_PROGRAM, (name,), command, os.path.join(folder, "plan.trace"), rank, module=True)

        report = planned(FITTED, found)
        calls = sum(total.calls for total in report.collectives)
        found = replace(found, unit_ns=max(measured[FITTED] - report.step_ns, 0.0) / max(calls, 1))
        steps = {name: float(planned(name, found).step_ns) for name in HELD_OUT}
    held_out = tuple(HeldOutStep(what=name, planned_ns=ns, measured_ns=measured[name]) for name, ns in steps.items())
    found = replace(found, held_out=held_out)
    write_calibration(found, out)
    return CalibrationReport(file=out, calibration=found)


def calibration(measured: Sequence[Mapping[str, Any]], num_ranks: int, device: str) -> Calibration:
    """Return a calibration from the figures of all ranks, without the time for a unit and held-out steps."""
    collectives: dict[tuple[str, int], list[CollectiveTime]] = {}
    for each in measured:
        for one in decode(tuple[CollectiveTime, ...], each["collectives"], "collectives"):
            collectives.setdefault((one.kind, one.num_ranks), []).append(one)
    ops: dict[tuple[str, str, int], list[float]] = {}
    for each in measured:
        for op in decode(tuple[OpTime, ...], each["ops"], "ops"):
            ops.setdefault((op.op, op.dtype, op.work), []).append(op.time_ns)

    def middle(name: str) -> float:
        return float(median(each[name] for each in measured))

    dtypes = measured[0]["flops_per_s"]

    return Calibration(
        version=VERSION,
        host=platform.node(),
        device=device,
        processor=measured[0]["processor"],
        torch=version("torch"),
        backend="nccl" if device == "cuda" else "gloo",
        num_ranks=num_ranks,
        cores=os.cpu_count() or 1,
        memory_bytes=measured[0]["memory_bytes"],
        flops_per_s={dtype: median(each["flops_per_s"][dtype] for each in measured) for dtype in dtypes},
        memory_bytes_per_s=middle("memory_bytes_per_s"),
        host_copy_bytes_per_s=middle("host_copy_bytes_per_s"),
        op_ns=middle("op_ns"),
        dtensor_ns=middle("dtensor_ns"),
        unit_ns=0.0,
        spread_percent=max(each["spread_percent"] for each in measured),
        ops=tuple(OpTime(op=op, dtype=t, work=work, time_ns=median(ns)) for (op, t, work), ns in sorted(ops.items())),
        collectives=tuple(_middle(each) for each in collectives.values()),
    )


def _middle(found: Sequence[CollectiveTime]) -> CollectiveTime:
    """Return the medians of what the ranks of a group have measured."""
    latency_ns, rate = (median(getattr(each, name) for each in found) for name in ("latency_ns", "bytes_per_s"))
    return replace(found[0], latency_ns=latency_ns, bytes_per_s=rate)
