"""The findings about an FSDP that a student wrote, beside a reference that ran on the same ranks.

Two numbers say how good it is: its peak memory, and the communication that compute waits for, each as a ratio to the
reference. Before them comes what makes it right: the units, the number of collectives and their bytes, the same order
on all ranks, and the values of the unsharded run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from workbench.course.call_checks import counts, order
from workbench.course.finding import CheckFinding, fails, holds, unit_list
from workbench.course.memory_checks import nothing_left, peak
from workbench.course.overlap_checks import ahead_of_work, exposed, overlaps
from workbench.course.run_steps import step_of
from workbench.course.value_checks import ratio_of, same
from workbench.events import Kind, Param, Unit, unit_words
from workbench.replay import collectives
from workbench.trace.columns import Trace
from workbench.trace.step_names import step_name

Values = tuple[Any, Any]
"""Values of the run, and those of the unsharded run: numbers, or nested lists and dictionaries of them."""


def engine_findings(
    trace: Trace,
    reference: Trace,
    values: Mapping[str, Values] | None = None,
    *,
    peak_ratio: float = 1.1,
    exposed_ratio: float = 1.5,
    step: int = -1,
) -> Iterator[CheckFinding]:
    """Yield the findings about a student's FSDP.

    Args:
        trace: of its run, such as ``recorded(source="my fsdp")``.
        reference: of the reference's run with the same model, on the same ranks.
        values: what to compare with the unsharded run, in this order: ``"initial weights"``, before the first step;
            ``"gradients"`` of a step; ``"losses"``; ``"weights"``, after the last step. Each is optional, and others
            may be added.
        peak_ratio: limit of the peak, as a multiple of the reference's.
        exposed_ratio: limit of the exposed communication, likewise.
        step: the step, of both runs; a negative one counts from the newest that has ended.
    """
    number, other = step_of(trace, step), step_of(reference, step, "the reference run")
    if isinstance(number, CheckFinding):
        yield number
        return
    if isinstance(other, CheckFinding):
        yield other
        return
    yield same_units(trace, number, reference, other)
    yield counts(trace, _calls(reference, other), number)
    yield least_padding(trace, number)
    yield order(trace, number)
    yield from _value_findings(trace, values or {})
    yield nothing_left(trace, number)
    yield peak(trace, reference=reference, ratio=peak_ratio, step=step)
    if min(count for count, _ in ahead_of_work(reference, Kind.ALL_GATHER, other).values()):
        yield overlaps(trace, step=number)
    yield exposed(trace, reference=reference, ratio=exposed_ratio, step=step)


def same_units(trace: Trace, step: int, reference: Trace, other: int) -> CheckFinding:
    """Return whether a step of a run uses units with the same names as a step of the reference."""
    mine, wanted = _unit_names(trace, step), _unit_names(reference, other)
    missing, more = sorted(wanted - mine), sorted(mine - wanted)
    if not missing and not more:
        return holds(f"the units are those of the reference: {_names(reference, wanted)}")
    texts = [f"the units are {_names(trace, mine)}"] if mine else ["no unit is announced"]
    if missing:
        texts.append(f"{_names(reference, missing)} is missing")
    if more:
        texts.append(f"the reference has no {_names(trace, more)}")
    reason = (
        "parameters in no unit are not sharded, and nothing reduces their gradients: the ranks part" if missing else ""
    )
    return fails("; ".join(texts), reason)


def _unit_names(trace: Trace, step: int) -> set[str]:
    indices = {int(unit) for rank in trace.slice(step=step).ranks for unit in np.unique(rank.rows["unit"]) if unit >= 0}
    return {trace.header.units[index].name for index in indices}


def _names(trace: Trace, names: set[str] | list[str]) -> str:
    return unit_list(trace.header, [unit.index for unit in trace.header.units if unit.name in names])


def _calls(reference: Trace, step: int) -> dict[str, int]:
    """Return how many collectives of each kind of units the first rank of the reference issued in a step."""
    rank = reference.slice(step=step).ranks[0]
    found = collectives.table(rank)
    kinds = found.kind[(found.step == step) & (found.unit >= 0)].tolist()
    tally = Counter(Kind(kind) for kind in kinds)
    return {kind.key: tally[kind] for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)}


def least_padding(trace: Trace, step: int) -> CheckFinding:
    """Return whether all-gathers of a step have no more padding than the ranks need to have equal parts."""
    part = trace.slice(step=step).ranks[0]
    found = collectives.table(part)
    wrong = []
    for unit in trace.header.units:
        own = found.num_bytes[(found.kind == Kind.ALL_GATHER) & (found.unit == unit.index) & (found.step == step)]
        if len(own) and own[0] != (least := _least_bytes(unit)):
            wrong.append((unit, int(own[0]), least))
    if not wrong:
        return holds(f"the all-gathers of {step_name(step)} have no needless padding")
    (unit, came, least), *others = wrong
    names = unit_list(trace.header, [each.index for each, *_ in others])
    reason = (
        "a flat parameter is padded to the next multiple of the number of ranks: by -length % world_size elements, "
        "which is none if the length divides"
    )
    more = f", and so on for {names}" if names else ""
    return fails(
        f"an all-gather of {unit_words(unit.name)} has {came:,} B, not {least:,}{more}",
        reason if came > least else "part of the parameters is not gathered",
    )


def _least_bytes(unit: Unit) -> int:
    return unit.compute_itemsize * sum(_least_elements(param, unit.shard_size) for param in unit.params)


def _least_elements(param: Param, num_ranks: int) -> int:
    if not param.parts:
        return param.padded_rows * num_ranks * math.prod(param.shape) // max(param.shape[param.shard_dim], 1)
    length = sum(part.numel for part in param.parts)
    return -(-length // num_ranks) * num_ranks


# ---- values


def _value_findings(trace: Trace, values: Mapping[str, Values]) -> Iterator[CheckFinding]:
    for what, (mine, wanted) in values.items():
        finding = same(mine, wanted, atol=1e-5, rtol=1e-4, what=f"the {what}")
        yield finding if finding.ok else fails(finding.sentence, _why(trace, what, values))


def _why(trace: Trace, what: str, values: Mapping[str, Values]) -> str:
    """Return the usual reason why values are wrong, as far as it shows; empty otherwise."""
    mine, wanted = values[what]
    size = trace.header.world_size
    if what == "initial weights" and not _sent_before_steps(trace):
        return (
            "no broadcast precedes the first step, and each rank keeps its part of other weights: send those of rank 0"
        )
    if what == "gradients" and ratio_of(mine, wanted) == size:
        return f"they are the sum over {size} ranks instead of the mean: divide by the number of ranks"
    if "initial weights" in values and mine == values["initial weights"][0]:
        return (
            "they are those from before training: the optimizer has to update the shards, as the next all-gather "
            "overwrites the full parameters"
        )
    return ""


def _sent_before_steps(trace: Trace) -> bool:
    """Return whether a rank sent anything before the first step that could carry the weights of rank 0."""
    kinds = [Kind.BROADCAST, Kind.SCATTER, Kind.ALL_REDUCE, Kind.SEND]
    return any((np.isin(rank.rows["kind"][: rank.place_after(-1)], kinds)).any() for rank in trace.ranks)
