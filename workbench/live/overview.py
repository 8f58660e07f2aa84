"""The state at a glance: whether ranks train and if not why, what a step costs, and what a changed setting did.

All of it is computed from a snapshot, the steps so far and the record. Times are nanoseconds of the displayed axis,
without time in which ranks were held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from workbench.base.text_formats import format_long, plural
from workbench.events import Edge, Kind, Unit, unit_words
from workbench.live.fold import Fold
from workbench.live.messages import BreakpointState, Costs, KnobEffect, RankHealth, RunStatus
from workbench.protocol.breakpoints import UNTIL
from workbench.replay import memory
from workbench.replay.grouping import by_value, label
from workbench.replay.spans import of_kind
from workbench.reports.event_text import unit_names
from workbench.reports.failures import HEAL, RESTART, losses_in_words
from workbench.reports.stop_positions import StopGroup, describe
from workbench.session.snapshot import ActivePolicy, ClusterSnapshot
from workbench.trace.schema import Header
from workbench.views import theme

STUCK_S = 3.0
"""Seconds without a new event after which ranks that wait for each other count as stuck."""

COMPARED = 20
"""Steps compared before and after a change, without the first step of a policy, which includes set-up."""

NAMED = 3
"""Maximum number of units that are listed by name; more are only counted."""

Knobs = dict[str, dict[str, object]]
"""By unit, the values of the settings that a user can change, by their names in plain words."""

_KNOBS: dict[str, Callable[[Unit], object]] = {
    "engine": lambda unit: unit.runner.name,
    "api": lambda unit: "classic" if unit.is_flat else "fully_shard",
    "reshard after forward": lambda unit: unit.reshard_after_forward,
    "ranks per copy": lambda unit: unit.shard_size,
    "copies": lambda unit: unit.replicate_size,
    "computed in": lambda unit: unit.compute_dtype,
    "reduced in": lambda unit: unit.reduce_dtype,
    "offloaded": lambda unit: unit.offload,
}


def health(pulse: ClusterSnapshot) -> tuple[RankHealth, ...]:
    """Return the current state of the ranks, equal ones in one entry."""
    names = unit_names(pulse.trace.header)
    holds = StopGroup(positions=pulse.positions).holds
    where = {r: describe(hold, names) for r, hold in holds.items() if pulse.states.get(r) == "held"}
    groups = by_value((rank, (state, where.get(rank, ""))) for rank, state in sorted(pulse.states.items()))
    return tuple(
        RankHealth(label=label(ranks), ranks=tuple(ranks), state=state, where=where)
        for (state, where), ranks in groups.items()
    )


def breakpoints(pulse: ClusterSnapshot) -> tuple[BreakpointState, ...]:
    """Return the breakpoints except that of ``step --until``: it cannot be switched, and the request shows it."""
    return tuple(BreakpointState(id=b.id, text=str(b), is_on=b.is_on) for b in pulse.breakpoints if b.id != UNTIL)


FREE = "These ranks are free now. To take them: %fsdp attach."


def said(pulse: ClusterSnapshot) -> str:
    """Return a sentence about what is shown, or what to do first; empty while ranks train."""
    if pulse.exchange == "start":
        return f"{theme.begun(pulse.waits_for or 'starting or attaching ranks')}."
    if pulse.exchange == "stop":
        return "The ranks are stopping; the trace is kept."
    if pulse.is_free:
        return FREE
    if pulse.holder:
        return (
            f"{pulse.holder} controls these ranks; here you can only view them. To take control: %fsdp attach --take."
        )
    if pulse.losses:
        heal = f"{HEAL}, or " if len(pulse.losses) < len(pulse.states) else ""
        return f"{losses_in_words(pulse.losses)}. No further step can run: {heal}{RESTART}."
    return _recorded(pulse)


def _recorded(pulse: ClusterSnapshot) -> str:
    """Return a sentence about what is recorded, or how to record something."""
    is_recorded = pulse.trace.num_rows > 0
    if not pulse.running:
        if is_recorded:
            return f"No ranks are running. Showing {pulse.record or 'their last recording'}."
        return "No ranks are running and nothing is recorded. Start ranks with %fsdp start -n 4."
    if any((rank_trace.kinds == Kind.STEP).any() for rank_trace in pulse.trace.ranks):
        return ""
    if any(unit.in_use for unit in pulse.trace.header.units):
        return "No step has run yet: %fsdp step 5 calls train_step(), which a %%fsdp cell defines with an optimizer."
    return "No model is sharded yet. Define one in a %%fsdp cell, then shard it with %fsdp shard MODEL."


def status(pulse: ClusterSnapshot, quiet_s: float) -> RunStatus:
    """Return what the ranks do, in a word, and why.

    Args:
        pulse: the snapshot.
        quiet_s: seconds since the last new row.
    """
    states = set(pulse.states.values())
    if pulse.losses or "gone" in states:
        how = losses_in_words(pulse.losses) or f"{label(_ranks(pulse, 'gone'))} is gone"
        return RunStatus(word="dead", why=how)
    if not pulse.running:
        return RunStatus(word="recorded" if pulse.is_live else "over" if pulse.trace.num_rows else "empty", why="")
    if "held" in states:
        can_go_on = pulse.under_way is not None and pulse.under_way.is_stopped
        return RunStatus(word="stopped", why=_stops(pulse), can_go_on=can_go_on)
    if not states & {"running", "waiting"}:
        return RunStatus(word="idle" if pulse.trace.num_rows else "empty", why=_last_step(pulse))
    if "waiting" in states and quiet_s >= STUCK_S:
        return RunStatus(word="stuck", why=f"no event for {quiet_s:.0f} s: {_who(pulse)}")
    return RunStatus(word="training", why=_progress(pulse))


def _ranks(pulse: ClusterSnapshot, state: str) -> list[int]:
    return sorted(rank for rank, found in pulse.states.items() if found == state)


def _stops(pulse: ClusterSnapshot) -> str:
    """Say where ranks are held, equal ones together, and why."""
    stopped = [found for found in health(pulse) if found.state == "held"]
    text = "; ".join(f"{found.label} {found.where or 'in the gate'}" for found in stopped)
    reasons = pulse.under_way.reasons if pulse.under_way is not None else ()
    return f"{text} ({', '.join(reasons)})" if reasons else text


def _who(pulse: ClusterSnapshot) -> str:
    groups = (_ranks(pulse, "running"), "still running user code"), (_ranks(pulse, "waiting"), "waiting for others")
    return ", ".join(f"{label(ranks)} {doing}" for ranks, doing in groups if ranks)


def _progress(pulse: ClusterSnapshot) -> str:
    """Say how far a command of several steps is: ``12 of 40 steps done, 3.2 s to go, 12,400 tokens/s``."""
    if pulse.under_way is None or pulse.under_way.progress is None:
        return pulse.under_way.words if pulse.under_way is not None else ""
    found = pulse.under_way.progress
    parts = [f"{found.done:,} of {plural(found.total, 'step')} done"]
    if found.left_ns is not None:
        parts.append(f"{format_long(found.left_ns)} to go")
    if found.tokens_per_s is not None:
        parts.append(f"{found.tokens_per_s:,.0f} tokens/s")
    return ", ".join(parts)


def _last_step(pulse: ClusterSnapshot) -> str:
    if pulse.under_way is not None:
        return pulse.under_way.words
    recorded = [r.rows for r in pulse.trace.ranks if len(r.rows)]
    last = max((int(rows["step"].max()) for rows in recorded), default=-1)
    if last < 0:
        return ""
    ends = [rows["step"][of_kind(rows, (Kind.STEP,)) & (rows["edge"] == Edge.END)] for rows in recorded]
    has_ended = all(int(steps.max(initial=-1)) == last for steps in ends)
    return f"step {last} was the last" if has_ended else f"step {last} did not finish"


def whose(header: Header, kernel_pid: int) -> str:
    """Return which ranks these are and of which kernel: ``4 ranks on host, cpu, kernel pid 12``."""
    if not header.ranks:
        return ""
    hosts = ", ".join(sorted({info.host for info in header.ranks}))
    devices = ", ".join(sorted({info.device.partition(":")[0] for info in header.ranks}))
    return f"{plural(len(header.ranks), 'rank')} on {hosts}, {devices}, kernel pid {kernel_pid}"


def slowest(step: np.void) -> str:
    """Say which rank waited least in a step of LEARNED_DTYPE, if others waited notably longer; else empty."""
    if step["waits_least"] < 0:
        return ""
    return theme.waits_least(f"rank {step['waits_least']}", float(step["spread_ns"]))


def knobs(units: Iterable[Unit]) -> Knobs:
    """Return the settings of each unit by its name; equal as long as the policy is."""
    return {unit.name: {words: value(unit) for words, value in _KNOBS.items()} for unit in units}


def turned(before: Knobs, after: Knobs) -> str:
    """Say what changed between two results of :func:`knobs`; empty if nothing."""
    found = by_value(
        (unit_words(name), f"{words}: {_value_words(was)} \u2192 {_value_words(now)}")
        for name, values in after.items()
        for words, now in values.items()
        if (was := before.get(name, values)[words]) != now
    )
    every = len(after)
    changes = [words if len(units) == every else f"{words} ({_some(units)})" for words, units in found.items()]
    if after.keys() != before.keys():
        changes.append(f"{plural(len(before), 'unit')} \u2192 {len(after)}")
    return "; ".join(changes)


def _some(units: list[str]) -> str:
    return ", ".join(units) if len(units) <= NAMED else plural(len(units), "unit")


def _value_words(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class PolicyEffect:
    """Compares the steps under the newest policy with those under the one before."""

    def __init__(self) -> None:
        self._steps: dict[int, NDArray[np.void]] = {}  # by a policy's first step: its first and last steps
        self._before: tuple[tuple[int, int], Costs | None] = (-1, -1), None

    def take(self, fold: Fold, policies: Sequence[ActivePolicy], new: NDArray[np.void]) -> KnobEffect | None:
        """Add ``new`` steps, of LEARNED_DTYPE, and return the effect of the last change; None: nothing to compare.

        Args:
            fold: of the trace of the steps.
            policies: all policies so far, in order.
            new: steps that finished since the last call.
        """
        if not len(new):
            return None
        apart = _apart(policies)
        place = np.searchsorted([policy.from_step for policy in apart], new["step"], side="right") - 1
        for at, policy in enumerate(apart):
            known = self._steps.get(policy.from_step, new[:0])
            steps = np.concatenate([known, new[place == at]])
            self._steps[policy.from_step] = np.concatenate([steps[:1], steps[1:][-COMPARED:]])
        trained = [policy for policy in apart if len(self._steps[policy.from_step])]
        if len(trained) < 2 or trained[-1] is not apart[-1]:
            return None
        first, second = trained[-2:]
        between = first.from_step, second.from_step
        before, after = (self._steps[from_step] for from_step in between)
        if self._before[0] != between:
            self._before = between, costs(fold, before[1:] if len(before) > 1 else before)
        what, found = turned(knobs(first.units), knobs(second.units)), costs(fold, after[1:])
        if self._before[1] is None or found is None or not what:
            return None
        return KnobEffect(what=what, at_step=int(after["step"][0]), before=self._before[1], after=found)


def _apart(policies: Sequence[ActivePolicy]) -> list[ActivePolicy]:
    """Return the policies that differ in a setting from the one before."""
    found: list[ActivePolicy] = []
    for policy in policies:
        if policy.units and (not found or knobs(policy.units) != knobs(found[-1].units)):
            found.append(policy)
    return found


def costs(fold: Fold, steps: NDArray[np.void]) -> Costs | None:
    """Return the costs of steps, of LEARNED_DTYPE: medians, and the highest peak of the last 3; None without steps."""
    if not len(steps):
        return None
    ends = [int(end_ns) for end_ns in steps["end_ns"][-3:]]
    begins = [end_ns - int(step_ns) for end_ns, step_ns in zip(ends, steps["step_ns"][-3:], strict=True)]
    rank, true_at = fold.groups[0][0], fold.cuts.true_at
    parts = (fold.moments.part(fold.trace, rank, *map(true_at, times)) for times in zip(begins, ends, strict=True))
    return Costs(
        num_steps=len(steps),
        ms=float(np.median(steps["step_ns"])) / 1e6,
        exposed=float(np.median(steps["exposed"])),
        peak_bytes=max(int(memory.series(part).total.max(initial=0)) for part in parts),
    )
