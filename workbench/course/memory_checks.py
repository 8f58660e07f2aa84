"""Findings about memory and unit states in a step; for ``step`` see :mod:`workbench.course.call_checks`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.base.text_formats import format_bytes
from workbench.course.finding import CheckFinding, and_list, fails, holds, unit_list
from workbench.course.run_steps import no_step, step_of
from workbench.course.step_reasons import peak_reason
from workbench.errors import UsageError
from workbench.events import ROOT, Category, Edge, Kind, UnitState, unit_words
from workbench.protocol.breakpoints import read_event, split_event
from workbench.replay import memory
from workbench.replay.grouping import by_value, label
from workbench.replay.states import at as states_at
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Rows
from workbench.trace.step_names import step_name

_LEFT = (
    Category.UNSHARDED_PARAMS,
    Category.ALL_GATHER_BUFFERS,
    Category.UNSHARDED_GRADS,
    Category.REDUCE_SCATTER_BUFFERS,
)
"""Classes of bytes that no step may leave behind."""


def peak(
    trace: Trace,
    at_most: float | None = None,
    *,
    reference: Trace | None = None,
    ratio: float = 1.1,
    step: int = -1,
) -> CheckFinding:
    """Return whether the most bytes that a rank has in use in a step are within a limit.

    Args:
        trace: of the run.
        at_most: the limit in bytes.
        reference: of another run, whose peak in its step ``step`` times ``ratio`` is the limit instead.
        ratio: see there.
        step: the step.

    Raises:
        UsageError: neither or both of ``at_most`` and ``reference`` are given.
    """
    if (at_most is None) == (reference is None):
        raise UsageError("peak needs a limit: peak(trace, at_most=BYTES) or peak(trace, reference=other_trace)")
    number = step_of(trace, step)
    if number is None:
        return no_step(trace, step)
    rank, found = _highest(trace, number)
    limit, words = at_most, "the limit"
    if reference is not None:
        other = step_of(reference, step)
        if other is None:
            return no_step(reference, step, "the reference run")
        best = _highest(reference, other)[1].num_bytes
        limit, words = (
            ratio * best,
            f"{found.num_bytes / max(best, 1):.2f} times the reference's {format_bytes(best)}",
        )
    assert limit is not None
    size = format_bytes(found.num_bytes)
    if found.num_bytes <= limit:
        return holds(f"the peak of {step_name(number)} is {size}" + (f", {words}" if reference else ""))
    against = f"{words}, more than {ratio:g}" if reference else f"more than {format_bytes(limit)}"
    return fails(
        f"the peak of {step_name(number)} is {size} on rank {rank}, {against} "
        f"({memory.describe_peak(trace.header, found)})",
        peak_reason(trace, number, rank),
    )


def _highest(trace: Trace, step: int) -> tuple[int, memory.Peak]:
    peaks = [(rank.rank, memory.peak(rank)) for rank in trace.slice(step=step).ranks]
    return max(peaks, key=lambda each: each[1].num_bytes)


def nothing_left(trace: Trace, step: int = -1) -> CheckFinding:
    """Return whether a step leaves no unit gathered, and no full gradient and no buffer of a collective allocated.

    The bytes that count are those left before the next step begins; after the newest one, at the end of the trace.
    """
    number = step_of(trace, step)
    if number is None:
        return no_step(trace, step)
    left = by_value({rank.rank: text for rank in trace.ranks if (text := _left(trace, rank, number))})
    if not left:
        return holds(f"{step_name(number)} leaves nothing gathered")
    each = [f"{label(ranks)} keep{'s' if len(ranks) == 1 else ''} {text}" for text, ranks in left.items()]
    return fails(
        f"after {step_name(number)}, {and_list(each)}",
        "after backward the engine has to free the full parameters, the full gradients and the buffers of each unit",
    )


def _left(trace: Trace, rank: RankTrace, step: int) -> str:
    """Return what a rank keeps after a step, as text; empty if nothing.

    Buffers and gradients count if the step before it has left some too: a transport may free the tensors of a
    collective a moment after its end.
    """
    ends = [rank.place_after(each) for each in sorted({max(step - 1, int(rank.steps[0])), step})]
    states = rank.unit_states_before(ends[-1])
    units = unit_list(trace.header, [unit for unit, found in states.items() if found != UnitState.SHARDED])
    sizes = [rank.bytes_before(end) for end in ends]
    held = {category: min(size[category] for size in sizes) for category in _LEFT}
    held[Category.UNSHARDED_PARAMS] = sizes[-1][Category.UNSHARDED_PARAMS]
    texts = [f"{format_bytes(size)} of {category.words}" for category, size in held.items() if size > 0]
    return and_list([*([f"{units} unsharded"] if units else []), *texts])


def states(trace: Trace, event: str, expected: Mapping[str, str], step: int = -1) -> CheckFinding:
    """Return whether units are in the expected states when an event first happens in a step.

    Args:
        trace: of the run.
        event: as in ``%fsdp break add``: ``"backward:blocks.1"``, ``"all_gather.end:blocks.0"``.
        expected: state by unit: ``sharded``, ``all-gather in flight``, ``unsharded`` or ``reducing``.
        step: the step.

    Raises:
        UsageError: there is no such event or state.
    """
    name, unit = read_event(event)
    kind, edge = split_event(name)
    wanted = {one.replace(ROOT, ""): _state(text) for one, text in expected.items()}
    number = step_of(trace, step)
    if number is None:
        return no_step(trace, step)
    part = trace.slice(step=number)
    when = f"at {event} of {step_name(number)}"
    wrong = by_value({rank.rank: _states_at(part, rank, (kind, edge, unit), wanted) for rank in part.ranks})
    if set(wrong) == {""}:
        return holds(f"{when}: " + and_list([f"{unit_words(one)} is {state.words}" for one, state in wanted.items()]))
    return fails("; ".join(f"{when} on {label(ranks)}, {text}" for text, ranks in wrong.items() if text))


def _states_at(
    part: Trace, rank: RankTrace, event: tuple[Kind, Edge, str | None], wanted: Mapping[str, UnitState]
) -> str:
    """Return which units are in other states than ``wanted`` just before the first such event, as text."""
    kind, edge, unit = event
    rows = rank.rows
    is_one = (rows["kind"] == kind) & (rows["edge"] == edge)
    if unit is not None:
        name = unit.replace(ROOT, "")
        is_one &= np.isin(rows["unit"], [each.index for each in part.header.units if each.name == name])
    places = np.flatnonzero(is_one)
    if not len(places):
        return "there is no such event"
    found = states_at(rank, int(rows["seq"][places[0]]) - 1)
    texts = []
    for one, state in wanted.items():
        index = _newest(part, one, rows)
        if index is None:
            texts.append(f"there is no unit {unit_words(one)}")
        elif state not in (found[index], found.params.get(index, UnitState.SHARDED)):  # it may also be reducing
            texts.append(f"{unit_words(one)} is {found[index].words}, not {state.words}")
    return and_list(texts)


def _state(text: str) -> UnitState:
    for state in UnitState:
        if text.strip().lower().replace("_", " ") in {state.words, state.key.replace("_", " ")}:
            return state
    raise UsageError(f"there is no state {text!r}; the states: {', '.join(state.words for state in UnitState)}")


def _newest(trace: Trace, name: str, rows: Rows) -> int | None:
    """Return the unit of a name that has rows; the newest one if several have, or none has."""
    named = [unit.index for unit in trace.header.units if unit.name == name]
    used = [index for index in named if (rows["unit"] == index).any()]
    return max(used or named, default=None)
