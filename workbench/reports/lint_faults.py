"""The faults that ``lint`` finds: what each rank sees, and what only a comparison of ranks shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from workbench.base.fault import Fault
from workbench.protocol.lint_reply import LintReply, RankComparison
from workbench.replay.grouping import label

_CAUSE = {"replicas-differ": "options-differ"}
"""What follows from another fault of the same model, and is not named beside it: one cause is one fault."""

_SHOWN = 3  # names in the evidence of a comparison


def lint_faults(by_rank: Sequence[LintReply]) -> tuple[Fault, ...]:
    """Return the faults of all ranks, in rank order, each once, those that do most damage first."""
    alone = [(rank, fault) for rank, reply in enumerate(by_rank) for fault in reply.faults]
    found = [*_joined(alone, len(by_rank)), *_compared(by_rank)]
    order = {name: place for reply in by_rank for place, name in enumerate(reply.rules)}
    return tuple(sorted(dict.fromkeys(found), key=lambda fault: order[fault.rule]))


def abstained(by_rank: Sequence[LintReply]) -> tuple[str, ...]:
    """Return why rules could not decide on some rank, each reason once."""
    return tuple(dict.fromkeys(reason for reply in by_rank for reason in reply.abstained))


def num_decided(by_rank: Sequence[LintReply]) -> int:
    """Return the number of rules that could decide on every rank."""
    undecided = {reason.partition(":")[0] for reason in abstained(by_rank)}
    return len({name for reply in by_rank for name in reply.rules} - undecided)


def _joined(found: Iterable[tuple[int, Fault]], num_ranks: int) -> Iterator[Fault]:
    """Yield each fault once; evidence, and a fault itself, that only some ranks have names them."""
    ranks: dict[tuple[str, str], dict[int, Fault]] = {}
    for rank, fault in found:
        ranks.setdefault((fault.rule, fault.verdict), {})[rank] = fault
    for having in ranks.values():
        first = next(iter(having.values()))
        by_text: dict[str, list[int]] = {}
        for rank, fault in having.items():
            for text in fault.evidence:
                by_text.setdefault(text, []).append(rank)
        evidence = (text if len(own) == num_ranks else f"{label(own)}: {text}" for text, own in by_text.items())
        yield replace(first, evidence=tuple(evidence))


def _compared(by_rank: Sequence[LintReply]) -> Iterator[Fault]:
    """Yield a fault for each comparison that fails, with the names and ranks for which it does."""
    digests: dict[tuple[str, str, str], dict[str, dict[int, list[int]]]] = {}
    before: dict[str, dict[int, int]] = {}
    first: dict[tuple[str, str, str], RankComparison] = {}
    for rank, reply in enumerate(by_rank):
        for each in reply.comparisons:
            key = each.fault.rule, each.model, each.fault.verdict
            first.setdefault(key, each)
            for name, digest in each.digests.items():
                digests.setdefault(key, {}).setdefault(name, {}).setdefault(digest, []).append(rank)
            for name, digest in each.before.items():
                before.setdefault(name, {})[rank] = digest
    failures = {
        key: {
            name: ranks
            for name, ranks in names.items()
            if _fails(ranks, before.get(name, {}), wants_equal=first[key].wants_equal)
        }
        for key, names in digests.items()
    }
    causes = {(rule, model) for (rule, model, _), failed in failures.items() if failed}
    for key, failed in failures.items():
        if failed and (_CAUSE.get(key[0]), key[1]) not in causes:
            evidence = [f"{name}: {_alike(ranks)}" for name, ranks in failed.items()]
            more = [f"and {len(evidence) - _SHOWN} more"] if len(evidence) > _SHOWN else []
            yield replace(first[key].fault.about(list(failed)), evidence=(*evidence[:_SHOWN], *more))


def _fails(ranks: Mapping[int, Sequence[int]], before: Mapping[int, int], *, wants_equal: bool) -> bool:
    """Return whether digests, each with its ranks, are wrong, given the earlier digest of each rank if it counts."""
    if wants_equal:
        return len(ranks) > 1
    return any(len({before.get(rank, rank) for rank in own}) > 1 for own in ranks.values())


def _alike(ranks: Mapping[int, Sequence[int]]) -> str:
    """Return which ranks have equal values: ``"the same on ranks 1, 2; different on rank 0"``."""
    shared = [f"the same on {label(own)}" for own in ranks.values() if len(own) > 1]
    single = [own[0] for own in ranks.values() if len(own) == 1]
    each_of = "each of " if len(single) > 1 else ""
    return "; ".join([*shared, *([f"different on {each_of}{label(single)}"] if single else [])])
