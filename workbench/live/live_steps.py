"""Finished training steps of a growing trace: number, loss and duration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from workbench.events import Edge, Kind
from workbench.replay import training
from workbench.replay.arrivals import LATE
from workbench.replay.paused_time import Cuts
from workbench.replay.spans import chosen
from workbench.replay.training import TrainingProgress
from workbench.reports.step_progress import Progress, progress_of
from workbench.trace.columns import Trace
from workbench.trace.schema import Rows

LEARNED_DTYPE = np.dtype(
    [
        ("step", "<i4"),
        ("loss", "<f4"),
        ("has_loss", "u1"),  # 0: none was logged, and loss is NaN
        ("step_ns", "<i8"),
        ("end_ns", "<i8"),
        ("model", "<i4"),  # -1: not known
        ("exposed", "<f4"),  # share of the step's time in which compute waited, the mean over ranks
        ("waits_least", "<i2"),  # the rank that waited least, if the others waited notably longer; else -1
        ("spread_ns", "<i8"),  # how much longer
    ]
)
MAX_STEPS = 2_000
"""Maximum number of steps that a client receives at once: the last ones."""


class Steps:
    """Finished steps of a trace: each is known when every rank has finished it, and its loss is or the next has begun.

    Attributes:
        count: number of steps so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[NDArray[np.void]] = []
        self._states: dict[int, TrainingProgress] = {}  # of the steps that are not known yet
        self._newest = Progress(done=0, total=0)  # of those that are
        self._seen: dict[int, int] = {}
        self._model = -1
        self._waits_ns: dict[int, dict[int, int]] = {}  # by rank and step
        self._whole_from: dict[int, int] = {}  # by rank, the first step of which no row is missing

    def take(self, trace: Trace, cuts: Cuts | None = None) -> NDArray[np.void]:
        """Return the new steps in ``trace``, of LEARNED_DTYPE.

        The loss is the mean over ranks, NaN if none was logged; times are those of the slowest rank, without the
        time that ``cuts`` leave out.
        """
        for rank_trace in trace.ranks:
            rank, seen = rank_trace.rank, self._seen.get(rank_trace.rank, 0)
            rows = rank_trace.rows[max(seen - rank_trace.start.seq, 0) :]
            if seen < rank_trace.start.seq and len(rows):
                self._whole_from[rank] = int(rows["step"][0]) + 1
            elif seen < rank_trace.start.seq:
                continue  # its rows come later
            if cuts is not None:
                rows = cuts.rows(rows)
            self._states[rank] = training.advance(self._states.get(rank, training.start()), rows)
            _add_waits(self._waits_ns.setdefault(rank, {}), rows, self._whole_from.get(rank, 0))
            self._seen[rank] = rank_trace.end_seq
        states = list(self._states.values())
        name = trace.header.strings.index(training.LOSS) if training.LOSS in trace.header.strings else -1
        count = _num_ready(states, name)
        if count:
            self._newest = self.progress(trace.header.strings)
        learned = _learned(states, name, count)
        self._take_waits(learned)
        learned["model"] = self._models(trace, states, learned["step"])
        self._states = {rank: _without(state, count) for rank, state in self._states.items()}
        self._parts = [*self._parts, learned] if count else self._parts
        self.count += count
        return learned

    def following(self, after: int) -> NDArray[np.void]:
        """Return the steps that follow the first ``after``, of LEARNED_DTYPE: the last MAX_STEPS of them."""
        found, missing = [np.empty(0, LEARNED_DTYPE)], min(self.count - after, MAX_STEPS)
        for part in reversed(self._parts):
            if missing <= 0:
                break
            found.append(part[-missing:])
            missing -= len(part)
        return np.concatenate(found[::-1])

    def progress(self, strings: tuple[str, ...]) -> Progress:
        """Return the newest step that a rank began, the newest loss, and time and tokens of the newest finished step.

        Args:
            strings: of the trace's header.
        """
        if not self._states:
            return self._newest
        now, known = progress_of(list(self._states.values()), strings), self._newest
        if now.loss_step < 0:
            now = replace(now, loss=known.loss, loss_step=known.loss_step)
        return now if now.done else replace(now, step_ns=known.step_ns, tokens_per_s=known.tokens_per_s)

    def _take_waits(self, learned: NDArray[np.void]) -> None:
        """Fill in each step's exposed share and which rank waits least; drop the waits of these and older steps."""
        ranks = sorted(self._waits_ns)
        waited = [[self._waits_ns[rank].get(step, 0) for rank in ranks] for step in learned["step"].tolist()]
        waits_ns = np.array(waited, np.int64).reshape(len(learned), len(ranks))
        step_ns = np.maximum(learned["step_ns"], 1)
        learned["exposed"] = np.clip(waits_ns.mean(axis=1) / step_ns, 0, 1) if ranks else 0
        spread = waits_ns.max(axis=1, initial=0) - (waits_ns.min(axis=1) if ranks else 0)
        least = np.array(ranks, np.int64)[waits_ns.argmin(axis=1)] if ranks else np.full(len(learned), -1)
        learned["spread_ns"] = spread
        learned["waits_least"] = np.where(spread > LATE * step_ns, least, -1)
        if len(learned):
            last = int(learned["step"][-1])
            for rank, waits in self._waits_ns.items():
                self._waits_ns[rank] = {step: ns for step, ns in waits.items() if step > last}

    def _models(self, trace: Trace, states: list[TrainingProgress], steps: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return which model each of ``steps`` trained; one without a forward has that of the step before. ``[S]``."""
        found = training.model_of_steps(trace.header, states)
        at = np.searchsorted(found["step"], steps, side="right")
        known = np.append(found["unit"], self._model)[at - 1]  # -1, before the first, is the appended entry
        self._model = int(known[-1]) if len(known) else self._model
        return known


def _add_waits(waits_ns: dict[int, int], rows: Rows, from_step: int) -> None:
    """Add the waits in ``rows`` to each step's sum: the times of their ends minus those of their begins."""
    waits = chosen(rows, (rows["kind"] == Kind.WAIT) & (rows["step"] >= from_step))
    steps, place = np.unique(waits["step"], return_inverse=True)
    signed = np.where(waits["edge"] == Edge.END, waits["t_ns"], -waits["t_ns"])
    sums = np.zeros(len(steps), np.int64)
    np.add.at(sums, place, signed)
    for step, total in zip(steps.tolist(), sums.tolist(), strict=True):
        waits_ns[step] = waits_ns.get(step, 0) + total


def _num_ready(states: list[TrainingProgress], name: int) -> int:
    """Return how many of the finished steps can be returned."""
    count = min((len(state.steps) for state in states), default=0)
    if not count:
        return 0
    last = int(states[0].steps["step"][count - 1])
    has_loss = any(((s.values["name"] == name) & (s.values["step"] == last)).any() for s in states)
    went_on = any(len(s.steps) > count or len(s.pending) for s in states)
    return count if has_loss or went_on else count - 1


def _learned(states: list[TrainingProgress], name: int, count: int) -> NDArray[np.void]:
    learned = np.empty(count, LEARNED_DTYPE)
    if not count:
        return learned
    steps = np.stack([state.steps[:count] for state in states])  # [ranks, count]
    learned["step"] = steps["step"][0]
    learned["end_ns"] = steps["end_ns"].max(axis=0)
    learned["step_ns"] = (steps["end_ns"] - steps["begin_ns"] - steps["held_ns"]).max(axis=0)
    logged = np.concatenate([s.values[s.values["name"] == name] for s in states])
    place = np.searchsorted(learned["step"], logged["step"])
    mine = (place < count) & (learned["step"][np.minimum(place, count - 1)] == logged["step"])
    total = np.bincount(place[mine], logged["value"][mine], count)
    number = np.bincount(place[mine], minlength=count)
    learned["loss"] = np.where(number > 0, total / np.maximum(number, 1), np.nan)
    learned["has_loss"] = number > 0
    return learned


def _without(state: TrainingProgress, count: int) -> TrainingProgress:
    """Return the state without its first ``count`` steps and the values logged for them."""
    if not count:
        return state
    last = state.steps["step"][count - 1]
    return replace(
        state,
        steps=state.steps[count:],
        values=state.values[state.values["step"] > last],
        models=state.models[state.models["step"] > last],
    )
