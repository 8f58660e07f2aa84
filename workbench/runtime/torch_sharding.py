"""Sharding with torch's own FSDP: the part of ``shard`` that is specific to ``--engine torch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

from workbench.engine.backends import backend_of
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.module_names import named_params
from workbench.engine.unsharding import remap_optimizer
from workbench.errors import UsageError
from workbench.events import TORCH_CLASSIC, TORCH_FULLY_SHARD, Unit
from workbench.protocol.commands import Shard
from workbench.protocol.policy import CLASSIC, STRATEGIES, TORCH, PrecisionNames
from workbench.runtime.classic_wrapping import dtype_of, warnings_in_plain_words

_RESHARD: dict[str | int, bool | None] = {"auto": None, "true": True, "false": False}

Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Chosen:
    """What a command shards.

    Attributes:
        model: the plain model.
        inner: modules in it that become units, innermost first.
        ignored: parameters that stay whole.
        mesh: the mesh over which it is sharded.
        kept: the policy's ``param_dtype_override_fn``.
    """

    model: nn.Module
    inner: tuple[nn.Module, ...]
    ignored: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    kept: Callable[[nn.Parameter], torch.dtype | None] | None = None

    @property
    def ignored_names(self) -> set[str]:
        """Names of the ignored parameters in the model, while it is plain."""
        left_out = {id(param) for param in self.ignored}
        return {name for name, param in named_params(self.model, repeats=True) if id(param) in left_out}


def engine_name(command: Shard) -> str:
    """Return the name in a trace of what runs the model that ``command`` shards; empty: the workbench's engine."""
    if command.engine != TORCH:
        return ""
    return TORCH_CLASSIC if command.api == CLASSIC else TORCH_FULLY_SHARD


def shard(
    command: Shard, chosen: Chosen, plan: Sequence[Unit], device: torch.device, optimizers: Optimizers
) -> nn.Module:
    """Return the sharded model: the same module, or with ``--api classic`` its wrapper. Optimizers continue with it.

    Args:
        command: how.
        chosen: what.
        plan: the units that the command makes.
        device: of this rank.
        optimizers: those of the model's parameters.

    Raises:
        UsageError: tensor parallelism splits the model, or torch's wrapper has no such option here.
        TypeError, ValueError, ...: torch refuses; the model is unchanged.
    """
    split = [name for name, param in chosen.model.named_parameters() if isinstance(param, DTensor)]
    if split:
        raise UsageError(
            f"{split[0]!r} of {command.model!r} is split by tensor parallelism, and the mesh of a command holds all "
            "ranks: call torch's fully_shard in a %%fsdp cell, with the mesh of the data-parallel dimension"
        )
    if chosen.kept is not None and not DTensorParam.reduces_in_grad_dtype:
        raise UsageError(
            f"--mp {command.mp}: fully_shard of torch {torch.__version__} has no dtypes of single parameters, that of "
            "2.15 has: leave out keep=, or --engine torch"
        )
    if command.api == CLASSIC and command.offload and backend_of(device).is_host:
        raise UsageError(
            "torch's FullyShardedDataParallel offloads only from an accelerator: leave out --offload, with which "
            "nothing would move here, or use --api fully_shard"
        )
    with _unchanged_on_error(chosen.model, optimizers):
        if command.api == CLASSIC:
            return _wrap(command, chosen, plan, device, optimizers)
        return _fully_shard(command, chosen, device, optimizers)


