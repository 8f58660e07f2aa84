"""The recording probe of a rank: every event becomes one packed row of the trace.

The ring holds the newest :data:`CAPACITY` rows. An append puts a tuple into a queue: between two parts of a step, whose
code has left the processor's caches, that takes half as long as packing it under a lock. The rows are packed when they
are read, or :data:`_BATCH` of them at once, under a re-entrant lock (a freed gradient can announce itself from within,
through the garbage collector). No tensor's data is read. The key frame is folded from the rows, at a drain or when half
a ring has passed without one, so a drain always includes the exact state after its last row.

On a device, every event also puts a mark into the current stream. When the device reaches the mark, a second row
records the time (:attr:`Recorder.device_clock`). The end of a collective is marked where the collective really ends,
not where compute waits for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from workbench.engine.backends.device_clock import NOBODYS, DeviceClock, StreamMark
from workbench.events import (
    BESIDE,
    NUMBERED,
    STATE_AFTER,
    Category,
    Comm,
    Edge,
    Kind,
    ParamTensors,
    Phase,
    Source,
    Unit,
    UnitState,
)
from workbench.models.own import count_unfreed
from workbench.trace import advance
from workbench.trace.schema import NO_CATEGORY, ROW, ROW_DTYPE, BufferSum, GroupInfo, Header, KeyFrame, RankInfo, Rows

CAPACITY = 2**18
_BATCH = 4096
NO_STEP = -1
_NAN = math.nan
_LOOK_BACK = 256
_pack_row, _ROW_BYTES = ROW.pack_into, ROW.size
_ALLOC, _FREE, _RESET, _WAIT = Kind.ALLOC, Kind.FREE, Kind.RESET, Kind.WAIT  # looked up once, as an enum takes its time
_BEGIN, _INSTANT = Edge.BEGIN, Edge.INSTANT
_NO_COMM = (-1, -1)
_KIND_AND_EDGE, _STEP_BEGINS = slice(8, 10), (Kind.STEP, Edge.BEGIN)  # of a row that is not packed
_IS_BESIDE = np.isin(np.arange(256), list(BESIDE))
_UNTIMED = frozenset({_ALLOC, _FREE, Kind.RESIDENT})  # of a collector, another thread or a model that is gone


@dataclass(frozen=True)
class DrainedRows:
    """Result of a drain.

    Attributes:
        first_seq: number of the first row in ``rows``.
        rows: packed rows.
        lost: number of requested rows that the ring has overwritten.
        key_frame: state after the last row.
    """

    first_seq: int
    rows: bytes
    lost: int
    key_frame: KeyFrame


class _Unrecorded:
    """Lasting effects of what runs off the record.

    Args:
        begun: filled with the collectives that begin, as (comm_seq, comm_group).

    Attributes:
        deltas: signed bytes by category, unit and owner.
        states: last state of each unit's parameters.
    """

    def __init__(self, begun: set[tuple[int, int]]) -> None:
        self.deltas: Counter[tuple[int, int, int]] = Counter()
        self.states: dict[int, UnitState] = {}
        self._begun = begun

    def takes(
        self, kind: int, edge: int, unit: int, num_bytes: int, category: int, comm: tuple[int, int], module: int
    ) -> bool:
        """Account for a row; return False if it ends a collective that began on the record, and so must be recorded."""
        if category != NO_CATEGORY:
            self.deltas[category, unit, module] += num_bytes
        state = STATE_AFTER.get((Kind(kind), Edge(edge)))
        if state is not None and unit >= 0:
            self.states[unit] = state
        if kind in NUMBERED and edge == Edge.END and comm not in self._begun:
            return False
        if kind in NUMBERED:
            (self._begun.add if edge == Edge.BEGIN else self._begun.discard)(comm)
        return True


class Recorder:
    """The probe that packs every event into one row of a ring, and marks it on a device that computes.

    Attributes:
        header: this rank's part of the trace's header.
        header_version: grows whenever ``header`` changes.
        now_ns: the clock of its rows.
        step: number of the current step, :data:`NO_STEP` outside.
        next_step: number of the next step.
        ordinal: events announced since the step began: the number of the next one; equal on ranks at the same event.
        num_issued: collectives that have begun, recorded or not.
        held_ns: total time for which a gate held this rank.
        is_aside: whether the running code is not part of the step; see :meth:`aside` and :meth:`unrecorded`.
        device_clock: times at which the device reaches events; None where the host computes.
        on_forward: called when a forward begins outside of any step.
        on_phase: called when a step has begun and when the phase is about to change.
        on_unit: called when a unit is new or has changed.
        on_issue: called when a collective has been recorded that is about to be issued, with its kind, unit, payload
            and group; None: not called.
        before_own: called before an event that the engine does not announce: edges of steps and optimizers.
    """

    def __init__(self, header: Header, capacity: int = CAPACITY, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.header = header
        self.now_ns = now_ns
        self.header_version = 1
        self._unit_versions = dict.fromkeys((unit.index for unit in header.units), 1)  # in which each last changed
        self.step = NO_STEP
        self.ordinal = 0
        self.num_issued = 0
        self.held_ns = 0
        self.is_aside = False
        self.device_clock: DeviceClock | None = None
        self.on_forward: Callable[[], None] = lambda: None
        self.on_phase: Callable[[], None] = lambda: None
        self.on_unit: Callable[[], None] = lambda: None
        self.on_issue: Callable[[tuple[int, int, int, int]], None] | None = None
        self.before_own: Callable[[Kind, Edge], None] = lambda kind, edge: None
        self.next_step = 0
        self._capacity = capacity
        self._ring = bytearray(capacity * ROW.size)
        self._new: deque[tuple[tuple[float, ...], StreamMark | None]] = deque()  # rows that are not in the ring yet
        self._batch = min(_BATCH, capacity // 2)
        self._is_packing = False
        self._lock = threading.RLock()
        self._head = 0
        self._key_frame = KeyFrame()
        self._fold_at = capacity // 2
        self._phase = Phase.IDLE
        self._sources: list[Source] = []
        self._strings: dict[str, int] = {}
        self._groups: dict[int, int] = {}
        self._unrecorded: _Unrecorded | None = None
        self._is_expected = False  # the step that begins, or began last
        self._is_given_up = False  # a step, or a forward outside of one, since the last step began
        self._begun_unrecorded: set[tuple[int, int]] = set()  # collectives, as (comm_seq, comm_group)
        self._ends: dict[
            tuple[int, int], StreamMark
        ] = {}  # of collectives in flight on a device, as (comm_seq, comm_group)

    def resume(self, header: Header, key_frame: KeyFrame, next_step: int) -> None:
        """Continue the rows of a recorder whose process or model is gone: what it held is freed, its units sharded.

        Args:
            header: with its strings and communication groups.
            key_frame: the state after its last row.
            next_step: number of the next step.
        """
        self._strings = {text: index for index, text in enumerate(header.strings)}
        self._change(header)
        with self._lock:
            self._head, self._key_frame = key_frame.seq, key_frame
            self._fold_at = key_frame.seq + self._capacity // 2
        self.next_step = next_step
        for category, num_bytes in enumerate(key_frame.bytes_by_category):
            if num_bytes:
                self._append(_FREE, _INSTANT, -1, -num_bytes, category)
        for unit in sorted({*key_frame.unit_states, *key_frame.reducing}):
            self._append(_RESET, _INSTANT, unit, 0)

    # ---- Probe

    def source(self, source: Source) -> None:
        """Append a source to the header's producers."""
        if source not in self._sources:
            self._sources.append(source)
        known = [*filter(None, self.header.producer.split(", ")), source.name]
        self._change(dataclasses.replace(self.header, producer=", ".join(dict.fromkeys(known))))

    def event(
        self,
        kind: Kind,
        edge: Edge,
        unit: int,
        num_bytes: int,
        comm: Comm | None,
        t_ns: int | None,
    ) -> None:
        """Record an event."""
        self.ordinal += 1
        pair, dtype, root = _NO_COMM, -1, _NAN
        if comm is not None:
            pair = (comm.seq, self._groups.get(comm.group, -1))
            if kind != _WAIT:
                if pair in self._begun_unrecorded and self.is_recording:
                    self._begun_unrecorded.discard(pair)  # aborted off the record; this is its end
                    return
                if edge == _BEGIN:
                    self.num_issued += 1
                    dtype = self._intern(comm.dtype) if comm.dtype else -1
                    root = _NAN if comm.root < 0 else float(comm.root)
        elif kind == _RESET and self.is_recording and not self._is_in_work:
            self._reset_at_rest(unit)
            return
        if self.device_clock is None:
            self._append(kind, edge, unit, num_bytes, NO_CATEGORY, pair, t_ns, module=dtype, value=root)
        else:
            self._append_marked(kind, edge, unit, num_bytes, comm=pair, module=dtype, value=root)
        if self.on_issue is not None and edge == _BEGIN and kind in NUMBERED:
            self.on_issue((kind, unit, num_bytes, pair[1]))

    def late_end(self, kind: Kind, unit: int, num_bytes: int, comm: Comm | None, t_ns: int) -> None:
        """Record the end of a collective that no code has waited for; not counted in :attr:`ordinal`."""
        pair = (-1, -1) if comm is None else (comm.seq, self._groups.get(comm.group, -1))
        if pair in self._begun_unrecorded and self.is_recording:
            self._begun_unrecorded.discard(pair)
            return
        self._append(kind, Edge.END, unit, num_bytes, NO_CATEGORY, pair, t_ns)

    def readers(self, edge: Edge, rank: int = -1) -> None:
        """Record a wait for ranks that have yet to read; not counted in :attr:`ordinal`."""
        self._append(Kind.READERS, edge, -1, 0, value=rank if edge is Edge.END else _NAN)

    def issued(self, comm: Comm, wait: Callable[[], object]) -> None:
        """Mark where a collective on a device ends."""
        if self.device_clock is not None and self.is_recording:
            mark = self.device_clock.mark_end(wait, comm.group)
            if mark is not None:
                self._ends[comm.seq, self._groups.get(comm.group, -1)] = mark

    def memory(self, category: Category, unit: int, delta_bytes: int, owner: str = "") -> None:
        """Record bytes (signed, not 0) that were allocated or freed."""
        module = self._intern(owner) if owner else -1
        self._append(_ALLOC if delta_bytes > 0 else _FREE, _INSTANT, unit, delta_bytes, category, module=module)

    def phase(self, phase: Phase) -> None:
        """Stamp the rows that follow with ``phase``."""
        if phase == Phase.FORWARD and self.step == NO_STEP:
            self.on_forward()
        self.on_phase()
        self._phase = phase

    def unit(self, info: Unit) -> None:
        """Put a new or changed unit into the header, at its index.

        Lower indices may belong to models that are gone: the process may have been recorded before.
        """
        units = [*self.header.units]
        units += [
            dataclasses.replace(info, index=index, root=-1, params=(), gone=True)
            for index in range(len(units), info.index)
        ]
        known = units[info.index] if info.index < len(units) and units[info.index].in_use else None
        step = self.next_step if self.step == NO_STEP else self.step
        units[info.index : info.index + 1] = [info.following(known, step)]
        self._change(dataclasses.replace(self.header, units=tuple(units)))
        self.on_unit()

    def note_gone(self) -> None:
        """Mark units that no longer exist as gone in the header; called in the main thread, like all calls on units.

        No event announces the end of a model, for example when the cell that makes it is run again.
        """
        sources = self._sources
        gone = {u.index for u in self.header.units if u.in_use and not any(each.has(u.index) for each in sources)}
        if gone and sources:
            units = tuple(dataclasses.replace(u, gone=True) if u.index in gone else u for u in self.header.units)
            self._change(dataclasses.replace(self.header, units=units))

    def note_unmanaged(self, params: tuple[str, ...], hooks: tuple[str, ...]) -> None:
        """Put into the header the trainable parameters that belong to no unit, and the hooks that are never called."""
        if (params, hooks) != (self.header.unmanaged, self.header.hooks):
            self._change(dataclasses.replace(self.header, unmanaged=params, hooks=hooks))

    def note_buffers(self, sums: Mapping[str, int]) -> None:
        """Put this rank's checksums of buffers into the header, by name."""
        buffers = tuple(BufferSum(name=name, crc32=crc32) for name, crc32 in sums.items())
        ranks = tuple(dataclasses.replace(info, buffers=buffers) for info in self.header.ranks)  # only its own
        if ranks != self.header.ranks:
            self._change(dataclasses.replace(self.header, ranks=ranks))

    def comm_group(self, index: int, ranks: tuple[int, ...], name: str = "") -> None:
        """Put a new communication group into the header; one that has an earlier one's name is numbered."""
        known = self.header.comm_groups
        self._groups[index] = len(known)
        name = name or f"group {index}"
        again = sum(group.name == name or group.name.startswith(f"{name} (rebuild ") for group in known)
        group = GroupInfo(name=f"{name} (rebuild {again})" if again else name, ranks=ranks)
        self._change(dataclasses.replace(self.header, comm_groups=(*known, group)))

    def begin_step(self, *, is_expected: bool = False) -> None:
        """Open the next step; one that is still open ends.

        Args:
            is_expected: whether nothing announces its begin: it is recorded when something of the step follows it,
                which freed memory and late ends of collectives are not.
        """
        self.end_step()
        self.note_gone()
        if self.device_clock is not None:
            with self._lock:
                self._take_marks(self.device_clock)
                self.device_clock.compare_if_idle()
        self._is_given_up, self._is_expected = False, is_expected
        self.step = self.next_step
        self.next_step += 1
        self.ordinal = 0
        self._own(Kind.STEP, Edge.BEGIN)
        self.on_phase()

    def end_step(self) -> None:
        """Close the step, if one is open."""
        if self.step != NO_STEP:
            count_unfreed()
            self._own(Kind.STEP, Edge.END)
            self.step = NO_STEP

    def metric(self, name: str, value: float) -> None:
        """Record a number under ``name``."""
        if self._unrecorded is not None:
            return
        self._append(Kind.METRIC, Edge.INSTANT, -1, 0, module=self._intern(name), value=value)

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return its source's tensors of a unit's parameters; empty if no source has the unit any more."""
        return next((found for source in self._sources if (found := source.tensors(unit))), {})

    # ---- records of the runtime

    def resident(self, num_bytes: int, after: str = "") -> None:
        """Record the resident memory of this process, ``num_bytes`` (more than 0); ``after``: what has just ended."""
        self._append(Kind.RESIDENT, Edge.INSTANT, -1, num_bytes, module=self._intern(after) if after else -1)

    def set_run(self, info: RankInfo, *, mesh_shape: tuple[int, ...], mesh_axes: tuple[str, ...]) -> None:
        """Put this rank and the mesh into the header."""
        self._change(dataclasses.replace(self.header, ranks=(info,), mesh_shape=mesh_shape, mesh_axes=mesh_axes))

    def wait_for_device(self, pause: Callable[[], object]) -> None:
        """Wait until a device has reached all events, so that the trace holds their times; not within a step.

        ``pause`` is called between polls; it may raise.
        """
        while self.device_clock is not None:
            with self._lock:
                self._take_marks(self.device_clock)
            if not self.device_clock.is_behind:
                return
            pause()

    def _own(self, kind: Kind, edge: Edge) -> None:
        """Record an event that the engine does not announce."""
        self.before_own(kind, edge)
        self.ordinal += 1
        self._append_marked(kind, edge, -1, 0)

    def give_up_step(self) -> None:
        """Leave a step that raised, without END rows for it and its collectives in flight.

        An expected step without any recorded event is dropped: its number is used again.
        """
        with self._lock:
            self._pack()
            if self._is_only_expected():
                (_, mark), *others = [self._new.popleft() for _ in range(len(self._new))]
                if mark is not None:
                    mark.row = NOBODYS
                self._new.extendleft(((*row[:3], NO_STEP, *row[4:]), mark) for row, mark in reversed(others))
                self.step, self.next_step = NO_STEP, self.step
        for mark in self._ends.values():
            mark.row = NOBODYS
        self._ends.clear()
        self._is_given_up = self._is_in_work
        self.step = NO_STEP
        self._phase = Phase.IDLE

    @property
    def _is_in_work(self) -> bool:
        """Whether there is, or was when it was given up, a step or a forward that has not ended."""
        return self._is_given_up or self.step != NO_STEP or self._phase != Phase.IDLE

    def _reset_at_rest(self, unit: int) -> None:
        """Record what a reset changes between steps, as after a cell that failed: no step was aborted."""
        with self._lock:
            self._fold()
            state, is_reducing = self._key_frame.unit_states.get(unit), unit in self._key_frame.reducing
        if is_reducing or state == UnitState.ALL_GATHER_IN_FLIGHT:
            self._append_marked(Kind.RESET, Edge.INSTANT, unit, 0)
        elif state == UnitState.UNSHARDED:  # as an evaluation leaves a root
            self._append_marked(Kind.RESHARD, Edge.INSTANT, unit, 0)

    def optimizer_edge(self, edge: Edge) -> None:
        """Record the begin or end of an optimizer step."""
        self.on_phase()
        if edge is Edge.BEGIN:
            count_unfreed()
            self._phase = Phase.OPTIMIZER
        self._own(Kind.OPTIMIZER, edge)
        if edge is Edge.END:
            self._phase = Phase.IDLE

    @contextmanager
    def held(self, unit: int) -> Iterator[None]:
        """Record that this rank is held before an event of ``unit`` while the body runs."""
        begin_ns = self.now_ns()
        self._append(Kind.GATE, Edge.BEGIN, unit, 0, t_ns=begin_ns)
        try:
            yield
        finally:
            end_ns = self.now_ns()
            self._append(Kind.GATE, Edge.END, unit, 0, t_ns=end_ns)
            self.held_ns += end_ns - begin_ns

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the body within a held step: record its events, but keep the step's phase and ordinal."""
        before = self._phase, self.ordinal
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
            self._phase, self.ordinal = before

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded: False within :meth:`unrecorded`."""
        return self._unrecorded is None

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Run the body, between two steps, off the record: it is not part of the run, and no view may show it.

        Its lasting effects are recorded at its end: bytes by class and unit, and the states of the units' parameters.
        """
        if self._unrecorded is not None:  # within what is off the record already
            yield
            return
        before, on_phase = (self._phase, self.ordinal), self.on_phase
        with self._lock:
            self._fold()
            self._unrecorded = _Unrecorded(self._begun_unrecorded)
        self.is_aside, self.on_phase = True, lambda: None
        try:
            yield
        finally:
            self.is_aside, self.on_phase = False, on_phase
            self._phase, self.ordinal = before
            with self._lock:
                left, self._unrecorded = self._unrecorded, None
                self._settle(left)

    def _settle(self, left: _Unrecorded) -> None:
        """Record the lasting effects of what ran off the record."""
        for (category, unit, module), delta_bytes in left.deltas.items():
            if delta_bytes:
                kind = _ALLOC if delta_bytes > 0 else _FREE
                self._append(kind, _INSTANT, unit, delta_bytes, category, module=module)
        for unit, state in left.states.items():
            if state == self._key_frame.unit_states.get(unit, UnitState.SHARDED):
                continue
            if state == UnitState.SHARDED:
                self._append_marked(Kind.RESHARD, Edge.INSTANT, unit, 0)
            elif state == UnitState.UNSHARDED:  # one in flight was aborted, and is reset
                self._append_marked(Kind.UNSHARD, Edge.BEGIN, unit, 0)
                self._append_marked(Kind.UNSHARD, Edge.END, unit, 0)

    def _append_marked(
        self,
        kind: int,
        edge: int,
        unit: int,
        num_bytes: int,
        *,
        comm: tuple[int, int] = (-1, -1),
        module: int = -1,
        value: float = _NAN,
    ) -> None:
        """Record an event, and mark it on the device; without the lock, as a device with a full queue blocks marks."""
        clock = self.device_clock
        if clock is None or not self.is_recording:
            self._append(kind, edge, unit, num_bytes, comm=comm, module=module, value=value)
            return
        ends = kind in NUMBERED and edge == Edge.END
        mark = (self._ends.pop(comm, None) if ends else None) or clock.mark()
        t_ns = clock.now_ns() if ends else mark.made_ns
        self._append(kind, edge, unit, num_bytes, comm=comm, t_ns=t_ns, module=module, value=value, mark=mark)

    def _take_marks(self, clock: DeviceClock) -> None:
        """Record the marks that the device has reached since the last call; none while off the record."""
        self._pack()
        for mark in clock.read() if self.is_recording else ():
            stream = self._intern(mark.stream)
            self._append(Kind.DEVICE, Edge.INSTANT, -1, 0, t_ns=mark.t_ns, module=stream, value=float(mark.row))

    def _append(  # noqa: PLR0913 - the columns of a row
        self,
        kind: int,
        edge: int,
        unit: int,
        num_bytes: int,
        category: int = NO_CATEGORY,
        comm: tuple[int, int] = _NO_COMM,
        t_ns: int | None = None,
        *,
        module: int = -1,
        value: float = _NAN,
        mark: StreamMark | None = None,
    ) -> None:
        """Record a row; its number becomes the mark's row, NOBODYS if it is off the record.

        Every event of a step passes here, so this is the cost of recording: keep name lookups and calls to a minimum.
        """
        if self._unrecorded is not None:
            with self._lock:
                if self._unrecorded is not None and self._unrecorded.takes(
                    kind, edge, unit, num_bytes, category, comm, module
                ):
                    if mark is not None:
                        mark.row = NOBODYS
                    return
        t_ns = self.now_ns() if t_ns is None else t_ns
        at = (t_ns, num_bytes, value, self.step, module, comm[0], unit, comm[1], kind, edge, self._phase, category)
        self._new.append((at, mark))
        if len(self._new) >= self._batch:
            self._pack()

    def _pack(self) -> None:
        """Number the new rows and pack them into the ring; call it before reading.

        The begin of a step that is only expected stays back until a row of the step follows it.
        """
        with self._lock:
            if self._is_packing:  # an event announced itself within the loop below, which packs it too
                return
            self._is_packing = True
            try:
                while self._new and not (self._is_expected and self._is_only_expected()):
                    row, mark = self._new.popleft()
                    seq = self._head
                    _pack_row(self._ring, seq % self._capacity * _ROW_BYTES, seq, *row)
                    self._head = seq + 1
                    if mark is not None:
                        mark.row = seq
                    if seq >= self._fold_at:
                        self._fold()
            finally:
                self._is_packing = False

    def _is_only_expected(self) -> bool:
        """Return whether the oldest new row is the begin of an expected step, of which no other row has come."""
        if not self._is_expected or not self._new or self._new[0][0][_KIND_AND_EDGE] != _STEP_BEGINS:
            return False
        others = [row[_KIND_AND_EDGE] for row, _ in itertools.islice(self._new.copy(), 1, None)]
        return len(others) < self._batch - 1 and all(
            kind in _UNTIMED or (kind in NUMBERED and edge == Edge.END) for kind, edge in others
        )

    def _fold(self) -> None:
        """Advance the key frame to the newest row, while its rows are still in the ring."""
        self._pack()
        rows = np.frombuffer(self._copy(self._key_frame.seq, self._head), ROW_DTYPE)
        self._key_frame = advance(self._key_frame, rows)
        self._fold_at = self._key_frame.seq + self._capacity // 2

    def _copy(self, first: int, last: int) -> bytes:
        """Return the packed rows ``[first, last)``, all of which must still be in the ring."""
        size = ROW.size
        view = memoryview(self._ring)
        begin, end = first % self._capacity, last % self._capacity
        if first == last:
            return b""
        if begin < end:
            return bytes(view[begin * size : end * size])
        return b"".join((view[begin * size :], view[: end * size]))

    def _intern(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings)
            self._change(dataclasses.replace(self.header, strings=tuple(self._strings)))
        return self._strings[text]

    def _change(self, header: Header) -> None:
        version = self.header_version + 1
        known = {id(unit) for unit in self.header.units}
        self._unit_versions |= {unit.index: version for unit in header.units if id(unit) not in known}
        self.header = header
        self.header_version = version  # last: who reads it finds all of this version

    # ---- reading

    def header_since(self, version: int) -> tuple[int, Header | None]:
        """Return the version of the header, and what changed since an earlier version; called from another thread.

        A session that makes many models has hundreds of units, of which a step changes none.

        Returns:
            The version, and the header with only the units that changed since ``version``; None if nothing did.
        """
        newest = self.header_version
        if newest == version:
            return newest, None
        header = self.header
        units = tuple(unit for unit in header.units if self._unit_versions.get(unit.index, 0) > version)
        return newest, dataclasses.replace(header, units=units)

    def drain(self, next_seq: int = 0) -> DrainedRows:
        """Return the rows from number ``next_seq`` on that the ring still holds; called from another thread."""
        with self._lock:
            if self.device_clock is not None:
                self._take_marks(self.device_clock)
            self._fold()
            first = max(min(next_seq, self._head), self._head - self._capacity)
            lost = max(first - next_seq, 0)
            rows = self._copy(first, self._head)
            return DrainedRows(first_seq=first, rows=rows, lost=lost, key_frame=self._key_frame)

    def packed_since(self, seq: int, most: int) -> tuple[int, bytes]:
        """Return the packed rows from number ``seq`` on, at most the newest ``most``, and the number of the first."""
        with self._lock:
            self._pack()
            first = max(seq, self._head - min(most, self._capacity))
            return first, self._copy(first, self._head)

    @property
    def phase_now(self) -> Phase:
        """The phase of the next row."""
        return self._phase

    def newest(self, count: int) -> Rows:
        """Return the newest rows, at most ``count``, oldest first; thread-safe."""
        with self._lock:
            self._pack()
            count = min(count, self._head, self._capacity)
            return np.frombuffer(self._copy(self._head - count, self._head), ROW_DTYPE)

    def last_event(self) -> np.void | None:
        """Return the newest row that marks the progress of the rank, None if there is none."""
        count = _LOOK_BACK
        while True:
            rows = self.newest(count)
            found = rows[~_IS_BESIDE[rows["kind"]]]
            if len(found) or len(rows) < count:
                break
            count *= 8  # a device reports a whole step at once
        last: np.void | None = found[-1] if len(found) else rows[-1] if len(rows) else None
        return last
