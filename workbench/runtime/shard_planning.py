"""Description of a rank's models, and of the result of a ``shard`` or ``reshard``, for the control channel.

Nothing here changes a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from workbench.engine import MixedPrecisionPolicy
from workbench.engine.classic.flat_places import FLAT_PARAM
from workbench.engine.classic.unwrapping import check_in_one_group
from workbench.engine.classic.wrapper import check_params
from workbench.engine.classic.wrapper_state import KEEPS_AFTER_FORWARD
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.fsdp_state import states_below, units_of
from workbench.engine.full_param import local_tensor
from workbench.engine.managed_params import _get_managed_modules, _get_param_module_infos
from workbench.engine.module_names import Names, full_name, names_below
from workbench.engine.param import FSDPParam, ParamModuleInfo
from workbench.engine.reshard import origins
from workbench.engine.shard_layout import ShardLayout
from workbench.errors import UsageError
from workbench.events import FlatPart, Param, Unit
from workbench.models.engines import OF_COMMANDS, class_name
from workbench.models.sharded_model import ShardedModel
from workbench.protocol.commands import Reshard, Shard
from workbench.protocol.policy import CLASSIC, STRATEGIES, TORCH, WORKBENCH, PrecisionNames
from workbench.protocol.rank_messages import ModelInfo, WrapClass
from workbench.runtime import sharding
from workbench.runtime.model_summary import sizes_of
from workbench.runtime.namespace import find_module, module_names, optimizers_of

ModelsIn = Callable[[nn.Module], Sequence[ShardedModel]]
"""Returns a model as the engines that run parts of it see them."""


def models(models_in: ModelsIn, never_cleared: Callable[[nn.Module], tuple[str, ...]]) -> tuple[ModelInfo, ...]:
    """Return the models among the cells' variables, by name; none while a cell is building one."""
    try:
        found = [(name, find_module(name)) for name in module_names()]
        return tuple(replace(_model(name, each, models_in), never_cleared=never_cleared(each)) for name, each in found)
    except (RuntimeError, UsageError):  # a cell is building or dropping one at this moment
        return ()


def _model(name: str, model: nn.Module, models_in: ModelsIn) -> ModelInfo:
    engines = models_in(model)
    sizes = sizes_of(model, (each for each in engines if each.engine.is_flat))
    offered = sharding.possible_units(model, sizes)
    counts = Counter(own for own, _ in offered)
    elements = {own: sum(n for other, n in offered if other == own) for own in counts}
    ordered = sorted(counts, key=lambda own: (-elements[own], own))
    return ModelInfo(
        name=name,
        class_name=class_name(model),
        is_sharded=bool(states_below(model)),
        num_params=len(sizes),
        num_elements=sum(size.numel for size in sizes),
        num_bytes=sum(size.num_bytes for size in sizes),
        classes=tuple(WrapClass(name=own, count=counts[own], num_elements=elements[own]) for own in ordered),
        suggested=tuple(sorted(sharding.repeated_class(model))),
        policy=sharding.policy_of(model),
        units=tuple(unit.index for each in engines for unit in each.units),
        has_optimizer=bool(optimizers_of(model)),
    )


def plan(command: Shard | Reshard, world_size: int) -> tuple[Unit, ...]:
    """Return the units that ``command`` would make on ``world_size`` ranks; their indices are only provisional.

    Raises:
        UsageError, ValueError, NotImplementedError: the command is not possible.
    """
    return _of_shard(command, world_size) if isinstance(command, Shard) else _of_reshard(command, world_size)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Part:
    """A parameter that would be in a unit.

    Attributes:
        info: where it is registered while it is whole.
        param: its description, on one rank.
        held: the parameter that optimizers hold for it now: itself, or a flat one.
    """

    info: ParamModuleInfo
    param: Param
    held: nn.Parameter


class _Placed(Protocol):
    """Something with a place on modules."""

    @property
    def info(self) -> ParamModuleInfo:
        """Where it is registered while it is whole."""


_P = TypeVar("_P", bound=_Placed)


def _of_shard(command: Shard, world_size: int) -> tuple[Unit, ...]:
    model, inner, ignored = sharding.chosen(command, world_size)
    names = names_below((model,))
    left_out = frozenset(id(param) for param in ignored)
    taken: set[int] = set()
    found: list[tuple[nn.Module, list[_Part]]] = []
    for module in [*inner, model]:
        managed = _get_managed_modules([module], is_taken=lambda child: child in inner)
        infos = _get_param_module_infos(managed, left_out)
        parts = [_Part(info=info, param=_param(_name_of(info, names), param), held=param) for param, info in infos]
        _check_not_tied([part.param.fqn for part in parts if id(part.held) in taken], names[module] or command.model)
        taken |= {id(part.held) for part in parts}
        found.append((module, parts))
    return _made(command, world_size, model, found)


