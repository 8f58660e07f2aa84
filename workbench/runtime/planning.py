"""What a rank's models are, and what ``shard`` or ``reshard`` would make of one, seen from the side door.

Nothing is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from workbench.engine.classic.flat_param import FLAT_PARAM
from workbench.engine.classic.state import KEEPS_AFTER_FORWARD
from workbench.engine.full_param import local_tensor
from workbench.engine.layout import ShardLayout
from workbench.engine.managed import _get_managed_modules, _get_param_module_infos
from workbench.engine.param import FSDPParam
from workbench.engine.reshard import origins
from workbench.engine.state import states_below, units_of
from workbench.errors import UsageError
from workbench.events import FlatPart, Param, Unit
from workbench.protocol.commands import Reshard, Shard
from workbench.protocol.messages import ModelInfo, WrapClass
from workbench.protocol.policy import CLASSIC, DTYPES, STRATEGIES, MixedPrecision
from workbench.runtime import sharding
from workbench.runtime.describe import sizes_of
from workbench.runtime.namespace import find_module, module_names


def models() -> tuple[ModelInfo, ...]:
    """Return the models among the cells' variables, by name; none while a cell is building one."""
    try:
        return tuple(_model(name, find_module(name)) for name in module_names())
    except (RuntimeError, UsageError):  # a cell is building or dropping one at this moment
        return ()


def _model(name: str, model: nn.Module) -> ModelInfo:
    sizes, offered = sizes_of(model), sharding.possible_units(model)
    counts = Counter(own for own, _ in offered)
    elements = {own: sum(n for other, n in offered if other == own) for own in counts}
    ordered = sorted(counts, key=lambda own: (-elements[own], own))
    return ModelInfo(
        name=name,
        class_name=sharding.class_name(model),
        is_sharded=sharding.is_sharded(model),
        num_params=len(sizes),
        num_elements=sum(size.numel for size in sizes),
        num_bytes=sum(size.numel * size.itemsize for size in sizes),
        classes=tuple(WrapClass(name=own, count=counts[own], num_elements=elements[own]) for own in ordered),
        suggested=tuple(sorted(sharding.repeated_class(model))),
        policy=sharding.policy_of(model),
    )


def plan(command: Shard | Reshard, world_size: int) -> tuple[Unit, ...]:
    """Return the units that ``command`` would make on ``world_size`` ranks, without numbers of their own.

    Raises:
        UsageError, ValueError, NotImplementedError: it cannot be done.
    """
    return _of_shard(command, world_size) if isinstance(command, Shard) else _of_reshard(command)


def _of_shard(command: Shard, world_size: int) -> tuple[Unit, ...]:
    model, inner, ignored = sharding.chosen(command, world_size)
    names = {module: name for name, module in model.named_modules()}
    copies, size = _ranks(command, world_size)
    units: list[Unit] = []
    taken: set[int] = set()
    for module in [*inner, model]:
        managed = _get_managed_modules([module], is_taken=lambda child: child in inner)
        infos = _get_param_module_infos(managed, frozenset(id(param) for param in ignored))
        tied = next((info.path for param, info in infos if id(param) in taken), None)
        if tied is not None:
            raise _tied(tied, names[module] or command.model)
        taken |= {id(param) for param, _ in infos}
        given = [(_path(names[module], info.path), param) for param, info in infos]
        params = [_param(fqn, param, size) for fqn, param in given]
        if command.api == CLASSIC:
            params = _flat(_path(names[module], FLAT_PARAM), params, size)
        if params:
            policy = _policy(command, infos[0][0].dtype, is_root=module is model)
            placed = Unit(
                index=len(units),
                name=names[module],
                root=-1,
                params=tuple(params),
                shard_size=size,
                replicate_size=copies,
                **policy,
            )
            units.append(placed)
    return tuple(units)


def _ranks(command: Shard, world_size: int) -> tuple[int, int]:
    """Return copies, and ranks that share one."""
    if command.strategy == "none":
        return world_size, 1
    copies, size = (1, *(command.mesh_shape or (world_size,)))[-2:]
    return copies, size


def _flat(fqn: str, params: Sequence[Param], size: int) -> list[Param]:
    """Return the flat parameter that stands for ``params``; none for none."""
    if not params:
        return []
    firsts = accumulate((math.prod(param.shape) for param in params), initial=0)
    parts = tuple(FlatPart(fqn=p.fqn, shape=p.shape, first=first) for p, first in zip(params, firsts, strict=False))
    shape = torch.Size([parts[-1].first + parts[-1].numel])
    flat = replace(params[0], fqn=fqn, shape=tuple(shape), global_shape=tuple(shape), **_rows(shape, 0, size))
    return [replace(flat, trainable=any(param.trainable for param in params), parts=parts)]