def _fully_shard(command: Shard, chosen: Chosen, device: torch.device, optimizers: Optimizers) -> nn.Module:
    model = chosen.model
    before = dict(model.named_parameters())
    dtypes = PrecisionNames.parse(command.mp)
    param, reduce, output = map(dtype_of, (dtypes.param, dtypes.reduce, dtypes.output))
    kept: Any = {} if chosen.kept is None else {"param_dtype_override_fn": chosen.kept}
    after_forward = command.reshard_after_forward
    for module in (*chosen.inner, model):
        fully_shard(
            module,
            mesh=chosen.mesh,
            reshard_after_forward=_RESHARD.get(after_forward, after_forward),  # type: ignore[arg-type]
            mp_policy=MixedPrecisionPolicy(param, reduce, output if module is model else None, **kept),
            # pages are pinned for an accelerator
            offload_policy=CPUOffloadPolicy(pin_memory=not backend_of(device).is_host)
            if command.offload
            else OffloadPolicy(),
            ignored_params=set(chosen.ignored),
        )
    mapping = {before[name]: param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        remap_optimizer(optimizer, mapping)
    if command.prefetch:
        _set_prefetch(model, command.prefetch)
    return model


def _set_prefetch(model: nn.Module, ahead: int) -> None:
    """Let each unit gather those that follow it in forward and in backward, ``ahead`` of them."""
    forward, backward = list(_in_order(model, backward=False)), list(_in_order(model, backward=True))
    for place, unit in enumerate(forward, start=1):
        unit.set_modules_to_forward_prefetch(forward[place : place + ahead])
    for place, unit in enumerate(backward, start=1):
        unit.set_modules_to_backward_prefetch(backward[place : place + ahead])


def _in_order(module: nn.Module, *, backward: bool) -> Iterator[FSDPModule]:
    """Yield the units of a model, outer before inner, otherwise in definition order, or for backward in reverse."""
    if isinstance(module, FSDPModule):
        yield module
    children = list(module.children())
    for child in reversed(children) if backward else children:
        yield from _in_order(child, backward=backward)


# ---- the classic wrapper


def _wrap(
    command: Shard, chosen: Chosen, plan: Sequence[Unit], device: torch.device, optimizers: Optimizers
) -> nn.Module:
    inner = frozenset(chosen.inner)
    dtypes = PrecisionNames.parse(command.mp)
    names: dict[torch.Tensor, str] = {param: name for name, param in named_params(chosen.model)}
    states = [_by_name(optimizer, names) for optimizer in optimizers]
    with warnings_in_plain_words():
        wrapper = FullyShardedDataParallel(
            chosen.model,
            auto_wrap_policy=CustomPolicy(lambda module: module in inner),
            device_mesh=chosen.mesh,
            device_id=device,
            sharding_strategy=ShardingStrategy[STRATEGIES[command.strategy or "full"]],
            mixed_precision=MixedPrecision(dtype_of(dtypes.param), dtype_of(dtypes.reduce)),
            cpu_offload=CPUOffload(offload_params=command.offload),
            forward_prefetch=bool(command.prefetch),
            use_orig_params=command.orig_params,
            ignored_states=list(chosen.ignored),
            # ranks may draw different numbers, and copies would stay different
            sync_module_states=any(param.is_meta for param in names),
        )
        for optimizer, state in zip(optimizers, states, strict=True):
            _rewrap(wrapper, plan, optimizer, state)
    return wrapper


@dataclass(frozen=True)
class _PlainOptimizer:
    """An optimizer of a plain model, by the names of parameters, as torch's functions for its wrapper take it.

    Attributes:
        state: whole state of each parameter that has some.
        groups: options of each group, with ``params``: names of its parameters.
    """

    state: dict[str, Any]
    groups: list[dict[str, Any]]


def _by_name(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> _PlainOptimizer:
    return _PlainOptimizer(
        {names[param]: state for param, state in optimizer.state.items() if param in names},
        [group | {"params": [names[p] for p in group["params"] if p in names]} for group in optimizer.param_groups],
    )


def _rewrap(
    wrapper: FullyShardedDataParallel, plan: Sequence[Unit], optimizer: torch.optim.Optimizer, plain: _PlainOptimizer
) -> None:
    """Give an optimizer the wrapper's parameters and its part of the state; collective if there is some."""
    now = dict(named_params(wrapper))
    flat_of = {part.fqn: now.get(flat.fqn) for unit in plan for flat in unit.params for part in flat.parts}
    for group, before in zip(optimizer.param_groups, plain.groups, strict=True):
        held = (now.get(name) if flat_of.get(name) is None else flat_of[name] for name in before["params"])
        group["params"] = list(dict.fromkeys(param for param in held if param is not None))
    optimizer.state.clear()
    if plain.state:
        whole = {"state": plain.state, "param_groups": plain.groups}
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(wrapper, optimizer, whole))


# ---- undoing


@contextmanager
def _unchanged_on_error(model: nn.Module, optimizers: Optimizers) -> Iterator[None]:
    """If the body raises, restore the modules, parameters and optimizers, which torch then leaves half changed."""
    modules = [
        (module, type(module), {name: (value, _copied(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    values = [(param, param.data) for param in model.parameters()]
    groups = [(group, list(group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
    states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for module, cls, attributes in modules:
            module.__class__ = cls
            vars(module).clear()
            for name, (value, content) in attributes.items():
                if isinstance(value, dict):  # the same object: handles of hooks refer to it
                    value.clear()
                    value.update(content)
                vars(module)[name] = value
        for param, data in values:
            param.data = data
        for group, params in groups:
            group["params"] = params
        for optimizer, state in states:
            optimizer.state.clear()
            optimizer.state.update(state)
        raise


def _copied(value: object) -> Any:  # noqa: ANN401 - a dict, or nothing
    return dict(value) if isinstance(value, dict) else None