def _of_reshard(command: Reshard, world_size: int) -> tuple[Unit, ...]:
    model, inner, only = sharding.chosen_again(command)
    states, names = states_below(model), names_below((model,))
    managed = [param for unit in units_of(states) for param in unit.params_as_defined]
    if only is None and sharding.is_anew(command, model):
        parts = [part for param in managed for part in _parts_of(param, names)]
        regrouped = _regrouped(command, model, inner or sharding.units_now(model), parts)
        ranks = world_size if sharding.mesh_beside_tp(model) is None else sharding.num_ranks(model)
        return _made(sharding.anew(command, model), ranks, model, regrouped)
    if not inner:
        found = [
            (unit, state, state.modules[0], unit.params_as_defined) for state in states for unit in units_of([state])
        ]
    else:
        above, some = origins(model, states[0]), units_of(states)[:1]
        found = [
            (unit, above[module], module, params)
            for module, params in _regrouped(command, model, inner, managed)
            for unit in (units_of([above[module]]) or some)[:1]
        ]
    return tuple(
        _changed(
            command if only in {None, state} else Reshard(model=command.model),
            replace(unit.describe(), index=index, name=names[module], params=_described(params, names)),
            state.mp_policy,
            is_auto=state.auto_reshard,
            is_root=module is model,
        )
        for index, (unit, state, module, params) in enumerate(found)
    )


def _regrouped(
    command: Reshard, model: nn.Module, inner: Sequence[nn.Module], managed: Iterable[_P]
) -> list[tuple[nn.Module, list[_P]]]:
    """Return the parameters that each module would manage; modules without any are left out."""
    names = names_below((model,))
    at: dict[nn.Module, list[_P]] = {}
    for param in managed:
        for owner, _ in param.info.places:
            at.setdefault(owner, []).append(param)
    taken: set[_P] = set()
    found: list[tuple[nn.Module, list[_P]]] = []
    for module in [*inner, model]:
        owners = _get_managed_modules([module], is_taken=lambda child: child in inner)
        params = list(dict.fromkeys(param for _, owner in owners for param in at.get(owner, ())))
        _check_not_tied([_name_of(p.info, names) for p in params if p in taken], names[module] or command.model)
        taken.update(params)
        if params:
            found.append((module, params))
    return found


def _parts_of(managed: FSDPParam, names: Names) -> list[_Part]:
    """Return the plain parameters of a managed one: several if it is flat."""
    known, owned = managed.describe(), managed.owned
    alone = replace(known, parts=(), use_orig_params=False)
    plain = [replace(alone, shape=part.shape, global_shape=part.global_shape) for part in known.parts] or [alone]
    held = owned if len(owned) == len(plain) else [*owned] * len(plain)
    return [
        _Part(info=info, param=replace(param, fqn=_name_of(info, names), shard_dim=0, trainable=trains), held=holder)
        for info, param, trains, holder in zip(managed.infos, plain, managed.trains, held, strict=True)
    ]


def _made(
    command: Shard, world_size: int, model: nn.Module, grouped: Iterable[tuple[nn.Module, Sequence[_Part]]]
) -> tuple[Unit, ...]:
    """Return the units that ``command`` makes from the modules that become units and their plain parameters.

    Raises:
        ValueError: parameters cannot form one flat parameter, or an optimizer cannot continue with it.
    """
    names = names_below((model,))
    copies, size = _ranks(command, world_size)
    units: list[Unit] = []
    flats: list[list[tuple[str, nn.Parameter]]] = []
    for module, parts, keeps in _by_precision(command, grouped):
        name = names[module]
        params = [replace(part.param, **_rows(torch.Size(part.param.shape), 0, size)) for part in parts]
        if command.api == CLASSIC:
            flats.append([(part.param.fqn.removeprefix(f"{name}."), part.held) for part in parts])
            check_params(flats[-1], use_orig_params=command.orig_params)
            flat = full_name(names, module, FLAT_PARAM)
            params = [_flat(flat, params, size, use_orig_params=command.orig_params)]
        policy = _policy(command, getattr(torch, params[0].dtype), is_root=module is model, keeps_dtype=keeps)
        units.append(
            Unit(
                index=len(units),
                name=name,
                root=-1,
                params=tuple(params),
                shard_size=size,
                replicate_size=copies,
                engine=OF_COMMANDS[command.api].engine.name if command.engine == TORCH else "",
                **policy,
            )
        )
    for optimizer in () if command.orig_params else optimizers_of(model):
        for named in reversed(flats):  # the outermost first, as the engine requires
            check_in_one_group(named, optimizer)
    return tuple(units)


def _by_precision(
    command: Shard, grouped: Iterable[tuple[nn.Module, Sequence[_Part]]]
) -> Iterator[tuple[nn.Module, Sequence[_Part], bool]]:
    """Yield each unit's module, its parameters, at least one, and whether they keep their dtype."""
    globs = PrecisionNames.parse(command.mp).kept if command.engine == WORKBENCH else []
    for module, parts in grouped:
        for keeps in (False, True):
            own = [part for part in parts if any(fnmatch(part.param.fqn, glob) for glob in globs) == keeps]
            if own:
                yield module, own, keeps


def _ranks(command: Shard, world_size: int) -> tuple[int, int]:
    """Return the number of copies, and of ranks that share one."""
    if command.strategy == "none":
        return world_size, 1
    copies, size = (1, *(command.mesh_shape or (world_size,)))[-2:]
    return copies, size


