"""Results of commands: small frozen reports that print as sentences and display as a small table.

All texts are escaped when they become HTML.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from workbench.base.fault import Fault, facts_of, listed
from workbench.base.text_formats import format_bytes, format_duration, format_loss, format_share, plural
from workbench.events import Unit, unit_words
from workbench.protocol.commands import (
    Command,
    ModelSharding,
    Reshard,
    Run,
    RunReply,
    Shard,
    ShardReply,
    Snapshot,
    SnapshotReply,
    Step,
    StepComparison,
    StepReply,
    UnmanagedState,
    Unshard,
    UnshardReply,
    Verify,
    VerifyReply,
    registered,
)
from workbench.protocol.lint_reply import LintReply
from workbench.protocol.policy import policy_words
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.grouping import by_value, label, ranges
from workbench.replay.shards import totals, unit_shards
from workbench.replay.units import by_number, differing, unmanaged_sentences, unseen_words
from workbench.reports.clock_text import clock_words
from workbench.reports.lint_faults import lint_faults
from workbench.reports.repeat_faults import first_repeated, repeat_faults
from workbench.reports.report import Report, meanings
from workbench.reports.resume_faults import NOT_COMPARED, resume_faults
from workbench.reports.stop_positions import live_units
from workbench.reports.verify_faults import DATA, DRIFT, UNEVEN_COPIES, FirstDifference, faults_of, first_differences
from workbench.trace.schema import Header, HostClock


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Current state of one rank.

    Attributes:
        rank: global rank.
        alive: whether its process exists.
        host: its machine.
        device: e.g. ``cpu`` or ``cuda:0``.
        pid: of its process.
        doing: what it is doing, as text; ``busy`` if it runs a request and did not answer, ``""`` if it runs none.
        lost: how it was lost, as text; ``""`` if it was not, or the cause is unknown.
    """

    rank: int
    alive: bool
    host: str
    device: str
    pid: int
    doing: str = ""
    lost: str = ""

    def __str__(self) -> str:
        return self.words(with_host=True)

    def words(self, *, with_host: bool) -> str:
        """Return its device, process and activity as text, with the host's name if ``with_host``."""
        place = f"{self.device}{f' on {self.host}' if with_host else ''}, pid {self.pid}"
        return f"{place}; {self.doing or 'no answer'}" if self.alive else f"{place}; {self.lost or 'gone'}"


def _held(holder: str, *, is_free: bool = False) -> list[tuple[str, str]]:
    """Return the fact that another notebook controls the ranks, or controlled them."""
    if is_free:
        return [("held by", "no notebook; the ranks are free. To take them: %fsdp attach")]
    return [("held by", f"{holder}; here you can only view them")] if holder else []


def _next(line: str) -> list[tuple[str, str]]:
    """Return the fact that says what to type next."""
    return [("next", line)] if line else []


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """A model that is sharded.

    Attributes:
        name: its variable on the ranks; empty if unknown.
        units: names of its units, ``(root)`` included, from the top of the model.
        policy: how they are stored and computed, a phrase each; empty for the default.
        is_replicated: whether every rank holds the whole model.
    """

    name: str = ""
    units: tuple[str, ...]
    policy: tuple[str, ...] = ()
    is_replicated: bool = False

    def __str__(self) -> str:
        if self.is_replicated:
            return "; ".join(filter(None, [self.name, *self.policy]))
        units = f"{plural(len(self.units), 'unit')}: {listed(self.units)}"
        return "; ".join([f"{self.name}, {units}" if self.name else units, *self.policy])


def sharded_models(header: Header, models: Sequence[ModelInfo] = ()) -> tuple[ModelStatus, ...]:
    """Return the models whose units are in use, in the order in which they were sharded.

    Args:
        header: of the trace.
        models: the variables that hold a model. If several hold a unit, the one with the most units names it. A unit
            that none of them holds belongs to the model of its root; roots with a path count as parts of one model.
    """
    holders = sorted(models, key=lambda model: -len(model.units))
    parts: dict[tuple[str, int], list[Unit]] = {}
    for unit in live_units(header):
        name = next((model.name for model in holders if unit.index in model.units), "")
        is_alone = not name and unit.root >= 0 and not header.units[unit.root].name
        parts.setdefault((name, unit.root if is_alone else -1), []).append(unit)
    return tuple(
        ModelStatus(
            name=name,
            units=tuple(map(unit_words, sorted((unit.name for unit in units), key=by_number))),
            policy=_replicated_words(header, units) or tuple(policy_words(units)),
            is_replicated=bool(_replicated_words(header, units)),
        )
        for (name, _), units in parts.items()
    )


