"""A rank's tensors of one parameter at this moment: shard, full parameter, gradients, optimizer state.

Nothing here communicates: all numbers are of this rank's data. Units, parameters, states and their reasons are read
from the trace; only the tensors come from the event source.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import local_of
from workbench.errors import UsageError
from workbench.events import STATE_AFTER, Edge, FlatPart, Kind, Param, ParamTensors, Phase, Unit, UnitState, unit_words
from workbench.models.engines import paths_below
from workbench.models.sharded_model import join
from workbench.protocol.inspect_reply import FullFacts, InspectReply, Number, OptimizerFacts, ShardFacts, TensorFacts
from workbench.runtime.namespace import module_names, user_namespace
from workbench.runtime.recorder import Recorder
from workbench.trace.schema import Rows
from workbench.trace.step_names import step_name

_LOOK_BACK = 20_000
"""Rows searched for the begin of an unshard: dozens of steps of a small model."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A parameter, and what this rank holds of it.

    Attributes:
        model: variable that holds its model, empty if none does.
        fqn: its name relative to that model.
        part: the part of the flat parameter ``param``; None: it is ``param`` itself.
        flat: this rank's tensors of ``param``, if it is a part of it.
    """

    model: str = ""
    fqn: str
    unit: Unit
    param: Param
    tensors: ParamTensors
    part: FlatPart | None = None
    flat: ParamTensors | None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.param.global_shape if self.part is None else self.part.global_shape

    @property
    def slot(self) -> tuple[int, int]:
        """Elements of the padded flat parameter that belong to this rank."""
        begin = self.tensors.shard_rank * self.param.padded_rows
        return begin, begin + self.param.padded_rows


def inspect(fqn: str, recorder: Recorder) -> InspectReply:
    """Return what this rank holds of a parameter.

    Args:
        fqn: its name in its model, with or without the model's variable before it.
        recorder: the rank's recorder.

    Raises:
        UsageError: no such parameter is sharded, or several are.
    """
    found = _find(fqn.strip(), recorder)
    tensors, dtype = found.tensors, found.param.dtype
    return InspectReply(
        fqn=found.fqn,
        model=found.model,
        unit=unit_words(found.unit.name),
        global_shape=found.global_shape,
        trainable=found.param.trainable,
        shard=_shard(found),
        full=_full(found, recorder),
        full_grad=_full_grad(found),
        sharded_grad=None if tensors.sharded_grad is None else _facts(tensors.sharded_grad, dtype),
        optimizers=tuple(_optimizers(found)),
    )


# ---- which parameter


def _find(fqn: str, recorder: Recorder) -> _Found:
    """Return the parameter ``fqn``.

    Raises:
        UsageError: as :func:`inspect`.
    """
    known = list(_known(recorder))
    matching = [f for f in known if fqn in {f.fqn, f"{f.model}.{f.fqn}"}]
    # a model that no variable holds may be garbage that is not collected yet
    matches = {(f.unit.index, f.param.fqn, f.part): f for f in [m for m in matching if m.model] or matching}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        names = ", ".join(f"{f.model}.{f.fqn}" for f in matches.values())
        raise UsageError(f"several models have a parameter {fqn!r}; name one: {names}")
    raise UsageError(_not_found(fqn, list(dict.fromkeys(f.fqn for f in known))))


def _known(recorder: Recorder) -> Iterator[_Found]:
    """Yield every parameter under each of its names, first those in models among the cells' variables."""
    held = [
        _Found(fqn=param.fqn, unit=unit, param=param, tensors=tensors[param.fqn])
        for unit in recorder.header.units
        for tensors in [recorder.tensors(unit.index)]
        for param in unit.params
        if param.fqn in tensors
    ]
    held += [
        replace(flat, fqn=part.fqn, tensors=tensors[part.fqn], part=part, flat=flat.tensors)
        for flat in held
        for part in flat.param.parts
        for tensors in [recorder.tensors(flat.unit.index)]
        if part.fqn in tensors
    ]
    models = {id(module): (name, module) for name, module in reversed(list(_models()))}
    for name, model in reversed(models.values()):
        yield from _params_below(name, model, held)
    yield from held


