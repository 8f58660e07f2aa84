"""Dumps of c10d's Flight Recorder, one file a rank: the newest collectives of each process group, and their state.

They come from ``TORCH_NCCL_DUMP_ON_TIMEOUT``, ``torch.distributed.debug`` or ``_dump_fr_trace``, as pickles or as JSON.
Steps, units and what else the ranks did are not in them. gloo gives no times of ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from workbench.errors import TraceError
from workbench.events import Comm, Edge, Kind
from workbench.importers.collective_names import itemsize_of, kind_of, numel_of
from workbench.importers.json_stream import DAMAGED, read_object, unpacked
from workbench.importers.plain_pickle import loads
from workbench.importers.rank_rows import EventRow, GroupTable, RankRows, rank_in_name
from workbench.trace.columns import Trace
from workbench.trace.invariants import MAX_RANKS
from workbench.trace.read_recording import RecordedRank, Recording, missing_ranks
from workbench.trace.recording import Activity, Heartbeat, RunStart, SilentStack
from workbench.trace.schema import Header, RankInfo

MAX_PICKLE_BYTES = 64 << 20
MAX_ENTRIES = 1_000_000
"""Maximum collectives of all files together; a dump has those of a ring, by default 2,000."""

PICKLE = b"\x80"
"""First byte of a pickle."""

_MAX_NS = 2**61
_CLOCK = "time of day"


@dataclass(frozen=True, kw_only=True)
class RecordedCollective:
    """One collective of a rank, as its dump describes it.

    Attributes:
        group: name of its process group.
        desc: what the program calls the group; may be empty.
        number: of the collective in its group; None for a send or receive.
        end_ns: time of its end; None: it has not ended.
        has_end_time: whether ``end_ns`` is a measured time.
        frames: the stack that issued it, the innermost call last.
    """

    kind: Kind
    group: str
    desc: str
    number: int | None
    begin_ns: int
    end_ns: int | None
    has_end_time: bool
    num_bytes: int
    frames: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Dump:
    rank: int
    entries: list[RecordedCollective]
    groups: dict[str, tuple[int, ...]]
    written_ns: int


def read(paths: Sequence[Path]) -> Recording:
    """Return what the dumps of one run say, as a recording that ends when they were written.

    Args:
        paths: one file a rank, whose name has its rank: ``nccl_trace_rank_3``.

    A file that is no dump, is too long, damaged, or of the rank of another one, is left out with a note.

    Raises:
        TraceError: no file is a dump, or they have too many collectives.
    """
    notes: list[str] = []
    dumps: dict[int, _Dump] = {}
    for path in sorted(paths):
        try:
            dump = _read_dump(path, notes)
        except (TraceError, OSError) as error:
            notes.append(f"{path.name} is left out: {error}")
            continue
        if dump.rank in dumps:
            notes.append(f"{path.name} is left out: another file is of rank {dump.rank}")
        else:
            dumps[dump.rank] = dump
        if sum(len(each.entries) for each in dumps.values()) > MAX_ENTRIES:
            raise TraceError(f"the dumps have more than {MAX_ENTRIES:,} collectives: open fewer ranks")
    if not dumps:
        raise TraceError("; ".join(notes) or "there are no dumps")
    return _joined(dumps, notes)


# ---- reading


def _read_dump(path: Path, notes: list[str]) -> _Dump:
    raw: list[Any] = []
    with path.open("rb") as file:
        is_pickle = file.read(1) == PICKLE
        file.seek(0)
        content = _content(file) if is_pickle else b""
    if is_pickle:
        data = loads(content)
        if not isinstance(data, dict):
            raise TraceError("it is not a dump of the Flight Recorder, which would be a dict")
        raw = list(data["entries"]) if isinstance(data.get("entries"), list | tuple) else []
    else:
        data, damage = read_object(path, {"entries": lambda entry: _append(raw, entry)})
        if damage:
            notes.append(f"{path.name} {damage}; the collectives before are shown")
    if "entries" not in data:
        raise TraceError("it is not a dump of the Flight Recorder, which would have entries")
    rank = rank_in_name(path.name)
    if rank is None or rank >= MAX_RANKS:
        raise TraceError("the name of a dump says its rank, as nccl_trace_rank_3 does; rename the file")
    finished = _finished(data.get("pg_status"))
    raw.sort(key=lambda entry: _number(entry.get("record_id")) if isinstance(entry, dict) else 0)
    entries = [entry for each in raw if (entry := _entry(each, finished)) is not None]
    newest = max((max(entry.begin_ns, entry.end_ns or 0) for entry in entries), default=0)
    return _Dump(
        rank=rank,
        entries=entries,
        groups=_groups(data.get("pg_config")),
        written_ns=max(path.stat().st_mtime_ns, newest),
    )


def _content(file: BufferedReader) -> bytes:
    try:
        content: bytes = unpacked(file).read(MAX_PICKLE_BYTES + 1)
    except DAMAGED as error:
        raise TraceError("it is damaged") from error
    if len(content) > MAX_PICKLE_BYTES:
        raise TraceError(f"it has more than {MAX_PICKLE_BYTES >> 20} MB; dumps have a few")
    return content


def _append(raw: list[Any], entry: Any) -> None:  # noqa: ANN401 - untrusted
    if len(raw) >= MAX_ENTRIES:
        raise TraceError(f"it has more than {MAX_ENTRIES:,} collectives")
    raw.append(entry)


def _number(value: object) -> int:
    """Return a number, or the text of one, in a dump; 0 if it is none."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        value = int(value)
    return value if type(value) is int and -_MAX_NS < value < _MAX_NS else 0


