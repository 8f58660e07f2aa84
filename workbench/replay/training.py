"""Training progress: logged values per step over all ranks, and step times.

A fold per rank (:func:`advance`) collects logged values and finished steps; :func:`summary` combines the ranks. The
model of a step is the one whose forward comes first in it. Curves are cut where another model begins, and totals cover
the current model only. Time that a rank was held by a breakpoint or a pause (GATE) is not step time.
Arrays: ``M`` values logged by a rank, ``S`` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.events import Edge, Kind, Unit
from workbench.replay.grouping import by_value
from workbench.replay.spans import chosen
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW_DTYPE, Header, Rows

LOSS = "loss"
"""The metric that a step's return value is logged as."""

VALUE_DTYPE = np.dtype([("name", "<i4"), ("step", "<i4"), ("value", "<f8")])  # name: index into Header.strings
MODEL_DTYPE = np.dtype([("step", "<i4"), ("unit", "<i4")])
STEP_DTYPE = np.dtype([("step", "<i4"), ("begin_ns", "<i8"), ("end_ns", "<i8"), ("held_ns", "<i8")])

_WANTED = np.isin(np.arange(256), (Kind.STEP, Kind.GATE, Kind.METRIC))  # indexed by the ``kind`` column


@dataclass(frozen=True, eq=False)
class TrainingProgress:
    """Training state of one rank after some rows. Equal by value (NaN equals NaN).

    Attributes:
        values: ``[M]`` of VALUE_DTYPE, in the order they were logged.
        steps: ``[S]`` of STEP_DTYPE, finished steps in order.
        pending: STEP and GATE rows of the running step; none between steps.
        last_step: the step begun last, -1 if none: values logged right after a step belong to it.
        models: of MODEL_DTYPE, by step: the unit whose forward came first, for steps that have a forward.
    """

    values: NDArray[np.void]
    steps: NDArray[np.void]
    pending: Rows
    last_step: int
    models: NDArray[np.void]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TrainingProgress):
            return NotImplemented
        return self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> tuple[object, ...]:
        arrays = (self.values, self.steps, self.pending, self.models)
        return self.last_step, *(array.tobytes() for array in arrays)


def start() -> TrainingProgress:
    """Return the state before any row. A key frame has no training state, so every fold starts here."""
    return TrainingProgress(
        values=np.empty(0, VALUE_DTYPE),
        steps=np.empty(0, STEP_DTYPE),
        pending=np.empty(0, ROW_DTYPE),
        last_step=-1,
        models=np.empty(0, MODEL_DTYPE),
    )


def advance(state: TrainingProgress, rows: Rows, kind: NDArray[np.uint8] | None = None) -> TrainingProgress:
    """Return the state after ``rows``; splitting the rows into several calls gives the same state.

    Args:
        state: before them.
        rows: consecutive rows of one rank.
        kind: their field ``kind`` as a contiguous array; None: read it from ``rows``.
    """
    kind = np.ascontiguousarray(rows["kind"]) if kind is None else kind
    first = _first_of_steps(state.models, rows, np.flatnonzero(kind == Kind.FORWARD))
    rows = chosen(rows, _WANTED[kind])
    logged = rows["kind"] == Kind.METRIC
    steps_now = _step_at(rows, state.last_step)
    spans = _after(state.pending, rows[~logged])
    return TrainingProgress(
        values=_after(state.values, _values(rows[logged], steps_now[logged])),
        steps=_after(state.steps, _finished(spans)),
        pending=_unfinished(spans),
        last_step=int(steps_now[-1]) if len(steps_now) else state.last_step,
        models=first,
    )


def _after(known: NDArray[np.void], fresh: NDArray[np.void]) -> NDArray[np.void]:
    """Return ``known`` followed by ``fresh``, without a copy if possible: concatenating structured arrays is slow."""
    return np.concatenate([known, fresh]) if len(known) else fresh


