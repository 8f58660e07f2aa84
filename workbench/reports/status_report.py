"""The ranks and the sharded models, as the reports of ``status`` and ``start``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from workbench.base.fault import listed
from workbench.base.text_formats import format_bytes, plural
from workbench.events import Unit, unit_words
from workbench.protocol.policy import policy_words
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.grouping import by_rank_words, label
from workbench.replay.shards import totals, unit_shards
from workbench.replay.units import by_number, unseen_words
from workbench.reports.clock_text import clock_words
from workbench.reports.report import Report, next_facts
from workbench.reports.stop_positions import live_units
from workbench.trace.schema import Header, HostClock
from workbench.trace.step_names import step_name


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


def holder_facts(holder: str, *, is_free: bool = False) -> list[tuple[str, str]]:
    """Return the fact that another notebook controls the ranks, or controlled them."""
    if is_free:
        return [("held by", "no notebook; the ranks are free. To take them: %fsdp attach")]
    return [("held by", f"{holder}; here you can only view them")] if holder else []


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
            policy=_replicated_words(header, units) or (*policy_words(units), *_since(header, units)),
            is_replicated=bool(_replicated_words(header, units)),
        )
        for (name, _), units in parts.items()
    )


def _since(header: Header, units: Sequence[Unit]) -> list[str]:
    """Return since when units have their policy, as text, if a model was resharded."""
    is_changed = any(unit.earlier for unit in units) or any(
        unit.retired and unit.since_step >= 0 for unit in header.units
    )
    return [f"this policy since {step_name(max(unit.since_step for unit in units))}"] if is_changed else []


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
        next: what to type next; empty if it was done before.
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
    next: str = ""

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
        found = [*holder_facts(self.holder, is_free=self.is_free), *self._ranks_of_hosts()]
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
        return [*found, *next_facts(self.next)] if self.running and not self.problem else found

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
        devices = by_rank_words(list(self.devices))
        return f"{plural(self.num_ranks, 'rank')} {self.how} in {self.seconds:.1f} s: {devices}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the holder, the notice, and what to type next."""
        return [*holder_facts(self.holder), *([("notice", self.notice)] if self.notice else []), *next_facts(self.next)]
