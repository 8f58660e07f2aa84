"""Findings about the collectives of a step: how many, how many bytes, and in which order.

Like all findings about a trace they never raise for a run that is wrong: a step that was not recorded is a finding that
failed. ``step`` is a step's number; a negative one counts from the newest step that has ended on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from workbench.base.text_formats import format_bytes
from workbench.course.finding import CheckFinding, and_list, fails, holds, not_an_answer, unit_list, whole_number
from workbench.course.run_steps import NOT_SHARDED, CallKind, read_call, runs_no_unit, step_of
from workbench.course.step_reasons import all_reduce_reasons, gather_reasons, reduction_reasons
from workbench.errors import UsageError
from workbench.events import Kind, unit_words
from workbench.replay import collectives
from workbench.replay.grouping import by_value, label
from workbench.reports.stall_cause import parted
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.step_names import step_name


def counts(trace: Trace, expected: Mapping[str, int], step: int = -1, *, look: str = "") -> CheckFinding:
    """Return whether each rank issued as many collectives in a step as expected.

    Args:
        trace: of the run.
        expected: calls by kind, ``{"all_gather": 9}``, or by kind and unit, ``{"all_gather:blocks.1": 2}``.
        step: the step.
        look: where a student finds the numbers, such as ``"%fsdp comms"``: then ``expected`` is an answer, and the
            sentence has the right number only once it is right.

    Raises:
        UsageError: there is no such kind of collective.
    """
    return _sent(trace, expected, step, look, in_bytes=False)


def payload(trace: Trace, expected: Mapping[str, int], step: int = -1, *, look: str = "") -> CheckFinding:
    """Return whether the collectives of each rank in a step have the expected payload in bytes; as :func:`counts`.

    The payload of an all-gather is its whole output, that of a reduce-scatter its whole input, and that of an
    all-reduce one rank's input.
    """
    return _sent(trace, expected, step, look, in_bytes=True)


def _sent(trace: Trace, expected: Mapping[str, int], step: int, look: str, *, in_bytes: bool) -> CheckFinding:
    wanted: dict[CallKind, int] = {}
    for key, amount in expected.items():
        what, whole = read_call(key), whole_number(amount)
        if whole is None:
            asked = f"the {'bytes in' if in_bytes else 'number of'} {what.plural}"
            return not_an_answer(amount, asked, "a whole number, such as 12")
        wanted[what] = whole
    if not wanted:
        return not_an_answer(None, "the collectives", 'a number for each kind, such as {"all_gather": 12}')
    number = step_of(trace, step, may_pause=bool(look))
    if isinstance(number, CheckFinding):
        return number
    part = trace.slice(step=number)
    found = {rank.rank: _amounts(part, rank, wanted, number, in_bytes=in_bytes) for rank in part.ranks}
    groups = by_value(found)
    where = f"in {step_name(number)}"
    if set(groups) == {tuple(wanted.values())}:
        every = and_list([what.words(amount, in_bytes=in_bytes) for what, amount in wanted.items()])
        return holds(f"each rank issued {every} {where}")
    wrong = {
        tuple(ranks): [
            (what, came, amount) for (what, amount), came in zip(wanted.items(), amounts, strict=True) if came != amount
        ]
        for amounts, ranks in groups.items()
        if amounts != tuple(wanted.values())
    }
    if look:
        return _wrong_answer(next(iter(wrong.values())), wanted, where, look, in_bytes=in_bytes)
    reasons = [why for ranks, some in wrong.items() for why in _why_sent(trace, number, ranks[0], some)]
    return fails(_wrong_words(wrong, where, in_bytes=in_bytes), *dict.fromkeys(reasons))


def _wrong_answer(
    wrong: _Wrong, wanted: Mapping[CallKind, int], where: str, look: str, *, in_bytes: bool
) -> CheckFinding:
    """Return which answers are wrong and where to look, with the right ones for a teacher."""
    in_words = "B in " if in_bytes else ""
    every = and_list([f"{amount:,} {in_words}{what.plural}" for what, _, amount in wrong])
    right = [what.plural for what in wanted if what not in {each for each, *_ in wrong}]
    more = f"; your answer for the {and_list(right)} is right" if right else ""
    answer = and_list([what.words(came, in_bytes=in_bytes) for what, came, _ in wrong])
    sentence = f"you answered {every}, which is not what a rank issued {where}{more}"
    return replace(fails(sentence, f"look at {look}"), answer=answer)


def sent(trace: Trace, at_most: float, step: int = -1) -> CheckFinding:
    """Return whether the bytes that each rank sends in a step, on a ring, are within a limit.

    Args:
        trace: of the run.
        at_most: the limit in bytes.
        step: the step.
    """
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    if problem := runs_no_unit(trace, number):
        return fails(problem)
    by_rank: dict[int, float] = {rank.rank: 0.0 for rank in trace.ranks}
    for row in collectives.compare(trace, number):
        for rank in row.ranks:
            by_rank[rank] += collectives.ring_bytes(row.kind, row.num_bytes, max(row.num_ranks, 1))
    rank = max(by_rank, key=by_rank.__getitem__)
    words = f"rank {rank} sends {format_bytes(by_rank[rank])} in {step_name(number)}"
    found = holds(words) if by_rank[rank] <= at_most else fails(f"{words}, more than {format_bytes(at_most)}")
    return replace(found, measured=("bytes sent", by_rank[rank]))


_Wrong = Sequence[tuple[CallKind, int, int]]
"""What differs: the collectives, what came, and what was expected."""


def _wrong_words(wrong: Mapping[tuple[int, ...], _Wrong], where: str, *, in_bytes: bool) -> str:
    """Return what ranks issued and should have issued: ``"rank 0 issued 5 all-gathers in step 3, not 9"``."""
    (ranks, some), *others = wrong.items()
    if not others and len(some) == 1:
        ((what, came, amount),) = some
        return f"{label(ranks)} issued {what.words(came, in_bytes=in_bytes)} {where}, not {amount:,}"
    each = (
        f"{label(ranks)} issued "
        + and_list([f"{what.words(came, in_bytes=in_bytes)} (not {amount:,})" for what, came, amount in some])
        for ranks, some in wrong.items()
    )
    return f"{'; '.join(each)}; all {where}" if others else f"{next(each)} {where}"


def _amounts(
    part: Trace, rank: RankTrace, wanted: Mapping[CallKind, int], step: int, *, in_bytes: bool
) -> tuple[int, ...]:
    found = collectives.table(rank)
    here = found.step == step
    amounts = []
    for what in wanted:
        mine = here & (found.kind == what.kind)
        if what.unit is not None:
            units = [unit.index for unit in part.header.units if unit.name == what.unit]
            mine &= np.isin(found.unit, units)
        amounts.append(int(found.num_bytes[mine].sum()) if in_bytes else int(mine.sum()))
    return tuple(amounts)


def _why_sent(trace: Trace, step: int, rank: int, wrong: _Wrong) -> list[str]:
    """Return the usual reasons of the first wrong number, as far as the trace shows them."""
    known = {unit.name for unit in trace.header.units}
    absent = next((what.unit for what, *_ in wrong if what.unit is not None and what.unit not in known), None)
    if absent is not None:
        units = unit_list(trace.header, range(len(trace.header.units))) or "none"
        return [f"the run has no unit {unit_words(absent)}; its units: {units}"]
    if runs_no_unit(trace, step) and not len(collectives.table(trace.slice(step=step).rank(rank)).unit):
        return [f"no sharded unit ran, so {NOT_SHARDED}"]
    return [
        text
        for what, came, amount in wrong
        if what.kind in _REASONS
        for text in _REASONS[what.kind](trace, step, rank, too_few=came < amount)
    ]


_REASONS = {
    Kind.ALL_GATHER: gather_reasons,
    Kind.REDUCE_SCATTER: reduction_reasons,
    Kind.ALL_REDUCE: all_reduce_reasons,
}


def number_of_calls(trace: Trace, call: str) -> int:
    """Return how many collectives of a kind, or of a kind and unit, the first rank issued in the newest step.

    Raises:
        UsageError: there is no such kind of collective, or no step that has ended.
    """
    what, number = read_call(call), step_of(trace, -1)
    if isinstance(number, CheckFinding):
        raise UsageError(number.sentence)
    part = trace.slice(step=number)
    return _amounts(part, part.ranks[0], {what: 0}, number, in_bytes=False)[0]


def order(trace: Trace, step: int = -1) -> CheckFinding:
    """Return whether all ranks issued the same collectives in the same order in a step."""
    number = step_of(trace, step)
    if isinstance(number, CheckFinding):
        return number
    fault = parted(trace.slice(step=number))
    if fault is None:
        return holds(f"all ranks issued the same collectives in the same order in {step_name(number)}")
    return fails(
        fault.verdict,
        "each rank must issue the same collectives in the same order: the call that one rank makes first is paired "
        "with another call of the other ranks, and values are mixed up or the run hangs",
    )