def _first_of_steps(known: NDArray[np.void], rows: Rows, forwards: NDArray[np.int64]) -> NDArray[np.void]:
    """Return ``known``, of MODEL_DTYPE, with the first of ``forwards`` of each step that it lacks."""
    edge, step, unit = (rows[name][forwards] for name in ("edge", "step", "unit"))
    begins = np.flatnonzero((edge == Edge.BEGIN) & (step >= 0) & (unit >= 0))
    _, first = np.unique(step[begins], return_index=True)
    fresh = np.empty(len(first), MODEL_DTYPE)
    fresh["step"], fresh["unit"] = step[begins][first], unit[begins][first]
    if not len(known):
        return fresh
    fresh = fresh[~np.isin(fresh["step"], known["step"])]
    found = np.concatenate([known, fresh])
    return found[np.argsort(found["step"], kind="stable")]


def _step_at(rows: Rows, last_step: int) -> NDArray[np.int64]:
    """For each row, the step of the last STEP row up to it; ``last_step`` before the first one. ``[rows]``."""
    places = np.where(rows["kind"] == Kind.STEP, np.arange(len(rows)), -1)
    latest = np.maximum.accumulate(places)
    return np.where(latest >= 0, rows["step"][latest], last_step).astype(np.int64)


def _values(rows: Rows, steps_now: NDArray[np.int64]) -> NDArray[np.void]:
    values = np.empty(len(rows), VALUE_DTYPE)
    values["name"], values["value"] = rows["module"], rows["value"]
    values["step"] = np.where(rows["step"] >= 0, rows["step"], steps_now)
    return values


def _finished(spans: Rows) -> NDArray[np.void]:
    """Steps whose BEGIN is followed, among the STEP rows, by their own END. ``spans`` holds STEP and GATE rows."""
    places = np.flatnonzero(spans["kind"] == Kind.STEP)
    edges, numbers = spans["edge"][places], spans["step"][places]
    paired = (edges[:-1] == Edge.BEGIN) & (edges[1:] == Edge.END) & (numbers[:-1] == numbers[1:])
    begin, end = places[:-1][paired], places[1:][paired]
    held_until = np.cumsum(_held_ns(spans))
    steps = np.empty(len(begin), STEP_DTYPE)
    steps["step"] = spans["step"][begin]
    steps["begin_ns"], steps["end_ns"] = spans["t_ns"][begin], spans["t_ns"][end]
    steps["held_ns"] = held_until[end] - held_until[begin]
    return steps


def _held_ns(spans: Rows) -> NDArray[np.int64]:
    """Nanoseconds since GATE BEGIN at each GATE END that directly follows it, else 0. ``[spans]``."""
    held = np.zeros(len(spans), np.int64)
    is_gate = spans["kind"] == Kind.GATE
    opened, closed = is_gate & (spans["edge"] == Edge.BEGIN), is_gate & (spans["edge"] == Edge.END)
    ends = np.flatnonzero(opened[:-1] & closed[1:]) + 1
    held[ends] = spans["t_ns"][ends] - spans["t_ns"][ends - 1]
    return held


