"""The recording of one rank of a run: a probe in memory, and a thread that appends what it records to a file."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from workbench.base.clock import clock_here
from workbench.engine import probe
from workbench.events import Unit
from workbench.models.c10d import sees_all_collectives
from workbench.models.engines import Watch
from workbench.models.patches import Patches, Watching
from workbench.record.crash_report import CrashReport
from workbench.record.launch import Place
from workbench.record.reasons import reason_of
from workbench.record.thread_activity import ThreadActivity
from workbench.runtime import error_notes
from workbench.runtime.enclosing_blocks import block_words
from workbench.runtime.handled_errors import handled_error
from workbench.runtime.loop_steps import SampledSteps
from workbench.runtime.recorder import Recorder
from workbench.runtime.rss_sampler import RssSampler
from workbench.trace.frames import is_of_a_library
from workbench.trace.newest_rows import NUM_ROWS, NewestRows
from workbench.trace.process_state import processes_here
from workbench.trace.recording import (
    THREAD_ENDED,
    TWO_THREADS,
    Activity,
    FrameKind,
    Heartbeat,
    RecordingWriter,
    RunEnd,
    RunStart,
    SilentStack,
)
from workbench.trace.schema import ROW_DTYPE, Header, RankInfo

PERIOD_S = 0.2
"""Time between two writes: what a killed process has not written yet."""

FLUSH_S = 0.2
"""Limit of the time for which a rank waits until a collective that it has never issued before is written.

A write takes less than a millisecond, and longer only where the processors are busy.
"""

_FLUSH_EVERY_S = 0.05
_MAX_FLUSHES = 100
"""A rank waits for so many writes one after the other, and then for one each :data:`_FLUSH_EVERY_S`."""

_MAX_ISSUED = 10_000
QUIET_S = (1, 10, 60)
"""Times without an event, in seconds, after which the main thread's stack is written."""

_BEAT_S = 1.0
_EXIT_S = 2.0
_MAX_FRAMES = 200
_MAX_TEXT = 20_000
_CALL_IN_TEXT = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
_MAX_LINE = 200
_OWN = tuple(f"{Path(__file__).parents[1] / part}{os.sep}" for part in ("record", "models"))


