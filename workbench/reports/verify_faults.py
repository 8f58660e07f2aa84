"""Why a sharded step differs from the same step of an unsharded copy: the causes that what the ranks measured decides.

Each cause is a function of the replies of all ranks, which returns a fault if the evidence is unambiguous, and None
otherwise. :data:`CAUSES` has them in the order of importance. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.base.fault import Fault, listed
from workbench.base.text_formats import plural
from workbench.events import unit_words
from workbench.protocol.commands import CopyStep, Difference, Sketch, StepDifferences, VerifyReply
from workbench.replay.grouping import by_value, label

DATA = "different-data"
"""Rule of a fault with which nothing can be compared."""

DRIFT, UNEVEN_COPIES = "drifting-replica", "uneven-copies"
"""Rules of faults with which the comparison holds, and the model is still not one."""

_SETTINGS, _COUNTERS = "other-settings", "optimizer-counters"
_CAUSES_OF_DRIFT = (_SETTINGS, _COUNTERS)
"""Rules of faults that may have made the replicas drift."""

_CLOSE = 5e-3  # relative difference of two numbers that count as equal

Differences = Sequence[StepDifferences]
"""One of each rank, in order."""


def faults_of(by_rank: Sequence[VerifyReply]) -> tuple[Fault, ...]:
    """Return the faults that the replies of all ranks show, the most important first."""
    differences = [reply.differences for reply in by_rank if reply.differences is not None]
    differ = len(differences) == len(by_rank)
    everyone = tuple(range(len(by_rank)))
    are_alike = all(step.peers == everyone for reply in by_rank for step in reply.copy)
    judged = [cause for cause in CAUSES if differ and (are_alike or cause not in _OF_NORMS)]
    causes = [fault for cause in judged if (fault := cause(differences)) is not None]
    first = [
        _other_targets,
        _own_not_finite,
        *([_settings] if differ or any(reply.uneven_copies for reply in by_rank) else []),
    ]
    causes = [*(f for f in causes if f.rule == DATA), *filter(None, (cause(by_rank) for cause in first)), *causes]
    if differ and not causes and _drift(by_rank) is None:
        causes = list(filter(None, [_copies_differ(by_rank)]))
    counters = _counters(by_rank)
    if counters is not None:
        causes = [*(fault for fault in causes if fault.rule in _BEFORE_COUNTERS), counters]
    if not causes:
        causes = list(filter(None, [_uneven_copies(by_rank)]))
    found = [_drift(by_rank), *causes[:1], _left_out(by_rank)]  # further causes may be consequences
    if causes and causes[0].rule in _CAUSES_OF_DRIFT:
        found[:2] = reversed(found[:2])
    return tuple(fault for fault in found if fault is not None)


# ---- where the steps differ first


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first value of its kind that differs between the two steps, over all ranks.

    Attributes:
        what: ``output``, ``gradient`` or ``parameter``.
        name: module or parameter; empty: the root module.
        position: its index in the order of execution, of backward, or of the model's parameters.
        total: number of values in that order.
        relative: norm of the difference relative to that of the unsharded value; the largest of all ranks.
        ranks: ranks on which it differs.
        where: these ranks, with their rows, as text.
    """

    what: str
    name: str
    position: int
    total: int
    relative: float
    ranks: tuple[int, ...]
    where: str

    @property
    def words(self) -> str:
        """The difference as text."""
        size = "not finite" if math.isinf(self.relative) else f"{100 * self.relative:.2g}% of its size"
        noun, order = _ORDERS[self.what]
        return f"{unit_words(self.name)}, {noun} {self.position + 1} of {self.total} {order}: {size}, on {self.where}"


_ORDERS = {
    "output": ("module", "in the order of execution"),
    "gradient": ("parameter", "in the order of backward"),
    "parameter": ("parameter", "of the model"),
}


def first_differences(differences: Differences) -> tuple[FirstDifference, ...]:
    """Return the first output, gradient and parameter that differ, in the order of a step."""
    found = (
        first_of("output", [each.output for each in differences]),
        first_of("gradient", [each.grad for each in differences]),
        first_of("parameter", [each.param for each in differences]),
    )
    return tuple(each for each in found if each is not None)


