"""The hooks of one ``fully_shard`` call.

A step, as the hooks of one call see it::

    forward pre-hook   unshard, wait, prefetch          forward hook    reshard (policy), hook the outputs
    output grad hook   unshard, wait, prefetch          post-backward   take grads, reshard, start the reduction
    end of backward    (root) post-backward of the rest, wait for the last reductions
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from workbench.engine import call, groups, probe
from workbench.engine._torch import base_of, is_in_backward, is_transforming, queue_backward_final_callback
from workbench.engine.backends import backend_of
from workbench.engine.call import ShardedCall, units_of
from workbench.engine.comm_context import RecordedForward
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.policies import MixedPrecisionPolicy
from workbench.engine.root import RootContext, join_root
from workbench.engine.tensors import cast_floats, differentiable_in, map_tensors, tensors_in
from workbench.events import Phase


class FSDPState(ShardedCall):
    """State behind the modules of one ``fully_shard`` call.

    Attributes:
        forward_prefetch: calls whose units are gathered ahead, set by the user; None: the one that ran next before.
        backward_prefetch: the same for backward; empty: the one that ran before in forward.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: Sequence[FSDPParamGroup],
        *,
        device: torch.device,
        auto_reshard: bool,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(modules, param_groups, device=device, auto_reshard=auto_reshard, mp_policy=mp_policy)
        self.forward_prefetch: tuple[ShardedCall, ...] | None = None
        self.backward_prefetch: tuple[ShardedCall, ...] = ()
        self._root = RootContext()
        self._handles = self._register_hooks()

    # ---- hooks on and off

    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        before, after = map(torch.compiler.disable, (self._pre_forward, self._post_forward))  # compiled code ends here
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, prepend=False))
            handles.append(module.register_load_state_dict_post_hook(self._after_load))
        for module in self._owners():
            handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            handles.append(module.register_load_state_dict_pre_hook(self._before_state_dict))
        return handles

    def _owners(self) -> set[nn.Module]:
        """Return the modules that parameters are registered on: each can be asked for its state dict by itself."""
        return {m for unit in self._fsdp_param_groups for p in unit.fsdp_params for m, _ in p.info.places}

    def remove_hooks(self) -> None:
        """Take every hook off the modules."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def plain_modules(self) -> Iterator[None]:
        """Within the body nothing of the call is on the modules; enter it while they are sharded."""
        self.remove_hooks()
        classes = [type(m) for m in self.modules]
        for module, original in zip(self.modules, self.original_classes, strict=True):
            call.detach(module)
            module.__class__ = original
        try:
            yield
        finally:
            for module, cls in zip(self.modules, classes, strict=True):
                call.attach(module, self)
                module.__class__ = cls
            self._handles = self._register_hooks()

    def _before_state_dict(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        for unit in self._fsdp_param_groups:
            unit.reshard()

    def _after_load(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        for unit in self._fsdp_param_groups:
            unit.adopt_registered()

    def _lazy_init(self) -> None:
        """Make this state the root of the tree below it, on the first forward.

        Raises:
            RuntimeError: a module below ran before this root did; parameters are still on the meta device.
            RanksDisagreeError: ranks hold different units.
        """
        join_root(self)

    # ---- forward

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if is_transforming():
            raise NotImplementedError(
                f"{type(module).__name__} is sharded and cannot run within a transform of torch.func (grad, vjp, vmap "
                "...): transform what it is made of, use torch.autograd on its outputs, or undo it with unshard_module"
            )
        if self._training_state is TrainingState.PRE_BACKWARD:
            # activation checkpointing recomputes the forward within backward
            self._unshard(())
            for unit in self._fsdp_param_groups:
                unit.recomputes()
            return self._cast_inputs(args, kwargs)
        if self._is_root is None:
            self._lazy_init()
        if self._is_outermost:
            args, kwargs = self._on_device(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        is_first = self._training_state is not TrainingState.FORWARD or id(module) not in self._not_yet_run
        if is_first:
            self._begin_forward()
        self._not_yet_run.discard(id(module))
        # autograd reaches the inputs of the first module last, when all gradients of the unit are there
        return self._hook_inputs(args, kwargs) if is_first else (args, kwargs)

    def _begin_forward(self) -> None:
        probe.phase(Phase.FORWARD)
        self._recomputes = is_in_backward()
        expected: tuple[ShardedCall, ...] = ()
        if not self._recomputes:
            if self._is_root:
                self._root.begin_forward(self._comm_ctx)
            elif not self._root.is_running:
                self._root.shards_changed(self._comm_ctx)
            expected = self._root.expected_after(self)
        self._unshard(expected if self.forward_prefetch is None else self.forward_prefetch)
        for unit in self._fsdp_param_groups:
            unit.pre_forward(recomputed=self._recomputes)
        self._training_state = TrainingState.FORWARD
        self._not_yet_run = {id(m) for m in self.modules}
        self._backward_follows = False

    def _unshard(self, ahead: Iterable[ShardedCall]) -> None:
        """Make the parameters full, and start doing so for the units of ``ahead``.

        What was gathered ahead itself is copied out first, which frees its staging for the next one. On a device that
        would let the next all-gather wait for this copy, and so for the compute before it: there it is issued first.
        """
        units = self._fsdp_param_groups
        copies_first = any(u.is_unsharding for u in units) and not self._comm_ctx.streams.are_there
        for unit in units:
            unit.unshard()
        if not copies_first:
            _prefetch(ahead)
        for unit in units:
            unit.wait_for_unshard()
        if copies_first:
            _prefetch(ahead)

    @property
    def _is_outermost(self) -> bool:
        """True where the model is entered: at its root, or at an inner module that was called by itself."""
        return bool(self._is_root) or not self._root.is_running

    def _on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Move the model's inputs from the host, where a data loader leaves them, to the device that computes."""
        device = self._comm_ctx.device
        if backend_of(device).is_host:
            return args, kwargs
        moved_args, moved_kwargs = map_tensors((args, kwargs), lambda t: t.to(device))
        return moved_args, moved_kwargs

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        policy = self.mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return cast_floats(args, policy.param_dtype), cast_floats(kwargs, policy.param_dtype)

    def _hook_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Let the units know when the gradients of their inputs are done."""
        if not self._fsdp_param_groups or not torch.is_grad_enabled():
            return args, kwargs
        found = differentiable_in((args, kwargs))
        if not found:
            return args, kwargs
        hooked = iter(RegisterPostBackwardFunction.apply(self._post_backward, *found))  # type: ignore[no-untyped-call]
        hooked_args, hooked_kwargs = map_tensors((args, kwargs), lambda t: next(hooked) if t.requires_grad else t)
        return hooked_args, hooked_kwargs

    def _post_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401 - hook signature
        if self._training_state is TrainingState.PRE_BACKWARD:
            return cast_floats(output, self.mp_policy.output_dtype)
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            self._hook_output(tensor)
        if not self._not_yet_run:  # else another module of the same call has yet to run
            if self._is_root:
                self._root.end_partial_forwards()
            self._end_forward()
            if self._recomputes:
                probe.phase(Phase.BACKWARD)
            elif self._is_outermost:
                self._end_outermost_forward()
        return cast_floats(output, self.mp_policy.output_dtype)

    def _end_outermost_forward(self) -> None:
        if not self._backward_follows:
            for unit in units_of(self._states):
                if unit.is_unsharding:
                    unit.reshard()  # gathered ahead for nothing; by the next forward the shards may have changed
            self._root.forget_order(self._comm_ctx)
        self._comm_ctx.comms.order_reads()
        if not self._backward_follows:
            groups.end_iteration()
        probe.phase(Phase.IDLE)

    def _hook_output(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            self._backward_follows = True
            if self._recorded is None:
                self._recorded = RecordedForward([unit.home for unit in self._fsdp_param_groups])
                self._comm_ctx.recorded.add(self._recorded)
            tensor.register_hook(functools.partial(self._pre_backward, self._recorded))
            base = base_of(tensor)
            if base is not None:  # writing to a view in place makes it another node's, and leaves its hooks behind
                base.register_hook(functools.partial(self._pre_backward_of_base, self._recorded))

    # ---- backward

    def _pre_backward_of_base(self, forward: RecordedForward, grad: torch.Tensor) -> torch.Tensor:
        return self._pre_backward(forward, grad) if forward in self._comm_ctx.recorded else grad

    def _pre_backward(self, forward: RecordedForward, grad: torch.Tensor) -> torch.Tensor:
        self._comm_ctx.recorded.discard(forward)
        root = self._root
        if not root.final_callback_queued:
            root.final_callback_queued = True
            queue_backward_final_callback(root.end_of_backward)
        self._training_state = TrainingState.PRE_BACKWARD
        units = []
        for unit, home in zip(self._fsdp_param_groups, forward.homes, strict=True):
            if unit.training_state is TrainingState.PRE_BACKWARD:  # another output, or another forward
                unit.go_to(home)
            else:
                unit.pre_backward(home)
                units.append(unit)
        if units:
            before = () if forward.before is None else (forward.before,)
            _prefetch(self.backward_prefetch or before, backward=True)
        for unit in units:
            unit.begin_backward()
        return grad

    def _post_backward(self) -> None:
        for unit in reversed(self._fsdp_param_groups):
            unit.post_backward()

    # ---- what torch's pipelining asks a root for, where it ends a step's backward itself

    @property
    def _state_ctx(self) -> RootContext:
        return cast("RootContext", self._root)

    def _root_post_backward_final_callback(self) -> None:
        self._root.end_of_backward()


def _prefetch(states: Iterable[ShardedCall], *, backward: bool = False) -> None:
    """Start gathering the units of ``states``."""
    for state in states:
        units = state._fsdp_param_groups
        for unit in reversed(units) if backward else units:
            if unit.unshard_in_backward or not backward:
                unit.unshard()


class RegisterPostBackwardFunction(torch.autograd.Function):
    """Identity on a module's inputs whose backward runs when the module's own backward has ended."""

    @staticmethod
    def forward(ctx: Any, post_backward: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Return ``inputs`` unchanged."""
        ctx.post_backward = post_backward
        ctx.set_materialize_grads(False)  # an input the unit did not use gets no gradient, rather than zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run the post-backward, then let the gradients pass."""
        ctx.post_backward()
        return (None, *grads)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the ``fully_shard`` call that ``module`` itself was given to."""
    return cast("FSDPState | None", call.state_of(module))


def states_below(module: nn.Module) -> list[FSDPState]:
    """Return the state of every ``fully_shard`` call in ``module``'s tree, each once, parents first."""
    return cast("list[FSDPState]", call.states_below(module))