def _replicated_words(header: Header, units: Sequence[Unit]) -> tuple[str, ...]:
    """Return how a model is stored of which every rank holds the whole; empty for another."""
    if any(unit.runner.splits for unit in units):
        return ()
    num_bytes = sum(totals(unit_shards(unit)).bytes_at_rest for unit in units)
    buckets = [unit.num_reductions for unit in units if unit.num_reductions]
    return (
        f"{units[0].runner.short_name}, not sharded: every rank holds {format_bytes(num_bytes)}",
        *([f"gradients averaged in {plural(sum(buckets), 'all-reduce')}"] if buckets else []),
        *([] if all(unit.comm for unit in units) else [unseen_words(header)]),
    )


@dataclass(frozen=True, kw_only=True)
class StatusReport(Report):
    """The ranks, the sharded units, and how much is recorded.

    Attributes:
        running: whether ranks are started.
        ranks: one entry per rank; empty when stopped.
        models: the sharded models.
        num_rows: rows of the trace so far, all ranks together.
        num_lost: rows overwritten on ranks before they could be read.
        num_dropped: oldest rows dropped here, because the number of rows kept is bounded.
        record: the file that is shown instead of the ranks' trace; empty if none.
        kept: ids of the processes that stay without ranks, for the next start.
        holder: the notebook that controls the ranks, so that this one can only view them; empty if none.
        is_free: whether the holder has released them.
        clocks: the clocks of hosts that do not read rank 0's.
        stopped: where the running request is stopped, as text; empty if it is not.
        obstacle: why no step is possible any more, and what to do; empty if unknown.
        under_way: the running request, as text; empty if none.
        cluster: the cluster that the ranks were attached from, as text; empty if they were started here.
        notes: what is probably unintended, and what to do, a sentence each.
        collectives: which collectives are recorded, as text; empty if the workbench's engine issues all.
    """

    running: bool
    ranks: tuple[RankStatus, ...] = ()
    models: tuple[ModelStatus, ...] = ()
    num_rows: int = 0
    num_lost: int = 0
    num_dropped: int = 0
    record: str = ""
    kept: tuple[int, ...] = ()
    holder: str = ""
    is_free: bool = False
    clocks: tuple[HostClock, ...] = ()
    stopped: str = ""
    obstacle: str = ""
    under_way: str = ""
    cluster: str = ""
    notes: tuple[str, ...] = ()
    collectives: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if not self.running:
            shown = f", {self.record} is open" if self.record else ""
            return f"no ranks are running{shown}: %fsdp start -n 4"
        return self.problem or self.stopped or f"{plural(len(self.ranks), 'rank')} running"

    @property
    def problem(self) -> str:
        """Which ranks are gone, or why no step is possible, and what to do; empty if there is no problem."""
        dead = [r.rank for r in self.ranks if not r.alive]
        if self.running and dead:
            heal = "%fsdp heal, or " if len(dead) < len(self.ranks) else ""
            return f"{label(dead)} of {len(self.ranks)} died: {heal}%fsdp stop, then %fsdp start"
        return self.obstacle if self.running else ""

    def facts(self) -> list[tuple[str, str]]:
        """Return the ranks, the sharded models, and how much is recorded."""
        found = [*_held(self.holder, is_free=self.is_free), *self._ranks_of_hosts()]
        if self.cluster:
            found.insert(0, ("attached", self.cluster))
        if self.under_way:
            found.append(("under way", self.under_way))
        found += [("replicated" if model.is_replicated else "sharded", str(model)) for model in self.models]
        if not self.models and (self.running or self.record):
            found.append(("sharded", "nothing yet: %fsdp shard MODEL"))
        if self.collectives:
            found.append(("collectives", self.collectives))
        found += [("note", note) for note in self.notes]
        lost = f", {self.num_lost:,} lost: overwritten before they were read" if self.num_lost else ""
        dropped = f", {self.num_dropped:,} older ones dropped: the limit is reached" if self.num_dropped else ""
        found.append(("recorded", plural(self.num_rows, "event") + dropped + lost))
        if self.kept:
            found.append(("kept", f"processes {', '.join(map(str, self.kept))}, so that the next start is quick"))
        return found

    def _ranks_of_hosts(self) -> Iterator[tuple[str, str]]:
        """Yield a fact for each rank and, if there are several hosts, one for each host before its ranks."""
        has_several = len({r.host for r in self.ranks}) > 1
        for host, own in groupby(self.ranks, key=lambda r: r.host):
            ranks = list(own)
            if has_several:
                yield host, f"{label([r.rank for r in ranks])}{self._clock_of(ranks[0].rank)}"
            for r in ranks:
                yield f"{'  ' * has_several}rank {r.rank}", r.words(with_host=not has_several)

    def _clock_of(self, rank: int) -> str:
        """Return the offset of a rank's clock from rank 0's as text; empty if it is the same clock or unknown."""
        return "".join(f"; {clock_words(clock)}" for clock in self.clocks if rank in clock.ranks)