def _models() -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules among the cells' variables."""
    for name in module_names():
        yield name, cast("nn.Module", user_namespace()[name])


def _params_below(model: str, root: nn.Module, held: list[_Found]) -> Iterator[_Found]:
    paths = paths_below(root) if held else {}
    for found in held:
        for module, name in found.tensors.places:
            path = paths.get(cast("nn.Module", module))
            if path is not None:
                yield replace(found, model=model, fqn=join(path, name))


def _not_found(fqn: str, names: list[str]) -> str:
    if not names:
        return "no model is sharded on this rank; shard one first: %fsdp shard MODEL"
    ending = [name for name in names if name.endswith(f".{fqn}") or name.startswith(f"{fqn}.")]
    nearest = ending[:5] or difflib.get_close_matches(fqn, names, n=5, cutoff=0.3) or names[:5]
    return f"no sharded parameter is called {fqn!r}; nearest: {', '.join(nearest)}"


# ---- numbers


def _plain_number(value: float) -> Number:
    return value if math.isfinite(value) else repr(value)


@torch.no_grad()
def _facts(values: object, dtype: str) -> TensorFacts:
    """Describe this rank's part of a tensor; sums use at least float32.

    Args:
        values: tensor of a source.
        dtype: dtype of values that are not a tensor.
    """
    given = values if isinstance(values, torch.Tensor) else torch.as_tensor(values, dtype=getattr(torch, dtype))
    local = (local_of(given) if isinstance(given, DTensor) else given).detach()
    norm, mean, max_abs = _numbers(local)
    return TensorFacts(
        shape=tuple(local.shape),
        dtype=str(local.dtype).removeprefix("torch."),
        device=str(local.device),
        num_bytes=local.nbytes,
        norm=norm,
        mean=mean,
        max_abs=max_abs,
    )


def _numbers(values: torch.Tensor) -> tuple[Number | None, Number | None, Number | None]:
    """Return 2-norm, mean and largest magnitude."""
    if values.is_meta or not (values.is_floating_point() or values.is_complex()):
        return None, None, None
    dtype = torch.float32 if values.dtype in {torch.float16, torch.bfloat16} else None
    norm = _plain_number(float(torch.linalg.vector_norm(values, dtype=dtype)))
    if not values.numel():
        return norm, None, None
    mean = None if values.is_complex() else _plain_number(float(values.mean(dtype=dtype)))
    return norm, mean, _plain_number(float(values.abs().max()))


# ---- the forms of a parameter


def _shard(found: _Found) -> ShardFacts:
    param, rank = found.param, found.tensors.shard_rank
    if found.part is not None:
        first, last = found.part.within(*found.slot)
        return ShardFacts(
            dim=None,
            first_row=first - found.part.first,
            num_rows=max(0, last - first),
            of_rows=found.part.numel,
            values=_facts(found.tensors.shard, param.dtype),
        )
    return ShardFacts(
        dim=param.shard_dim,
        first_row=sum(param.rows_per_rank[:rank]),
        num_rows=param.rows_per_rank[rank],
        of_rows=param.shape[param.shard_dim],
        values=_facts(found.tensors.shard, param.dtype),
    )


def _full(found: _Found, recorder: Recorder) -> FullFacts:
    full = found.tensors.full
    past = _Past.of(found.unit.index, recorder)
    if full is not None:
        values = _facts(full, found.unit.compute_dtype)
        return FullFacts(state=UnitState.UNSHARDED, why=past.why_full(found.unit), values=values)
    if past.is_gathering:
        why = f"its all-gather was issued{past.when_requested}; compute has not waited for it yet"
        return FullFacts(state=UnitState.ALL_GATHER_IN_FLIGHT, why=why, values=None)
    why = f"about to be all-gathered{past.when_requested}" if past.is_requested else past.why_sharded(found.unit)
    return FullFacts(state=UnitState.SHARDED, why=why, values=None)


