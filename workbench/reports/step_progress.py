"""Progress of a running command, read from the growing trace: the content of a progress bar."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.replay import training
from workbench.replay.training import TrainingProgress
from workbench.trace.columns import Trace

TOKENS = "tokens"
"""The metric that each rank logs once per step, and that is shown as tokens per second over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a command of several steps; None where the trace has no value (yet).

    Attributes:
        done: steps that every rank finished since the command began.
        total: steps requested.
        step: number of the newest step any rank began, -1 before the first.
        loss: loss of the newest step that has one, mean over the ranks that logged it.
        loss_step: number of that step, -1 if none has a loss.
        step_ns: time of the newest step that every rank finished, on the slowest rank, in nanoseconds.
        tokens_per_s: tokens of all ranks in that step per second of ``step_ns``; None if not finite.
    """

    done: int
    total: int
    step: int = -1
    loss: float | None = None
    loss_step: int = -1
    step_ns: float | None = None
    tokens_per_s: float | None = None

    @property
    def left_ns(self) -> float | None:
        """Nanoseconds for the remaining steps at the pace of the last one; None before the first and after the last."""
        return None if self.step_ns is None or self.done >= self.total else self.step_ns * (self.total - self.done)


class Follower:
    """Progress tracker that reads each row of a growing trace once, starting at its current end. Thread-safe.

    Args:
        trace: the trace before the command.
        num_ranks: ranks that take part.
        total: steps requested.
    """

    def __init__(self, trace: Trace, *, num_ranks: int, total: int) -> None:
        self._next_seq = {r.rank: r.end_seq for r in trace.ranks}
        self._states = {rank: training.start() for rank in range(num_ranks)}
        self._total = total
        self._lock = threading.Lock()

    def catch_up(self, trace: Trace) -> Progress:
        """Read the new rows of ``trace``, another state of the same trace, and return the progress.

        Rows already read from a later state are not read again.
        """
        with self._lock:
            for rank_trace in trace.ranks:
                rank, seen = rank_trace.rank, self._next_seq.get(rank_trace.rank, 0)
                if rank_trace.end_seq > seen:
                    new = rank_trace.rows[max(seen - rank_trace.start.seq, 0) :]
                    self._states[rank] = training.advance(self._states[rank], new)
                    self._next_seq[rank] = rank_trace.end_seq
            return progress_of(list(self._states.values()), trace.header.strings, self._total)


def progress_of(states: list[TrainingProgress], strings: tuple[str, ...], total: int = 0) -> Progress:
    """Return the progress of ranks, at least one, from their training states.

    Args:
        states: of each rank.
        strings: of the trace's header.
        total: steps requested.
    """
    done = min(len(s.steps) for s in states)
    step_ns = max(_time_of(s, done - 1) for s in states) if done else None
    losses, loss_step = _newest(states, strings, training.LOSS)
    tokens = _values(states, strings, TOKENS, int(states[0].steps["step"][done - 1])) if done else []
    return Progress(
        done=done,
        total=total,
        step=max(s.last_step for s in states),
        loss=float(np.mean(losses)) if losses else None,
        loss_step=loss_step,
        step_ns=step_ns,
        tokens_per_s=sum(tokens) / step_ns * 1e9 if tokens and step_ns and np.isfinite(tokens).all() else None,
    )


def _time_of(state: TrainingProgress, index: int) -> float:
    """Nanoseconds of the ``index``-th finished step, without holds."""
    step = state.steps[index]
    return float(step["end_ns"] - step["begin_ns"] - step["held_ns"])


def _newest(states: list[TrainingProgress], strings: tuple[str, ...], metric: str) -> tuple[list[float], int]:
    """Return what the ranks logged as ``metric`` for the newest step that has it, and that step, -1 if none has."""
    step = max((int(part["step"].max()) for part in _logged(states, strings, metric) if len(part)), default=-1)
    return _values(states, strings, metric, step), step


def _values(states: list[TrainingProgress], strings: tuple[str, ...], metric: str, step: int) -> list[float]:
    """Return the mean of ``metric`` in ``step`` for each rank that logged it."""
    parts = [part[part["step"] == step] for part in _logged(states, strings, metric)]
    return [float(part["value"].mean()) for part in parts if len(part)]


def _logged(states: list[TrainingProgress], strings: tuple[str, ...], metric: str) -> list[NDArray[np.void]]:
    """Return all values of ``metric`` by rank, of VALUE_DTYPE."""
    name = strings.index(metric) if metric in strings else -1
    return [state.values[state.values["name"] == name] for state in states]
