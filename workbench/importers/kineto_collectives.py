"""The labels and collectives of one profile."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from workbench.events import Kind
from workbench.importers.collective_names import MAX_NUMEL, itemsize_of, kind_of, numel_of
from workbench.importers.kineto_profile import C10D_PREFIX, GLOO_PREFIX, HostSpan, Profile, ranks_of

ANY_GROUP = "unknown group"
_LABEL = re.compile(r"FSDP::(\w+)(?: \((.*)\))?")

_GLOO_INSTEAD = {(Kind.REDUCE_SCATTER, Kind.ALL_REDUCE), (Kind.BARRIER, Kind.ALL_REDUCE)}
"""Operations and what gloo's thread may do for them."""


class Label(NamedTuple):
    """A label of FSDP: what it says, and the name of the unit."""

    begin_ns: int
    end_ns: int
    what: str
    unit: str


OF_UNITS = {
    *("pre_forward", "post_forward", "pre_backward", "all_gather", "all_gather_copy_out"),
    *("post_backward_accumulate", "post_backward_reshard", "post_backward_reduce"),
}


def labels_of(profile: Profile) -> list[Label]:
    """Return the labels of FSDP, in the order in which they begin."""
    found = [(span, _LABEL.fullmatch(span.name)) for span in profile.labels]
    return [Label(span.begin_ns, span.end_ns, hit[1], hit[2] or "") for span, hit in found if hit is not None]


def reshards_of(labels: Sequence[Label]) -> dict[str, tuple[list[int], bool]]:
    """Return when each unit was resharded, and whether it is after forward, by the unit's name.

    No label says whether ``post_forward`` frees the full parameters. It has if an all-gather follows before the unit's
    next such label.
    """
    of_unit: dict[str, list[Label]] = {}
    for label in labels:
        if label.what in ("all_gather", "post_forward", "post_backward_reshard"):
            of_unit.setdefault(label.unit, []).append(label)
    found = {}
    for unit, mine in of_unit.items():
        followed = [first for first, then in pairwise(mine) if then.what == "all_gather" != first.what]
        after_forward = any(label.what == "post_forward" for label in followed)
        last = mine[-1]
        if last.what == "post_backward_reshard" or (last.what == "post_forward" and after_forward):
            followed.append(last)
        found[unit] = ([label.end_ns for label in followed], after_forward)
    return found


@dataclass(frozen=True, kw_only=True)
class ProfiledCollective:
    """A collective of one rank.

    Attributes:
        unit: name of its unit; None: it belongs to no unit.
        issued_ns: when the host had issued it.
        end_ns: time of its end on the host; None: it has not ended, or this is unknown.
        blocked: whether the host did nothing until ``end_ns``.
        number: NCCL's count of it among the collectives of its group; None: unknown.
        device: begin and end of its kernel.
    """

    kind: Kind
    unit: str | None
    group: tuple[str, tuple[int, ...]]
    begin_ns: int
    issued_ns: int
    end_ns: int | None
    blocked: bool
    num_bytes: int
    number: int | None
    device: tuple[int, int] | None
    stream: int = 0


def collectives_of(profile: Profile, labels: Sequence[Label], world_size: int) -> list[ProfiledCollective]:
    """Return the collectives of a profile, in the order in which they were issued.

    Args:
        profile: of one rank.
        labels: those of :func:`labels_of`.
        world_size: ranks of the job.
    """
    calls = [(span, kind) for span in profile.calls if (kind := kind_of(span.name.removeprefix(C10D_PREFIX)))]
    inner = _within(profile.comms, [span for span, _ in calls])
    covered = {id(comm) for comm in inner if comm is not None}
    # c10d's operation is missing where a compiled graph calls the process group
    others = [(comm, kind_of(str(comm.args.get("Collective name")))) for comm in profile.comms]
    alone = [(comm, kind) for comm, kind in others if kind and id(comm) not in covered]
    calls += alone
    inner += [comm for comm, _ in alone]
    order = sorted(range(len(calls)), key=lambda place: calls[place][0].begin_ns)
    calls, inner = [calls[place] for place in order], [inner[place] for place in order]
    done = _in_gloo(calls, profile.gloo)
    kernels = _nccl_kernels(profile, [span for span, _ in calls])
    found = []
    for place, (span, kind) in enumerate(calls):
        comm, work = inner[place], done[place]
        args = {} if comm is None else comm.args
        group = _group(profile, args, world_size)
        size = len(group[1]) or world_size
        end_ns = None if work is None else max(work.end_ns, span.begin_ns)
        found.append(
            ProfiledCollective(
                kind=kind,
                unit=_unit_at(labels, span.begin_ns),
                group=group,
                begin_ns=span.begin_ns,
                issued_ns=span.end_ns,
                end_ns=end_ns if work is not None or profile.device is None else span.end_ns,
                blocked=end_ns is not None and _is_idle(profile, span, end_ns),
                num_bytes=_num_bytes(kind, args, span.args, {} if work is None else work.args, size),
                number=args["Seq"] if type(args.get("Seq")) is int and 0 <= args["Seq"] < 2**31 else None,
                device=kernels[place][:2] if kernels[place] is not None else None,  # type: ignore[index]
                stream=kernels[place][2] if kernels[place] is not None else 0,  # type: ignore[index]
            )
        )
    return found


