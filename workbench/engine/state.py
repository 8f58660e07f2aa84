"""The hooks of one ``fully_shard`` call, and what a whole model's calls share.

A step, as the hooks of one unit see it::

    forward pre-hook   unshard, wait                    forward hook    reshard (policy), hook the outputs
    output grad hook   unshard, wait, prefetch next     post-backward   take grads, reshard, start the reduction
    end of backward    (root) post-backward of the rest, wait for the last reduction
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.hooks import RemovableHandle

from workbench.engine import probe
from workbench.engine._torch import queue_backward_final_callback
from workbench.engine.param_group import (
    FSDPCommContext,
    FSDPParamGroup,
    RegisterPostBackwardFunction,
    TrainingState,
)
from workbench.engine.probe import Phase
from workbench.engine.signature import check_same_units

roots: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""Every root that has run; recovery after a failure resets them."""


class FSDPState:
    """State behind the modules of one ``fully_shard`` call.

    Attributes:
        modules: the modules given to that call.
        original_classes: their classes before it.
        auto_reshard: no policy was given: reshard after forward unless this is the root.
    """

    def __init__(self, modules: tuple[nn.Module, ...], group: FSDPParamGroup | None, *, auto_reshard: bool) -> None:
        self.modules = modules
        self.original_classes = tuple(type(m) for m in modules)
        self.auto_reshard = auto_reshard
        self._fsdp_param_group = group
        self._comm_ctx = FSDPCommContext(end_of_backward=self._end_of_backward)
        self._is_root: bool | None = None
        self._states: tuple[FSDPState, ...] = ()
        self._not_yet_run: set[int] = set()
        self._training_state = TrainingState.IDLE
        self._handles = self._register_hooks()

    # ---- hooks on and off

    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._post_forward, prepend=False))
            handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            handles.append(module.register_load_state_dict_post_hook(self._after_load))
        return handles

    def remove_hooks(self) -> None:
        """Take every hook off the modules."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def plain_modules(self) -> Iterator[None]:
        """Within the body the modules have neither hooks nor the mixed-in class, parameters sharded."""
        if self._fsdp_param_group is not None:
            self._fsdp_param_group.reshard()
        self.remove_hooks()
        classes = [type(m) for m in self.modules]
        for module, original in zip(self.modules, self.original_classes, strict=True):
            module.__class__ = original
        try:
            yield
        finally:
            for module, cls in zip(self.modules, classes, strict=True):
                module.__class__ = cls
            self._handles = self._register_hooks()

    def _before_state_dict(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        if self._fsdp_param_group is not None:
            self._fsdp_param_group.reshard()

    def _after_load(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        if self._fsdp_param_group is not None:
            self._fsdp_param_group.adopt_registered()

    # ---- root

    def _lazy_init(self) -> None:
        """Make this state the root of the tree below it, on the first forward.

        Raises:
            RuntimeError: a module below ran before this root did.
            RanksDisagreeError: ranks hold different units.
        """
        root_module = self.modules[0]
        names = {module: name for name, module in root_module.named_modules()}
        states = tuple({id(s): s for m in names if (s := state_of(m)) is not None}.values())
        early = [s for s in states if s is not self and s._is_root is not None]
        if early:
            raise RuntimeError(
                f"module {names[early[0].modules[0]]!r} ran before its FSDP root {type(root_module).__name__}; "
                "run the root first, or give the modules one root by calling fully_shard on their common parent"
            )
        self._is_root, self._states = True, states
        self._name_units(names)
        self._check_ranks_agree()
        for state in states:
            state._is_root = state is self
            state._comm_ctx = self._comm_ctx
        roots.add(self)

    def _name_units(self, names: dict[nn.Module, str]) -> None:
        """Give units and parameters their names relative to the root, and settle the root's policy."""
        own = self._fsdp_param_group
        if own is not None and self.auto_reshard:
            own.reshard_after_forward = False
        root_index = own.index if own is not None else -1
        for state in self._states:
            unit = state._fsdp_param_group
            if unit is None:
                continue
            unit.adopt_registered()
            unit.name = ", ".join(names[m] for m in state.modules)
            unit.root_index = root_index
            unit.comm_ctx = self._comm_ctx
            for param in unit.fsdp_params:
                prefix = names[param.info.module]
                param.fqn = f"{prefix}.{param.info.name}" if prefix else param.info.name
            unit.announce()

    def _check_ranks_agree(self) -> None:
        units = self._units()
        meta = [p.fqn for u in units for p in u.fsdp_params if p.sharded_param.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters still on the meta device: {', '.join(meta)}; call module.to_empty(device=...) and "
                "initialise them, or load a state dict with assign=True, before the first forward"
            )
        group = units[0].mesh_info.group if units else None
        if group is not None:
            check_same_units([u.describe() for u in units], group, units[0].flat_shard.device)

    def _units(self) -> list[FSDPParamGroup]:
        return [s._fsdp_param_group for s in self._states if s._fsdp_param_group is not None]

    # ---- forward

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._training_state is TrainingState.PRE_BACKWARD:
            return args, kwargs  # activation checkpointing recomputes the forward within backward
        if self._is_root is None:
            self._lazy_init()
        if self._training_state is not TrainingState.FORWARD or id(module) not in self._not_yet_run:
            self._training_state = TrainingState.FORWARD
            self._not_yet_run = {id(m) for m in self.modules}
            if self._fsdp_param_group is not None:
                self._fsdp_param_group.pre_forward()
        self._not_yet_run.discard(id(module))
        return self._hook_inputs(args, kwargs)

    def _hook_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Let the unit know when the gradients of its inputs are done."""
        unit = self._fsdp_param_group
        if unit is None or not torch.is_grad_enabled():
            return args, kwargs
        leaves, spec = tree_flatten((args, kwargs))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if where:
            hooked = RegisterPostBackwardFunction.apply(unit, *(leaves[i] for i in where))  # type: ignore[no-untyped-call]
            for i, tensor in zip(where, hooked, strict=True):
                leaves[i] = tensor
            args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs

    def _post_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401 - hook signature
        if self._training_state is TrainingState.PRE_BACKWARD:
            return output
        output = tree_map_only(torch.Tensor, self._hook_output, output)
        if self._not_yet_run:
            return output  # another module of the same unit has yet to run
        if self._fsdp_param_group is not None:
            self._fsdp_param_group.post_forward(reshard=self._reshards_now())
        self._training_state = TrainingState.IDLE
        if self._is_root:
            probe.phase(Phase.IDLE)
        return output

    def _reshards_now(self) -> bool:
        unit = self._fsdp_param_group
        if unit is None:
            return False
        # a root is kept for the backward that follows; without autograd none does, and no one would free it
        return unit.reshard_after_forward or (self.auto_reshard and not torch.is_grad_enabled())

    def _hook_output(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._pre_backward)
        return tensor

    # ---- backward

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if not self._comm_ctx.final_callback_queued:
            self._comm_ctx.final_callback_queued = True
            queue_backward_final_callback(self._comm_ctx.end_of_backward)
        self._training_state = TrainingState.PRE_BACKWARD
        unit = self._fsdp_param_group
        if unit is not None and unit.training_state is not TrainingState.PRE_BACKWARD:
            unit.pre_backward()  # once for several outputs of the same forward
        return grad

    def _end_of_backward(self) -> None:
        """Finish every unit of the tree: some have no hooked input, some did not take part."""
        self._comm_ctx.final_callback_queued = False
        for state in self._states:
            state._training_state = TrainingState.IDLE
        for unit in reversed(self._units()):
            if unit.training_state is TrainingState.PRE_BACKWARD:
                unit.post_backward()
            unit.finalize_backward()
        if self._comm_ctx.reducing is not None:
            self._comm_ctx.reducing.finish_reduce()
        self._comm_ctx.post_forward_order.clear()
        probe.phase(Phase.IDLE)

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward (root only)."""
        for unit in self._units():
            unit.reset_iter_state()
        for state in self._states:
            state._training_state = TrainingState.IDLE
        self._comm_ctx.post_forward_order.clear()
        self._comm_ctx.reducing = None
        self._comm_ctx.final_callback_queued = False
        probe.phase(Phase.IDLE)


_ATTRIBUTE = "_workbench_fsdp_state"


def attach(module: nn.Module, state: FSDPState) -> None:
    """Remember ``state`` on ``module``."""
    object.__setattr__(module, _ATTRIBUTE, state)


def detach(module: nn.Module) -> None:
    """Forget it."""
    object.__delattr__(module, _ATTRIBUTE)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the ``fully_shard`` call that ``module`` itself was given to."""
    state: FSDPState | None = getattr(module, _ATTRIBUTE, None)
    return state


def for_each_unit(module: nn.Module, visit: Callable[[FSDPParamGroup], None]) -> None:
    """Call ``visit`` on every unit in ``module``'s tree, each once."""
    seen: set[int] = set()
    for submodule in module.modules():
        state = state_of(submodule)
        if state is not None and id(state) not in seen and state._fsdp_param_group is not None:
            visit(state._fsdp_param_group)
            seen.add(id(state))
