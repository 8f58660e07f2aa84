"""Preview of a sharding policy, from the units it would create, by the same formulas as the views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.events import Kind, Unit, unit_words
from workbench.live.messages import Model, Preview, RestPreview, SentPreview
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay.collectives import closed_form, ring_bytes
from workbench.replay.grouping import by_value
from workbench.replay.shards import at_rest, shards, totals
from workbench.trace.schema import Header


def preview(
    number: int, line: str, units: Sequence[Unit], num_ranks: int, models: Iterable[ModelInfo] = (), name: str = ""
) -> Preview:
    """Return what ranks would hold at rest, and what a step would send.

    Args:
        number: number of the question.
        line: line of the command.
        units: units that the command would create.
        num_ranks: number of ranks.
        models: models of a rank; if the model to shard is among them, its bytes outside any unit count as well.
        name: name of the model to shard.
    """
    header = Header(units=tuple(units), world_size=num_ranks)
    size = max((unit.shard_size for unit in units), default=1)
    groups = by_value((rank, at_rest(header, rank % size)) for rank in range(num_ranks))
    sent = _sent(header)
    in_units = totals(shards(header)).bytes_unsharded
    whole = next((model.num_bytes for model in models if model.name == name), in_units)
    ignored = whole - in_units
    return Preview(
        number=number,
        line=line,
        units=tuple(unit_words(unit.name) for unit in units),
        bytes_unsharded=whole,
        bytes_ignored=ignored,
        at_rest=tuple(
            RestPreview(ranks=tuple(ranks), params=held.params + ignored, grads=held.grads, adam=held.adam)
            for held, ranks in groups.items()
        ),
        sent=sent,
        sent_bytes=sum(collectives.sent_bytes for collectives in sent),
    )


def _sent(header: Header) -> tuple[SentPreview, ...]:
    found: dict[tuple[Kind, int], list[int]] = {}
    for expected in closed_form(header):
        sums = found.setdefault((expected.kind, expected.num_ranks), [0, 0])
        sums[0] += expected.calls
        sums[1] += expected.num_bytes
    return tuple(
        SentPreview(
            kind=kind.words,
            num_ranks=num_ranks,
            calls=calls,
            num_bytes=num_bytes,
            sent_bytes=round(ring_bytes(kind, num_bytes, num_ranks)),
        )
        for (kind, num_ranks), (calls, num_bytes) in found.items()
        if calls
    )


def models_of(by_rank: dict[int, tuple[ModelInfo, ...]]) -> tuple[Model, ...]:
    """Return the models of all ranks by name, each as on the first rank that has it."""
    having = by_value(((rank, model), model.name) for rank, models in sorted(by_rank.items()) for model in models)
    return tuple(Model(ranks=tuple(rank for rank, _ in own), **vars(own[0][1])) for _, own in sorted(having.items()))
