"""The recording of one rank of a run: a probe in memory, and a thread that appends what it records to a file."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from workbench.clock import clock_here
from workbench.engine import probe
from workbench.engine.event_source import SOURCE
from workbench.record.launch import Place
from workbench.runtime.loop_steps import LoopSteps
from workbench.runtime.recorder import Recorder
from workbench.runtime.rss_sampler import RssSampler
from workbench.trace.recording import Beat, End, FrameKind, Quiet, RecordingWriter, Start
from workbench.trace.schema import Header, RankInfo
from workbench.watch import Watch

PERIOD_S = 0.2
"""Time between two writes: what a killed process has not written yet."""

QUIET_S = (1, 10, 60)
"""Times without an event, in seconds, after which the main thread's stack is written."""

_BEAT_S = 1.0
_MAX_FRAMES = 200
_OWN = tuple(f"{Path(__file__).parents[1] / part}{os.sep}" for part in ("record", "watch"))


class RankRecording:
    """The recording of this process, from :meth:`begin` to :meth:`end`.

    Args:
        folder: the recording's folder.
        here: this process's place in its run.
        program: the script and its arguments.
        max_bytes: limit of the rank's files together.
        keep: number of the newest steps to keep at least; 0: all.
        complain: receives a sentence if the recording has to stop early.

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
        )
        self._recorder.set_run(info, mesh_shape=(here.world_size,), mesh_axes=("rank",))
        start = Start(
            rank=here.rank,
            world_size=here.world_size,
            clock=clock_here(),
            t_ns=time.monotonic_ns(),
            wall_ns=time.time_ns(),
            program=program,
        )
        self._written = 0
        self._header_version = self._recorder.header_version
        self._writer = RecordingWriter(folder, start, self._recorder.header, max_bytes, keep)
        self._main = threading.get_ident()
        self._quiet_at = (-1, 0)  # number of the next event, stacks written since
        self._next_beat = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="workbench recording", daemon=True)
        self._watch: Watch | None = None
        self._undo: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Record from now on."""
        probe.active = self._recorder
        self._recorder.source(SOURCE)
        steps = LoopSteps(self._recorder)
        self._watch = Watch()
        self._undo = [self._watch.end, *(hook.remove for hook in steps.install())]
        os.register_at_fork(after_in_child=_forget)  # a data loader's worker is no rank
        self._thread.start()

    def end(self, reason: str = "") -> None:
        """Stop recording, and write the rest; ``reason`` says why the program ended, empty for success."""
        for undo in self._undo:
            undo()
        if probe.active is self._recorder:
            probe.active = None
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            self._write()
            self._writer.write(FrameKind.END, End(t_ns=time.monotonic_ns(), reason=reason))
        self._writer.close()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self._write()
                self._write_if_quiet()
                self._write_beat()
            except OSError as error:
                probe.active = None  # training goes on
                self._complain(
                    f"recording stopped: cannot write to {self._folder}: {error.strerror}; the program goes on"
                )
                return

    def _write(self) -> None:
        if self._watch is not None:
            self._watch.settle()
        drained = self._recorder.drain(self._written)
        if self._recorder.header_version != self._header_version:
            self._header_version = self._recorder.header_version
            self._writer.set_header(self._recorder.header)
        self._writer.append(drained.rows, drained.key_frame, lost=drained.lost)
        self._written = drained.key_frame.seq
        self._writer.turn(self._recorder.step)

    def _write_if_quiet(self) -> None:
        """Write the main thread's stack when no event has come for a while."""
        newest = self._recorder.newest(1)
        seq, since_ns = (int(newest["seq"][0]), int(newest["t_ns"][0])) if len(newest) else (-1, 0)
        if seq != self._quiet_at[0]:
            self._quiet_at = (seq, 0)
        stacks = self._quiet_at[1]
        silence_s = (time.monotonic_ns() - since_ns) / 1e9
        if seq < 0 or stacks == len(QUIET_S) or silence_s < QUIET_S[stacks]:
            return
        self._quiet_at = (seq, stacks + 1)
        frame = sys._current_frames().get(self._main)
        quiet = Quiet(t_ns=time.monotonic_ns(), seq=seq + 1, frames=() if frame is None else stack_of(frame))
        self._writer.write(FrameKind.QUIET, quiet)

    def _write_beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._writer.write(FrameKind.BEAT, Beat(t_ns=time.monotonic_ns(), wall_ns=time.time_ns()))


def stack_of(frame: FrameType) -> tuple[str, ...]:
    """Return the calls of a stack, the innermost last, without those of the recording itself."""
    calls = [call for call in traceback.extract_stack(frame) if not call.filename.startswith(_OWN)]
    first = next((at for at, call in enumerate(calls) if "runpy" not in call.filename), 0)
    return tuple(
        f"{call.filename}:{call.lineno} in {call.name}: {call.line or ''}".rstrip(": ")
        for call in calls[first:][-_MAX_FRAMES:]
    )


def _forget() -> None:
    probe.active = None
