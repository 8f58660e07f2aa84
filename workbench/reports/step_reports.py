"""The reports of ``step``, ``run`` and other commands that take ``--until``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from workbench.base.fault import listed
from workbench.base.text_formats import format_bytes, format_duration, format_loss, plural
from workbench.protocol.commands import (
    RunReply,
    StepReply,
)
from workbench.replay.grouping import by_value, first_on_words, label, on_words
from workbench.reports.report import Report, next_facts


@dataclass(frozen=True, kw_only=True)
class UntilReport(Report):
    """Base of the reports of commands that take ``--until``.

    Attributes:
        missed: the event to stop before, if it did not occur; else empty.
        occurred: events that did occur, those most similar to ``missed`` first.
    """

    missed: str = ""
    occurred: tuple[str, ...] = ()

    def _with_missed(self, *parts: str) -> str:
        """Return the parts of a headline, and that the event did not occur."""
        return "; ".join(filter(None, [*parts, f"{self.missed} did not occur" if self.missed else ""]))

    def facts(self) -> list[tuple[str, str]]:
        """Return the events that occurred instead of the missed one; none if nothing was missed."""
        return [("occurred, nearest first", ", ".join(self.occurred) or "nothing")] if self.missed else []


@dataclass(frozen=True, kw_only=True)
class RunReport(UntilReport):
    """A script has ended.

    Attributes:
        steps_done: steps that every rank did.
        seconds: duration on the slowest rank.
        models: variables of the script that hold a model and stay on the ranks.
    """

    steps_done: int
    seconds: float
    models: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        steps = f"{plural(self.steps_done, 'step')} in " if self.steps_done else ""
        return self._with_missed(f"the script has ended: {steps}{format_duration(self.seconds * 1e9)}")

    def facts(self) -> list[tuple[str, str]]:
        """Return the models that stay, and the events that occurred instead of a missed one."""
        return [*([("models that stay", ", ".join(self.models))] if self.models else []), *super().facts()]


@dataclass(frozen=True, kw_only=True)
class StepReport(UntilReport):
    """Training steps were run.

    Attributes:
        steps_done: steps of this command.
        losses: per step, the mean over the ranks whose step function returned a number; None if none did.
        seconds: time of each step on its slowest rank.
        optimizer_steps: optimizer steps since the ranks started.
        not_finite: from which step on, and on which rank first, the loss is not finite; empty if it is.
        unreduced: which units hold unreduced gradients, on which ranks, and what to do; empty if none.
        notes: what is probably unintended, and what to do, a sentence each.
        next: what to type next; empty if it was done before.
        saved: the folders of the checkpoints that were saved meanwhile.
    """

    computed = (*Report.computed, "median_seconds")

    steps_done: int
    losses: tuple[float | None, ...] | None
    seconds: tuple[float, ...]
    optimizer_steps: int
    not_finite: str = ""
    unreduced: str = ""
    notes: tuple[str, ...] = ()
    next: str = ""
    saved: tuple[str, ...] = ()

    @property
    def median_seconds(self) -> float:
        """Median step time in seconds; NaN without a step."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        parts = [plural(self.steps_done, "step")]
        losses = [loss for loss in self.losses or () if loss is not None]
        if losses:
            ends = losses[:1] if len(losses) == 1 else [losses[0], losses[-1]]
            parts.append(f"loss {' -> '.join(map(format_loss, ends))}")
        if self.seconds:
            parts.append(f"{format_duration(self.median_seconds * 1e9)} a step (median)")
        return self._with_missed(", ".join(parts), self.problem)

    @property
    def problem(self) -> str:
        """Where the loss is not finite, and which gradients were not reduced; empty if there is no problem."""
        return "; ".join(filter(None, [self.not_finite, self.unreduced]))

    def facts(self) -> list[tuple[str, str]]:
        """Return the notes, the events that occurred instead of a missed one, and what to type next."""
        saved = [("saved", f"{self.saved[-1]}{_others_words(self.saved[:-1])}")] if self.saved else []
        return [*saved, *(("note", note) for note in self.notes), *super().facts(), *next_facts(self.next)]


def _others_words(folders: Sequence[str]) -> str:
    return f", and {plural(len(folders), 'checkpoint')} before" if folders else ""


