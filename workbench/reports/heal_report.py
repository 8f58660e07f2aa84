"""What a heal has done."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base.fault import listed
from workbench.base.text_formats import plural
from workbench.replay.grouping import label
from workbench.reports.report import Report


@dataclass(frozen=True, kw_only=True)
class HealReport(Report):
    """Lost ranks were replaced.

    Attributes:
        ranks: the ranks.
        seconds: how long it took.
        start_s: how long of it the new processes and the process groups took.
        cells: number of cells and commands that all ranks repeated.
        steps_redone: number of steps that they repeated, from the snapshot on.
        steps_lost: number of steps without a snapshot, which were not repeated.
        kept: variables that the other ranks kept, though no repeated cell makes them.
        other: what is not as it was when they were lost, by expression, on the other ranks.
        left_out: cells and commands that are no part of the program, such as those on some ranks only.
        failed: cells and commands that raised this time, each with its error.
        has_snapshot: whether the state is that of a snapshot.
        replicas: ranks whose state the others got, as they hold the same parameters; empty: none.
        lacking: ranks that got it, and whose random numbers and variables of that step are lost.
        next: what to type to go on with the steps that were interrupted; empty: none were.
    """

    ranks: tuple[int, ...]
    seconds: float
    start_s: float
    cells: int
    steps_redone: int = 0
    steps_lost: int = 0
    kept: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    has_snapshot: bool = False
    replicas: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    next: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        is_one = len(self.ranks) == 1
        return f"{label(self.ranks)} {'was' if is_one else 'were'} replaced in {self.seconds:.1f} s"

    @property
    def problem(self) -> str:
        """What raised; empty if nothing did."""
        return "; ".join(self.failed)

    def facts(self) -> list[tuple[str, str]]:
        """Return what was repeated, kept and lost, and what to type next."""
        found = [("repeated", f"{plural(self.cells, 'cell')} and commands, on all ranks; nothing is recorded twice")]
        if self.has_snapshot:
            found.append(("steps", f"from a snapshot; {plural(self.steps_redone, 'step')} done again after it"))
        if self.replicas:
            found.append(
                ("state", f"of the last completed step, from {label(self.replicas)}, which had the same shards")
            )
        if self.lacking:
            own = "random numbers, buffers and variables are those before the last step: it died as it ended that step"
            found.append(("own state", f"{label(self.lacking)}: {own}"))
        if self.steps_lost:
            found.append(
                (
                    "lost",
                    f"{plural(self.steps_lost, 'step')}: no whole snapshot, and no replica with a whole state",
                )
            )
        if self.kept:
            found.append(("kept", f"{listed(self.kept)}: no repeated cell makes them, and the others had them"))
        if self.other:
            found.append(
                ("other", f"{listed(self.other)}: not as before, as no snapshot holds what steps change there")
            )
        if self.left_out:
            found.append(("not repeated", listed(self.left_out)))
        if self.failed:
            found.append(("raised", "; ".join(self.failed)))
        if self.next:
            more = " --snapshot 10 goes on, with a snapshot every 10 steps" if self.steps_lost else " goes on"
            found.append(("next", f"{self.next}{'' if '--snapshot' in self.next else more}"))
        return found