def first_of(what: str, by_rank: Sequence[Difference | None]) -> FirstDifference | None:
    """Return the first difference of all ranks; None without one."""
    places = [each.position for each in by_rank if each is not None]
    at = {rank: each for rank, each in enumerate(by_rank) if each is not None and each.position == min(places)}
    if not at:
        return None
    one = next(iter(at.values()))
    rows = by_value((rank, each.rows) for rank, each in at.items())
    return FirstDifference(
        what=what,
        name=one.name,
        position=one.position,
        total=one.total,
        relative=max(each.relative for each in at.values()),
        ranks=tuple(at),
        where="; ".join(f"{label(ranks)}{f' ({text})' if text else ''}" for text, ranks in rows.items()),
    )


# ---- causes


def _other_data(differences: Differences) -> Fault | None:
    ranks = [rank for rank, each in enumerate(differences) if each.differs_in_input]
    return data_fault(ranks, "steps", _SAME_DATA) if ranks else None


def data_fault(ranks: Sequence[int], compared: str, fix: str) -> Fault:
    """Return the fault that the two ``compared``, steps or runs, had other inputs on ``ranks``."""
    return Fault(
        rule=DATA,
        verdict=f"the two {compared} got different data, so they cannot be compared",
        evidence=(f"the inputs of the root module differ on {label(ranks)}",),
        fix=fix,
    )


_SAME_DATA = (
    "draw batches from an iterator, loader or generator that the step function reaches by its variables: what threads, "
    "files, the time or the system give cannot be given again"
)


