"""Profiles of ``torch.profiler`` (Kineto traces), one file a rank.

``FSDP::all_gather (layers.2)`` and the other labels that torch's ``fully_shard`` writes give the units, and the events
of each. The calls of c10d on the host, together with the work in gloo's threads or NCCL's kernels, give the
collectives. Steps are ``ProfilerStep#3``, or reach from one step of an optimizer to the next.

What the labels say is turned into the rows that a live run has:

- ``all_gather``: the unit's unshard begins; copy-in until c10d is called; then the all-gather;
- ``all_gather_copy_out``: a wait, if the all-gather ends in it; copy-out; the unshard ends;
- ``pre_forward`` and ``post_forward``: forward, from the end of the one to the begin of the other;
- ``pre_backward`` and ``post_backward_...``: backward, likewise;
- ``post_backward_reduce``: copy-in until c10d is called; then the reduce-scatter;
- ``post_forward`` and ``post_backward_reshard``: a reshard, if the unit is gathered again before its next such label.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import TraceError
from workbench.events import C10D, COMPUTE_STREAM, Comm, Edge, Kind, Phase, Unit
from workbench.importers.kineto_collectives import (
    ANY_GROUP,
    OF_UNITS,
    Label,
    ProfiledCollective,
    collectives_of,
    labels_of,
    launch_times,
    reshards_of,
)
from workbench.importers.kineto_profile import MAX_NS, MAX_SPANS, Profile, read_profile
from workbench.importers.rank_rows import NO_UNIT, EventRow, GroupTable, Period, RankRows
from workbench.trace.columns import Trace
from workbench.trace.read_recording import aligned, missing_ranks
from workbench.trace.recording import RunStart
from workbench.trace.schema import Header, RankInfo

MAX_UNITS = 2**15 - 1
_DEVICE_ERROR_NS = 1000


def read(paths: Sequence[Path]) -> tuple[Trace, tuple[str, ...]]:
    """Return the trace of the profiles of one run, and what it cannot say, as sentences.

    Args:
        paths: one file a rank.

    Raises:
        TraceError: a file is no Kineto trace or too long, or no file has anything to show.
        OSError: a file cannot be read.
    """
    notes: list[str] = []
    profiles: dict[int, Profile] = {}
    num_spans = 0
    for path in sorted(paths):
        profile = read_profile(path, MAX_SPANS - num_spans)
        num_spans += profile.num_spans
        if profile.damage:
            notes.append(f"{path.name} {profile.damage}; the events before are shown")
        if profile.rank is None and len(paths) == 1:
            profile.rank = 0
            notes.append(f"neither the content nor the name of {path.name} says its rank: it is shown as rank 0")
        if profile.rank is None or profile.rank in profiles:
            why = "nothing says its rank" if profile.rank is None else f"another file is of rank {profile.rank}"
            notes.append(f"{path.name} is left out: {why}")
        else:
            profiles[profile.rank] = profile
    if not profiles:
        raise TraceError("; ".join(notes))
    return _joined(profiles, notes)


def _joined(profiles: dict[int, Profile], notes: list[str]) -> tuple[Trace, tuple[str, ...]]:
    world = max(*(profile.world_size for profile in profiles.values()), max(profiles) + 1)
    origin = min((each.begin_ns for p in profiles.values() for spans in p.spans for each in spans[:1]), default=0)
    labels = {rank: labels_of(profile) for rank, profile in profiles.items()}
    reshards = {rank: reshards_of(mine) for rank, mine in labels.items()}
    names = list(dict.fromkeys(label.unit for mine in labels.values() for label in mine if label.what in OF_UNITS))
    if len(names) > MAX_UNITS:
        raise TraceError(f"the labels name {len(names):,} units, more than the limit of {MAX_UNITS:,}")
    index = {name: place for place, name in enumerate(names)}
    groups, starts, ranks = GroupTable(), {}, []
    strings: list[str] = []
    found = {rank: collectives_of(profile, labels[rank], world) for rank, profile in profiles.items()}
    for rank, profile in sorted(profiles.items()):
        builder = _RankBuilder(profile, index, groups)
        builder.add_labels(labels[rank], reshards[rank])
        builder.add_collectives(found[rank], labels[rank])
        steps = builder.add_steps(labels[rank], found[rank])
        rows = builder.finished(origin)
        ranks.append(rows.trace(strings, _moved(steps, origin), _moved(_phases(labels[rank], profile), origin)))
        # without the name of a host, one host is assumed
        starts[rank] = RunStart(rank=rank, world_size=world, clock=profile.host, t_ns=0, wall_ns=origin)
    header = Header(
        producer="torch.profiler",
        world_size=world,
        mesh_shape=(world,),
        mesh_axes=("ranks",),
        ranks=tuple(_rank_info(rank, profile) for rank, profile in sorted(profiles.items())),
        units=tuple(_unit(name, index, world, found, reshards) for name in names),
        comm_groups=tuple(groups.groups),
        strings=tuple(strings),
    )
    trace = Trace(header, tuple(ranks))
    if not trace.num_rows:
        raise TraceError("the profile has no label of FSDP, no collective and no step of an optimizer: nothing to show")
    notes += [*missing_ranks(profiles, world, "profile"), *_lacks(profiles, found, names)]
    return aligned(trace, starts), tuple(notes)


def _rank_info(rank: int, profile: Profile) -> RankInfo:
    on_device = profile.device is not None
    return RankInfo(
        rank=rank,
        host=profile.host,
        device=f"cuda:{profile.device}" if on_device else "cpu",
        pid=profile.pid,
        device_error_ns=_DEVICE_ERROR_NS if on_device else 0,
    )


def _unit(
    name: str,
    index: dict[str, int],
    world: int,
    found: dict[int, list[ProfiledCollective]],
    reshards: dict[int, dict[str, tuple[list[int], bool]]],
) -> Unit:
    gathers = [each for mine in found.values() for each in mine if each.unit == name and each.kind is Kind.ALL_GATHER]
    size = len(gathers[0].group[1]) or world if gathers else world
    return Unit(
        index=index[name],
        name=name,
        root=index.get("", -1),
        params=(),
        reshard_after_forward=any(mine[name][1] for mine in reshards.values() if name in mine),
        shard_size=size,
        replicate_size=max(world // size, 1),
        compute_dtype="",
        reduce_dtype="",
        compute_itemsize=0,
        reduce_itemsize=0,
        comm=C10D,
    )


def _lacks(
    profiles: dict[int, Profile], found: dict[int, list[ProfiledCollective]], names: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence about each thing that the profiles do not say."""
    if names:
        yield "a profile does not say shapes of parameters, nor which bytes are in memory: these parts stay empty"
    else:
        yield (
            "no unit is named: the profile has no FSDP:: labels, which torch's fully_shard writes if the model is "
            "sharded with it; collectives and steps are shown"
        )
    every = [each for mine in found.values() for each in mine]
    if every and not any(each.num_bytes for each in every):
        yield "sizes of collectives are unknown: profile with record_shapes=True"
    if any(each.group[0] == ANY_GROUP for each in every):
        yield "the profile does not say which process group a collective used; they are numbered together"
    if any(each.end_ns is None for each in every):
        yield "the ends of some collectives are not in the profile"
    kinds = {rank: [each.kind for each in mine] for rank, mine in found.items()}
    first = min(kinds)
    others = [rank for rank in kinds if len(kinds[rank]) != len(kinds[first])]
    if others and len({each.group for each in every}) == 1 and any(each.number is None for each in every):
        yield (
            f"rank {first} has {len(kinds[first])} collectives, rank {others[0]} has {len(kinds[others[0]])}: they are "
            "paired in order, which may be wrong"
        )
    if len(profiles) > 1 and not all(profile.host for profile in profiles.values()):
        yield "the files do not name their hosts: times of several hosts are as good as their clocks agree"
    if any(profile.device is not None for profile in profiles.values()):
        yield "times of the device are those of its kernels; what is between two of them is not known"