def _unfinished(spans: Rows) -> Rows:
    places = np.flatnonzero(spans["kind"] == Kind.STEP)
    open_step = len(places) and spans["edge"][places[-1]] == Edge.BEGIN
    return spans[places[-1] :] if open_step else spans[:0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """One quantity per step over the ranks that have it; arrays are ``[S]``, steps ascending.

    Attributes:
        name: as the user logged it.
        steps: step numbers; -1 for what was logged before the first step.
        mean: mean over ranks, after averaging each rank's values of a step.
        low: smallest value of any rank.
        high: largest value of any rank.
        num_ranks: ranks that have any value.
        first_not_finite: ranks whose value is not finite at the first step with such a value; none if all values are
            finite.
    """

    name: str
    steps: NDArray[np.int64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    num_ranks: int
    first_not_finite: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """Training over all ranks.

    Attributes:
        metrics: what was logged, by name: the loss first, then in the order of first appearance.
        step_times: nanoseconds of each finished step, without time held at a gate.
        cuts: steps at which another model began, ascending; none with one model.
        behind: ranks that have not finished the last step that others have.
        every: of the steps before ``whole_from``, only those are known whose number is a multiple of it.
        whole_from: the first step of which all events are known; 0: all steps.
    """

    metrics: dict[str, Series]
    step_times: Series
    cuts: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    every: int = 1
    whole_from: int = 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the current model that any rank finished."""
        return int(self._is_present(self.step_times).sum())

    @property
    def losses(self) -> NDArray[np.float64]:
        """Mean loss over ranks, of the current model's steps that logged one. ``[S]``."""
        loss = self.metrics.get(LOSS)
        return np.empty(0) if loss is None else loss.mean[self._is_present(loss)]

    @property
    def steps_without_loss(self) -> NDArray[np.int64]:
        """Numbers of the current model's finished steps without a logged loss. ``[S]``."""
        steps, loss = self.step_times.steps[self._is_present(self.step_times)], self.metrics.get(LOSS)
        return steps if loss is None else np.setdiff1d(steps, loss.steps)

    @property
    def step_ns(self) -> float:
        """Median time of the current model's steps on their slowest ranks, in ns; NaN without a finished step."""
        times = self.step_times.high[self._is_present(self.step_times)]
        return float(np.median(times)) if len(times) else float("nan")

    def _is_present(self, series: Series) -> NDArray[np.bool_]:
        """Mask of the entries of the current model. ``[S]``."""
        return series.steps >= self.cuts[-1] if self.cuts else np.ones(len(series.steps), np.bool_)


def fold(rank_trace: RankTrace, *, with_earlier: bool = False) -> TrainingProgress:
    """Return the state after all rows of a rank, by default without the steps of which the rows were dropped."""
    before = advance(start(), rank_trace.earlier.rows) if with_earlier else start()
    return advance(before, rank_trace.rows, rank_trace.kinds)


def summary(trace: Trace, *, with_earlier: bool = False) -> Summary:
    """Return what the ranks logged and how long their steps took, combined per step; arguments as for :func:`fold`."""
    ranks, states = [r.rank for r in trace.ranks], [fold(r, with_earlier=with_earlier) for r in trace.ranks]
    last = [int(state.steps["step"].max(initial=-1)) for state in states]
    return Summary(
        metrics=_metrics(trace.header, ranks, states),
        step_times=_step_times(ranks, states),
        cuts=_cuts(trace.header, states),
        behind=tuple(r.rank for r, step in zip(trace.ranks, last, strict=True) if step < max(last)),
        every=max((r.earlier.every for r in trace.ranks if with_earlier), default=1),
        whole_from=max((int(r.steps[0]) for r in trace.ranks if len(r.earlier.rows) and len(r.steps)), default=0),
    )


def model_of_steps(header: Header, states: Sequence[TrainingProgress]) -> NDArray[np.void]:
    """Return which model each step trained, of MODEL_DTYPE, steps ascending; ``unit`` is the model's number.

    If ranks disagree, the first one counts. Steps without a forward are left out.
    """
    found = np.concatenate([np.empty(0, MODEL_DTYPE), *(state.models for state in states)])
    _, first = np.unique(found["step"], return_index=True)
    numbers = np.array(models(header), np.int32)
    known = found[first][found["unit"][first] < len(numbers)]
    known["unit"] = numbers[known["unit"]]
    return known


def models(header: Header) -> tuple[int, ...]:
    """Return the number of each unit's model, which is the index of the root it was first sharded under.

    A root continues the model of an earlier one if that was unsharded and they share parameters, by name and shape.
    Otherwise it is a new model, even under the same name: the cell that makes the model was run again.

    Example: root 0, undone, then root 3 with the same parameters, then root 6 -> ``(0, 0, 0, 0, 0, 0, 6, ...)``.
    """
    roots = by_value((unit, _root(unit)) for unit in header.units)
    params = {
        root: {
            (each.fqn, each.global_shape)
            for unit in units
            for param in unit.params
            for each in param.parts or (param,)  # a flat parameter holds several
        }
        for root, units in roots.items()
    }
    undone: list[int] = []
    found: dict[int, int] = {}
    for root, units in sorted(roots.items()):
        before = next((other for other in reversed(undone) if params[other] & params[root]), None)
        if before is not None:
            undone.remove(before)
        found[root] = root if before is None else found[before]
        if all(unit.retired for unit in units):
            undone.append(root)
    return tuple(found[_root(unit)] for unit in header.units)


def _root(unit: Unit) -> int:
    return unit.root if unit.root >= 0 else unit.index


def _cuts(header: Header, states: Sequence[TrainingProgress]) -> tuple[int, ...]:
    found = model_of_steps(header, states)
    changes = np.flatnonzero(np.diff(found["unit"])) + 1
    return tuple(found["step"][changes].tolist())


def _metrics(header: Header, ranks: Sequence[int], states: Sequence[TrainingProgress]) -> dict[str, Series]:
    order = dict.fromkeys(int(i) for state in states for i in _first_appearances(state.values["name"]))
    names = {i: header.strings[i] if 0 <= i < len(header.strings) else f"metric {i}" for i in order}
    found = {}
    for index, name in sorted(names.items(), key=lambda item: item[1] != LOSS):
        parts = [state.values[state.values["name"] == index] for state in states]
        found[name] = _over_ranks(name, ranks, [(part["step"], part["value"]) for part in parts])
    return found


def _first_appearances(names: NDArray[np.int32]) -> NDArray[np.int32]:
    return names[np.sort(np.unique(names, return_index=True)[1])]


def _step_times(ranks: Sequence[int], states: Sequence[TrainingProgress]) -> Series:
    parts = [state.steps for state in states]
    return _over_ranks("step time", ranks, [(s["step"], s["end_ns"] - s["begin_ns"] - s["held_ns"]) for s in parts])


def _over_ranks(
    name: str, ranks: Sequence[int], parts: Sequence[tuple[NDArray[np.int32], NDArray[np.generic]]]
) -> Series:
    """Combine the ranks' ``(steps [M], values [M])``; a rank may have any steps, and repeat some."""
    having = [rank for rank, part in zip(ranks, parts, strict=True) if len(part[0])]
    filled = [part for part in parts if len(part[0])]
    steps = np.unique(np.concatenate([part[0] for part in filled])) if filled else np.empty(0, np.int64)
    shape = len(filled), len(steps)
    means = np.array([_mean_per_step(steps, *part) for part in filled]).reshape(shape)
    has = np.array([np.isin(steps, part[0]) for part in filled], np.bool_).reshape(shape)
    bad = has & ~np.isfinite(means)
    first_bad = np.flatnonzero(bad.any(axis=0))[:1]
    return Series(
        name=name,
        steps=steps.astype(np.int64),
        mean=np.where(has, means, 0.0).sum(axis=0) / has.sum(axis=0),
        low=np.where(has, means, np.inf).min(axis=0, initial=np.inf),
        high=np.where(has, means, -np.inf).max(axis=0, initial=-np.inf),
        num_ranks=len(filled),
        first_not_finite=tuple(having[i] for i in np.flatnonzero(bad[:, first_bad]).tolist()),
    )


def _mean_per_step(
    steps: NDArray[np.int64], own_steps: NDArray[np.int32], values: NDArray[np.generic]
) -> NDArray[np.float64]:
    """One rank's mean at each of ``steps``; NaN where it has none. ``[S]``."""
    at = np.searchsorted(steps, own_steps)
    count = np.bincount(at, minlength=len(steps))
    total = np.bincount(at, weights=values.astype(np.float64), minlength=len(steps))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
