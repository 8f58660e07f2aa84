"""What one wants to know at a glance: whether ranks train and why not, what it costs, and what a knob has changed.

Pure: of a pulse, the steps that were told so far, and the record. Times are nanoseconds as they are shown, without time
in which ranks were held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import Category, Unit, unit_words
from workbench.replay import memory
from workbench.replay.alike import label
from workbench.replay.holds import Cuts
from workbench.reports.failures import losses_in_words
from workbench.reports.places import describe, unit_names
from workbench.session.pulse import Pulse
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import theme
from workbench.widgets.messages import Change, Costs, Status
from workbench.widgets.moments import Moments
from workbench.widgets.steps import LEARNED_DTYPE

STUCK_S = 3.0
"""Without a new event for so long ranks that wait for each other are said to be stuck, in seconds."""

COMPARED = 20
"""Steps before and after a change whose medians are compared, the first one after it left out: it sets up."""

NAMED = 3
"""Units that are named; of more it is said how many they are."""

_KNOBS = {
    "reshard_after_forward": "reshard after forward",
    "shard_size": "ranks that share a copy",
    "replicate_size": "copies",
    "compute_dtype": "computed in",
    "reduce_dtype": "reduced in",
    "offload": "offloaded",
}


def status(pulse: Pulse, quiet_s: float) -> Status:
    """Return what the ranks do, in a word, and why.

    Args:
        pulse: how they are.
        quiet_s: for how long nothing new was recorded, in seconds.
    """
    states = set(pulse.states.values())
    if pulse.losses or "gone" in states:
        how = losses_in_words(pulse.losses) or f"{label(_ranks(pulse, 'gone'))} is gone"
        return Status(word="dead", why=how)
    if not pulse.running:
        return Status(word="over" if pulse.trace.num_rows else "empty", why="")
    if "held" in states:
        can_go_on = pulse.under_way is not None and pulse.under_way.is_stopped
        return Status(word="stopped", why=_stops(pulse), can_go_on=can_go_on)
    if not states & {"running", "waiting"}:
        return Status(word="idle" if pulse.trace.num_rows else "empty", why=_last_step(pulse))
    if "waiting" in states and quiet_s >= STUCK_S:
        return Status(word="stuck", why=f"nothing has happened for {quiet_s:.0f} s: {_who(pulse)}")
    return Status(word="training", why=_progress(pulse))


def _ranks(pulse: Pulse, state: str) -> list[int]:
    return sorted(rank for rank, found in pulse.states.items() if found == state)


def _stops(pulse: Pulse) -> str:
    """Where ranks are held, alike ones together, and because of what."""
    names = unit_names(pulse.trace.header)
    places: dict[str, list[int]] = {}
    for rank in _ranks(pulse, "held"):
        position = pulse.positions.get(rank)
        where = describe(position.held, names) if position is not None and position.held is not None else "in the gate"
        places.setdefault(where, []).append(rank)
    said = "; ".join(f"{label(ranks)} {where}" for where, ranks in places.items())
    reasons = pulse.under_way.reasons if pulse.under_way is not None else ()
    return f"{said} ({', '.join(reasons)})" if reasons else said


def _who(pulse: Pulse) -> str:
    said = [(_ranks(pulse, "running"), "still in code of its own"), (_ranks(pulse, "waiting"), "waiting for others")]
    return ", ".join(f"{label(ranks)} {doing}" for ranks, doing in said if ranks)


def _progress(pulse: Pulse) -> str:
    """How far a command of several steps is: ``step 12 of 40, 3.2 s to go, 12,400 tokens/s``."""
    if pulse.under_way is None or pulse.under_way.progress is None:
        return pulse.under_way.words if pulse.under_way is not None else ""
    found = pulse.under_way.progress
    parts = [f"{found.done:,} of {theme.plural(found.total, 'step')} done"]
    if found.step_ns is not None and found.done < found.total:
        parts.append(f"{theme.format_duration(found.step_ns * (found.total - found.done))} to go")
    if found.tokens_per_s is not None:
        parts.append(f"{found.tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)


def _last_step(pulse: Pulse) -> str:
    if pulse.under_way is not None:
        return pulse.under_way.words
    last = max((int(r.rows["step"].max()) for r in pulse.trace.ranks if len(r.rows)), default=-1)
    return f"step {last} was the last" if last >= 0 else "no step was trained yet"


def whose(header: Header, kernel_pid: int) -> str:
    """Return whose ranks these are: ``4 ranks on host, cpu, of the kernel with process 12``."""
    if not header.ranks:
        return ""
    hosts = ", ".join(sorted({info.host for info in header.ranks}))
    devices = ", ".join(sorted({info.device.partition(":")[0] for info in header.ranks}))
    return f"{theme.plural(len(header.ranks), 'rank')} on {hosts}, {devices}, of the kernel with process {kernel_pid}"


def slowest(step: np.void) -> str:
    """Return which rank the others wait for in a step of LEARNED_DTYPE, and how long; empty: none to speak of."""
    if step["straggler"] < 0:
        return ""
    return f"rank {step['straggler']} is late, the others wait {theme.format_duration(float(step['spread_ns']))} longer"


def knobs(header: Header) -> tuple[Unit, ...]:
    """Return the units in force, without what is no knob: equal as long as nobody has turned one."""
    return tuple(replace(unit, index=0, root=0, params=(), comm="") for unit in header.units if unit.in_use)


def turned(before: tuple[Unit, ...], after: tuple[Unit, ...]) -> str:
    """Return what was changed between two answers of :func:`knobs`, in words; empty: nothing that has a name."""
    known = {unit.name: unit for unit in before}
    found: dict[str, list[str]] = {}
    for unit in after:
        for field, words in _KNOBS.items():
            was, now = (getattr(which, field) if which else None for which in (known.get(unit.name), unit))
            if was is not None and was != now:
                found.setdefault(f"{words}: {_said(was)} \u2192 {_said(now)}", []).append(unit_words(unit.name))
    every = len(after)
    changes = [words if len(units) == every else f"{words} ({_some(units)})" for words, units in found.items()]
    if {unit.name for unit in after} != set(known):
        changes.append(f"{theme.plural(len(before), 'unit')} \u2192 {len(after)}")
    return "; ".join(changes)


def _some(units: list[str]) -> str:
    return ", ".join(units) if len(units) <= NAMED else theme.plural(len(units), "unit")


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Turns:
    """Follows what the last turn of a knob has changed.

    Attributes:
        what: that was turned, in words; empty: nothing.
        at_step: the first step after it.
    """

    what: str = ""
    at_step: int = -1

    def __post_init__(self) -> None:
        self._before = self._after = np.empty(0, LEARNED_DTYPE)
        self._knobs: tuple[Unit, ...] | None = None
        self._costs: Costs | None = None

    def take(self, trace: Trace, new: NDArray[np.void], moments: Moments, rank: int, cuts: Cuts) -> Change | None:
        """Read ``new`` steps, of LEARNED_DTYPE, and return what they say of the last turn; None: of none.

        Args:
            trace: they are of.
            new: finished steps since the last time.
            moments: knows key frames of ``trace``.
            rank: whose memory is looked at.
            cuts: what is cut out of the axis on which steps are told.
        """
        now = knobs(trace.header)
        if self._knobs is not None and now and now != self._knobs and (words := turned(self._knobs, now)):
            self.what, self._before, self._after = words, self._after, np.empty(0, LEARNED_DTYPE)
            self.at_step = int(self._before["step"][-1]) + 1 if len(self._before) else 0
            self._costs = costs(trace, self._before, moments, rank, cuts)
        self._knobs = now or self._knobs
        self._after = np.concatenate([self._after, new])[-COMPARED:]
        if not self.what or not len(new):
            return None
        after = self._after[self._after["step"] > self.at_step] if self.at_step >= 0 else self._after
        found = costs(trace, after, moments, rank, cuts)
        if self._costs is None or found is None:
            return None
        return Change(what=self.what, at_step=self.at_step, before=self._costs, after=found)


def costs(trace: Trace, steps: NDArray[np.void], moments: Moments, rank: int, cuts: Cuts) -> Costs | None:
    """Return what some steps cost, of LEARNED_DTYPE: medians, and the highest peak; None of no steps."""
    if not len(steps):
        return None
    ends = [int(end_ns) for end_ns in steps["end_ns"][-3:]]
    begins = [end_ns - int(step_ns) for end_ns, step_ns in zip(ends, steps["step_ns"][-3:], strict=True)]
    peaks = [_peak(trace, moments, rank, *map(cuts.true_at, times)) for times in zip(begins, ends, strict=True)]
    return Costs(
        num_steps=len(steps),
        ms=float(np.median(steps["step_ns"])) / 1e6,
        exposed=float(np.median(steps["exposed"])),
        peak_bytes=max(peaks),
    )


def _peak(trace: Trace, moments: Moments, rank: int, begin_ns: int, end_ns: int) -> int:
    held = memory.series(moments.part(trace, rank, begin_ns, end_ns)).num_bytes
    return int((held.sum(axis=1) - held[:, Category.RESERVED]).max(initial=0))