@dataclass(frozen=True, kw_only=True)
class ShardReport(ModelSharding, Report):
    """A model was sharded.

    Attributes:
        bytes_at_rest: bytes of parameters each rank keeps between steps, padding included, by rank.
        notes: what is probably unintended, and what to do, a sentence each.
        next: what to type next; empty if it was done before.
        terms: of the glossary, which the report explains: those that the session first meets here.
    """

    internal = ("terms",)

    bytes_at_rest: tuple[int, ...]
    notes: tuple[str, ...] = ()
    next: str = ""
    terms: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        size = f"{self.num_elements:,} elements in {plural(self.num_params, 'parameter')}"
        return f"{self.model}: {plural(len(self.units), 'unit')} on {plural(len(self.bytes_at_rest), 'rank')}, {size}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the units, and the bytes before and after."""
        whole = max(self.bytes_unsharded, 1)
        kept = [f"{format_bytes(n)} ({format_share(n / whole)})" for n in self.bytes_at_rest]
        at_rest = kept[0] if len({*kept}) == 1 else _by_rank(kept)
        return [
            ("units", listed(self.units)),
            *meanings(self.terms),
            *self._wrapped(),
            *([("policy", "; ".join(self.policy))] if self.policy else []),
            ("full model", format_bytes(self.bytes_unsharded)),
            ("each rank keeps", f"{at_rest} between uses"),
            *(("note", note) for note in self.notes),
            *_next(self.next),
        ]

    def _wrapped(self) -> list[tuple[str, str]]:
        """Return which class was chosen if the command named none."""
        if self.chosen is None:
            return []
        names = ", ".join(self.chosen)
        found = f"{names}, the class repeated most" if names else "nothing: no list of modules repeats a class"
        return [("wrapped", f"{found}; to choose another: --wrap CLASS")]


@dataclass(frozen=True, kw_only=True)
class ReshardReport(ShardReport):
    """A sharded model was resharded in place; attributes as in :class:`ShardReport`, and one more.

    Attributes:
        optimizers: number of optimizers whose state was carried over.
        is_changed: whether its sharding was changed; else it was as wanted already.
    """

    optimizers: int = 0
    is_changed: bool = True

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if not self.is_changed:
            return f"nothing to change, {super().headline}"
        return f"resharded in place, {super().headline}{_carried(self.optimizers)}"