def _moved(stretches: Sequence[Period], origin: int) -> list[Period]:
    return [
        Period(begin_ns=each.begin_ns - origin, end_ns=each.end_ns - origin, value=each.value) for each in stretches
    ]


def _phases(labels: Sequence[Label], profile: Profile) -> list[Period]:
    """Return the phases, from the labels that begin or end one."""
    marks = [(span.begin_ns, Phase.OPTIMIZER) for span in profile.optimizers]
    marks += [(span.end_ns, Phase.IDLE) for span in profile.optimizers]
    for label in labels:
        match label.what:
            case "pre_forward":
                marks.append((label.begin_ns, Phase.FORWARD))
            case "pre_backward":
                marks += [(label.begin_ns, Phase.PRE_BACKWARD), (label.end_ns, Phase.BACKWARD)]
            case "post_backward_accumulate" | "post_backward_reduce":
                marks.append((label.begin_ns, Phase.POST_BACKWARD))
            case "root_post_backward_callback":
                marks.append((label.end_ns, Phase.IDLE))
    marks.sort()
    return [
        Period(begin_ns=begin + 1, end_ns=end, value=phase)
        for (begin, phase), (end, _) in pairwise([*marks, (MAX_NS * 2, Phase.IDLE)])
        if end > begin
    ]


