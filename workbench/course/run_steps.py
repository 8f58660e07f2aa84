"""The step and the collectives that a finding is about."""

from __future__ import annotations

from typing import NamedTuple

from workbench.course.finding import CheckFinding, fails
from workbench.errors import UsageError
from workbench.events import COLLECTIVES, ROOT, Edge, Kind, unit_words
from workbench.trace.columns import RankTrace, Trace, steps
from workbench.trace.step_names import step_name


def step_of(trace: Trace, step: int) -> int | None:
    """Return the number of a step, None if there is none; -1 is the newest that has ended on all ranks, and so on."""
    ended = [set(_ended(rank)) for rank in trace.ranks]
    common = sorted(set[int]() if not ended else ended[0].intersection(*ended[1:]))
    if step >= 0:
        return step if step in common else None
    return common[step] if -step <= len(common) else None


def _ended(rank: RankTrace) -> list[int]:
    ends = rank.rows[(rank.kinds == Kind.STEP) & (rank.rows["edge"] == Edge.END)]
    found: list[int] = ends["step"].tolist()
    return found


def no_step(trace: Trace, step: int, what: str = "the run") -> CheckFinding:
    """Return the finding that a step was not recorded."""
    number = len(steps(trace))
    if not number:
        return fails(f"{what} has no recorded step: train at least one, such as with %fsdp step 1")
    wanted = f"{step_name(step)}" if step >= 0 else f"{-step} steps"
    return fails(f"{what} has no {wanted} that ended on all ranks; it has {number} recorded")


class CallKind(NamedTuple):
    """A kind of collective, and the name of a unit; None: all units."""

    kind: Kind
    unit: str | None

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