@dataclass(frozen=True, kw_only=True)
class UnshardReport(UnshardReply, Report):
    """A model is a plain module again; attributes as in :class:`~workbench.protocol.commands.UnshardReply`."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        done = f"{self.model} is a plain module again on every rank: {plural(self.num_params, 'parameter')}"
        return done + _carried(self.optimizers)


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
        return [*([("stays", ", ".join(self.models))] if self.models else []), *super().facts()]


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
        return [*saved, *(("note", note) for note in self.notes), *super().facts(), *_next(self.next)]


def _others_words(folders: Sequence[str]) -> str:
    return f", and {plural(len(folders), 'checkpoint')} before" if folders else ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(StepComparison, Report):
    """The comparison over all ranks: the largest differences, and the mean losses.

    Attributes:
        buffers: buffers that hold NaN or infinity, and on which ranks, as text; empty if none.
        since: since which step the loss is not finite, and on which ranks first, as text; empty if it is finite.
        notes: what is probably unintended, and what to do, a sentence each.
        faults: why the steps differ, as far as the evidence decides it, the most important first.
        first_differences: the first output, gradient and parameter that differ.
        is_repeated: whether the sharded step was compared with itself instead of an unsharded copy.
        resumed: the checkpoint from which the step was taken for the comparison; empty: from none.
        left_out: the variables that the step changes and a checkpoint does not hold.
    """

    buffers: str = ""
    since: str = ""
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    first_differences: tuple[FirstDifference, ...] = ()
    is_repeated: bool = False
    resumed: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence, with the most important fault."""
        if not self.faults:
            return self._comparison
        is_right = self.ok and self.could_compare and not self.not_finite
        return f"{self._comparison}{', but ' if is_right else ': '}{self.faults[0].verdict}"

    @property
    def _comparison(self) -> str:
        if self.ok and len(self.undecided) == self.num_params:
            return "cannot compare: the gradients of all parameters are rounding noise"
        if self.faults and not self.could_compare:
            return "cannot compare"
        if self.ok and self.not_finite:
            bad, compared = len(self.not_finite), plural(self.num_params, "parameter")
            those = f"all {compared}" if bad == self.num_params else f"{bad} of {compared}"
            since = f"; {self.since}" if self.since else ""
            return f"cannot compare: {those} hold NaN or infinity in both{since}"
        if self.resumed:
            verdict = "gives the same bits" if self.ok else "does NOT give the same bits"
            rest = f"; not part of it: {listed(self.left_out)}" if self.left_out else ""
            return f"one step from {self.resumed} {verdict} ({plural(self.num_params, 'tensor')} compared){rest}"
        if self.is_repeated:
            verdict = "gives the same bits twice" if self.ok else "does NOT give the same bits twice"
            return f"the sharded step {verdict}: outputs, gradients and parameters compared"
        verdict = "the same as" if self.ok else "NOT the same as"
        return (
            f"sharded training is {verdict} unsharded: {plural(self.num_params, 'parameter')} compared after one step"
        )

    @property
    def could_compare(self) -> bool:
        """Whether the comparison, or a fault, says anything about the recipe."""
        if self.faults:
            return self.faults[0].rule not in {DATA, *NOT_COMPARED}
        return not self.ok or (not self.not_finite and len(self.undecided) < self.num_params)

    @property
    def problem(self) -> str:
        """The headline, unless all values are equal and finite, and no fault was found."""
        return "" if self.ok and self.could_compare and not self.faults else self.headline

    def facts(self) -> list[tuple[str, str]]:
        """Return the faults, and the differences, term by term."""
        places = [(f"first {each.what}", each.words) for each in self.first_differences]
        return [*facts_of(self.faults), *places, *self._numbers()]

    def _numbers(self) -> list[tuple[str, str]]:
        worst = f", in {self.worst_param}" if self.max_rel_diff and self.worst_param else ""
        of = "parameter" if self.is_repeated or self.resumed else "update"
        found = [
            ("largest difference", f"{self.max_abs_diff:.3g}; {self.max_rel_diff:.3g} of the {of}{worst}"),
            ("tolerance", self.tolerance),
            ("bitwise equal", f"{self.equal_bits} of {plural(self.num_params, 'parameter')}"),
        ]
        is_of_another_step = bool(self.resumed) and not self.could_compare
        if is_of_another_step or (self.ok and len(self.not_finite) == self.num_params):
            found = []  # nothing could be compared
        if self.loss_sharded is not None and self.loss_reference is not None and not is_of_another_step:
            both = (format_loss(loss, ".6g") for loss in (self.loss_sharded, self.loss_reference))
            which = "{} in the second run, {} in the first" if self.is_repeated else "{} sharded, {} unsharded"
            which = "{} from the checkpoint, {} without" if self.resumed else which
            found.append(("loss", which.format(*both)))
        if self.not_finite:
            found.append(("NaN or infinity in", listed(self.not_finite)))
        if self.undecided:
            found.append(("not compared", f"{listed(self.undecided)}: their gradients are rounding noise"))
        if self.buffers:
            found.append(("NaN in buffers", self.buffers))
        return [*found, *(("note", note) for note in self.notes)]


