"""The reports of ``shard``, ``reshard`` and ``unshard``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.base.fault import listed
from workbench.base.glossary import meanings
from workbench.base.text_formats import format_bytes, format_share, plural
from workbench.protocol.commands import (
    ModelSharding,
    ShardReply,
    UnshardReply,
)
from workbench.protocol.lint_reply import LintReply
from workbench.replay.grouping import by_rank_words
from workbench.reports.lint_faults import lint_faults
from workbench.reports.report import Report, next_facts


@dataclass(frozen=True, kw_only=True)
class ShardReport(ModelSharding, Report):
    """A model was sharded.

    Attributes:
        bytes_at_rest: bytes of parameters each rank keeps between steps, padding included, by rank.
        notes: what is probably unintended, and what to do, a sentence each.
        next: what to type next; empty if it was done before.
        terms: of the glossary, which the report explains: those that the session first meets here.
    """

    internal = ("terms",)

    bytes_at_rest: tuple[int, ...]
    notes: tuple[str, ...] = ()
    next: str = ""
    terms: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        size = f"{self.num_elements:,} elements in {plural(self.num_params, 'parameter')}"
        return f"{self.model}: {plural(len(self.units), 'unit')} on {plural(len(self.bytes_at_rest), 'rank')}, {size}"

    def facts(self) -> list[tuple[str, str]]:
        """Return the units, and the bytes before and after."""
        whole = max(self.bytes_unsharded, 1)
        kept = [f"{format_bytes(n)} ({format_share(n / whole)})" for n in self.bytes_at_rest]
        at_rest = kept[0] if len({*kept}) == 1 else by_rank_words(kept)
        return [
            ("units", listed(self.units)),
            *meanings(self.terms),
            *self._wrapped(),
            *([("policy", "; ".join(self.policy))] if self.policy else []),
            ("full model", format_bytes(self.bytes_unsharded)),
            ("each rank keeps", f"{at_rest} between uses"),
            *(("note", note) for note in self.notes),
            *next_facts(self.next),
        ]

    def _wrapped(self) -> list[tuple[str, str]]:
        """Return which class was chosen if the command named none."""
        if self.chosen is None:
            return []
        names = ", ".join(self.chosen)
        found = f"{names}, the class repeated most" if names else "nothing: no list of modules repeats a class"
        return [("wrapped", f"{found}; to choose another: --wrap CLASS")]


@dataclass(frozen=True, kw_only=True)
class ReshardReport(ShardReport):
    """A sharded model was resharded in place; attributes as in :class:`ShardReport`, and one more.

    Attributes:
        optimizers: number of optimizers whose state was carried over.
        is_changed: whether its sharding was changed; else it was as wanted already.
    """

    optimizers: int = 0
    is_changed: bool = True

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        if not self.is_changed:
            return f"nothing to change, {super().headline}"
        return f"resharded in place, {super().headline}{_carried(self.optimizers)}"


@dataclass(frozen=True, kw_only=True)
class UnshardReport(UnshardReply, Report):
    """A model is a plain module again; attributes as in :class:`~workbench.protocol.commands.UnshardReply`."""

    @property
    def headline(self) -> str:
        """The result in one sentence."""
        done = f"{self.model} is a plain module again on every rank: {plural(self.num_params, 'parameter')}"
        return done + _carried(self.optimizers)


def shard_report(by_rank: Sequence[ShardReply]) -> ShardReport:
    """Return the report of one sharded model."""
    sharded, optimizers = _sharded(by_rank), by_rank[0].optimizers
    if optimizers:
        it, them = ("was", "it") if optimizers == 1 else ("were", "them")
        carried = f"{plural(optimizers, 'optimizer')} made before sharding {it} carried over; in a script, make {them}"
        sharded["notes"] = (f"{carried} after fully_shard", *sharded["notes"])
    return ShardReport(**sharded, chosen=by_rank[0].chosen)


def reshard_report(by_rank: Sequence[ShardReply]) -> ReshardReport:
    """Return the report of one resharded model."""
    first = by_rank[0]
    return ReshardReport(**_sharded(by_rank), optimizers=first.optimizers, is_changed=first.is_changed)


def unshard_report(by_rank: Sequence[UnshardReply]) -> UnshardReport:
    """Return the report of one model that is plain again."""
    return UnshardReport(**vars(by_rank[0]))


def _sharded(by_rank: Sequence[ShardReply]) -> dict[str, Any]:
    first = by_rank[0]
    same = {name: getattr(first, name) for name in ("model", "num_params", "num_elements", "bytes_unsharded")}
    at_rest = tuple(sharded.bytes_at_rest for sharded in by_rank)
    notes = _lint_notes(first.model, [sharded.lint for sharded in by_rank])
    return same | {"units": first.units, "policy": first.policy, "bytes_at_rest": at_rest, "notes": notes}


def _lint_notes(model: str, by_rank: Sequence[LintReply]) -> tuple[str, ...]:
    """Return the note that a sharded model has faults: the most important one with its fix, and how many more."""
    first, *others = lint_faults(by_rank) or (None,)
    if first is None:
        return ()
    more = f". {plural(len(others), 'further fault')}: %fsdp lint {model}" if others else ""
    return (f"{first.sentence}{more}",)


def _carried(optimizers: int) -> str:
    """Return a note that the state of some optimizers was carried over; empty for 0."""
    return f", state of {plural(optimizers, 'optimizer')} carried over" if optimizers else ""
