"""Findings about the collectives of a step: how many, how many bytes, and in which order.

Like all findings about a trace they never raise for a run that is wrong: a step that was not recorded is a finding that
failed. ``step`` is a step's number; a negative one counts from the newest step that has ended on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workbench.course.finding import CheckFinding, and_list, fails, holds
from workbench.course.run_steps import CallKind, no_step, read_call, step_of
from workbench.course.step_reasons import all_reduce_reasons, gather_reasons, reduction_reasons
from workbench.events import Kind
from workbench.replay import collectives
from workbench.replay.grouping import by_value, label
from workbench.reports.stall_cause import parted
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.step_names import step_name


def counts(trace: Trace, expected: Mapping[str, int], step: int = -1) -> CheckFinding:
    """Return whether each rank issued as many collectives in a step as expected.

    Args:
        trace: of the run.
        expected: calls by kind, ``{"all_gather": 9}``, or by kind and unit, ``{"all_gather:blocks.1": 2}``.
        step: the step.

    Raises:
        UsageError: there is no such kind of collective.
    """
    return _sent(trace, expected, step, in_bytes=False)


def payload(trace: Trace, expected: Mapping[str, int], step: int = -1) -> CheckFinding:
    """Return whether the collectives of each rank in a step have the expected payload in bytes; as :func:`counts`.

    The payload of an all-gather is its whole output, that of a reduce-scatter its whole input, and that of an
    all-reduce one rank's input.
    """
    return _sent(trace, expected, step, in_bytes=True)


def _sent(trace: Trace, expected: Mapping[str, int], step: int, *, in_bytes: bool) -> CheckFinding:
    wanted = {read_call(key): amount for key, amount in expected.items()}
    number = step_of(trace, step)
    if number is None:
        return no_step(trace, step)
    part = trace.slice(step=number)
    found = {rank.rank: _amounts(part, rank, wanted, number, in_bytes=in_bytes) for rank in part.ranks}
    groups = by_value(found)
    where = f"in {step_name(number)}"
    if set(groups) == {tuple(wanted.values())}:
        every = and_list([what.words(amount, in_bytes=in_bytes) for what, amount in wanted.items()])
        return holds(f"each rank issued {every} {where}")
    sentences, reasons = [], dict[str, None]()
    for amounts, ranks in groups.items():
        wrong = [
            (what, came, amount) for (what, amount), came in zip(wanted.items(), amounts, strict=True) if came != amount
        ]
        if wrong:
            each = and_list([f"{what.words(came, in_bytes=in_bytes)}, not {amount:,}" for what, came, amount in wrong])
            sentences.append(f"{label(ranks)} issued {each}")
            reasons |= dict.fromkeys(_why_sent(trace, number, ranks[0], wrong))
    return fails(f"{' and '.join(sentences)}, {where}", *reasons)


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


def _why_sent(trace: Trace, step: int, rank: int, wrong: Sequence[tuple[CallKind, int, int]]) -> list[str]:
    """Return the usual reasons of the first wrong number, as far as the trace shows them."""
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


def order(trace: Trace) -> CheckFinding:
    """Return whether all ranks issued the same collectives in the same order."""
    fault = parted(trace)
    if fault is None:
        return holds("all ranks issued the same collectives in the same order")
    return fails(
        fault.verdict,
        "each rank must issue the same collectives in the same order: the call that one rank makes first is paired "
        "with another call of the other ranks, and values are mixed up or the run hangs",
    )
