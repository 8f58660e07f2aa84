"""What a panel shows: the state at the newest snapshot, parameters, models, and a sharding policy before it is used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from workbench.base.codec import sent_number
from workbench.events import FlatPart, Kind, Param, Unit, unit_words
from workbench.live.fold import Fold
from workbench.live.live_trace import LiveTrace
from workbench.live.messages import (
    ClockState,
    ClusterState,
    Model,
    ParamInfo,
    Preview,
    RankState,
    RequestState,
    RestPreview,
    SentPreview,
    State,
    TrainingSummary,
    UnitInfo,
    UnitStates,
)
from workbench.live.overview import breakpoints, said
from workbench.protocol.rank_messages import ModelInfo
from workbench.replay import memory
from workbench.replay.collectives import closed_form, ring_bytes
from workbench.replay.grouping import by_value
from workbench.replay.shards import ParamShards, at_rest, pieces, shards, totals, unit_shards
from workbench.reports.clock_text import clock_words
from workbench.reports.event_text import unit_names
from workbench.reports.pause_reports import row_of
from workbench.reports.stop_positions import live_units
from workbench.session.snapshot import ActiveRequest, ClusterSnapshot
from workbench.trace.columns import Trace
from workbench.trace.schema import Header, KeyFrame, RankInfo


def panel_state(number: int, live: LiveTrace, cluster: ClusterState, known_units: Sequence[UnitInfo] | None) -> State:
    """Return the state at the newest snapshot.

    Args:
        number: number of the question.
        live: the cluster's snapshot and the fold of its trace.
        cluster: its settings, and how its ranks were started or would be.
        known_units: units as last sent to the caller; None: not sent yet.
    """
    with live.lock:
        pulse = live.pulse or ClusterSnapshot(trace=Trace.empty())
        trace, units = pulse.trace, units_of(pulse.trace.header)
        return State(
            number=number,
            cluster=replace(
                cluster,
                is_running=pulse.running,
                waits_for=pulse.waits_for,
                num_ranks=len(pulse.states) if pulse.running else cluster.num_ranks,
                is_free=pulse.is_free,
            ),
            ranks=tuple(_rank(pulse, live.fold, rank) for rank in sorted(pulse.states)),
            clocks=_clocks(trace.header),
            units=None if units == known_units else units,
            unit_states=_unit_states(live.fold, units),
            breakpoints=breakpoints(pulse),
            request=_request(pulse.under_way),
            training=_training(live.fold),
            ended=pulse.ended,
            output=pulse.output,
            is_recorded=trace.num_rows > 0,
            record=pulse.record,
            said=said(pulse),
            fault=pulse.fault,
        )


def _rank(pulse: ClusterSnapshot, fold: Fold, rank: int) -> RankState:
    unknown = RankInfo(rank=rank, host="", device="", pid=0)
    info = next((info for info in pulse.trace.header.ranks if info.rank == rank), unknown)
    is_recorded = any(r.rank == rank and r.end_seq for r in pulse.trace.ranks)
    folded = fold.rank(rank).memory if is_recorded else memory.start(KeyFrame())
    return RankState(
        rank=rank,
        health=pulse.states[rank],
        where=_where(pulse, rank),
        host=info.host,
        device=info.device,
        pid=info.pid,
        num_bytes=folded.bytes_by_category,
        in_use=memory.in_use(folded.bytes_by_category),
        peak_bytes=folded.peak_bytes,
        peak_bytes_by_class=folded.peak_bytes_by_category,
        peak=memory.describe_peak(pulse.trace.header, fold.peak(rank)) if is_recorded else "",
    )


def _unit_states(fold: Fold, units: Sequence[UnitInfo]) -> tuple[UnitStates, ...]:
    after = {rank_trace.rank: fold.rank(rank_trace.rank).units for rank_trace in fold.trace.ranks}
    groups = by_value((r, "".join(str(int(found[unit.index])) for unit in units)) for r, found in after.items())
    return tuple(UnitStates(ranks=tuple(ranks), states=digits) for digits, ranks in groups.items())


def _training(fold: Fold) -> TrainingSummary:
    found = fold.steps.progress(fold.trace.header.strings)
    return TrainingSummary(
        step=found.step,
        loss=sent_number(found.loss),
        loss_step=found.loss_step,
        steps_per_s=1e9 / found.step_ns if found.step_ns else None,
        tokens_per_s=found.tokens_per_s,
    )


def _clocks(header: Header) -> tuple[ClockState, ...]:
    return tuple(
        ClockState(ranks=clock.ranks, error_ns=clock.readings[-1].error_ns, text=clock_words(clock))
        for clock in header.clocks
    )


def _where(pulse: ClusterSnapshot, rank: int) -> str:
    """Return where a rank is; for one that is gone, how it was lost."""
    health = pulse.states[rank]
    if health == "gone":
        return pulse.losses.get(rank, "died")
    if health in {"no answer", "idle"} or rank not in pulse.positions:
        return ""
    row = row_of(rank, pulse.positions[rank], unit_names(pulse.trace.header), state=health)
    of = f" of {row.unit}" if row.unit else ""
    step = "" if row.step is None else f"step {row.step}"
    return ", ".join(filter(None, (f"{row.event}{of}" if row.event else "", step)))


def units_of(header: Header) -> tuple[UnitInfo, ...]:
    """Return all units in use, from the top of each model."""
    return tuple(map(_unit, live_units(header)))


def _unit(unit: Unit) -> UnitInfo:
    total = totals(unit_shards(unit))
    after = unit.reshard_after_forward
    return UnitInfo(
        index=unit.index,
        name=unit_words(unit.name),
        root=unit.root,
        num_params=total.num_params,
        is_flat=total.num_flat > 0,
        bytes_unsharded=total.bytes_unsharded,
        bytes_at_rest=total.bytes_at_rest,
        bytes_padding=total.bytes_wasted,
        shard_size=unit.shard_size,
        replicate_size=unit.replicate_size,
        reshard_after_forward=str(after).lower(),
        compute_dtype=unit.compute_dtype,
        reduce_dtype=unit.reduce_dtype,
        offload=unit.offload,
    )


def params_of(header: Header, unit: int) -> tuple[ParamInfo, ...]:
    """Return the parameters of a unit, each flat one before its parts; empty if the unit is no longer in use."""
    found = [part for other in header.units if other.index == unit and other.in_use for part in unit_shards(other)]
    return tuple(info for split in found for info in (_param(split), *_parts(split.param)))


def _param(split: ParamShards) -> ParamInfo:
    return ParamInfo(
        fqn=split.param.fqn,
        shape=split.param.global_shape,
        dtype=split.param.dtype,
        bytes_unsharded=split.bytes_global,
        bytes_at_rest=split.bytes_at_rest,
        rows_per_rank=split.param.rows_per_rank,
        is_trainable=split.param.trainable,
    )


def _parts(flat: Param) -> Iterator[ParamInfo]:
    held: dict[FlatPart, list[int]] = {part: [0] * len(flat.rows_per_rank) for part in flat.parts}
    for piece in pieces(flat):
        held[piece.part][piece.shard_rank] = piece.end - piece.begin
    for part, elements in held.items():
        yield ParamInfo(
            fqn=part.fqn,
            shape=part.global_shape,
            dtype=flat.dtype,
            bytes_unsharded=math.prod(part.global_shape) * flat.itemsize,
            bytes_at_rest=max(elements) * flat.itemsize,
            rows_per_rank=tuple(elements),
            is_trainable=part.trainable,
            flat=flat.fqn,
        )


def _request(under_way: ActiveRequest | None) -> RequestState | None:
    if under_way is None:
        return None
    progress = under_way.progress
    return RequestState(
        line=under_way.words,
        is_stopped=under_way.is_stopped,
        stop=under_way.stop,
        reasons=under_way.reasons,
        in_background=under_way.in_background,
        steps_done=progress.done if progress is not None else 0,
        steps_total=progress.total if progress is not None else 0,
    )


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
            RestPreview(ranks=tuple(ranks), **vars(replace(held, params=held.params + ignored)))
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