def _of_reshard(command: Reshard) -> tuple[Unit, ...]:
    model, inner = sharding.chosen_again(command)
    if CLASSIC in {sharding.api_of(model), command.api}:
        raise UsageError("what becomes of a classic model, or of one that is to be classic, is seen once it is done")
    states = states_below(model)
    names = {module: name for name, module in model.named_modules()}
    if not inner:
        found = [
            (unit, state, state.modules[0], unit.params_as_defined) for state in states for unit in units_of([state])
        ]
    else:
        above, some = origins(model, states[0]), units_of(states)[:1]
        found = [
            (unit, above[module], module, params)
            for module, params in _regrouped(command, model, inner, names)
            for unit in (units_of([above[module]]) or some)[:1]
        ]
    return tuple(
        _changed(
            command,
            replace(unit.describe(), index=index, name=names[module], params=_described(params, names)),
            is_auto=state.auto_reshard,
            is_root=module is model,
        )
        for index, (unit, state, module, params) in enumerate(found)
    )


def _regrouped(
    command: Reshard, model: nn.Module, inner: list[nn.Module], names: dict[nn.Module, str]
) -> list[tuple[nn.Module, list[FSDPParam]]]:
    """Return which parameters each module would manage; modules that would manage none are left out."""
    managed_now = [param for unit in units_of(states_below(model)) for param in unit.params_as_defined]
    at = {place: param for param in managed_now for place in param.info.places}
    taken: set[FSDPParam] = set()
    found: list[tuple[nn.Module, list[FSDPParam]]] = []
    for module in [*inner, model]:
        managed = _get_managed_modules([module], is_taken=lambda child: child in inner)
        places = ((owner, name) for _, owner in managed for name in owner._parameters)
        params = dict.fromkeys(at[place] for place in places if place in at)
        tied = next((_name_of(param, names) for param in params if param in taken), None)
        if tied is not None:
            raise _tied(tied, names[module] or command.model)
        taken |= params.keys()
        if params:
            found.append((module, list(params)))
    return found


def _tied(path: str, unit: str) -> UsageError:
    return UsageError(f"parameter {path!r} of {unit!r} is tied to one of another unit")


def _described(params: Iterable[FSDPParam], names: dict[nn.Module, str]) -> tuple[Param, ...]:
    """Describe parameters by their names from the root, which they have themselves only once that is known."""
    return tuple(replace(param.describe(), fqn=_name_of(param, names)) for param in params)


def _name_of(param: FSDPParam, names: dict[nn.Module, str]) -> str:
    return _path(names[param.info.module], param.info.name)


def _changed(command: Reshard, unit: Unit, *, is_auto: bool, is_root: bool) -> Unit:
    """Return ``unit`` with what ``command`` gives; all else stays as it is."""
    copies, size = (1, *command.mesh_shape)[-2:] if command.mesh_shape else (unit.replicate_size, unit.shard_size)
    after_forward = command.reshard_after_forward or ("auto" if is_auto else unit.reshard_after_forward)
    policy: dict[str, Any] = {"reshard_after_forward": _after_forward(after_forward, is_root=is_root)}
    if command.mp:
        policy |= _precision(command.mp, getattr(torch, unit.params[0].dtype))
    if command.offload is not None:
        policy["offload"] = command.offload
    params = tuple(replace(param, **_rows(torch.Size(param.shape), param.shard_dim, size)) for param in unit.params)
    return replace(unit, params=params, root=-1, comm="", shard_size=size, replicate_size=copies, **policy)


def _path(module: str, path: str) -> str:
    return f"{module}.{path}" if module else path


def _param(fqn: str, param: nn.Parameter, size: int) -> Param:
    shape = local_tensor(param).shape
    return Param(
        fqn=fqn,
        shape=tuple(shape),
        global_shape=tuple(param.shape),
        dtype=_name(param.dtype),
        itemsize=param.itemsize,
        shard_dim=0,
        **_rows(shape, 0, size),
        trainable=param.requires_grad,
    )


def _rows(shape: torch.Size, dim: int, size: int) -> dict[str, Any]:
    """Return how the rows of a parameter lie on ``size`` ranks, as its description has it."""
    layout = ShardLayout(shape, dim, size)
    bounds = [layout.rows_of(rank) for rank in range(size)]
    return {"rows_per_rank": tuple(last - first for first, last in bounds), "padded_rows": layout.padded_rows}


def _policy(command: Shard, own: torch.dtype, *, is_root: bool) -> dict[str, Any]:
    """Return the policy of a unit whose parameters are of dtype ``own``, as its description has it."""
    keeps = STRATEGIES.get(command.strategy, "") in {strategy.name for strategy in KEEPS_AFTER_FORWARD}
    after_forward = _after_forward("false" if keeps else command.reshard_after_forward, is_root=is_root)
    return {"reshard_after_forward": after_forward, "offload": command.offload, **_precision(command.mp, own)}


def _after_forward(policy: str | int, *, is_root: bool) -> bool | int:
    words = {"auto": not is_root, "true": True, "false": False}
    return words[policy] if isinstance(policy, str) else policy


def _precision(mp: str, own: torch.dtype) -> dict[str, Any]:
    wanted = MixedPrecision.parse(mp)
    compute = getattr(torch, DTYPES[wanted.param]) if wanted.param and own.is_floating_point else own
    reduce = getattr(torch, DTYPES[wanted.reduce]) if wanted.reduce else compute
    return {
        **{"compute_dtype": _name(compute), "compute_itemsize": compute.itemsize},
        **{"reduce_dtype": _name(reduce), "reduce_itemsize": reduce.itemsize},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
