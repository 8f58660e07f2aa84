"""One profile of ``torch.profiler``, read from its file event by event."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import TraceError
from workbench.importers.json_stream import read_object
from workbench.importers.rank_rows import rank_in_name
from workbench.trace.invariants import MAX_RANKS

MAX_SPANS = 1_000_000
"""Maximum labels and collectives of all files together; each takes about 400 bytes while a file is read."""

MAX_NS = 2**61
STEP = re.compile(r"ProfilerStep#(\d{1,9})")
OPTIMIZER = "Optimizer.step#"
C10D_PREFIX, GLOO_PREFIX, NCCL_PREFIX = "c10d::", "gloo:", "nccl"
COMMS = "record_param_comms"


class HostSpan(NamedTuple):
    """A span of a thread; ``args`` only where they are needed."""

    begin_ns: int
    end_ns: int
    thread: int | str
    name: str
    args: dict[str, Any]


@dataclass(eq=False)
class Profile:
    """The needed events of a file, in the order of the file until :func:`read_profile` has sorted them.

    Attributes:
        labels: FSDP's labels.
        calls: c10d's operations on the host.
        comms: descriptions of the collectives within calls.
        gloo: work of gloo's threads.
        steps: steps of the profiler.
        optimizers: steps of optimizers.
        starts: times at which anything began on a thread, by thread.
        kernels: begin, end, correlation and stream of each kernel; NCCL's have their stream negated, minus 1.
        launches: correlation, time and thread of every call of the device's runtime.
    """

    rank: int | None = None
    world_size: int = 0
    host: str = ""
    pid: int = 0
    device: int | None = None
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    labels: list[HostSpan] = field(default_factory=list)
    calls: list[HostSpan] = field(default_factory=list)
    comms: list[HostSpan] = field(default_factory=list)
    gloo: list[HostSpan] = field(default_factory=list)
    steps: list[HostSpan] = field(default_factory=list)
    optimizers: list[HostSpan] = field(default_factory=list)
    starts: dict[int | str, Any] = field(default_factory=dict)
    kernels: tuple[Any, Any, Any, Any] = field(default_factory=lambda: tuple(array("q") for _ in range(4)))  # type: ignore[assignment]
    launches: tuple[Any, Any] = field(default_factory=lambda: (array("q"), array("q")))
    num_events: int = 0
    damage: str = ""

    @property
    def spans(self) -> tuple[list[HostSpan], ...]:
        """All lists of spans."""
        return self.labels, self.calls, self.comms, self.gloo, self.steps, self.optimizers

    @property
    def num_spans(self) -> int:
        """Number of all spans."""
        return sum(map(len, self.spans))

    def take(self, event: Any, max_spans: int) -> None:  # noqa: ANN401 - untrusted
        """Take an event of the file; those that are not needed, or malformed, are dropped."""
        self.num_events += 1
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        name, times = event.get("name"), _times(event)
        if times is None or not isinstance(name, str):
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        match event.get("cat"):
            case "user_annotation" | "cpu_op":
                thread = event.get("tid")
                thread = thread if isinstance(thread, int | str) else ""
                self._take_span(HostSpan(*times, thread, name, args), event.get("pid"))
                if self.num_spans > max_spans:
                    raise TraceError(
                        f"the profiles have more than {MAX_SPANS:,} labels and collectives: profile fewer steps, "
                        "for example with torch.profiler.schedule(wait=1, warmup=1, active=3)"
                    )
            case "kernel" | "gpu_memcpy" | "gpu_memset":
                self._take_kernel(name, times, args)
            case "cuda_runtime" | "cuda_driver" | "hip_runtime":
                if type(args.get("correlation")) is int:
                    _append(self.launches, (args["correlation"], times[0]))

    def _take_span(self, span: HostSpan, pid: object) -> None:
        if span.thread not in self.starts:
            self.starts[span.thread] = array("q")
        self.starts[span.thread].append(span.begin_ns)
        if isinstance(pid, int) and not self.pid:
            self.pid = pid
        plain = span._replace(name=sys.intern(span.name), args={})
        if span.name.startswith("FSDP::"):
            self.labels.append(plain)
        elif span.name.startswith(C10D_PREFIX):
            self.calls.append(span)
        elif span.name.startswith(GLOO_PREFIX):
            self.gloo.append(span)
        elif span.name == COMMS:
            self.comms.append(span)
        elif span.name.startswith(OPTIMIZER):
            self.optimizers.append(plain)
        elif STEP.fullmatch(span.name):
            self.steps.append(plain)

    def _take_kernel(self, name: str, times: tuple[int, int], args: dict[str, Any]) -> None:
        correlation, stream, device = (args.get(key) for key in ("correlation", "stream", "device"))
        if type(correlation) is int and type(stream) is int and 0 <= stream < 2**31:
            _append(self.kernels, (*times, correlation, -stream - 1 if name.startswith(NCCL_PREFIX) else stream))
            if type(device) is int and 0 <= device < 2**16:
                self.device = device


def _append(columns: Iterable[Any], values: tuple[int, ...]) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(max(min(value, MAX_NS), -MAX_NS))


def _times(event: dict[str, Any]) -> tuple[int, int] | None:
    """Return begin and end of an event, in ns on the clock of the file; None if they are none."""
    ts, dur = event.get("ts"), event.get("dur", 0)
    if not isinstance(ts, int | float) or not isinstance(dur, int | float):
        return None
    if not (0 <= ts < MAX_NS / 1000 and 0 <= dur < MAX_NS / 1000):  # NaN is neither
        return None
    begin = round(ts * 1000)
    return begin, begin + round(dur * 1000)


def read_profile(path: Path, max_spans: int) -> Profile:
    """Return what is needed of a file; its times are those since 1970, in ns.

    Args:
        path: path of the file.
        max_spans: maximum number of labels and collectives.

    Raises:
        TraceError: the file is no Kineto trace, or too long.
        OSError: the file cannot be read.
    """
    profile = Profile()
    try:
        entries, profile.damage = read_object(path, {"traceEvents": lambda event: profile.take(event, max_spans)})
    except TraceError as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if "traceEvents" not in entries and not profile.num_events:
        raise TraceError(
            f"cannot read {path}: it is not a trace of torch.profiler, which would have traceEvents"
            + (f"; it {profile.damage}" if profile.damage else "")
        )
    other = entries.get("otherData")
    if isinstance(other, dict) and "producer" in other:
        raise TraceError(f"cannot read {path}: the workbench wrote it for Perfetto. Open the .trace file instead")
    info = entries.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = info.get("rank"), info.get("world_size")
    profile.rank = rank if _is_rank(rank) else rank_in_name(path.name)
    profile.world_size = world if type(world) is int and 0 < world <= MAX_RANKS else 0
    host, base = entries.get("host_name"), entries.get("baseTimeNanoseconds")
    profile.host = host[:200] if isinstance(host, str) else ""
    for group in info.get("pg_config", ()) if isinstance(info.get("pg_config"), list) else ():
        if isinstance(group, dict) and isinstance(group.get("pg_name"), str):
            name = str(group.get("pg_desc") or group["pg_name"])[:100]
            profile.groups[group["pg_name"]] = (name, ranks_of(group.get("ranks")))
    _move(profile, base if type(base) is int and 0 <= base < MAX_NS else 0)
    return profile


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_RANKS


def ranks_of(value: object) -> tuple[int, ...]:
    """Return the ranks of a list, or of the text of one; empty if it is none or cut."""
    if isinstance(value, str):
        value = [int(each) for each in re.findall(r"\d{1,6}", value)] if re.fullmatch(r"\[[\d, ]*\]", value) else None
    if isinstance(value, list) and all(map(_is_rank, value)) and len(set(value)) == len(value):
        return tuple(value)
    return ()


def _move(profile: Profile, base_ns: int) -> None:
    """Sort the spans, and add to all times the one that the file counts from."""
    for spans in profile.spans:
        spans[:] = sorted(
            (each._replace(begin_ns=each.begin_ns + base_ns, end_ns=each.end_ns + base_ns) for each in spans),
            key=lambda each: (each.begin_ns, -each.end_ns),
        )
    for thread, starts in profile.starts.items():
        profile.starts[thread] = np.sort(np.array(starts, np.int64) + base_ns)
    begin, end, *others = (np.array(column, np.int64) for column in profile.kernels)
    profile.kernels = (begin + base_ns, end + base_ns, *others)  # type: ignore[assignment]
    correlation, launched = (np.array(column, np.int64) for column in profile.launches)
    profile.launches = correlation, launched + base_ns
