"""State of one wrapper: the hooks of ``fully_shard``, with the options of the FSDP1 API."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from workbench.engine._torch import is_in_backward
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    WrapperTrainingState,
)
from workbench.engine.fsdp_state import FSDPState, state_of
from workbench.engine.managed_params import _get_managed_modules
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.module_names import WRAPPED
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.policies import MixedPrecisionPolicy

KEEPS_AFTER_FORWARD = frozenset({ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2})


class WrapperState(FSDPState):
    """State of one wrapper and its unit.

    Attributes:
        wrapper: the wrapper module.
        strategy: the sharding strategy.
        precision: dtypes of parameters, reductions, buffers and inputs.
        mesh: the ranks of the wrapper.
        cpu_offload: whether its shards are on the CPU.
        when_to_prefetch: when backward prefetches the next wrapper's parameters; None: never.
        limit_all_gathers: the value that was given; it has no effect.
        is_summoned: whether the wrapper is within ``summon_full_params``.
        is_loading: whether temporary parameters are on the modules, into which a state dict is loaded.
        was_kept: whether this rank got the last state dict made.
        settings: state dict settings; see :func:`workbench.engine.classic.state_dict_settings.settings_of`.
        original_buffer_dtypes: original dtypes of the wrapper's own buffers that were cast, by module and name.
    """

    made_by = "FullyShardedDataParallel"
    undone_by = "workbench.engine.classic.unwrap"
    joined_by = "wrap a module that contains both, and no module inside it that contains only one"
    reduced_by = "run a backward outside no_sync()"

    def __init__(  # noqa: PLR0913 - keywords, each an argument of the wrapper
        self,
        wrapper: nn.Module,
        unit: FSDPParamGroup | None,
        *,
        mesh: FSDPMeshInfo,
        strategy: ShardingStrategy,
        precision: MixedPrecision,
        cpu_offload: CPUOffload,
        backward_prefetch: BackwardPrefetch | None,
        forward_prefetch: bool,
        limit_all_gathers: bool,
    ) -> None:
        self.wrapper = wrapper
        self.strategy = strategy
        self.precision = precision
        self.mesh = mesh.mesh
        self.is_summoned = False
        self.is_loading = False
        self.was_kept = True
        self.settings = StateDictSettings.of(StateDictType.FULL_STATE_DICT)
        self.original_buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._of_training = MixedPrecisionPolicy(precision.param_dtype, precision.reduce_dtype)
        self._full_precision_in_eval = os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1"
        self.cpu_offload, self.limit_all_gathers = cpu_offload, limit_all_gathers
        self._ahead: tuple[FSDPState, ...] = ()
        super().__init__(
            (wrapper,),
            [] if unit is None else [unit],
            device=mesh.device,
            auto_reshard=strategy not in KEEPS_AFTER_FORWARD,
            mp_policy=self._of_training,
        )
        self.forward_prefetch = None if forward_prefetch else ()
        self.when_to_prefetch = backward_prefetch

    @property
    def wrapped(self) -> nn.Module:
        """The wrapped module."""
        return self.wrapper.get_submodule(WRAPPED)

    @property
    def when_to_prefetch(self) -> BackwardPrefetch | None:
        """When backward prefetches the next wrapper's parameters; None: never, they are gathered when needed."""
        return self._when_to_prefetch

    @when_to_prefetch.setter
    def when_to_prefetch(self, when: BackwardPrefetch | None) -> None:
        """Set it, from the next backward on."""
        self._when_to_prefetch = when
        self.backward_prefetch = () if when is None else None

    @property
    def doing(self) -> WrapperTrainingState:
        """The wrapper's current activity."""
        if self.is_summoned:
            return WrapperTrainingState.SUMMON_FULL_PARAMS
        idle = self.training_state is TrainingState.IDLE
        return WrapperTrainingState.IDLE if idle else WrapperTrainingState.FORWARD_BACKWARD

    @property
    def unit(self) -> FSDPParamGroup | None:
        """The wrapper's unit; None if all its parameters are in wrappers below it, or ignored."""
        return self.units[0] if self.units else None

    @property
    def flat(self) -> FlatParam | None:
        """The flat parameter."""
        return None if self.unit is None else flat_of(self.unit)

    def _state_dict_hooks(self) -> list[RemovableHandle]:
        """Return no hooks: a wrapper saves and loads state dicts in its own way."""
        return []

    # ---- precision

    @property
    def is_full_precision(self) -> bool:
        """True while the module is in eval mode, if ``FSDP_USE_FULL_PREC_IN_EVAL=1`` was set when it was wrapped."""
        return self._full_precision_in_eval and not self.wrapped.training

    def _begin_forward(self) -> Iterable[FSDPState]:
        if self._full_precision_in_eval and self._is_outermost and not is_in_backward():
            for state in self.root_ctx.states:
                if isinstance(state, WrapperState):
                    state.match_mode()
        return super()._begin_forward()

    def match_mode(self) -> None:
        """Set the dtypes of the unit and buffers for the module's current mode, train or eval."""
        wanted = MixedPrecisionPolicy() if self.is_full_precision else self._of_training
        if self.mp_policy == wanted:
            return
        self.mp_policy = wanted
        for unit in self.units:
            unit.reshard()  # a forward without a backward may have left it unsharded
            unit.change_policy(replace(unit.policy, mp_policy=wanted, reshard_after_forward=unit.reshard_after_forward))
        if self.is_full_precision:
            self.restore_buffers()
        else:
            self.has_root()

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs of forward are cast to; None: no cast."""
        precision = self.precision
        casts = precision.cast_forward_inputs and self.unit is not None
        casts = casts or (bool(self.is_root) and precision.cast_root_forward_inputs)
        return precision.param_dtype if casts and not self.is_full_precision else None

    def has_root(self) -> None:
        """Cast the wrapper's own buffers to the dtype that forward uses; called once the root is known."""
        dtype = self.precision.buffer_dtype
        if dtype is None or self.is_full_precision:
            return
        for module, name, buffer in own_buffers(self.wrapper):
            if buffer.is_floating_point() and buffer.dtype != dtype:
                self.original_buffer_dtypes.setdefault((module, name), buffer.dtype)
                module._buffers[name] = buffer.to(dtype)

    def restore_buffers(self) -> None:
        """Cast buffers back to the dtype that they had before the first forward."""
        for (module, name), dtype in self.original_buffer_dtypes.items():
            module._buffers[name] = module.get_buffer(name).to(dtype)
        self.original_buffer_dtypes.clear()

    # ---- within summon_full_params

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """As for any call; within summon_full_params, only move the arguments to the device."""
        if not self.is_summoned:
            return super().pre_forward(module, args, kwargs)
        if torch.is_grad_enabled() and self.unit is not None and self.unit.is_trained:
            raise RuntimeError(
                "a forward within summon_full_params cannot train, because its gradients would reach no shard; run "
                "it under torch.no_grad(), or outside summon_full_params"
            )
        return self._on_device(args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ANN401 - hook signature
        """As for any call; within summon_full_params, do nothing."""
        return output if self.is_summoned else super().post_forward(module, args, output)

    # ---- order

    def _backward_begins(self, ahead: Iterable[FSDPState]) -> None:
        if self.when_to_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._ahead = tuple(ahead)
        else:
            super()._backward_begins(ahead)

    def after_post_backward(self) -> None:
        """With BACKWARD_POST, prefetch the next unit."""
        ahead, self._ahead = self._ahead, ()
        super()._backward_begins(ahead)


def flat_of(unit: FSDPParamGroup) -> FlatParam:
    """Return the flat parameter of a wrapper's unit.

    Raises:
        TypeError: ``fully_shard`` made the unit.
    """
    (param,) = unit.fsdp_params
    if not isinstance(param, FlatParam):
        raise TypeError(f"unit {unit.name!r} was made by fully_shard and has no flat parameter")
    return param


def wrapper_states_below(module: nn.Module) -> list[WrapperState]:
    """Return the state of every wrapper in the tree of ``module``, parents first."""
    found = (state_of(m) for m in module.modules())
    return [state for state in found if isinstance(state, WrapperState)]


def is_first(state: WrapperState) -> bool:
    """Return whether this rank is the first of its wrapper's mesh; tensor parallelism makes several such meshes."""
    return dist.get_rank() == int(state.mesh.mesh.flatten()[0])


def check_idle(states: Iterable[WrapperState], what: str) -> None:
    """Check that none of ``states`` is within an iteration.

    Raises:
        RuntimeError: one is; the message names the operation ``what``.
    """
    busy = next((state for state in states if state.training_state is not TrainingState.IDLE), None)
    if busy is not None:
        raise RuntimeError(
            f"{what}: the forward or backward of {type(busy.wrapped).__name__} is running or has raised; call it "
            "between iterations, and after an exception call reset_iter_state() on the outermost wrapper first"
        )


def own_buffers(wrapper: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield (module, name, buffer) for the buffers in ``wrapper`` that are in no wrapper below it."""
    for _, module in _get_managed_modules(list(wrapper.children())):
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield module, name, buffer