def _finished(status: object) -> dict[str, int]:
    """Return the last collective that has ended in each group, by the group's number."""
    if not isinstance(status, dict):
        return {}
    return {
        str(group): _number(each.get("last_completed_collective"))
        for group, each in status.items()
        if isinstance(each, dict)
    }


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group, by its name."""
    found = {}
    for key, each in config.items() if isinstance(config, dict) else ():
        if isinstance(each, dict) and isinstance(key, str):
            ranks = tuple(int(rank) for rank in re.findall(r"\d{1,6}", str(each.get("ranks"))[:1_000_000]))
            found[key] = ranks if len(set(ranks)) == len(ranks) and max(ranks, default=0) < MAX_RANKS else ()
    return found


def _entry(raw: object, finished: dict[str, int]) -> RecordedCollective | None:
    """Return an entry of a dump; None if it is of no known collective, or malformed."""
    if not isinstance(raw, dict):
        return None
    kind = kind_of(str(raw.get("profiling_name")).rpartition(":")[2])
    begin_ns, end_ns = _number(raw.get("time_created_ns")), _number(raw.get("time_discovered_completed_ns"))
    if kind is None or begin_ns <= 0:
        return None
    named = raw.get("process_group")
    group, *more = (str(each)[:100] for each in named[:2]) if isinstance(named, list | tuple) and named else ("",)
    number = _number(raw.get("collective_seq_id"))
    is_over = raw.get("state") == "completed" or raw.get("retired") is True
    is_over = is_over or 0 < number <= finished.get(str(raw.get("pg_id")), 0)
    sizes, dtypes = ("output_sizes", "output_dtypes") if kind is Kind.ALL_GATHER else ("input_sizes", "input_dtypes")
    dtype = raw.get(dtypes)
    itemsize = itemsize_of(dtype[0]) if isinstance(dtype, list | tuple) and dtype else 0
    frames = raw.get("frames")
    return RecordedCollective(
        kind=kind,
        group=group,
        desc=more[0] if more else "",
        number=number - 1 if kind.info.is_collective and 0 < number < 2**31 else None,
        begin_ns=begin_ns,
        end_ns=max(end_ns, begin_ns) if is_over or end_ns > 0 else None,
        has_end_time=end_ns > 0,
        num_bytes=min(numel_of(raw.get(sizes)) * itemsize, 2**56 - 1),
        frames=tuple(reversed([_frame(each) for each in frames[:100]])) if isinstance(frames, list | tuple) else (),
    )


def _frame(frame: object) -> str:
    if not isinstance(frame, dict):
        return ""
    name, file, line = (str(frame.get(key))[:300] for key in ("name", "filename", "line"))
    return f"{file}:{line} in {name}"


# ---- from dumps to a recording


def _joined(dumps: dict[int, _Dump], notes: list[str]) -> Recording:
    configured = [rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks]
    world = max([*dumps, *configured]) + 1
    origin = min((entry.begin_ns for dump in dumps.values() for entry in dump.entries[:1]), default=0)
    groups, ranks, recorded = GroupTable(), [], {}
    for rank, dump in sorted(dumps.items()):
        rows = _rows(dump, groups, origin)
        ranks.append(rows.trace([], [], []))
        newest = max((row.t_ns for row in rows.rows), default=0)
        end_ns = dump.written_ns - origin
        recorded[rank] = RecordedRank(
            start=RunStart(rank=rank, world_size=world, clock=_CLOCK, t_ns=0, wall_ns=origin),
            header=Header(),
            quiet=tuple(_stack(dump, end_ns, len(rows.rows))),
            last_beat=Heartbeat(t_ns=end_ns, wall_ns=dump.written_ns, event_ns=newest),
        )
    header = Header(
        producer="Flight Recorder",
        world_size=world,
        mesh_shape=(world,),
        mesh_axes=("ranks",),
        ranks=tuple(RankInfo(rank=rank, host="", device="", pid=0) for rank in sorted(dumps)),
        comm_groups=tuple(groups.groups),
    )
    trace = Trace(header, tuple(ranks))
    if not trace.num_rows:
        raise TraceError("the dumps have no collective")
    notes += [
        *missing_ranks(dumps, world, "dump"),
        "the Flight Recorder knows collectives only: no units, no steps, no memory",
    ]
    every = [entry for dump in dumps.values() for entry in dump.entries]
    if any(entry.end_ns is not None and not entry.has_end_time for entry in every):
        notes.append("the dumps do not say when collectives ended: those that have are drawn without length")
    return Recording(trace=trace, ranks=recorded, notes=tuple(notes))


def _stack(dump: _Dump, t_ns: int, seq: int) -> Iterator[SilentStack]:
    """Yield the stack of the collective that a rank waits for, or else of its last one."""
    pending = _pending(dump)
    last = pending or (dump.entries[-1] if dump.entries else None)
    if last is not None and last.frames:
        activity: Activity = "" if pending else "since its last collective"
        yield SilentStack(t_ns=t_ns, seq=seq, frames=last.frames, activity=activity)


def _rows(dump: _Dump, groups: GroupTable, origin: int) -> RankRows:
    rows = RankRows(dump.rank)
    last: dict[int, int] = {}
    comm_of: dict[int, Comm] = {}
    begin_ns = 0
    for entry in dump.entries:
        group = groups.index_of(entry.desc or f"group {entry.group}", _ranks(dump, entry.group))
        comm = None
        if entry.kind.info.is_collective:
            number = last.get(group, -1) + 1 if entry.number is None else entry.number
            if number <= last.get(group, -1):  # several calls that c10d has issued as one
                continue
            last[group] = number
            comm = comm_of[id(entry)] = Comm(group=group, seq=number)
        end_ns = None if entry.end_ns is None else entry.end_ns - origin
        begin_ns = max(entry.begin_ns - origin, begin_ns)  # numbers ascend in the order of the rows
        rows.span(entry.kind, begin_ns, end_ns, num_bytes=entry.num_bytes, comm=comm)
    pending = _pending(dump)
    if pending is not None and id(pending) in comm_of:
        newest = max(row.t_ns for row in rows.rows)
        rows.rows.append(EventRow(t_ns=newest, kind=Kind.WAIT, edge=Edge.BEGIN, comm=comm_of[id(pending)]))
    return rows


def _pending(dump: _Dump) -> RecordedCollective | None:
    """Return the first collective that has not ended: the one that the rank waits for."""
    return next((entry for entry in dump.entries if entry.end_ns is None and entry.number is not None), None)


def _ranks(dump: _Dump, group: str) -> tuple[int, ...]:
    """Return the ranks of a group; gloo describes the default group without its name."""
    if group not in dump.groups and len(dump.groups) == 1:
        (only,) = dump.groups.values()
        return only
    return dump.groups.get(group, ())
