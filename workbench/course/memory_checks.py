"""Findings about memory and unit states in a step; for ``step`` see :mod:`workbench.course.call_checks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from workbench.base.text_formats import format_bytes
from workbench.course.finding import CheckFinding, and_list, fails, holds, not_an_answer, short, unit_list
from workbench.course.run_steps import runs_no_unit, step_of
from workbench.course.step_reasons import peak_reason, unfreed_units
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
    of: str = "",
    step: int = -1,
) -> CheckFinding:
    """Return whether the most bytes that a rank has in use in a step are within a limit.

    Args:
        trace: of the run.
        at_most: the limit in bytes.
        reference: of another run, whose peak in its step ``step`` times ``ratio`` is the limit instead.
        ratio: see there.
        of: a class of bytes, such as ``"activations"``, which alone counts; empty: all in use.
        step: the step.

    Raises:
        UsageError: neither or both of ``at_most`` and ``reference`` are given, or there is no such class.
    """
    if (at_most is None) == (reference is None):
        raise UsageError("peak needs a limit: peak(trace, at_most=BYTES) or peak(trace, reference=other_trace)")
    category = _category(of) if of else None
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    if problem := runs_no_unit(trace, number):
        return fails(problem)
    rank, came = _highest(trace, number, category)
    limit, words, reason = at_most, "the limit", "" if of else peak_reason(trace, number, rank)
    if reference is not None:
        other = step_of(reference, step, "the reference run")
        if isinstance(other, CheckFinding):
            return other
        best_rank, best = _highest(reference, other, category)
        if reason and peak_reason(reference, other, best_rank):
            reason = ""  # the reference does the same, so that is not what is wrong
        limit, words = ratio * best, f"{came / max(best, 1):.2f} times the reference's {format_bytes(best)}"
    assert limit is not None
    size = format_bytes(came)
    subject = f"the peak of {'' if category is None else f'the {category.words} in '}{step_name(number)} is {size}"
    if came <= limit:
        found = holds(subject + (f", {words}" if reference else ""))
    else:
        against = f"{words}, more than {ratio:g}" if reference else f"more than {format_bytes(limit)}"
        moment = "" if of else f" ({memory.describe_peak(trace.header, _peak(trace, number, rank))})"
        found = fails(f"{subject} on rank {rank}, {against}{moment}", reason)
    return replace(found, measured=(f"peak of {category.words}" if category is not None else "peak", came))


def most_bytes(trace: Trace, of: str, step: int = -1) -> int:
    """Return the most bytes of a class, such as ``"activations"``, that a rank has at once in a step.

    Raises:
        UsageError: there is no such class, or no such step.
    """
    category, number = _category(of), step_of(trace, step)
    if isinstance(number, CheckFinding):
        raise UsageError(number.sentence)
    return _highest(trace, number, category)[1]


def _category(name: str) -> Category:
    for category in Category:
        if _bare(name) == _bare(category.words):
            return category
    names = ", ".join(category.key for category in Category)
    raise UsageError(f"there is no class of bytes {short(name)}; the classes: {names}")


def _highest(trace: Trace, step: int, category: Category | None) -> tuple[int, int]:
    """Return the rank with the most bytes at once in a step, and these bytes: of a class, or all in use."""
    found = ((rank.rank, memory.series(rank)) for rank in trace.slice(step=step).ranks)
    most = [
        (rank, int((each.total if category is None else each.num_bytes[:, category]).max(initial=0)))
        for rank, each in found
    ]
    return max(most, key=lambda each: each[1])


def _peak(trace: Trace, step: int, rank: int) -> memory.Peak:
    return memory.peak(trace.slice(step=step).rank(rank))


def nothing_left(trace: Trace, step: int = -1) -> CheckFinding:
    """Return whether a step leaves no unit gathered, and no full gradient and no buffer of a collective allocated.

    The bytes that count are those left before the next step begins; after the newest one, at the end of the trace.
    """
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    if problem := runs_no_unit(trace, number):
        return fails(problem)
    unfreed = unit_list(trace.header, {unit for rank in trace.ranks for unit in unfreed_units(rank, number)})
    if unfreed:
        return fails(
            f"units that reshard in {step_name(number)} while their full parameters stay in memory: {unfreed}",
            "reshard() only announces it; then empty the storage, full.untyped_storage().resize_(0), or drop every "
            "reference to it",
        )
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


def states(
    trace: Trace, event: str, expected: Mapping[str, str], step: int = -1, *, units: Sequence[str] = (), look: str = ""
) -> CheckFinding:
    """Return whether units are in the expected states when an event first happens in a step.

    Args:
        trace: of the run.
        event: as in ``%fsdp break add``: ``"backward:blocks.1"``, ``"all_gather.end:blocks.0"``.
        expected: state by unit: ``sharded``, ``all-gather in flight``, ``unsharded`` or ``reducing``.
        step: the step.
        units: the units that ``expected`` has to have; none: it may have any.
        look: where a student finds the states: then ``expected`` is an answer, and no sentence has a state before it
            is right.

    Raises:
        UsageError: there is no such event, or no such state and ``look`` is empty.
    """
    name, unit = read_event(event)
    kind, edge = split_event(name)
    wanted = _answered(expected, units, f"the states at {event}", look)
    if isinstance(wanted, CheckFinding):
        return wanted
    number = step_of(trace, step, may_pause=bool(look))
    if isinstance(number, CheckFinding):
        return number
    part = trace.slice(step=number)
    when = f"at {event} of {step_name(number)}"
    found = {rank.rank: _states_at(part, rank, (kind, edge, unit), wanted) for rank in part.ranks}
    wrong = by_value({rank: and_list([*texts.values()]) for rank, texts in found.items()})
    if set(wrong) == {""}:
        return holds(f"{when}: " + and_list([f"{unit_words(one)} is {state.words}" for one, state in wanted.items()]))
    sentence = "; ".join(f"{when} on {label(ranks)}, {text}" for text, ranks in wrong.items() if text)
    if not look:
        return fails(sentence)
    names = [*dict.fromkeys(one for texts in found.values() for one in texts)]
    others = f"{and_list(names)} {'is' if len(names) == 1 else 'are'} in another one"
    return replace(
        fails(f"{when}, not every state is right: {others}", f"look at {look}"),
        answer=sentence,
    )


def _answered(
    expected: Mapping[str, str], units: Sequence[str], what: str, look: str
) -> dict[str, UnitState] | CheckFinding:
    """Return the states that were given, or the finding that they are no complete answer."""
    example = f"a state for each unit, such as {{{[*units, 'blocks.1'][0]!r}: {UnitState.SHARDED.words!r}}}"
    if not isinstance(expected, Mapping) or not expected:
        return not_an_answer(expected, what, example)
    given = {str(one).strip().replace(ROOT, ""): text for one, text in expected.items()}
    missing = [unit_words(one) for one in (each.replace(ROOT, "") for each in units) if one not in given]
    if missing:
        return fails(f"{what}: there is no answer for {and_list(missing)}", f"write {example}")
    try:
        return {one: _state(text) for one, text in given.items()}
    except UsageError as error:
        if not look:
            raise
        return fails(str(error))


def _states_at(
    part: Trace, rank: RankTrace, event: tuple[Kind, Edge, str | None], wanted: Mapping[str, UnitState]
) -> dict[str, str]:
    """Return which units are in other states than ``wanted`` just before the first such event, as text by unit."""
    kind, edge, unit = event
    rows = rank.rows
    is_one = (rows["kind"] == kind) & (rows["edge"] == edge)
    if unit is not None:
        name = unit.replace(ROOT, "")
        is_one &= np.isin(rows["unit"], [each.index for each in part.header.units if each.name == name])
    places = np.flatnonzero(is_one)
    if not len(places):
        return {"the event": "there is no such event"}
    found = states_at(rank, int(rows["seq"][places[0]]) - 1)
    texts = {}
    for one, state in wanted.items():
        index = _newest(part, one, rows)
        if index is None:
            texts[unit_words(one)] = f"there is no unit {unit_words(one)}"
        elif state not in (found[index], found.params.get(index, UnitState.SHARDED)):  # it may also be reducing
            texts[unit_words(one)] = f"{unit_words(one)} is {found[index].words}, not {state.words}"
    return texts


def _state(text: object) -> UnitState:
    for state in UnitState:
        if isinstance(text, str) and _bare(text) in {_bare(state.words), _bare(state.key)}:
            return state
    raise UsageError(f"there is no state {short(text)}; the states: {', '.join(state.words for state in UnitState)}")


def _bare(text: str) -> str:
    return text.strip().lower().replace("_", " ").replace("-", " ")


def _newest(trace: Trace, name: str, rows: Rows) -> int | None:
    """Return the unit of a name that has rows; the newest one if several have, or none has."""
    named = [unit.index for unit in trace.header.units if unit.name == name]
    used = [index for index in named if (rows["unit"] == index).any()]
    return max(used or named, default=None)