@dataclass(frozen=True, kw_only=True)
class ExportReport(Report):
    """A file was written.

    Attributes:
        path: its path.
        what: its content, as text.
        num_bytes: its size.
        notes: how a script differs from what the ranks did, as sentences.
    """

    path: Path
    what: str
    num_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"wrote {self.path} ({format_bytes(self.num_bytes)}): {self.what}"

    def facts(self) -> list[tuple[str, str]]:
        """Return how a script differs from what the ranks did."""
        return [("note", note) for note in self.notes]


@dataclass(frozen=True, kw_only=True)
class OpenReport(Report):
    """A trace file is shown.

    Attributes:
        name: of the file.
        num_ranks: ranks that recorded anything.
        steps: numbers of the training steps in it.
        models: the sharded models.
        num_rows: rows, all ranks together.
        notes: what a recording lacks, as sentences.
        is_live: whether the run that is recorded still writes.
    """

    name: str
    num_ranks: int
    steps: tuple[int, ...]
    models: tuple[ModelStatus, ...]
    num_rows: int
    notes: tuple[str, ...] = ()
    is_live: bool = False

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        ranks, events = plural(self.num_ranks, "rank"), plural(self.num_rows, "event")
        return f"opened {self.name}: {ranks}, {plural(len(self.steps), 'step')}, {events}; no ranks needed"

    def facts(self) -> list[tuple[str, str]]:
        """Return the steps, the sharded models, and the commands that draw the trace."""
        from workbench.views import VIEWS  # noqa: PLC0415 - they load plotly

        found = [("run", "continues; views and the dashboard follow it")] if self.is_live else []
        found += [("steps", ranges(self.steps))] if self.steps else []
        found += [("sharded", str(model)) for model in self.models] or [("sharded", "nothing")]
        found += [("note", note) for note in self.notes]
        return [*found, ("now", f"%fsdp explain, %fsdp dashboard, or a view: {', '.join(VIEWS)}")]


@dataclass(frozen=True, kw_only=True)
class CellReport(Report):
    """A cell ran on ranks.

    Attributes:
        texts: output of each rank as plain text, by rank.
        remarks: whether and how the ranks' output differs; ``""`` if there was none.
    """

    texts: Mapping[int, str]
    remarks: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return f"ran on {label(self.texts)}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the output of each rank."""
        return [(f"rank {rank}", text.strip()) for rank, text in self.texts.items() if text.strip()]


@dataclass(frozen=True, kw_only=True)
class StartReport(Report):
    """Ranks were started.

    Attributes:
        num_ranks: how many.
        devices: device of each rank.
        seconds: how long it took.
        notice: a sentence from the ranks for the user; empty if none.
        how: ``started`` or ``attached``.
        holder: the notebook that controls them, so that this one can only view them; empty if none.
        next: what to type next; empty if it was done before.
    """

    num_ranks: int
    devices: tuple[str, ...]
    seconds: float
    notice: str = ""
    how: str = "started"
    holder: str = ""
    next: str = ""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        devices = _by_rank(list(self.devices))
        return f"{plural(self.num_ranks, 'rank')} {self.how} in {self.seconds:.1f} s: {devices}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the holder, the notice, and what to type next."""
        return [*_held(self.holder), *([("notice", self.notice)] if self.notice else []), *_next(self.next)]


Source = Literal["cell", "panel", "tool"]


@dataclass(frozen=True, kw_only=True)
class PastCommand:
    """A command that was asked for in this notebook.

    Attributes:
        line: what was typed, or could have been.
        source: who asked.
        t_s: when, in seconds since 1970.
    """

    line: str
    source: Source
    t_s: float


@dataclass(frozen=True, kw_only=True)
class HistoryReport(Report):
    """The commands of a notebook.

    Attributes:
        commands: the oldest first.
    """

    commands: tuple[PastCommand, ...]

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return plural(len(self.commands), "command") if self.commands else "no commands yet; see %fsdp help for a list"

    def facts(self) -> list[tuple[str, str]]:
        """Return each with the time of day, and its source unless that was a cell."""
        return [(_when(past), past.line) for past in self.commands]


def _when(past: PastCommand) -> str:
    moment = time.strftime("%H:%M:%S", time.localtime(past.t_s))
    return moment if past.source == "cell" else f"{moment} {past.source}"