class _RankBuilder:
    """Turns the labels and collectives of one rank into rows."""

    def __init__(self, profile: Profile, index: dict[str, int], groups: GroupTable) -> None:
        self._profile = profile
        self._index = index
        self._groups = groups
        self._rows = RankRows(profile.rank or 0)
        self._next_number: dict[int, int] = {}
        self._unsharding: set[str] = set()
        self._device = _DeviceClock(profile)

    def add_labels(self, labels: Sequence[Label], reshards: dict[str, tuple[list[int], bool]]) -> None:
        """Add forward, backward and reshards of all units."""
        begun: dict[tuple[str, Kind], int] = {}
        for label in labels:
            match label.what:
                case "pre_forward":
                    begun.setdefault((label.unit, Kind.FORWARD), label.end_ns)
                case "pre_backward":
                    begun.setdefault((label.unit, Kind.BACKWARD), label.end_ns)
                case "post_forward":
                    self._close(begun, label.unit, Kind.FORWARD, label.begin_ns)
                case "post_backward_accumulate" | "post_backward_reshard" | "post_backward_reduce":
                    self._close(begun, label.unit, Kind.BACKWARD, label.begin_ns)
        for (unit, kind), begin_ns in begun.items():
            self._rows.span(kind, begin_ns, None, self._index[unit])
        for unit, (times, _) in reshards.items():
            for t_ns in times:
                self._rows.add(Kind.RESHARD, Edge.INSTANT, t_ns, self._index[unit])

    def _close(self, begun: dict[tuple[str, Kind], int], unit: str, kind: Kind, t_ns: int) -> None:
        begin_ns = begun.pop((unit, kind), None)
        if begin_ns is not None:
            self._rows.span(kind, begin_ns, t_ns, self._index[unit])

    def add_collectives(self, found: Sequence[ProfiledCollective], labels: Sequence[Label]) -> None:
        """Add the collectives with what precedes and follows those of units."""
        gathers: dict[str, tuple[ProfiledCollective, Comm]] = {}
        at = 0
        for label in labels:
            if label.what not in ("all_gather", "post_backward_reduce", "all_gather_copy_out"):
                continue
            while at < len(found) and found[at].begin_ns < label.begin_ns:
                self._add_collective(found[at])
                at += 1
            if label.what == "all_gather_copy_out":
                self._add_copy_out(label, gathers.pop(label.unit, None))
                continue
            unit = self._index[label.unit]
            if label.what == "all_gather":
                self._rows.add(Kind.UNSHARD, Edge.BEGIN, label.begin_ns, unit)
                self._unsharding.add(label.unit)
            if at < len(found) and found[at].begin_ns <= label.end_ns and found[at].unit == label.unit:
                first = found[at]
                at += 1
                self._rows.span(Kind.COPY_IN, label.begin_ns, first.begin_ns, unit, num_bytes=first.num_bytes)
                comm = self._add_collective(first)
                if label.what == "all_gather":
                    gathers[label.unit] = first, comm
        for each in found[at:]:
            self._add_collective(each)

    def _add_collective(self, found: ProfiledCollective) -> Comm:
        unit = NO_UNIT if found.unit is None else self._index[found.unit]
        group = self._groups.index_of(*found.group)
        counted = self._next_number.get(group, 0)
        number = counted if found.number is None else max(found.number, counted)
        comm = Comm(group=group, seq=number)
        if found.kind.info.is_collective:
            self._next_number[group] = number + 1
        used = comm if found.kind.info.is_collective else None
        end_ns = found.end_ns
        more: dict[str, Any] = {"num_bytes": found.num_bytes, "comm": used}
        if found.device is None:
            self._rows.span(found.kind, found.begin_ns, end_ns, unit, **more)
        else:
            begun = max(found.device[0], found.begin_ns)
            more["stream"] = f"stream {found.stream}"
            self._rows.add(found.kind, Edge.BEGIN, found.begin_ns, unit, device_ns=begun, **more)
            over = max(found.device[1], begun)
            self._rows.add(found.kind, Edge.END, found.issued_ns, unit, device_ns=over, **more)
        if found.blocked and end_ns is not None:
            self._rows.span(Kind.WAIT, found.issued_ns, end_ns, unit, comm=used)
        return comm

    def _add_copy_out(self, label: Label, gather: tuple[ProfiledCollective, Comm] | None) -> None:
        unit, begin_ns = self._index[label.unit], label.begin_ns
        copy: dict[str, Any] = {"num_bytes": 0 if gather is None else gather[0].num_bytes}
        if gather is not None:
            found, comm = gather
            if found.device is not None:
                before, stream = self._device.reached(begin_ns), COMPUTE_STREAM
                after = max(before, found.device[1])
                self._rows.span(Kind.WAIT, begin_ns, None, unit, comm=comm, device_ns=before, stream=stream)
                self._rows.add(Kind.WAIT, Edge.END, begin_ns, unit, comm=comm, device_ns=after, stream=stream)
                copy |= {"device_ns": after, "stream": stream}
            elif found.end_ns is not None and begin_ns < found.end_ns <= label.end_ns:
                self._rows.span(Kind.WAIT, begin_ns, found.end_ns, unit, comm=comm)
                begin_ns = found.end_ns
        self._rows.span(Kind.COPY_OUT, begin_ns, None, unit, **copy)
        self._rows.add(Kind.COPY_OUT, Edge.END, label.end_ns, unit, num_bytes=copy["num_bytes"])
        if label.unit in self._unsharding:
            self._unsharding.remove(label.unit)
            self._rows.add(Kind.UNSHARD, Edge.END, label.end_ns, unit)

    def add_steps(self, labels: Sequence[Label], found: Sequence[ProfiledCollective]) -> list[Period]:
        """Add the steps of optimizers and of the training; return the latter."""
        for span in self._profile.optimizers:
            self._rows.span(Kind.OPTIMIZER, span.begin_ns, span.end_ns)
        steps = _profiler_steps(self._profile) or _optimizer_steps(self._profile, labels, found)
        for step in steps:
            self._rows.span(Kind.STEP, step.begin_ns, step.end_ns)
        return steps

    def finished(self, origin: int) -> RankRows:
        """Return the rows with times since ``origin``, and with those of the device."""
        if self._profile.device is not None:
            self._rows.rows = [
                row if row.device_ns is not None else _reached(row, self._device.reached(row.t_ns), COMPUTE_STREAM)
                for row in self._rows.rows
            ]
        # a step contains what begins and ends with it
        opens = [row for row in self._rows.rows if row.kind is Kind.STEP and row.edge is Edge.BEGIN]
        closes = [row for row in self._rows.rows if row.kind is Kind.STEP and row.edge is Edge.END]
        others = [row for row in self._rows.rows if row.kind is not Kind.STEP]
        self._rows.rows = [_since(row, origin) for row in [*opens, *others, *closes]]
        return self._rows


