"""What a rank holds of one parameter at this moment: its shard, the full parameter, gradients, optimizer state.

Nothing here communicates: every number is of what lies on this rank. What a unit and its parameters are is read from
the record (:class:`~workbench.events.Unit`); the engine is asked for tensors, and for what it is about to do with them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import local_of
from workbench.engine.call import ShardedCall, units_of
from workbench.engine.param import FSDPParam, ShardedState, local_tensor
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.root import roots
from workbench.engine.state import states_below
from workbench.errors import UsageError
from workbench.events import Edge, Kind, Param, Phase, Unit, unit_words
from workbench.runtime.namespace import module_names, user_namespace
from workbench.runtime.recorder import Recorder
from workbench.trace.step_names import step_name

_LOOK_BACK = 20_000
"""Rows in which the beginning of an unshard is looked for: dozens of steps of a small model."""


@dataclass(frozen=True)
class Found:
    """A managed parameter.

    Attributes:
        model: variable that holds its model, empty if none does.
        fqn: its name relative to that model.
    """

    model: str
    fqn: str
    param: FSDPParam
    unit: FSDPParamGroup


def inspect(fqn: str, recorder: Recorder) -> dict[str, Any]:
    """Return what this rank holds of a parameter; JSON data, numbers of bytes and elements.

    Args:
        fqn: its name in its model, with or without the model's variable before it.
        recorder: what the rank recorded.

    Raises:
        UsageError: no such parameter is sharded, or several are.
    """
    found = find(fqn.strip())
    param, unit = found.param, found.unit
    told = next(info for info in recorder.header.units if info.index == unit.index)
    told_param = next(info for info in told.params if info.fqn == param.fqn)
    return {
        "fqn": found.fqn,
        "model": found.model,
        "unit": unit_words(told.name),
        "unit_index": told.index,
        "global_shape": list(told_param.global_shape),
        "trainable": told_param.trainable,
        "shard": _shard(param, told_param),
        "full": _full(param, told_param, unit, told, recorder),
        "full_grad": _full_grad(param),
        "sharded_grad": _tensor(param.sharded_param.grad),
        "optimizers": _optimizers(param),
        "policy": _policy(told) | {"reduces_gradients": unit.sync.reduce_grads},
    }


# ---- which parameter


def find(fqn: str) -> Found:
    """Return the parameter called ``fqn``.

    Raises:
        UsageError: see :func:`inspect`.
    """
    known = list(_known())
    matching = [f for f in known if fqn in {f.fqn, f"{f.model}.{f.fqn}"}]
    # a model that no variable holds may be one that waits for the garbage collector
    matches = {id(f.param): f for f in [m for m in matching if m.model] or matching}
    if len(matches) == 1:
        return next(iter(matches.values()))
    if matches:
        names = ", ".join(f"{f.model}.{f.fqn}" for f in matches.values())
        raise UsageError(f"several models have a parameter {fqn!r}; name one: {names}")
    raise UsageError(_not_found(fqn, list(dict.fromkeys(f.fqn for f in known))))


def _known() -> Iterator[Found]:
    """Yield every managed parameter by each of its names, those of models among the cells' variables first."""
    seen: set[int] = set()
    modules = [(name, cast("nn.Module", user_namespace()[name])) for name in module_names()]
    modules += [("", module) for root in list(roots) for module in root.modules]
    for model, module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield from _params_below(model, module)


def _params_below(model: str, root: nn.Module) -> Iterator[Found]:
    states = cast("list[ShardedCall]", states_below(root))
    names = {module: name for name, module in root.named_modules()} if states else {}
    for unit in units_of(states):
        for param in unit.fsdp_params:
            for module, name in param.info.places:
                prefix = names.get(module)
                if prefix is not None:
                    yield Found(model, f"{prefix}.{name}" if prefix else name, param, unit)


def _not_found(fqn: str, names: list[str]) -> str:
    if not names:
        return "no model is sharded on this rank; shard one first: %fsdp shard MODEL"
    ending = [name for name in names if name.endswith(f".{fqn}") or name.startswith(f"{fqn}.")]
    nearest = ending[:5] or difflib.get_close_matches(fqn, names, n=5, cutoff=0.3) or names[:5]
    return f"no sharded parameter is called {fqn!r}; nearest: {', '.join(nearest)}"


# ---- numbers


def plain_number(value: float) -> float | str:
    """Return ``value``, or its name if JSON has none for it: ``nan``, ``inf``, ``-inf``."""
    return value if math.isfinite(value) else repr(value)


@torch.no_grad()
def _values(tensor: torch.Tensor) -> dict[str, float | str | None]:
    """Return 2-norm, mean and largest magnitude of what is here, of a float32 accumulation at least.

    None where there is none: of no values, or of a kind that has none.
    """
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return {"norm": None, "mean": None, "max_abs": None}
    values = tensor.detach()
    dtype = torch.float32 if tensor.dtype in {torch.float16, torch.bfloat16} else None
    norm = torch.linalg.vector_norm(values, dtype=dtype)
    if not values.numel():
        return {"norm": float(norm), "mean": None, "max_abs": None}
    return {
        "norm": plain_number(float(norm)),
        "mean": None if values.is_complex() else plain_number(float(values.mean(dtype=dtype))),
        "max_abs": plain_number(float(values.abs().max())),
    }