def _carried(optimizers: int) -> str:
    """Return a note that the state of some optimizers was carried over; empty for 0."""
    return f", state of {plural(optimizers, 'optimizer')} carried over" if optimizers else ""


def _by_rank(values: Sequence[str]) -> str:
    """Return the texts with their ranks, equal ones once, without empty ones: ``"cpu on every rank"``."""
    return "; ".join(f"{value} {_on(own, len(values))}" for value, own in by_value(enumerate(values)).items() if value)


# ---- from the ranks' replies to the report of a command

Saying = Callable[[Sequence[Any]], Report]
"""Makes a report from the replies of all ranks, in rank order."""

SAYS: dict[type[Command], Saying] = {}


def says(command: type[Command]) -> Callable[[Saying], Saying]:
    """Register the decorated function as the report maker of ``command``."""
    return registered(SAYS, command)


@dataclass(frozen=True, kw_only=True)
class SnapshotReport(SnapshotReply, Report):
    """A snapshot was taken.

    Attributes:
        num_bytes: bytes of the largest state of a rank.
        kept_bytes: the largest number of bytes of snapshots that a rank keeps.
        seconds: how long it took.
    """

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        return (
            f"snapshot taken in {self.seconds:.2f} s: each rank keeps its state, {format_bytes(self.num_bytes)}, and "
            f"that of the rank before; {format_bytes(self.kept_bytes)} in all"
        )


@says(Snapshot)
def _snapshot(by_rank: Sequence[SnapshotReply]) -> SnapshotReport:
    return SnapshotReport(**{name: max(vars(each)[name] for each in by_rank) for name in vars(by_rank[0])})


@says(Shard)
def _shard(by_rank: Sequence[ShardReply]) -> ShardReport:
    sharded, optimizers = _sharded(by_rank), by_rank[0].optimizers
    if optimizers:
        it, them = ("was", "it") if optimizers == 1 else ("were", "them")
        carried = f"{plural(optimizers, 'optimizer')} made before sharding {it} carried over; in a script, make {them}"
        sharded["notes"] = (f"{carried} after fully_shard", *sharded["notes"])
    return ShardReport(**sharded, chosen=by_rank[0].chosen)


@says(Reshard)
def _reshard(by_rank: Sequence[ShardReply]) -> ReshardReport:
    first = by_rank[0]
    return ReshardReport(**_sharded(by_rank), optimizers=first.optimizers, is_changed=first.is_changed)


def _sharded(by_rank: Sequence[ShardReply]) -> dict[str, Any]:
    first = by_rank[0]
    same = {name: getattr(first, name) for name in ("model", "num_params", "num_elements", "bytes_unsharded")}
    at_rest = tuple(sharded.bytes_at_rest for sharded in by_rank)
    notes = _lint_notes(first.model, [sharded.lint for sharded in by_rank])
    return same | {"units": first.units, "policy": first.policy, "bytes_at_rest": at_rest, "notes": notes}


def _lint_notes(model: str, by_rank: Sequence[LintReply]) -> tuple[str, ...]:
    """Return the note that a sharded model has faults: the most important one with its fix, and how many more."""
    first, *others = lint_faults(by_rank) or (None,)
    if first is None:
        return ()
    more = f". {plural(len(others), 'further fault')}: %fsdp lint {model}" if others else ""
    return (f"{first.sentence}{more}",)


def _notes(model: str, by_rank: Sequence[UnmanagedState]) -> tuple[str, ...]:
    """Return notes on what the engine does not manage in ``model`` (its name on the ranks, or empty)."""
    params, hooks = ({name: None for rank in by_rank for name in getattr(rank, kind)} for kind in ("params", "hooks"))
    buffers = differing([rank.buffers for rank in by_rank])
    return unmanaged_sentences({model: tuple(params)}, tuple(hooks), {model: buffers})


@says(Unshard)
def _unshard(by_rank: Sequence[UnshardReply]) -> UnshardReport:
    return UnshardReport(**vars(by_rank[0]))


@says(Step)
def _step(by_rank: Sequence[StepReply]) -> StepReport:
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


@says(Run)
def _run(by_rank: Sequence[RunReply]) -> RunReport:
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
    where = [f"gradients of {names} were not reduced {_on(own, len(by_rank))}" for names, own in ranks.items()]
    return (
        f"{', '.join(where)}: call backward after the model's forward has returned, on a tensor computed from "
        "its outputs. To drop these gradients: model.reset_iter_state()"
    )


