"""The step and the collectives that a finding is about."""

from __future__ import annotations

import sys
from typing import NamedTuple

from workbench.course.finding import CheckFinding, fails
from workbench.errors import RankError, UsageError, without_colours
from workbench.events import COLLECTIVES, ROOT, Edge, Kind, unit_words
from workbench.replay.grouping import label
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.step_names import step_name

NOT_SHARDED = "the model was not sharded, or another one was trained; look for an error where it is sharded"


def step_of(trace: Trace, step: int, what: str = "the run", *, may_pause: bool = False) -> int | CheckFinding:
    """Return the number of a step that has ended on all ranks, or the finding that there is none.

    Args:
        trace: of the run.
        step: its number; a negative one counts from the newest step that has begun.
        what: the run, for the sentence.
        may_pause: whether a newer step may have begun, such as one that is stopped where a student looks at it.
    """
    ended = [set(_steps(rank, Edge.END)) for rank in trace.ranks]
    common = sorted(set[int]() if not ended else ended[0].intersection(*ended[1:]))
    unended = unended_step(trace)
    if step < 0 and unended and not may_pause:
        return fails(unended)
    if step >= 0 and step in common:
        return step
    if step < 0 and -step <= len(common):
        return common[step]
    number = len(steps(trace))
    if not number:
        return fails(f"{what} has no recorded step: train at least one, such as with %fsdp step 1")
    wanted = f"{step_name(step)}" if step >= 0 else f"{-step} steps"
    return fails(f"{what} has no {wanted} that ended on all ranks; it has {number} recorded")


def unended_step(trace: Trace) -> str:
    """Return that the newest step has begun and not ended on all ranks, and its error; empty if it has ended."""
    if isinstance(trace, FailedTrace):
        return trace.problem
    newest = max((step for rank in trace.ranks for step in _steps(rank, Edge.BEGIN)), default=-1)
    left = [rank.rank for rank in trace.ranks if newest >= 0 and newest not in _steps(rank, Edge.END)]
    if not left:
        return ""
    before = max((step for rank in trace.ranks for step in _steps(rank, Edge.END)), default=-1)
    if before >= 0 and runs_no_unit(trace, newest) and (unsharded := runs_no_unit(trace, before)):
        return unsharded  # and so its begin was only expected, where the last step had ended
    error = getattr(sys, "last_value", None)  # which IPython notes
    first = without_colours(str(error)).strip().partition("\n")[0] if isinstance(error, RankError) else ""
    advice = f"it raised {first}" if first else "continue it if it is stopped, or read the error above"
    return f"{step_name(newest)} began and did not end on {label(left)}, and an older step does not count: {advice}"


class FailedTrace(Trace):
    """A trace after which a command that was to train failed.

    Attributes:
        problem: that it failed, and its error.
    """

    problem: str


def with_failed_step(trace: Trace, error: str) -> FailedTrace:
    """Return a trace after which training failed with an error: its newest step is an older one, and does not count."""
    found = FailedTrace(trace.header, trace.ranks)
    first = without_colours(error).strip().partition("\n")[0]
    problem = f"the newest %fsdp step or run failed, and an older step does not count: {first}"
    object.__setattr__(found, "problem", problem)
    return found


def runs_no_unit(trace: Trace, step: int) -> str:
    """Return that no rank ran a sharded unit in a step; empty if one did."""
    if any((rank.rows["unit"] >= 0).any() for rank in trace.slice(step=step).ranks):
        return ""
    return f"{step_name(step)} ran no sharded unit: {NOT_SHARDED}"


def _steps(rank: RankTrace, edge: Edge) -> list[int]:
    found: list[int] = rank.rows[(rank.kinds == Kind.STEP) & (rank.rows["edge"] == edge)]["step"].tolist()
    return found


class CallKind(NamedTuple):
    """A kind of collective, and the name of a unit; None: all units."""

    kind: Kind
    unit: str | None

    @property
    def plural(self) -> str:
        """The collectives as text: ``"all-gathers of blocks.1"``."""
        return f"{self.kind.words}s{'' if self.unit is None else f' of {unit_words(self.unit)}'}"

    def words(self, amount: int, *, in_bytes: bool) -> str:
        """Return a number of these collectives, or of their bytes, as text: ``"9 all-gathers of blocks.1"``."""
        of = "" if self.unit is None else f" of {unit_words(self.unit)}"
        if in_bytes:
            return f"{amount:,} B in {self.kind.words}s{of}"
        return f"{amount:,} {self.kind.words}{'' if amount == 1 else 's'}{of}"


def read_call(key: str) -> CallKind:
    """Return ``"all_gather:blocks.1"`` as kind and unit.

    Raises:
        UsageError: there is no such kind of collective.
    """
    name, colon, unit = key.partition(":")
    kinds = {kind.key: kind for kind in COLLECTIVES}
    kind = kinds.get(name.strip().replace("-", "_"))
    if kind is None:
        raise UsageError(f"there is no kind of collective {name!r}; the kinds: {', '.join(kinds)}")
    return CallKind(kind, ("" if unit.strip() == ROOT else unit.strip()) if colon else None)