def _tensor(tensor: torch.Tensor | None) -> dict[str, Any]:
    """Describe what lies on this rank of ``tensor``."""
    if tensor is None:
        return {"present": False, "bytes": 0, "norm": None, "mean": None, "max_abs": None, "shape": None, "dtype": None}
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return {"present": True, "bytes": local.nbytes} | _values(local) | _kind_of(local)


def _kind_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


# ---- the forms of a parameter


def _shard(param: FSDPParam, told: Param) -> dict[str, Any]:
    local = local_of(cast("DTensor", param.sharded_param))
    rank = param.mesh_info.shard_mesh_rank
    first, num_rows = sum(told.rows_per_rank[:rank]), told.rows_per_rank[rank]
    rows = {
        "dim": told.shard_dim,
        "first_row": first,
        "last_row": first + num_rows,  # exclusive
        "num_rows": num_rows,
        "of_rows": told.shape[told.shard_dim],
        "shard_rank": rank,
        "num_shards": len(told.rows_per_rank),
        "bytes": local.nbytes,
        "device": str(local.device),
    }
    return rows | _kind_of(local) | _values(local)


def _full(param: FSDPParam, told_param: Param, unit: FSDPParamGroup, told: Unit, recorder: Recorder) -> dict[str, Any]:
    exists = param.state is ShardedState.UNSHARDED
    full = local_tensor(param.unsharded_param)
    num_bytes = full.nbytes if exists else 0
    state = "all-gather in flight" if unit.is_unsharding else param.state.value
    since = _unshard_row(unit.index, recorder) if exists or unit.is_unsharding else None
    return {
        "exists": exists,
        "state": state,
        "why": _why(param, unit, told, since),
        "bytes": num_bytes,
        **(_values(full) if exists else {}),
        "shape": list(told_param.shape),
        "dtype": str(full.dtype).removeprefix("torch."),
        "since": since,
    }


def _unshard_row(unit: int, recorder: Recorder) -> dict[str, Any] | None:
    """Return when the unit's unshard began: its step, phase and time; None if that is too long ago."""
    rows = recorder.newest(_LOOK_BACK)
    mine = (rows["unit"] == unit) & (rows["kind"] == Kind.UNSHARD) & (rows["edge"] == Edge.BEGIN)
    places = np.flatnonzero(mine)
    if not len(places):
        return None
    row = rows[places[-1]]
    phase = Phase(row["phase"]).words
    return {"step": int(row["step"]), "phase": phase, "t_ns": int(row["t_ns"])}


_NEEDED = {
    TrainingState.FORWARD: "its forward runs",
    TrainingState.PRE_BACKWARD: "its backward runs, or is about to",
    TrainingState.POST_BACKWARD: "its gradients are being taken",
}


def _why(param: FSDPParam, unit: FSDPParamGroup, told: Unit, since: dict[str, Any] | None) -> str:
    """Say in words why the full parameter is there, or is not."""
    asked = "" if since is None else f", asked for in {since['phase']} of {step_name(since['step'])}"
    if unit.is_unsharding:
        return f"its all-gather was issued{asked}; nobody has waited for it yet"
    if param.state is ShardedState.SHARDED:
        return "not needed now: only this rank's rows are in memory"
    if param.state is ShardedState.SHARDED_POST_FORWARD:
        return f"between forward and backward it lies on {told.reshard_after_forward} ranks"
    needed = _NEEDED.get(unit.training_state)
    if needed is None and unit.pending_backwards:
        needed = f"kept from forward to backward (reshard_after_forward={told.reshard_after_forward})"
    return f"{needed or 'nothing has given it up yet'}{asked}"


def _full_grad(param: FSDPParam) -> dict[str, Any]:
    grads = [g for g in (param.unsharded_param.grad, param.accumulated_grad) if g is not None]
    described = [_tensor(local_tensor(g)) for g in grads]
    if not described:
        return _tensor(None)
    return described[0] | {"bytes": sum(d["bytes"] for d in described)}


def _optimizers(param: FSDPParam) -> list[dict[str, Any]]:
    """Describe the state that optimizers among the cells' variables keep for a parameter."""
    found = {id(v): (k, v) for k, v in user_namespace().items() if isinstance(v, torch.optim.Optimizer)}
    mine = param.sharded_param
    return [
        {"name": name, "type": type(optimizer).__name__, "state": _state(optimizer.state.get(mine, {}))}
        for name, optimizer in found.values()
        if any(mine is p for group in optimizer.param_groups for p in group["params"])
    ]


def _state(state: dict[str, Any]) -> list[dict[str, Any]]:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return [{"name": name} | _tensor(value) for name, value in tensors.items()]


def _policy(info: Unit) -> dict[str, Any]:
    return {
        "reshard_after_forward": info.reshard_after_forward,
        "shard_size": info.shard_size,
        "replicate_size": info.replicate_size,
        "compute_dtype": info.compute_dtype,
        "reduce_dtype": info.reduce_dtype,
        "offload": info.offload,
        "comm": info.comm,
    }
