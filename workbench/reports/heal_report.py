"""What a heal has done."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.base.fault import listed
from workbench.base.text_formats import plural
from workbench.replay.grouping import label
from workbench.reports.report import Report, next_facts


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
        failed: cells and commands that did not end as before, each with its error.
        failed_again: cells that raised as before, each with the name of its exception.
        has_snapshot: whether the state is that of a snapshot.
        replicas: ranks whose state the others got, as they hold the same parameters; empty: none.
        lacking: ranks that got it, and whose random numbers and variables of that step are lost.
        next: what to type to do lost steps again, and go on with those that were interrupted; empty: there are none.
        next_step: number that views give the next step.
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
    failed_again: tuple[str, ...] = ()
    has_snapshot: bool = False
    replicas: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()
    next: str = ""
    next_step: int = 0

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        is_one = len(self.ranks) == 1
        return f"{label(self.ranks)} {'was' if is_one else 'were'} replaced in {self.seconds:.1f} s"

    @property
    def problem(self) -> str:
        """What did not end as before; empty if all did."""
        return "; ".join(self.failed)

    def facts(self) -> list[tuple[str, str]]:
        """Return what was repeated, kept and lost, and what to type next."""
        what = "1 cell or command" if self.cells == 1 else f"{self.cells} cells and commands"
        found = [("repeated", f"{what}, on all ranks; nothing is recorded twice")]
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
            why = f"{plural(self.steps_lost, 'step')}: no whole snapshot, and no replica with a whole state"
            now = "models and optimizers are as the cells made them"
            found.append(("lost", f"{why}; {now}. Views keep the lost steps, and call the next step {self.next_step}"))
        if self.kept:
            found.append(("kept", f"{listed(self.kept)}: no repeated cell makes them, and the others had them"))
        if self.other:
            found.append(
                ("other", f"{listed(self.other)}: not as before, as no snapshot holds what steps change there")
            )
        if self.left_out:
            found.append(("not repeated", listed(self.left_out)))
        if self.failed_again:
            found.append(("raised as before", "; ".join(self.failed_again)))
        if self.failed:
            found.append(("not as before", "; ".join(self.failed)))
        keeps = ", with --snapshot 10 to lose no more than 10 steps" if self.steps_lost else ""
        return [*found, *next_facts(self.next and f"{self.next}{'' if '--snapshot' in self.next else keeps}")]