def _within(inner: Sequence[HostSpan], outer: Sequence[HostSpan]) -> list[HostSpan | None]:
    """Return for each outer span the first inner one that lies in it, in the same thread."""
    begins = [span.begin_ns for span in inner]
    found: list[HostSpan | None] = []
    for span in outer:
        first, last = bisect_left(begins, span.begin_ns), bisect_right(begins, span.end_ns)
        found.append(next((each for each in inner[first:last] if each.thread == span.thread), None))
    return found


def _in_gloo(calls: Sequence[tuple[HostSpan, Kind]], works: Sequence[HostSpan]) -> list[HostSpan | None]:
    """Return the work in gloo's threads for each call: gloo begins works in the order of the calls."""
    found: list[HostSpan | None] = []
    kinds = [kind_of(work.name.removeprefix(GLOO_PREFIX)) for work in works]
    at = 0
    for span, kind in calls:
        while at < len(works) and works[at].begin_ns < span.begin_ns:
            at += 1
        fits = at < len(works) and (kinds[at] is kind or (kind, kinds[at]) in _GLOO_INSTEAD)
        found.append(works[at] if fits else None)
        at += fits
    return found


def _nccl_kernels(profile: Profile, calls: Sequence[HostSpan]) -> list[tuple[int, int, int] | None]:
    """Return begin, end and stream of the NCCL kernel that each call launched."""
    begin, end, _, stream = profile.kernels
    launched = launch_times(profile)
    mine = np.flatnonzero((stream < 0) & (launched >= 0))
    mine = mine[np.argsort(launched[mine], kind="stable")]
    times = launched[mine].tolist()
    found: list[tuple[int, int, int] | None] = []
    for span in calls:
        place = bisect_left(times, span.begin_ns)
        if place < len(times) and times[place] <= span.end_ns:
            kernel = mine[place]
            found.append((int(begin[kernel]), int(end[kernel]), int(-stream[kernel] - 1)))
        else:
            found.append(None)
    return found


def launch_times(profile: Profile) -> NDArray[np.int64]:
    """Return when the host launched each kernel; -1 if unknown."""
    correlation, times = profile.launches
    wanted = profile.kernels[2]
    if not len(correlation):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(correlation, kind="stable")
    place = np.minimum(np.searchsorted(correlation[order], wanted), len(order) - 1)
    return np.where(correlation[order][place] == wanted, times[order][place], -1)


def _group(profile: Profile, args: dict[str, Any], world_size: int) -> tuple[str, tuple[int, ...]]:
    """Return name and ranks of the process group of a collective."""
    name = args.get("Process Group Name")
    if isinstance(name, str):
        known = profile.groups.get(name, (str(args.get("Process Group Description") or name)[:100], ()))
        ranks = known[1] or ranks_of(args.get("Process Group Ranks"))
    elif len(profile.groups) == 1:
        ((known_name, ranks),) = profile.groups.values()
        known = known_name, ranks
    else:
        known, ranks = (ANY_GROUP, ()), ()
    return known[0], ranks if max(ranks, default=0) < world_size else ()


def _unit_at(labels: Sequence[Label], t_ns: int) -> str | None:
    """Return the unit of the innermost all-gather or reduction that is labelled at a time."""
    place = bisect_right(labels, t_ns, key=lambda label: label.begin_ns)
    near = labels[max(place - 8, 0) : place]
    return next(
        (
            label.unit
            for label in reversed(near)
            if label.what in ("all_gather", "post_backward_reduce") and label.end_ns >= t_ns
        ),
        None,
    )


def _is_idle(profile: Profile, span: HostSpan, end_ns: int) -> bool:
    """Return whether a call's thread began nothing between the call and a time."""
    starts = profile.starts.get(span.thread)
    if starts is None or end_ns <= span.end_ns:
        return False
    place = int(np.searchsorted(starts, span.end_ns))
    return place == len(starts) or int(starts[place]) >= end_ns


def _num_bytes(
    kind: Kind, args: dict[str, Any], call_args: dict[str, Any], work_args: dict[str, Any], group_size: int
) -> int:
    """Return the payload of a collective in bytes; 0 if unknown: the profile was made without shapes."""
    key = "Out msg nelems" if kind is Kind.ALL_GATHER else "In msg nelems"
    num_elements = args.get(key)
    if type(num_elements) is int and 0 <= num_elements < MAX_NUMEL:
        return num_elements * itemsize_of(args.get("dtype"))
    dims, types = call_args.get("Input Dims"), call_args.get("Input type")
    if isinstance(dims, list) and isinstance(types, list) and types and itemsize_of(types[0]):
        # of a single-tensor collective: output and input
        return min(max(map(numel_of, dims[:2]), default=0), MAX_NUMEL) * itemsize_of(types[0])
    dims, types = work_args.get("Input Dims"), work_args.get("Input type")
    if isinstance(dims, list) and isinstance(types, list) and types and dims:
        copies = group_size if kind is Kind.ALL_GATHER else 1
        return min(numel_of(dims[0]) * copies, MAX_NUMEL) * itemsize_of(types[0])
    return 0