class RankRecording:
    """The recording of this process, from :meth:`begin` to :meth:`end`.

    Processes that it forks, such as workers of a data loader, are no ranks: they record nothing.

    Args:
        folder: the recording's folder.
        here: this process's place in its run.
        program: the script and its arguments.
        max_bytes: limit of the rank's files together.
        keep: number of the newest steps to keep at least; 0: all.
        every: record only each step whose number is a multiple of it.
        complain: receives a sentence if the recording has to stop early, or something cannot be watched.

    Raises:
        FileExistsError: the folder has a recording of this rank.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        here: Place,
        *,
        program: tuple[str, ...] = (),
        max_bytes: int,
        keep: int = 0,
        every: int = 1,
        complain: Callable[[str], object],
    ) -> None:
        self._folder, self._complain = folder, complain
        self._recorder = Recorder(Header(world_size=here.world_size))
        rss = RssSampler(self._recorder.resident)
        self._recorder.on_phase = rss.sample
        device = f"cuda:{here.local_rank}" if torch.cuda.is_available() else "cpu"
        info = RankInfo(
            rank=here.rank,
            host=socket.gethostname(),
            device=device,
            pid=os.getpid(),
            baseline_bytes=rss.num_bytes() if device == "cpu" else 0,
            sees_cpp=sees_all_collectives(),
        )
        self._recorder.set_run(info, mesh_shape=(here.world_size,), mesh_axes=("rank",))
        self._steps = SampledSteps(self._recorder, every)
        start = RunStart(
            rank=here.rank,
            world_size=here.world_size,
            clock=clock_here(),
            t_ns=time.monotonic_ns(),
            wall_ns=time.time_ns(),
            program=program,
            processes=processes_here(),
        )
        self._written = 0
        self._header_version = self._recorder.header_version
        self._writer = RecordingWriter(folder, start, self._recorder.header, max_bytes, keep)
        self._main = threading.get_ident()
        self._activity = ThreadActivity(threading.current_thread())
        self._pid = os.getpid()
        self._progress = _Progress((-1, 0, 0), start.t_ns)
        self._next_beat = 0.0
        self._stop, self._wake, self._flushed = threading.Event(), threading.Event(), threading.Event()
        self._issued: set[tuple[int, int, int, int]] = set()
        self._flushes, self._refilled = float(_MAX_FLUSHES), time.monotonic()
        self._wants_stack = False
        self._crash = CrashReport(folder, here.rank)
        self._newest = NewestRows(folder, here.rank)
        self._thread = threading.Thread(target=self._run, name="workbench recording", daemon=True)
        self._has_stopped = self._is_over = False
        self._watch: Watch | None = None
        self._undo: list[Callable[[], object]] = []
        self._notes: deque[str] = deque()

    def begin(self) -> None:
        """Record from now on; if that raises, nothing is recorded."""
        probe.active = self._recorder
        try:
            self._watch = Watch(self._note).begin()
            error_notes.install(self._recorder)
            hooks = self._steps.install(Patches("steps of optimizers are", self._note))
        except Exception as error:
            self.forget()
            with suppress(OSError):
                self._writer.stop(time.monotonic_ns(), repr(error))
            self._close()
            raise
        exits = Patches("the end by os._exit is", self._note)
        exits.wrap(os, "_exit", self._watch_exit)
        exits.wrap(threading, "excepthook", self._watch_thread)
        crash = self._crash.begin()
        removals = [hook.remove for hook in hooks]
        self._undo = [self._watch.end, error_notes.uninstall, *removals, crash.end, exits.undo]
        self._recorder.on_issue = self._before_issue
        self._watch.collectives.on_two_threads = self._note_threads
        own = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(own()))
        self._thread.start()

    def _note(self, sentence: str) -> None:
        """Say what is not seen any more, and let the recording have it too."""
        self._notes.append(sentence)  # one thread writes
        self._steps.expect_no_forwards()
        self._complain(sentence)

    def _note_threads(self, first: str, second: str, call: str) -> None:
        place = _users_place(stack_of(sys._getframe()))
        self._notes.append(f"{TWO_THREADS}: {first}, and {second}, which issues {call}{place}")

    def _watch_exit(self, status: int) -> Watching:
        """Write the end of a program that calls ``os._exit``, for a moment at most: its thread may hold any lock."""
        if os.getpid() == self._pid:
            leaves = SystemExit(status)
            leaves.__context__ = sys.exception()
            reason, frames = reason_of(leaves), stack_of(sys._getframe())
            ends = threading.Thread(target=self.end, args=(reason,), kwargs={"frames": frames}, daemon=True)
            ends.start()
            ends.join(_EXIT_S)
        yield

    def _watch_thread(self, ended: Any, *_: Any) -> Watching:  # noqa: ANN401 - threading.ExceptHookArgs
        """Note the error that has ended a thread: the others may wait for what it no longer does."""
        if os.getpid() == self._pid and ended.exc_value is not None and ended.exc_type is not SystemExit:
            who, place = ended.thread.name if ended.thread else "", _users_place(_frames_of(ended.exc_value))
            self._notes.append(f"{THREAD_ENDED} {who} ended with {reason_of(ended.exc_value)}{place}")
        yield

    def end(self, reason: str = "", error: BaseException | None = None, *, frames: Sequence[str] = ()) -> None:
        """Stop recording, and write the rest.

        Args:
            reason: why the program ended; empty for success.
            error: what it raised, whose traceback is written.
            frames: else the calls in which it ended, the innermost last.
        """
        if self._is_over or os.getpid() != self._pid:  # a forked process that ends as this one would
            return
        with self._crash.held_back():
            self._end(reason, frames if error is None else _frames_of(error))

    def _end(self, reason: str, frames: Sequence[str]) -> None:
        self._leave()
        try:
            if not self._has_stopped:
                self._write()
        except Exception as problem:  # noqa: BLE001 - whatever it is, the program ends as it would without
            self._stop_early(problem)
        with suppress(OSError):
            self._writer.end(RunEnd(t_ns=time.monotonic_ns(), reason=reason, frames=_users(frames)))
        self._close()

    def at_end(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the recording ends."""
        self._undo.append(undo)

    def discard(self) -> None:
        """Stop recording, and delete what was written: this process is no rank."""
        self._leave()
        self._close()
        self._writer.delete()

    def _close(self) -> None:
        self._writer.close()
        self._newest.delete()

    def _leave(self) -> None:
        self._is_over = True
        self._stop.set()
        self._wake.set()
        self._thread.join()  # first: it may be about to announce the end of a collective
        for undo in (*self._undo, self._steps.close, self.forget):
            with suppress(Exception):  # the program goes on as it would without
                undo()

    @property
    def is_empty(self) -> bool:
        """Whether no event of this process was recorded, and none of processes in its place."""
        return not self._written and self._writer.exists

    def forget(self) -> None:
        """Announce nothing more to the recorder, and report no crash."""
        self._recorder.on_issue = None
        self._crash.end()
        if probe.active is self._recorder:
            probe.active = None

    def _run(self) -> None:
        while self._wake.wait(PERIOD_S) or not self._stop.is_set():
            if self._stop.is_set():
                return
            self._wake.clear()
            try:
                self._write()
                if self._wants_stack:
                    self._wants_stack = False
                    self._write_stack(time.monotonic_ns(), "")
                self._write_if_quiet()
                self._write_beat()
            except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
                self._stop_early(error)
                return
            finally:
                self._flushed.set()

    def _before_issue(self, call: tuple[int, int, int, int]) -> None:
        """Write the newest rows, and wait a moment until a collective is written that refers to something new."""
        if self._newest.is_open:
            self._newest.write(*self._recorder.packed_since(self._newest.seq, NUM_ROWS))
        self._flush_new(call)

    def _flush_new(self, call: tuple[int, int, int, int]) -> None:
        """Wait a moment until a collective is written that this rank has not issued before.

        If ranks issue different ones, a library may end the process within it, before the next write: gloo does so on a
        rank that receives more bytes than it expects. Ranks also part where one handles an error.
        """
        is_handling = sys.exception() is not None
        if (call in self._issued and not is_handling) or self._has_stopped:
            return
        now, since = time.monotonic(), self._refilled
        self._flushes, self._refilled = min(self._flushes + (now - since) / _FLUSH_EVERY_S, _MAX_FLUSHES), now
        if self._flushes < 1:
            return
        if len(self._issued) < _MAX_ISSUED:
            self._issued.add(call)
        self._flushes -= 1
        self._wants_stack = is_handling
        self._flushed.clear()
        self._wake.set()
        self._flushed.wait(FLUSH_S)

    def _stop_early(self, error: Exception) -> None:
        self._has_stopped = True
        self.forget()
        why = str(error.strerror) if isinstance(error, OSError) else repr(error)
        with suppress(OSError):
            self._writer.stop(time.monotonic_ns(), why)
        why = f"cannot write to {self._folder}: {why}" if isinstance(error, OSError) else why
        self._complain(f"recording stopped: {why}; the program continues")

    def _write(self) -> None:
        if self._watch is not None:
            self._watch.settle()
        while self._notes:
            self._writer.note(self._notes.popleft())
        drained = self._recorder.drain(self._written)
        version, header = self._recorder.header_version, described(self._recorder.header, drained.rows)
        if version != self._header_version or header is not self._recorder.header:
            self._header_version = version
            self._writer.set_header(header)
        self._writer.append(drained.rows, drained.key_frame, lost=drained.lost)
        self._written = drained.key_frame.seq

    def _write_if_quiet(self) -> None:
        """Write the main thread's stack when it has announced no event for a while, recorded or not."""
        now_ns = time.monotonic_ns()
        mark = (self._written - 1, self._recorder.next_step, self._recorder.ordinal)
        if mark != self._progress.mark:
            self._progress = _Progress(mark, now_ns)
            self._activity.begin()
        stacks = self._progress.stacks
        if stacks == len(QUIET_S) or now_ns - self._progress.t_ns < QUIET_S[stacks] * 1e9:
            return
        self._progress.stacks += 1
        self._write_stack(now_ns, self._activity.now())

    def _write_stack(self, now_ns: int, activity: Activity) -> None:
        frame = sys._current_frames().get(self._main)
        frames = () if frame is None else stack_of(frame, handled_error(self._main))
        silent = SilentStack(t_ns=now_ns, seq=self._written, frames=frames, activity=activity)
        self._writer.write(FrameKind.SILENT_STACK, silent)

    def _write_beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            beat = Heartbeat(t_ns=time.monotonic_ns(), wall_ns=time.time_ns(), event_ns=self._progress.t_ns)
            self._writer.write(FrameKind.HEARTBEAT, beat)


