"""What a rank's models are, and what ``shard`` would make of one: looked at from the side door; nothing is changed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from workbench.engine import FSDPModule
from workbench.engine.layout import ShardLayout
from workbench.engine.managed import _get_managed_modules, _get_param_module_infos
from workbench.engine.param import local_tensor
from workbench.errors import UsageError
from workbench.events import Param, Unit
from workbench.protocol.commands import Shard
from workbench.protocol.messages import ModelInfo, WrapClass
from workbench.protocol.policy import DTYPES, MixedPrecision
from workbench.runtime import sharding
from workbench.runtime.namespace import find_module, module_names


def models() -> tuple[ModelInfo, ...]:
    """Return the models among the cells' variables, by name; none while a cell is building one."""
    try:
        return tuple(_model(name, find_module(name)) for name in module_names())
    except (RuntimeError, UsageError):  # a cell is building or dropping one at this moment
        return ()


def _model(name: str, model: nn.Module) -> ModelInfo:
    params = list(model.parameters())
    offered = [(sharding.class_name(m), m) for m in list(model.modules())[1:] if sharding.may_be_unit(m)]
    counts = Counter(own for own, _ in offered)
    elements = {own: sum(p.numel() for other, m in offered if other == own for p in m.parameters()) for own in counts}
    ordered = sorted(counts, key=lambda own: (-elements[own], own))
    return ModelInfo(
        name=name,
        class_name=sharding.class_name(model),
        is_sharded=isinstance(model, FSDPModule),
        num_params=len(params),
        num_elements=sum(p.numel() for p in params),
        num_bytes=sum(p.numel() * p.itemsize for p in params),
        classes=tuple(WrapClass(name=own, count=counts[own], num_elements=elements[own]) for own in ordered),
        suggested=tuple(sorted(sharding.repeated_class(model))),
    )


def plan(command: Shard, world_size: int) -> tuple[Unit, ...]:
    """Return the units that ``command`` would make on ``world_size`` ranks, the root last.

    Raises:
        UsageError, ValueError, NotImplementedError: it cannot be done.
    """
    model, inner, ignored = sharding.chosen(command, world_size)
    names = {module: name for name, module in model.named_modules()}
    copies, size = (1, *(command.mesh_shape or (world_size,)))[-2:]
    units: list[Unit] = []
    taken: dict[int, str] = {}
    for module in [*inner, model]:
        managed = _get_managed_modules([module], is_taken=lambda child: child in inner)
        infos = _get_param_module_infos(managed, frozenset(id(param) for param in ignored))
        tied = next((info.path for param, info in infos if id(param) in taken), None)
        if tied is not None:
            raise UsageError(f"parameter {tied!r} of {names[module] or command.model!r} is tied to one of another unit")
        taken |= dict.fromkeys((id(param) for param, _ in infos), names[module])
        params = [_param(_path(names[module], info.path), param, size) for param, info in infos]
        if params:
            placed: dict[str, Any] = {"index": len(units), "root": -1, "shard_size": size, "replicate_size": copies}
            policy = _policy(command, infos[0][0].dtype, is_root=module is model)
            units.append(Unit(name=names[module], params=tuple(params), **placed, **policy))
    return tuple(units)


def _path(module: str, path: str) -> str:
    return f"{module}.{path}" if module else path


def _param(fqn: str, param: nn.Parameter, size: int) -> Param:
    shape = local_tensor(param).shape
    layout = ShardLayout(shape, 0, size)
    bounds = [layout.rows_of(rank) for rank in range(size)]
    return Param(
        fqn=fqn,
        shape=tuple(shape),
        global_shape=tuple(param.shape),
        dtype=_name(param.dtype),
        itemsize=param.itemsize,
        shard_dim=0,
        rows_per_rank=tuple(last - first for first, last in bounds),
        padded_rows=layout.padded_rows,
        trainable=param.requires_grad,
    )


def _policy(command: Shard, own: torch.dtype, *, is_root: bool) -> dict[str, Any]:
    """Return the policy of a unit whose parameters are of dtype ``own``, as its description has it."""
    wanted = MixedPrecision.parse(command.mp)
    compute = getattr(torch, DTYPES[wanted.param]) if wanted.param and own.is_floating_point else own
    reduce = getattr(torch, DTYPES[wanted.reduce]) if wanted.reduce else compute
    words = {"auto": not is_root, "true": True, "false": False}
    return {
        "reshard_after_forward": words.get(str(command.reshard_after_forward), command.reshard_after_forward),
        **{"compute_dtype": _name(compute), "compute_itemsize": compute.itemsize},
        **{"reduce_dtype": _name(reduce), "reduce_itemsize": reduce.itemsize},
        "offload": command.offload,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