@dataclass(frozen=True)
class _Past:
    """The newest rows of a unit, oldest first."""

    rows: Rows

    @classmethod
    def of(cls, unit: int, recorder: Recorder) -> _Past:
        rows = recorder.newest(_LOOK_BACK)
        return cls(rows[rows["unit"] == unit])

    def _last(self, *events: tuple[Kind, Edge]) -> np.void | None:
        """Return the newest row that is one of ``events``."""
        return next((row for row in self.rows[::-1] if (row["kind"], row["edge"]) in events), None)

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather was issued and its result is not in use yet."""
        row = self._last(*STATE_AFTER)
        return row is not None and STATE_AFTER[Kind(row["kind"]), Edge(row["edge"])] is UnitState.ALL_GATHER_IN_FLIGHT

    @property
    def is_requested(self) -> bool:
        """Whether the full parameter was requested, but no all-gather was issued yet."""
        row = self._last((Kind.UNSHARD, Edge.BEGIN), *STATE_AFTER)
        return row is not None and (Kind(row["kind"]), Edge(row["edge"])) == (Kind.UNSHARD, Edge.BEGIN)

    @property
    def when_requested(self) -> str:
        """When the full parameter was requested, as the end of a phrase; empty: too long ago."""
        row = self._last((Kind.UNSHARD, Edge.BEGIN))
        return "" if row is None else f" (requested in {Phase(row['phase']).words} of {step_name(int(row['step']))})"

    def why_sharded(self, unit: Unit) -> str:
        row, kept_by = self._last((Kind.RESHARD, Edge.INSTANT)), unit.reshard_after_forward
        is_between = row is not None and row["phase"] == Phase.FORWARD
        if is_between and not isinstance(kept_by, bool) and kept_by < unit.shard_size:
            return f"sharded over {kept_by} ranks between forward and backward"
        if unit.shard_size == 1:
            return "not needed now; with one shard rank, the shard is the full parameter"
        return f"not needed now: only this rank's {'elements' if unit.is_flat else 'rows'} are in memory"

    def why_full(self, unit: Unit) -> str:
        gathered = (Kind.UNSHARD, Edge.BEGIN)
        works = tuple((kind, edge) for kind in (Kind.FORWARD, Kind.BACKWARD) for edge in (Edge.BEGIN, Edge.END))
        row = self._last(gathered, *works)
        if row is None:
            return "not resharded yet"
        match Kind(row["kind"]), Edge(row["edge"]):
            case Kind.UNSHARD, _:
                part = Phase(row["phase"]).info.part
                why = f"its {part.words} is about to run" if part is not None else "not resharded yet"
            case kind, Edge.BEGIN:
                why = f"its {kind.words} runs"
            case Kind.FORWARD, _ if unit.reshard_after_forward is False:
                why = f"kept from forward to backward{'' if unit.is_flat else ' (reshard_after_forward=False)'}"
            case Kind.BACKWARD, _:
                why = "its gradients are being collected"
            case _:
                why = "not resharded yet"
        return f"{why}{self.when_requested}"


def _full_grad(found: _Found) -> TensorFacts | None:
    grads = [_facts(grad, found.unit.reduce_dtype) for grad in found.tensors.full_grads]
    return replace(grads[0], num_bytes=sum(grad.num_bytes for grad in grads)) if grads else None


def _optimizers(found: _Found) -> Iterator[OptimizerFacts]:
    """Describe the state that optimizers among the cells' variables keep for a parameter."""
    there = {id(v): (k, v) for k, v in user_namespace().items() if isinstance(v, torch.optim.Optimizer)}
    for name, optimizer in there.values():
        params = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if id(found.tensors.shard) in params:
            kept = optimizer.state.get(params[id(found.tensors.shard)], {})
        elif found.flat is not None and id(found.flat.shard) in params:
            kept = {key: _piece(found, v) for key, v in optimizer.state.get(params[id(found.flat.shard)], {}).items()}
        else:
            continue
        state = {key: _facts(value, "") for key, value in kept.items() if isinstance(value, torch.Tensor)}
        yield OptimizerFacts(name=name, type=type(optimizer).__name__, state=state)


def _piece(found: _Found, value: object) -> object:
    """Return the part of a flat parameter's state that belongs to a parameter; a scalar belongs to every part."""
    begin, end = found.slot
    if found.part is None or not isinstance(value, torch.Tensor) or value.shape != (end - begin,):
        return value
    first, last = found.part.within(begin, end)
    return value[first - begin : max(first, last) - begin]