def _reached(row: EventRow, device_ns: int, stream: str = "") -> EventRow:
    more = {"stream": stream} if stream else {}
    return EventRow(**{**vars(row), "device_ns": device_ns, **more})


def _since(row: EventRow, origin: int) -> EventRow:
    device = None if row.device_ns is None else row.device_ns - origin
    return EventRow(**{**vars(row), "t_ns": row.t_ns - origin, "device_ns": device})


class _DeviceClock:
    """When the compute stream had done what the host had launched: as an event recorded in it would say."""

    def __init__(self, profile: Profile) -> None:
        _, end, _, stream = profile.kernels
        launched = launch_times(profile)
        own = (stream >= 0) & (launched >= 0)
        streams, counts = np.unique(stream[own], return_counts=True)
        if not len(streams):
            self._launched: list[int] = []
            return
        mine = np.flatnonzero(own & (stream == streams[np.argmax(counts)]))
        mine = mine[np.argsort(launched[mine], kind="stable")]
        self._launched = launched[mine].tolist()
        self._end = np.maximum.accumulate(end[mine]).tolist()

    def reached(self, t_ns: int) -> int:
        """Return when the stream had done what was launched before a time, at the earliest that time."""
        place = bisect_left(self._launched, t_ns)
        return max(t_ns, self._end[place - 1]) if place else t_ns


def _profiler_steps(profile: Profile) -> list[Period]:
    found: list[Period] = []
    for span in profile.steps:
        number = int(span.name.partition("#")[2])
        if not found or (span.begin_ns > found[-1].end_ns and number > found[-1].value):
            found.append(Period(begin_ns=span.begin_ns, end_ns=span.end_ns, value=number))
    return found


def _optimizer_steps(profile: Profile, labels: Sequence[Label], found: Sequence[ProfiledCollective]) -> list[Period]:
    """Return steps that end with the steps of optimizers between two of which something else happens."""
    firsts = sorted([label.begin_ns for label in labels] or [each.begin_ns for each in found])
    steps: list[Period] = []
    after = min([*firsts[:1], *(span.begin_ns for span in profile.optimizers[:1])], default=0)
    for place, span in enumerate(profile.optimizers):
        later = profile.optimizers[place + 1] if place + 1 < len(profile.optimizers) else None
        between = bisect_left(firsts, span.end_ns)
        if later is not None and (between == len(firsts) or firsts[between] >= later.begin_ns):
            continue
        first = bisect_left(firsts, after)
        begin_ns = min(firsts[first] if labels and first < len(firsts) else after, span.begin_ns)
        steps.append(Period(begin_ns=begin_ns, end_ns=max(span.end_ns, begin_ns), value=len(steps)))
        after = span.end_ns + 1
    return steps