def described(header: Header, packed: bytes) -> Header:
    """Return the header with an entry for each unit of some rows: an engine may describe a unit after its first row."""
    highest = int(np.frombuffer(packed, ROW_DTYPE)["unit"].max(initial=-1))
    missing = (_unknown_unit(index) for index in range(len(header.units), highest + 1))
    return replace(header, units=(*header.units, *missing)) if highest >= len(header.units) else header


def _unknown_unit(index: int) -> Unit:
    return Unit(
        index=index,
        name="",
        root=-1,
        params=(),
        reshard_after_forward=False,
        shard_size=1,
        compute_dtype="",
        reduce_dtype="",
        compute_itemsize=0,
        reduce_itemsize=0,
        gone=True,
    )


@dataclass(slots=True)
class _Progress:
    """How far the main thread has come.

    Attributes:
        mark: changes with every event: number of the newest row, and the next step and event, recorded or not.
        t_ns: when that was seen first.
        stacks: number of stacks written since.
    """

    mark: tuple[int, int, int]
    t_ns: int
    stacks: int = 0


def _frames_of(error: BaseException) -> tuple[str, ...]:
    """Return the calls that raised an error, then those of a traceback in its text, as of a worker of a loader."""
    inner = _CALL_IN_TEXT.findall(str(error)[:_MAX_TEXT])
    summaries = (traceback.FrameSummary(path, int(line), name) for path, line, name in inner)
    return (*_frames(traceback.extract_tb(error.__traceback__)), *map(_frame, summaries))


