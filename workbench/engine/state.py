"""The hooks of one ``fully_shard`` call, and what a whole model's calls share.

A step, as the hooks of one unit see it::

    forward pre-hook   unshard, wait                    forward hook    reshard (policy), hook the outputs
    output grad hook   unshard, wait, prefetch next     post-backward   take grads, reshard, start the reduction
    end of backward    (root) post-backward of the rest, wait for the last reduction
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from workbench.engine import probe
from workbench.engine._torch import queue_backward_final_callback
from workbench.engine.param_group import (
    FSDPCommContext,
    FSDPParamGroup,
    TrainingState,
)
from workbench.engine.probe import Phase
from workbench.engine.signature import check_same_units

roots: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""Every root that has run; recovery after a failure resets them."""


def _give_up_outdated(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401 - hook signature
    """After an optimizer's step: full parameters from before it are no longer what their shards say."""
    stepped: set[int] = set()
    for unit in (unit for root in roots for unit in root._units() if unit.is_unsharded):
        stepped = stepped or {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p.sharded_param) in stepped for p in unit.fsdp_params):
            unit.reshard()


register_optimizer_step_post_hook(_give_up_outdated)


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
        self._backward_follows = False
        self._training_state = TrainingState.IDLE
        self._handles = self._register_hooks()

    # ---- hooks on and off

    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._post_forward, prepend=False))
            handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            handles.append(module.register_load_state_dict_pre_hook(self._before_state_dict))
            handles.append(module.register_load_state_dict_post_hook(self._after_load))
        return handles

    def remove_hooks(self) -> None:
        """Take every hook off the modules."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def plain_modules(self) -> Iterator[None]:
        """Within the body the modules have neither hooks nor the mixed-in class; call it while they are sharded."""
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
        names = self._names_below()
        states = tuple({id(s): s for m in names if (s := state_of(m)) is not None}.values())
        self._check_tree(states, names)
        self._name_units(states, names)
        _check_ranks_agree(units_of(states))
        self._is_root, self._states = True, states
        for state in states:
            state._is_root = state is self
            state._comm_ctx = self._comm_ctx
        roots.add(self)

    def _names_below(self) -> dict[nn.Module, str]:
        """Return the name of every module in the tree; the modules of a list are numbered, as a ModuleList's are."""
        if len(self.modules) == 1:
            return {module: name for name, module in self.modules[0].named_modules()}
        return {m: name for i, root in enumerate(self.modules) for name, m in root.named_modules(prefix=str(i))}

    def _check_tree(self, states: tuple[FSDPState, ...], names: dict[nn.Module, str]) -> None:
        root = type(self.modules[0]).__name__
        early = [s for s in states if s is not self and s._is_root is not None]
        if early:
            raise RuntimeError(
                f"module {names[_first_known(early[0].modules, names)]!r} ran before its FSDP root {root}; "
                "run the root first, or give the modules one root by calling fully_shard on their common parent"
            )
        held = [(m, p.fqn) for u in units_of(states) for p in u.fsdp_params for m, _ in p.info.places]
        lost = {fqn: type(m).__name__ for m, fqn in held if m not in names}
        if lost:
            fqn, module = next(iter(lost.items()))
            raise RuntimeError(
                f"parameter {fqn!r} belongs to a unit of the FSDP root {root}, but the {module} that held it is not "
                "below that root: call fully_shard after the last change of the model's modules, and on a parent of "
                "all modules of a list"
            )

    def _name_units(self, states: tuple[FSDPState, ...], names: dict[nn.Module, str]) -> None:
        """Give units and parameters their names relative to the root, and settle the root's policy."""
        own = self._fsdp_param_group
        if own is not None and self.auto_reshard:
            own.reshard_after_forward = False
        root_index = own.index if own is not None else -1
        for state in states:
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

    def overlaps(self, states: Iterable[FSDPState]) -> bool:
        """Tell whether one of ``states`` belongs to this root."""
        return any(state in self._states for state in states)

    def _units(self) -> list[FSDPParamGroup]:
        return units_of(self._states)

    # ---- forward

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._training_state is TrainingState.PRE_BACKWARD:
            return args, kwargs  # activation checkpointing recomputes the forward within backward
        if self._is_root is None:
            self._lazy_init()
        is_first = self._training_state is not TrainingState.FORWARD or id(module) not in self._not_yet_run
        if is_first:
            if self._fsdp_param_group is not None:
                self._fsdp_param_group.pre_forward()
            self._training_state = TrainingState.FORWARD
            self._not_yet_run = {id(m) for m in self.modules}
            self._backward_follows = False
        self._not_yet_run.discard(id(module))
        # autograd reaches the inputs of the first module last, when all gradients of the unit are there
        return self._hook_inputs(args, kwargs) if is_first else (args, kwargs)

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
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            self._hook_output(tensor)
        if self._not_yet_run:
            return output  # another module of the same unit has yet to run
        if self._is_root:
            for state in self._states:
                if state._not_yet_run:
                    state._end_forward()  # some module of its list did not run
        self._end_forward()
        if self._is_root:
            probe.phase(Phase.IDLE)
        return output

    def _end_forward(self) -> None:
        unit = self._fsdp_param_group
        if unit is not None:
            # a root is kept for the backward that follows; without autograd none does, and no one would free it
            reshard = unit.reshard_after_forward or (self.auto_reshard and not torch.is_grad_enabled())
            unit.post_forward(reshard=reshard, backward_follows=self._backward_follows)
        self._not_yet_run.clear()
        self._training_state = TrainingState.IDLE

    def _hook_output(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            self._backward_follows = True
            tensor.register_hook(self._pre_backward)

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
            if unit.training_state is TrainingState.PRE_BACKWARD or unit.owes_reduction:
                unit.post_backward()
            unit.finalize_backward()
        if self._comm_ctx.reducing is not None:
            self._comm_ctx.reducing.finish_reduce()
        self._comm_ctx.post_forward_order.clear()
        probe.phase(Phase.IDLE)

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward.

        Raises:
            RuntimeError: this is not the root; its tree communicates as one, and is reset as one.
        """
        if self._is_root is False:
            raise RuntimeError(
                f"reset_iter_state was called on a {type(self.modules[0]).__name__} inside of an FSDP root; "
                "call it on the root"
            )
        for state in self._states or (self,):
            if state._fsdp_param_group is not None:
                state._fsdp_param_group.reset_iter_state()
            state._training_state = TrainingState.IDLE
            state._not_yet_run.clear()
        self._comm_ctx.post_forward_order.clear()
        self._comm_ctx.reducing = None
        self._comm_ctx.final_callback_queued = False
        probe.phase(Phase.IDLE)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, and in the attributes of objects that are none (dataclasses ...)."""
    todo, seen = [value], set()
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
                seen.add(id(leaf))
                todo.extend(_attributes(leaf))


def _attributes(value: object) -> list[object]:
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def units_of(states: Iterable[FSDPState]) -> list[FSDPParamGroup]:
    """Return the units of ``states``; a call on modules without parameters has none."""
    return [s._fsdp_param_group for s in states if s._fsdp_param_group is not None]


def _first_known(modules: Iterable[nn.Module], names: dict[nn.Module, str]) -> nn.Module:
    return next(m for m in modules if m in names)


def _check_ranks_agree(units: Sequence[FSDPParamGroup]) -> None:
    """Raise RuntimeError if parameters are still on the meta device, RanksDisagreeError if ranks hold other units."""
    meta = [p.fqn for u in units for p in u.fsdp_params if p.sharded_param.is_meta]
    if meta:
        raise RuntimeError(
            f"parameters still on the meta device: {', '.join(meta)}; call module.to_empty(device=...) and "
            "initialise them, or load a state dict with assign=True, before the first forward"
        )
    group = units[0].mesh_info.group if units else None
    if group is not None:
        check_same_units([u.describe() for u in units], group, units[0].flat_shard.device)


class RegisterPostBackwardFunction(torch.autograd.Function):
    """Identity on a unit's inputs whose backward runs when the unit's own backward has ended."""

    @staticmethod
    def forward(ctx: Any, unit: FSDPParamGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Return ``inputs`` unchanged."""
        ctx.unit = unit
        ctx.set_materialize_grads(False)  # an input the unit did not use gets no gradient, rather than zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run the unit's post-backward, then let the gradients pass."""
        ctx.unit.post_backward()
        return (None, *grads)


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


def states_below(module: nn.Module) -> list[FSDPState]:
    """Return the state of every ``fully_shard`` call in ``module``'s tree, each once, parents first."""
    return list({id(s): s for m in module.modules() if (s := state_of(m)) is not None}.values())
