"""The cost of recording a step, as on a rank of the workbench; runs on the ranks, which alone load the engine."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from bench.cases import OURS, TORCH, Case
from bench.training import WARM_UP, Training, make_training


@dataclass(frozen=True)
class Recording:
    """The cost of recording on one rank.

    Attributes:
        on_ns: CPU time of recorded steps, each including a drain of its rows, as the notebook makes from time to time.
        off_ns: of plain steps, alternating with the others.
        num_rows: rows of one recorded step.
        row_ns: median CPU time of announcing one event, including its row.
    """

    on_ns: list[int]
    off_ns: list[int]
    num_rows: int
    row_ns: float


class _Recorded:
    """Recorded and drained steps, with all that listens on a rank of the workbench.

    Args:
        is_torchs: whether torch's engine trains, and is watched.
    """

    def __init__(self, *, is_torchs: bool) -> None:
        from workbench.models.engines import Watch
        from workbench.runtime.gate import Gate
        from workbench.runtime.recorder import Recorder
        from workbench.runtime.rss_sampler import RssSampler
        from workbench.runtime.trainer import Trainer
        from workbench.trace.schema import Header

        self._watch = Watch() if is_torchs else None
        self.recorder = Recorder(Header())
        self.num_rows = 0
        self.gate = Gate(self.recorder, dist.get_rank())
        self._trainer, self._resident = Trainer(self.recorder), RssSampler(self.recorder.resident)
        self._next_seq = 0

    def step(self, training: Training) -> None:
        from workbench.trace.schema import ROW

        self.recorder.begin_step()
        training.step()
        self.recorder.end_step()
        drained = self.recorder.drain(self._next_seq)
        self.num_rows, self._next_seq = len(drained.rows) // ROW.size, drained.key_frame.seq

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the gate before the recorder, the optimizers' hooks and the memory samples."""
        handles = self._trainer.install()
        self.gate.install()
        self.recorder.on_phase = self._resident.sample
        if self._watch is not None:
            self._watch.begin()
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.end()
            self.gate.uninstall()
            for handle in handles:
                handle.remove()


def measure_recording(case: Case, num_pairs: int, engine: str = OURS) -> Recording:
    """Return the times of ``num_pairs`` recorded and as many plain steps, whose order alternates.

    Args:
        case: the model.
        num_pairs: number of pairs.
        engine: :data:`OURS` or :data:`TORCH`.
    """
    recorded = _Recorded(is_torchs=engine == TORCH)
    with recorded.installed():  # units announce themselves to the probe when they are made
        training = make_training(case, engine)
        for _ in range(WARM_UP):
            recorded.step(training)
    on_ns: list[int] = []
    off_ns: list[int] = []
    for pair in range(num_pairs):
        for is_recorded in (True, False) if pair % 2 else (False, True):
            if is_recorded:
                with recorded.installed():
                    on_ns.append(_cpu_ns(lambda: recorded.step(training)))
            else:
                off_ns.append(_cpu_ns(training.step))
    return Recording(on_ns, off_ns, recorded.num_rows, _row_ns(recorded.gate))


def _cpu_ns(step: Callable[[], None]) -> int:
    dist.barrier()
    begin = time.process_time_ns()
    step()
    return time.process_time_ns() - begin


def _row_ns(gate: Any, repeats: int = 21, num_rows: int = 500) -> float:
    """Return the median CPU time of one event, in nanoseconds, including calls: half of the engine, half of memory."""
    from workbench.events import Category, Comm, Edge, Kind

    comm, times = Comm(group=0, seq=0), []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        for _ in range(num_rows // 2):
            gate.event(Kind.ALL_GATHER, Edge.BEGIN, 0, 8, comm, None)
            gate.memory(Category.UNSHARDED_PARAMS, 0, 8)
        times.append((time.thread_time_ns() - begin) / num_rows)
    return statistics.median(times)