def _users(frames: Sequence[str]) -> tuple[str, ...]:
    """Return the calls that are not of a library."""
    return tuple(each for each in frames if not is_of_a_library(each))


def _users_place(frames: Sequence[str]) -> str:
    """Return the innermost of them as the end of a sentence; empty if there is none."""
    return f", in {own[-1]}" if (own := _users(frames)) else ""


def stack_of(frame: FrameType, handled: tuple[FrameType, str] | None = None) -> tuple[str, ...]:
    """Return the calls of a stack, the innermost last, without those of the recording itself.

    ``handled``: the call that handles an error, and this as text; see :func:`handled_error`.
    """
    at, after = (None, "") if handled is None else (traceback.extract_stack(handled[0], 1)[0], handled[1])
    return _frames(traceback.extract_stack(frame), at, after)


def _frames(
    stack: traceback.StackSummary, at: traceback.FrameSummary | None = None, after: str = ""
) -> tuple[str, ...]:
    """Return calls as text, with ``after`` in that of the call ``at``."""
    calls = [call for call in stack if not call.filename.startswith(_OWN)]
    first = next((at for at, call in enumerate(calls) if "runpy" not in call.filename), 0)
    return tuple(_frame(call, after if call == at else "") for call in calls[first:][-_MAX_FRAMES:])


def _frame(call: traceback.FrameSummary, after: str = "") -> str:
    """Return a call as text: ``train.py:31 in main, loop 20, 24: loss.backward()``; 24 is the innermost loop's line."""
    blocks = block_words(call.filename, call.lineno or 0) + after
    return f"{call.filename}:{call.lineno} in {call.name}{blocks}: {(call.line or '')[:_MAX_LINE]}".rstrip(": ")


def _forget(recording: RankRecording | None) -> None:
    if recording is not None:
        recording.forget()
