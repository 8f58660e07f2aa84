"""Why a sharded step does not give the same bits twice: what the ranks measured decides it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.base.fault import Fault, listed
from workbench.events import unit_words
from workbench.protocol.commands import Repetition
from workbench.replay.grouping import by_value, label
from workbench.reports.verify_faults import FirstDifference, data_fault, first_of

_FIXED = "torch.use_deterministic_algorithms(True)"


def first_repeated(by_rank: Sequence[Repetition]) -> tuple[FirstDifference, ...]:
    """Return the first output and gradient that differ between the two runs."""
    found = (
        first_of("output", [each.output for each in by_rank]),
        first_of("gradient", [each.grad for each in by_rank]),
    )
    return tuple(each for each in found if each is not None)


def repeat_faults(by_rank: Sequence[Repetition]) -> tuple[Fault, ...]:
    """Return why the runs differ, the most important cause only."""
    for cause in (_other_data, _other_gather, _order, _changed, _random, _operations, _unknown):
        fault = cause(by_rank)
        if fault is not None:
            return (fault,)
    return ()


def _other_data(by_rank: Sequence[Repetition]) -> Fault | None:
    ranks = [rank for rank, each in enumerate(by_rank) if each.differs_in_input]
    fix = "draw batches from an iterator, loader or generator that the step function reaches by its variables"
    return data_fault(ranks, "runs", fix) if ranks else None


def _other_gather(by_rank: Sequence[Repetition]) -> Fault | None:
    """Find a full parameter that is not the same on all ranks that have it."""
    for name in by_rank[0].gathered:
        sums = {rank: each.gathered[name] for rank, each in enumerate(by_rank) if name in each.gathered}
        groups = sorted(by_value(sums.items()).values(), key=len)
        if len(groups) > 1:
            return Fault(
                rule="other-gather",
                verdict=f"{name} is not the same on all ranks when it is used",
                evidence=tuple(f"checksum {sums[ranks[0]]:08x} on {label(ranks)}" for ranks in groups[:4]),
                fix=f"compare it on {label(groups[0])} with other ranks: memory or transport may be faulty, or a rank "
                "writes to it",
            )
    return None


def _places(by_rank: Sequence[Repetition], name: str) -> dict[int, str]:
    return {rank: each for rank, one in enumerate(by_rank) if (each := getattr(one, name)) is not None}


def _order(by_rank: Sequence[Repetition]) -> Fault | None:
    places = _places(by_rank, "order")
    if not places:
        return None
    return Fault(
        rule="other-order",
        verdict=f"the modules do not run in the same order twice, from {unit_words(next(iter(places.values())))} on",
        evidence=_evidence(places),
        fix="iterate over lists and dictionaries, not over sets, and decide by what all runs share",
    )


def _changed(by_rank: Sequence[Repetition]) -> Fault | None:
    places = {
        rank: name
        for rank, name in _places(by_rank, "changed").items()
        if by_rank[rank].output is None or by_rank[rank].random is None
    }
    if not places:
        return None
    return Fault(
        rule="changed-parameters",
        verdict=f"{next(iter(places.values()))} had other values in the second run when it was used",
        evidence=_evidence(places),
        fix="compare what writes to it between the all-gather and its use",
    )


def _random(by_rank: Sequence[Repetition]) -> Fault | None:
    places = _places(by_rank, "random")
    if not places:
        return None
    return Fault(
        rule="other-random-numbers",
        verdict=f"another number of random numbers was drawn before module {unit_words(next(iter(places.values())))}",
        evidence=_evidence(places),
        fix="draw as many random numbers in each run: what decides it, such as the time, is not the program's state",
    )


def _operations(by_rank: Sequence[Repetition]) -> Fault | None:
    if not any(each.is_deterministic for each in by_rank):
        return None
    names = sorted({name for each in by_rank for name in each.operations})
    return Fault(
        rule="nondeterministic-operation",
        verdict="operations add in no fixed order" + (f": {listed(names)}" if names else ""),
        evidence=(f"with {_FIXED} the two runs are equal", *_where(by_rank)),
        fix=_FIXED,
    )


def _unknown(by_rank: Sequence[Repetition]) -> Fault | None:
    if not first_repeated(by_rank):
        return None
    names = sorted({name for each in by_rank for name in each.operations})
    why = (
        f"operations without a deterministic implementation ran: {listed(names)}"
        if names
        else (
            "parameters, inputs and random numbers were equal, and every operation has a deterministic implementation"
        )
    )
    return Fault(
        rule="not-repeatable",
        verdict="the same step gives other bits the second time",
        evidence=(why, *_where(by_rank)),
        fix="look for state that no variable reaches, such as the time, os.urandom or a generator inside a library",
    )


def _where(by_rank: Sequence[Repetition]) -> tuple[str, ...]:
    return tuple(each.words for each in first_repeated(by_rank)[:1])


def _evidence(places: dict[int, str]) -> tuple[str, ...]:
    return tuple(f"{label(ranks)}: {unit_words(name)}" for name, ranks in by_value(places.items()).items())