def step_report(by_rank: Sequence[StepReply]) -> StepReport:
    """Return the report of the steps that all ranks did."""
    return StepReport(
        steps_done=min(stepped.steps_done for stepped in by_rank),
        losses=_losses([stepped.losses or () for stepped in by_rank]),
        seconds=tuple(map(max, zip(*(stepped.seconds for stepped in by_rank), strict=False))),
        optimizer_steps=min(stepped.optimizer_steps for stepped in by_rank),
        not_finite=_not_finite(by_rank),
        unreduced=_unreduced([stepped.unreduced for stepped in by_rank]),
        notes=(*_step_notes(by_rank), *dict.fromkeys(note for saved in by_rank[0].saved for note in saved.notes)),
        saved=tuple(saved.folder for saved in by_rank[0].saved),
    )


def _step_notes(by_rank: Sequence[StepReply]) -> Iterator[str]:
    """Yield what the steps lacked, and what to do."""
    for name in dict.fromkeys(name for stepped in by_rank for name in stepped.never_cleared):
        used = f"nothing clears the gradients that {name} has used, and the next backward adds to them"
        yield f"{used}: {name}.zero_grad()"
    for name in dict.fromkeys(name for stepped in by_rank for name in stepped.never_reduced):
        yield f"gradients were not reduced over the ranks before the step of {name}; %fsdp lint says what to change"
    if kept := max(stepped.snapshot_bytes for stepped in by_rank):
        yield f"snapshots take {format_bytes(kept)} on each rank; %fsdp heal goes on from the newest"
    alone = [name for name in by_rank[0].unsharded if all(name in stepped.unsharded for stepped in by_rank)]
    if alone and len(by_rank) > 1:
        are = "are" if len(alone) > 1 else "is"
        yield f"no collective was issued: {listed(alone)} {are} not sharded; %fsdp shard {alone[0]}"
    rows = list(zip(*(stepped.rows for stepped in by_rank), strict=False))
    uneven = [number for number, each in enumerate(rows) if len({*each}) > 1]
    if uneven:
        step, of_ranks = by_rank[0].first_step + uneven[-1], by_value(enumerate(rows[uneven[-1]]))
        which = ", ".join(f"{count} on {label(ranks)}" for count, ranks in of_ranks.items())
        steps = plural(len(rows), "step")
        yield (
            f"batches had unequal rows in {len(uneven)} of {steps} (step {step}: {which}), and the gradients of all "
            "ranks count alike. If the loss is a mean over rows, weight it before backward: "
            "total = torch.tensor(len(x), device=device); torch.distributed.all_reduce(total); "
            "loss = loss * len(x) * world_size / total"
        )


def run_report(by_rank: Sequence[RunReply]) -> RunReport:
    """Return the report of a script that has ended on all ranks."""
    return RunReport(
        steps_done=min(ran.steps_done for ran in by_rank),
        seconds=max(ran.seconds for ran in by_rank),
        models=by_rank[0].models,
    )


def _unreduced(by_rank: Sequence[tuple[str, ...]]) -> str:
    """Return which units hold unreduced gradients, and what to do about it, as text; empty if none."""
    ranks = {names: own for names, own in by_value(enumerate(map(listed, by_rank))).items() if names}
    if not ranks:
        return ""
    where = [f"gradients of {names} were not reduced {on_words(own, len(by_rank))}" for names, own in ranks.items()]
    return (
        f"{', '.join(where)}: call backward after the model's forward has returned, on a tensor computed from "
        "its outputs. To drop these gradients: model.reset_iter_state()"
    )


def _not_finite(by_rank: Sequence[StepReply]) -> str:
    """Return in which step, and on which ranks, the loss was first NaN or infinite, as text; empty if in none."""
    steps = [
        {rank: loss for rank, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)}
        for losses in zip_longest(*(stepped.losses or () for stepped in by_rank))
    ]
    first = next((i for i, bad in enumerate(steps) if bad), None)
    if first is None:
        return ""
    kind = "NaN" if any(math.isnan(loss) for loss in steps[first].values()) else "infinite"
    number = by_rank[0].first_step + first
    where = first_on_words(list(steps[first]), len(by_rank))
    if not all(steps[first:]):
        return f"loss is {kind} in step {number}{where}"
    return f"loss is {kind} from step {number} on, {where.lstrip(', ')}"


def _losses(by_rank: Sequence[Sequence[float | None]]) -> tuple[float | None, ...] | None:
    """Return the mean loss of each step over the ranks that have one; None if no rank has any."""
    steps = [[loss for loss in step if loss is not None] for step in zip_longest(*by_rank)]
    return tuple(fmean(step) if step else None for step in steps) if any(steps) else None