def _other_targets(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find losses that differ although the outputs of the model do not."""
    ranks = [rank for rank, reply in enumerate(by_rank) if _has_other_loss(reply)]
    if not ranks:
        return None
    both = [(by_rank[rank].loss_sharded, by_rank[rank].loss_reference) for rank in ranks[:1]]
    return Fault(
        rule=DATA,
        verdict="the two steps computed their losses from different data, so they cannot be compared",
        evidence=(
            f"on {label(ranks)} the losses differ, as {both[0][0]:.6g} and {both[0][1]:.6g}, and the inputs and "
            "outputs of the model do not",
        ),
        fix=_SAME_DATA,
    )


def _has_other_loss(reply: VerifyReply) -> bool:
    found, sharded, reference = reply.differences, reply.loss_sharded, reply.loss_reference
    if found is None or found.output is not None or found.differs_in_input or sharded is None or reference is None:
        return False
    are_finite = math.isfinite(sharded) and math.isfinite(reference)
    return are_finite and not math.isclose(sharded, reference, rel_tol=10 * _CLOSE, abs_tol=1e-6)


def _own_not_finite(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find ranks whose own gradients are not finite, before the average spreads that over all ranks."""
    bad = {
        rank: next((s.name for s in reply.copy if s.own and not math.isfinite(s.own.norm)), None)
        for rank, reply in enumerate(by_rank)
    }
    ranks = [rank for rank, name in bad.items() if name is not None]
    if not ranks or len(ranks) == len(by_rank):
        return None
    losses = {rank: by_rank[rank].loss_reference for rank in ranks}
    return Fault(
        rule="not-finite",
        verdict=f"the gradients of {label(ranks)} are NaN or infinite, and the average spreads that over all ranks",
        evidence=(
            *(f"rank {rank}: first in {bad[rank]}, in the order of backward" for rank in ranks[:4]),
            *(f"loss of rank {rank}: {loss:g}" for rank, loss in list(losses.items())[:4] if loss is not None),
        ),
        fix=f"look at the batch and the loss of rank {ranks[0]}: %fsdp step --until forward.end, then %fsdp eval",
    )


def _settings(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find optimizers with other options on other ranks."""
    are_copies = any(reply.uneven_copies for reply in by_rank)  # of tensor parallelism, on ranks with other data or not
    together = [tuple(range(len(by_rank)))] if are_copies else _peers(by_rank)
    names = [name for name in by_rank[0].settings if all(name in reply.settings for reply in by_rank)]
    differing = [n for n in names if any(len({by_rank[rank].settings[n] for rank in ranks}) > 1 for ranks in together)]
    if not differing:
        return None
    values = [reply.settings[differing[0]] for reply in by_rank]
    option, groups = differing[0].rpartition(": ")[2], by_value(enumerate(values))
    odd = _odd(values)
    ordered = sorted(groups.items(), key=lambda each: (bool(odd) and each[1][0] not in odd, -each[1][0]))
    first = next((step.name for step in by_rank[0].copy), "")
    return Fault(
        rule=_SETTINGS,
        verdict=f"the optimizers differ: {option} is "
        + ", and ".join(f"{value} on {label(ranks)}" for value, ranks in ordered[:4]),
        evidence=(
            *(
                f"{name}: "
                + ", ".join(
                    f"{value} on {label(ranks)}"
                    for value, ranks in by_value(enumerate(reply.settings[name] for reply in by_rank)).items()
                )
                for name in differing[:4]
            ),
            f"every parameter of the group moves differently, the first is {first}",
        ),
        fix=f"give every rank's optimizer the same {option}; all-reduce what decides about it, such as the loss that "
        "ReduceLROnPlateau.step() gets",
    )


def _peers(by_rank: Sequence[VerifyReply]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that average all of their gradients, of the same parameters, with each other alone."""
    alone: dict[int, tuple[int, ...]] = {}
    for rank, reply in enumerate(by_rank):
        groups = {step.peers for step in reply.copy}
        if len(groups) == 1:
            alone[rank] = groups.pop()
    names = [tuple(step.name for step in reply.copy) for reply in by_rank]
    groups = {ranks for ranks in alone.values() if ranks and all(alone.get(rank) == ranks for rank in ranks)}
    return [ranks for ranks in sorted(groups) if len({names[rank] for rank in ranks}) == 1]


def _odd(values: Sequence[object]) -> list[int]:
    """Return the ranks whose values differ from those of most ranks; empty if no value is that of most."""
    ranks = sorted(by_value(enumerate(values)).values(), key=len)
    return sorted(rank for own in ranks[:-1] for rank in own) if 2 * len(ranks[-1]) > len(values) else []


def _copies_differ(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find ranks whose step function does something else after the average than that of others."""
    for find in (_other_grads, _other_update, _other_end):
        for ranks in _peers(by_rank):
            for steps in zip(*(by_rank[rank].copy for rank in ranks), strict=True):
                fault = find(steps, ranks)
                if fault is not None:
                    return fault
    return None


CopySteps = Sequence[CopyStep]
"""One parameter in the copies of ranks that average together."""


def _other_grads(steps: CopySteps, ranks: Sequence[int]) -> Fault | None:
    if any(step.grad is None or step.averaged is None for step in steps):
        return None
    factors = [_factor(step.grad, step.averaged) for step in steps]
    if all(_is_alike(step.grad, steps[0].grad) for step in steps):
        return None
    odd = _odd([None if f is None else f"{f:.3g}" for f in factors])
    odd = odd or [place for place, f in enumerate(factors) if f is None or not _is_close(f, 1.0)]
    name, norms = steps[0].name, ", ".join(f"{step.grad.norm:.4g}" for step in steps if step.grad is not None)
    return Fault(
        rule="other-gradients",
        verdict=f"{_label(odd, ranks)} changes gradients after the average, and other ranks do not: first that of "
        f"{name}",
        evidence=(
            *(
                f"rank {rank}: {_factor_words(f)} the averaged gradient"
                for rank, f in list(zip(ranks, factors, strict=True))[:8]
            ),
            f"norms at the optimizer's step, by rank: {norms}",
        ),
        fix="do the same with the gradients on every rank, or change the loss before backward",
    )


def _factor_words(factor: float | None) -> str:
    return "no multiple of" if factor is None else f"{factor:.4g} times"


def _factor(actual: Sketch | None, expected: Sketch | None) -> float | None:
    """Return the factor between two tensors; None if they are no multiples."""
    if actual is None or expected is None or not expected.norm or not math.isfinite(actual.norm):
        return None
    factor = math.copysign(actual.norm / expected.norm, actual.dot * expected.dot)
    return factor if math.isclose(actual.dot, factor * expected.dot, rel_tol=_CLOSE) else None


def _is_alike(a: Sketch | None, b: Sketch | None, close: float = 1e-3) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a.norm - b.norm) <= close * b.norm and abs(a.dot - b.dot) <= close * b.norm


_SAME_UPDATE = 1e-7  # two sums in double precision of equal parameters


def _label(places: Sequence[int], ranks: Sequence[int]) -> str:
    return label([ranks[place] for place in places])


def _other_update(steps: CopySteps, ranks: Sequence[int]) -> Fault | None:
    if all(_is_alike(step.stepped, steps[0].stepped, _SAME_UPDATE) for step in steps):
        return None
    if any(step.stepped is None for step in steps):
        return None
    odd = _odd([f"{s.stepped.norm:.9g} {s.stepped.dot:.9g}" for s in steps if s.stepped is not None])
    who = f"the optimizer of {_label(odd, ranks)} moves" if odd else "the optimizers of the ranks move"
    return Fault(
        rule="other-state",
        verdict=f"{who} parameters differently with the same gradients and options: first {steps[0].name}",
        evidence=(_norms("norms after the step", [step.stepped for step in steps]),),
        fix="load one optimizer state on every rank, and change neither parameters nor state on one rank alone",
    )


def _other_end(steps: CopySteps, ranks: Sequence[int]) -> Fault | None:
    if all(_is_alike(step.end, steps[0].end, _SAME_UPDATE) for step in steps):
        return None
    odd = [place for place, step in enumerate(steps) if not _is_alike(step.end, step.stepped, _SAME_UPDATE)]
    if not odd or len(odd) == len(steps):
        return None
    return Fault(
        rule="changed-parameters",
        verdict=f"{_label(odd, ranks)} changes parameters outside of the optimizer, and other ranks do not: first "
        f"{steps[0].name}",
        evidence=(
            _norms("norms after the optimizer's step", [step.stepped for step in steps]),
            _norms("norms at the end", [step.end for step in steps]),
        ),
        fix="change parameters on every rank, or on none",
    )


def _norms(what: str, sketches: Sequence[Sketch | None]) -> str:
    return f"{what}, by rank: " + ", ".join(f"{each.norm:.6g}" for each in sketches[:8] if each is not None)


def _not_finite(differences: Differences) -> Fault | None:
    first = first_of("output", [each.output for each in differences])
    if first is None or math.isfinite(first.relative):
        return None
    ranks = [rank for rank, each in enumerate(differences) if each.output is not None and _is_infinite(each.output)]
    return Fault(
        rule="not-finite",
        verdict=f"the output of {unit_words(first.name)} is NaN or infinite on {label(ranks)}, and not in the "
        "unsharded copy",
        evidence=(first.words,),
        fix="look at its input and output there: %fsdp step --until forward.end, then %fsdp eval",
    )


def _is_infinite(difference: Difference) -> bool:
    return not math.isfinite(difference.relative)


def _not_stepped(differences: Differences) -> Fault | None:
    steps = [each.optimizer_steps for each in differences]
    if len(set(steps)) == 1:
        return None
    counts = by_value(enumerate(steps))
    ahead = _odd(steps) if min(steps) else []
    ahead = [rank for rank in ahead if steps[rank] > min(steps)] or (
        [rank for rank, count in enumerate(steps) if count > min(steps)] if min(steps) and not ahead else []
    )
    behind = [rank for rank, count in enumerate(steps) if count < max(steps)]
    if ahead:
        return Fault(
            rule="rank-stepped-twice",
            verdict=f"{label(ahead)}: more optimizer steps than on other ranks, so rows move too far",
            evidence=tuple(f"{label(ranks)}: {plural(count, 'optimizer step')}" for count, ranks in counts.items()),
            fix="call optimizer.step() as often on every rank: each rank updates only its own rows",
        )
    return Fault(
        rule="rank-not-stepped",
        verdict=f"{label(behind)}: fewer optimizer steps than on other ranks, so rows stay behind",
        evidence=tuple(f"{label(ranks)}: {plural(count, 'optimizer step')}" for count, ranks in counts.items()),
        fix="call optimizer.step() on every rank: each rank updates only its own rows",
    )


def _unreduced(differences: Differences) -> Fault | None:
    units = by_value((rank, each.unreduced) for rank, each in enumerate(differences) if each.unreduced and each.missing)
    if not units:
        return None
    names = list(dict.fromkeys(unit for own in units for unit in own))
    missing = max((each.missing for each in differences), key=len)
    return Fault(
        rule="no-sync-left-on",
        verdict=f"gradients of {'unit' if len(names) == 1 else 'units'} {listed(names)} were never reduced",
        evidence=(
            *(
                f"{label(ranks)}: gradients of {listed(own)} still wait for their reduction"
                for own, ranks in units.items()
            ),
            f"{plural(len(missing), 'parameter')} without a gradient at the optimizer's step: {listed(missing)}",
            f"finished reductions of {'this unit' if len(names) == 1 else 'these units'} in this optimizer step: 0",
        ),
        fix="run the last backward before optimizer.step() with model.set_requires_gradient_sync(True), with replicas "
        "also model.set_requires_all_reduce(True), or outside no_sync()",
    )


def _unaveraged(differences: Differences) -> Fault | None:
    own = [each.unaveraged for each in differences]
    if not all(own) or any(each.missing for each in differences):
        return None
    names = max(own, key=len)
    some = plural(len(names), "parameter")
    return Fault(
        rule="no-sync-left-on",
        verdict=f"gradients of {some} were never averaged: each rank steps with those of its own batch",
        evidence=(f"on every rank they equal this rank's gradients before any average: {listed(names)}",),
        fix="call the wrapper, model(x), not model.module(x), and run the last forward and backward before "
        "optimizer.step() outside model.no_sync(); if they were added or unfrozen after the wrapper was made, make it "
        "again",
    )


def _partial_norm(differences: Differences) -> Fault | None:
    ratios = _ratio_by_rank(differences)
    if ratios is None or len(ratios) == 1 or all(_is_close(ratio, 1.0) for ratio in ratios):
        return None
    whole = [each.norm_reference for each in differences]
    clipped = [_is_close(each.norm, norm) for each, norm in zip(differences, whole, strict=True)]
    largest = max(ratios)
    others_unclipped = all(
        _is_close(ratio, largest) for ratio, is_clipped in zip(ratios, clipped, strict=True) if not is_clipped
    )
    if not any(clipped) or not others_unclipped or min(ratios) < 1 - _CLOSE or not _is_close(min(whole), max(whole)):
        return None
    return Fault(
        rule="partial-norm",
        verdict="gradients were clipped by the norm of each rank's own rows instead of the norm of all rows",
        evidence=(
            f"gradients of {label(range(len(ratios)))} are {_numbers(ratios)} times those of the unsharded copy; "
            f"with rows of equal norms it is sqrt({len(ratios)}) = {math.sqrt(len(ratios)):.4g}",
            f"the clipped rows of one rank have the norm {differences[clipped.index(True)].norm:.4g}, which all rows "
            "together should have",
        ),
        fix="total = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm); with the classic wrapper "
        "model.clip_grad_norm_(max_norm)",
    )


def _wrong_scale(differences: Differences) -> Fault | None:
    size = len(differences)
    groups = [[group for group in each.ratios if group.ratio != 1.0] for each in differences]
    found = [group for own in groups for group in own]
    if (
        size == 1
        or not found
        or any(group.ratio is None for group in found)
        or any(each.missing for each in differences)
    ):
        return None
    factor = found[0].ratio or 0.0
    if not all(_is_close(group.ratio or 0.0, factor) for group in found):
        return None
    counts = [sum(group.num_params for group in each.ratios) for each in differences]
    wrong = [sum(group.num_params for group in own) for own in groups]
    some = "" if wrong == counts else f" of {plural(max(wrong), 'parameter')} ({found[0].first}, ...)"
    evidence = (f"gradients{some} are {factor:.4g} times those of the unsharded copy, on {label(range(size))}",)
    if _is_close(factor, size):
        return Fault(
            rule="wrong-scale",
            verdict=f"gradients{some} are summed over the {size} ranks instead of averaged",
            evidence=evidence,
            fix="leave out set_gradient_divide_factor(1.0) and the like, or divide the loss by the number of ranks",
        )
    if _is_close(factor, 1 / size):
        return Fault(
            rule="wrong-scale",
            verdict=f"gradients{some} are divided by the {size} ranks twice",
            evidence=evidence,
            fix="do not divide the loss or the gradients by the number of ranks: the reduction averages them",
        )
    return Fault(
        rule="wrong-scale",
        verdict=f"gradients{some} have the wrong scale: {factor:.4g} times those of the unsharded copy",
        evidence=evidence,
        fix="",
    )


def _uneven_batches(differences: Differences) -> Fault | None:
    """Find gradients that each rank multiplied by its own factor after they were averaged."""
    ratios = _ratio_by_rank(differences)
    norms, sizes = [each.norm_reference for each in differences], [each.num_inputs for each in differences]
    if ratios is None or not all(_is_close(ratio, 1.0) for ratio in ratios) or not all(norms):
        return None
    factors = [norm / norms[0] for norm in norms]
    if all(_is_close(factor, 1.0) for factor in factors):
        return None
    who = label(range(len(factors)))
    evidence = [f"gradients of {who} are scaled like {_numbers(factors)} after they were averaged"]
    if all(sizes) and all(_is_close(f, size / sizes[0]) for f, size in zip(factors, sizes, strict=True)):
        batches = ", ".join(map(str, sizes))
        return Fault(
            rule="uneven-batches",
            verdict="uneven batches are weighed after the gradients were averaged: each rank scales only its rows",
            evidence=(*evidence, f"like the elements of the ranks' inputs: {batches}"),
            fix="weigh the loss before backward: (loss * my_tokens * world_size / all_tokens).backward()",
        )
    return Fault(
        rule="scaled-per-rank",
        verdict="each rank scales the averaged gradients of its rows by another factor",
        evidence=tuple(evidence),
        fix="scale the loss before backward, or all ranks' gradients by the same number",
    )


def _precision(differences: Differences) -> Fault | None:
    rounded = {each.rounded_to for each in differences}
    grads = [each.grad for each in differences if each.grad is not None]
    if len(rounded) != 1 or "" in rounded or any(each.missing or each.output for each in differences):
        return None
    (dtype,) = rounded
    worst = max((grad.relative for grad in grads), default=0.0)
    bits = f"they agree to about {-math.log2(worst):.0f} bits" if 0 < worst < 1 else "they agree"
    return Fault(
        rule="precision",
        verdict=f"only precision differs: gradients are rounded to {dtype}",
        evidence=(f"every sharded gradient is a {dtype} number, and the unsharded are not; {bits}",),
        fix="reduce in float32: MixedPrecisionPolicy(reduce_dtype=torch.float32), without a hook that compresses",
    )


CAUSES: tuple[Callable[[Differences], Fault | None], ...] = (
    _other_data,
    _not_finite,
    _not_stepped,
    _unreduced,
    _unaveraged,
    _partial_norm,
    _wrong_scale,
    _uneven_batches,
    _precision,
)
"""The causes of a difference, the most important first."""

_OF_NORMS = (_partial_norm, _uneven_batches)
"""Those that compare norms of gradients between ranks: they are equal where all ranks average the same parameters."""

_BEFORE_COUNTERS = (DATA, "not-finite", "rank-not-stepped", "rank-stepped-twice", _SETTINGS)
"""Rules of causes of which other counters may be a consequence."""


def _drift(by_rank: Sequence[VerifyReply]) -> Fault | None:
    groups: dict[tuple[str, int], dict[int, list[int]]] = {}
    for rank, reply in enumerate(by_rank):
        for each in reply.replicas:
            groups.setdefault((each.unit, each.first_rank), {}).setdefault(each.crc32, []).append(rank)
    differing = {key: list(sums.values()) for key, sums in groups.items() if len(sums) > 1}
    if not differing:
        return None
    units = list(dict.fromkeys(unit for unit, _ in differing))
    texts = [
        f"{unit}: the values of {' differ from those of '.join(label(ranks) for ranks in ranks_of)}"
        for (unit, _), ranks_of in differing.items()
    ]
    return Fault(
        rule=DRIFT,
        verdict=f"the replicas of the model had different parameters before the step, in {plural(len(units), 'unit')}",
        evidence=tuple(texts[:4]),
        fix="load one checkpoint on every rank; then see what parts them, as lint does too: averaged weights put into "
        "the model of some ranks, parameters unfrozen after DistributedDataParallel was made, no_sync() left on, "
        "or with fully_shard model.set_requires_all_reduce(False)",
    )


def _uneven_copies(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find parameters of which tensor parallelism gave each rank a copy, and whose copies get other gradients."""
    names = list(dict.fromkeys(name for reply in by_rank for name in reply.uneven_copies))
    if not names:
        return None
    uneven = [rank for rank, reply in enumerate(by_rank) if names[0] in reply.uneven_copies]
    ranks, fix = label(uneven), _SUM_COPIES
    if len({by_rank[rank].random_crc32 for rank in uneven}) > 1:
        fix = (
            f"{ranks} draw other random numbers: if the model draws, as dropout does, give the ranks of one group of "
            f"tensor parallelism the same seed; else {fix}"
        )
    return Fault(
        rule=UNEVEN_COPIES,
        verdict=f"the copies of {names[0]} on {ranks}, which tensor parallelism keeps equal, moved apart in this step"
        + (f", and so did those of {plural(len(names) - 1, 'other parameter')}" if len(names) > 1 else ""),
        evidence=(f"other updates on these ranks: {listed(names)}",),
        fix=fix,
    )


_SUM_COPIES = (
    "sum their gradients over the ranks of tensor parallelism, as DTensor does by itself, and after weight.to_local() "
    "only with weight.to_local(grad_placements=[Partial()])"
)


def _counters(by_rank: Sequence[VerifyReply]) -> Fault | None:
    """Find wrong numbers of steps in the optimizers' state; they are in the unsharded copy too, and make no difference.

    Parameters without a gradient in some steps have fewer: that the numbers of one rank differ is no fault.
    """
    steps = [{name: each.steps for each in reply.counters for name in each.params} for reply in by_rank]
    known: dict[str, set[int | None]] = {}
    for name, number in (item for own in steps for item in own.items()):
        known.setdefault(name, set()).add(number)
    differing = [name for name, numbers in known.items() if len(numbers) > 1]
    if differing:
        return _of_counters(
            "the optimizer's state is of different steps on different ranks, as after a resume that failed on some, or "
            "where torch.amp.GradScaler, instead of ShardedGradScaler, looks at a rank's own shards",
            [{name: own[name] for name in differing if name in own} for own in steps],
        )
    reset = [dict.fromkeys(reply.reset, 0) for reply in by_rank]
    if any(reset):
        return _of_counters(
            "the optimizer counts 0 steps although its moments are not zero, so it overrates them", reset
        )
    uneven = [{name: each.steps for each in reply.uneven for name in each.params} for reply in by_rank]
    if any(uneven):
        return _of_counters(
            "one step of the optimizer counted differently for parameters that all have a gradient, as if some shared "
            "one count",
            uneven,
        )
    return None


def _of_counters(verdict: str, steps: Sequence[Mapping[str, int | None]]) -> Fault:
    """Return the fault with the numbers of steps of parameters, by rank; a rank without any is left out."""
    texts: dict[str, list[int]] = {}
    for rank, own in enumerate(steps):
        texts.setdefault(_in_words(own), []).append(rank)
    return Fault(
        rule=_COUNTERS,
        verdict=verdict,
        evidence=tuple(f"{label(ranks)}: {text}" for text, ranks in texts.items() if text),
        fix="load the same checkpoint of the optimizer on every rank, with torch.distributed.checkpoint.state_dict",
    )


def _in_words(steps: Mapping[str, int | None]) -> str:
    """Return e.g. ``3 steps for 10 parameters (0.up.weight, ...)``; empty without parameters."""
    names: dict[int | None, list[str]] = {}
    for name, number in steps.items():
        names.setdefault(number, []).append(name)
    counts = {number: "no state" if number is None else plural(number, "step") for number in names}
    return ", ".join(
        f"{counts[number]} for {plural(len(own), 'parameter')} ({own[0]}, ...)" for number, own in names.items()
    )


def _left_out(by_rank: Sequence[VerifyReply]) -> Fault | None:
    parts = list(dict.fromkeys(part for reply in by_rank for part in reply.left_out))
    if not parts:
        return None
    return Fault(
        rule="stale-optimizer",
        verdict=f"{listed(parts)} got gradients and did not move",
        evidence=("no optimizer among the variables has their parameters, while it has others of the model",),
        fix="make the optimizer after sharding, with all parameters: torch.optim.AdamW(model.parameters(), ...)",
    )


def _ratio_by_rank(differences: Differences) -> list[float] | None:
    """Return the ratio of each rank's gradients, if it is one for all its parameters; None otherwise."""
    found = []
    for each in differences:
        if each.missing or len(each.ratios) != 1 or each.ratios[0].ratio is None:
            return None
        found.append(each.ratios[0].ratio)
    return found


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_CLOSE)


def _numbers(values: Sequence[float]) -> str:
    shown = [f"{value:.4g}" for value in values[:8]]
    return ", ".join([*shown, *(["..."] if len(values) > 8 else [])])