def _flat(fqn: str, params: Sequence[Param], size: int, *, use_orig_params: bool) -> Param:
    """Return the flat parameter that contains ``params``."""
    firsts = accumulate((math.prod(param.shape) for param in params), initial=0)
    parts = tuple(
        FlatPart(fqn=p.fqn, shape=p.shape, global_shape=p.global_shape, first=first, trainable=p.trainable)
        for p, first in zip(params, firsts, strict=False)
    )
    shape = torch.Size([parts[-1].first + parts[-1].numel])
    whole = (sum(math.prod(part.global_shape) for part in parts),)
    flat = replace(params[0], fqn=fqn, shape=tuple(shape), global_shape=whole, **_rows(shape, 0, size))
    trainable = any(param.trainable for param in params)
    return replace(flat, trainable=trainable, parts=parts, use_orig_params=use_orig_params)


def _check_not_tied(tied: Sequence[str], unit: str) -> None:
    if tied:
        raise UsageError(f"parameter {tied[0]!r} of {unit!r} is tied to a parameter of another unit")


def _described(params: Iterable[FSDPParam], names: Names) -> tuple[Param, ...]:
    """Describe parameters by their names from the root, which the parameters know only once the root is known."""
    return tuple(replace(param.describe(), fqn=_name_of(param.info, names)) for param in params)


def _name_of(info: ParamModuleInfo, names: Names) -> str:
    return full_name(names, info.module, info.name)


def _changed(command: Reshard, unit: Unit, now: MixedPrecisionPolicy, *, is_auto: bool, is_root: bool) -> Unit:
    """Return ``unit``, of the precision ``now``, with the options of ``command`` applied."""
    copies, size = (1, *command.mesh_shape)[-2:] if command.mesh_shape else (unit.replicate_size, unit.shard_size)
    after_forward = command.reshard_after_forward or ("auto" if is_auto else unit.reshard_after_forward)
    policy: dict[str, Any] = {"reshard_after_forward": _after_forward(after_forward, is_root=is_root)}
    if command.mp:
        in_own = DTensorParam.reduces_in_grad_dtype and not unit.params[0].parts
        wanted = sharding.changed_precision(now, command.mp)
        policy |= _precision(wanted, getattr(torch, unit.params[0].dtype), in_own=in_own)
    if command.offload is not None:
        policy["offload"] = command.offload
    params = tuple(replace(param, **_rows(torch.Size(param.shape), param.shard_dim, size)) for param in unit.params)
    return replace(unit, params=params, root=-1, comm="", shard_size=size, replicate_size=copies, **policy)


def _param(fqn: str, param: nn.Parameter) -> Param:
    """Describe a plain parameter, on one rank."""
    shape = local_tensor(param).shape
    return Param(
        fqn=fqn,
        shape=tuple(shape),
        global_shape=tuple(param.shape),
        dtype=_name(param.dtype),
        itemsize=param.itemsize,
        shard_dim=0,
        **_rows(shape, 0, 1),
        trainable=param.requires_grad,
    )


def _rows(shape: torch.Size, dim: int, size: int) -> dict[str, Any]:
    """Return the distribution of a parameter's rows over ``size`` ranks, as fields of its description."""
    layout = ShardLayout(shape, dim, size)
    bounds = [layout.rows_of(rank) for rank in range(size)]
    return {"rows_per_rank": tuple(last - first for first, last in bounds), "padded_rows": layout.padded_rows}


def _policy(command: Shard, own: torch.dtype, *, is_root: bool, keeps_dtype: bool) -> dict[str, Any]:
    """Return the policy of a unit whose parameters have dtype ``own``, as fields of its description."""
    keeps = STRATEGIES.get(command.strategy, "") in {strategy.name for strategy in KEEPS_AFTER_FORWARD}
    precision = sharding.changed_precision(MixedPrecisionPolicy(), command.mp)
    if keeps_dtype:
        precision = replace(precision, param_dtype=None)
    in_own = DTensorParam.reduces_in_grad_dtype and command.api != CLASSIC
    after_forward = _after_forward("false" if keeps else command.reshard_after_forward, is_root=is_root)
    dtypes = _precision(precision, own, in_own=in_own)
    return {"reshard_after_forward": after_forward, "offload": command.offload, **dtypes}


def _after_forward(policy: str | int, *, is_root: bool) -> bool | int:
    words = {"auto": not is_root, "true": True, "false": False}
    return words[policy] if isinstance(policy, str) else policy


def _precision(wanted: MixedPrecisionPolicy, own: torch.dtype, *, in_own: bool) -> dict[str, Any]:
    """Return the dtypes of a unit; ``in_own``: without ``reduce_dtype`` it reduces in the parameters' own."""
    compute = wanted.param_dtype if wanted.param_dtype is not None and own.is_floating_point else own
    reduce = wanted.reduce_dtype or (own if in_own else compute)
    return {
        **{"compute_dtype": _name(compute), "compute_itemsize": compute.itemsize},
        **{"reduce_dtype": _name(reduce), "reduce_itemsize": reduce.itemsize},
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