def _on(ranks: Sequence[int], num_ranks: int) -> str:
    return "on every rank" if len(ranks) == num_ranks else f"on {label(ranks)}"


def _first_on(ranks: Sequence[int], num_ranks: int) -> str:
    return f"{', first' if len(ranks) < num_ranks else ''} {_on(ranks, num_ranks)}"


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
    where = _first_on(list(steps[first]), len(by_rank))
    if not all(steps[first:]):
        return f"loss is {kind} in step {number}{where}"
    return f"loss is {kind} from step {number} on, {where.lstrip(', ')}"


def _losses(by_rank: Sequence[Sequence[float | None]]) -> tuple[float | None, ...] | None:
    """Return the mean loss of each step over the ranks that have one; None if no rank has any."""
    steps = [[loss for loss in step if loss is not None] for step in zip_longest(*by_rank)]
    return tuple(fmean(step) if step else None for step in steps) if any(steps) else None


def notes_of(by_rank: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the notes of all ranks, each once, with the ranks that have it unless all have."""
    found = dict.fromkeys(note for notes in by_rank for note in notes)
    having = {note: [rank for rank, notes in enumerate(by_rank) if note in notes] for note in found}
    return tuple(note if len(ranks) == len(by_rank) else f"{note} ({label(ranks)})" for note, ranks in having.items())


@says(Verify)
def _verify(by_rank: Sequence[VerifyReply]) -> VerifyReport:
    worst = max(by_rank, key=lambda verified: verified.max_rel_diff)
    repeats = [verified.repetition for verified in by_rank if verified.repetition is not None]
    resumes = [verified.resume for verified in by_rank if verified.resume is not None]
    compared = repeat_faults(repeats) if repeats else faults_of(by_rank)
    faults = resume_faults(resumes) if resumes else compared
    differences = [verified.differences for verified in by_rank if verified.differences is not None]
    return VerifyReport(
        num_params=worst.num_params,
        max_abs_diff=worst.max_abs_diff,
        max_rel_diff=max(verified.max_rel_diff for verified in by_rank),
        worst_param=worst.worst_param,
        loss_sharded=_mean([verified.loss_sharded for verified in by_rank]),
        loss_reference=_mean([verified.loss_reference for verified in by_rank]),
        equal_bits=min(verified.equal_bits for verified in by_rank),
        ok=all(verified.ok for verified in by_rank)
        and not any(fault.rule in {DRIFT, UNEVEN_COPIES} for fault in faults),
        tolerance=worst.tolerance,
        not_finite=worst.not_finite,
        undecided=worst.undecided,
        buffers=_by_rank([", ".join(verified.buffers_not_finite) for verified in by_rank]),
        since=_since([verified.since for verified in by_rank]),
        notes=(
            *_notes("", [verified.unmanaged for verified in by_rank]),
            *_not_seen(by_rank),
            *notes_of([resume.notes for resume in resumes]),
        ),
        faults=faults,
        first_differences=first_repeated(repeats) if repeats else first_differences(differences),
        is_repeated=bool(repeats),
        resumed=resumes[0].folder if resumes else "",
        left_out=tuple(dict.fromkeys(name for resume in resumes for name in resume.changed)),
    )


def _not_seen(by_rank: Sequence[VerifyReply]) -> tuple[str, ...]:
    """Return what the comparison cannot see, as both steps do it, a sentence each."""
    sizes = [verified.num_inputs for verified in by_rank]
    if len(set(sizes)) <= 1:
        return ()
    return (
        f"the ranks' inputs have {', '.join(map(str, sizes[:8]))} elements: not compared is how the loss weighs them, "
        "which both steps compute alike; a mean over each rank's own batch weighs its samples by 1 / its size, so "
        "use the sum, times the number of ranks, over the size of all batches",
    )


def _since(by_rank: Sequence[int | None]) -> str:
    steps = [step for step in by_rank if step is not None]
    if not steps:
        return ""
    first = [rank for rank, step in enumerate(by_rank) if step == min(steps)]
    return f"the loss has not been finite since step {min(steps)}{_first_on(first, len(by_rank))}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
