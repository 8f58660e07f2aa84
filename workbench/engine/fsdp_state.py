"""The state and hooks of one ``fully_shard`` call, and the context that the calls of one model share.

One step, hook by hook, for one call::

    forward pre-hook   unshard, wait, prefetch          forward hook    reshard (policy), hook the outputs
    output grad hook   unshard, wait, prefetch          post-backward   take grads, reshard, start the reduction
    end of backward    (root) post-backward of the rest, wait for the last reductions
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from workbench.engine import module_names, probe, process_groups, refusal_text, root_checks
from workbench.engine._spmd_types import no_checks
from workbench.engine._torch import (
    base_of,
    is_in_backward,
    is_transforming,
    queue_backward_final_callback,
    set_composed,
)
from workbench.engine.backends import backend_of
from workbench.engine.collective_order import END
from workbench.engine.comm_context import FSDPCommContext, RecordedForward
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError, StepAborted
from workbench.engine.explain import explain, explain_uncaught
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.policies import MixedPrecisionPolicy
from workbench.engine.process_groups import CommGroup
from workbench.engine.tensor_trees import cast_floats, differentiable_in, map_tensors, tensors_in, unrecorded
from workbench.events import Phase


class FSDPState:
    """State of one ``fully_shard`` call: its modules and the units made of their parameters.

    Attributes:
        modules: the modules passed to that call.
        original_classes: their classes before the call.
        units: the units made of their parameters; several if they are on several meshes, none without parameters.
        comm_ctx: communication context shared with the other calls of the model.
        is_root: this is the root of its tree; None until the first forward.
        root_ctx: context shared with the other calls of the tree.
        training_state: where the call is in the step.
        auto_reshard: True if the user gave no policy: reshard after forward, except on the root.
        mp_policy: dtypes to cast inputs and outputs to.
        forward_prefetch: states to prefetch in forward, set by the user; None: the one that ran next last iteration.
        backward_prefetch: states to prefetch in backward, set by the user; None: the one that ran before in forward.
    """

    made_by: ClassVar = "fully_shard"
    undone_by: ClassVar = "unshard_module"
    joined_by: ClassVar = "call fully_shard on a module that holds both, or on a list of the two"
    reduced_by: ClassVar = (
        "run a backward after set_requires_gradient_sync(True) and set_requires_all_reduce(True), or drop them with "
        "reset_iter_state()"
    )

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: Sequence[FSDPParamGroup],
        *,
        device: torch.device,
        auto_reshard: bool,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = modules
        self.original_classes = tuple(type(m) for m in modules)
        self.auto_reshard = auto_reshard
        self.mp_policy = mp_policy
        self.units = list(param_groups)
        for unit in self.units:
            unit.on_inner_grad = self._inner_backward
        self.comm_ctx = param_groups[0].comm_ctx if param_groups else FSDPCommContext(device)
        self.is_root: bool | None = None
        self._around: tuple[FSDPState, ...] = ()  # states whose modules contain this one's, outermost first
        self._not_yet_run: set[int] = set()
        self._handled: BaseException | None = None  # exception the caller was handling when this forward began
        self._backward_follows = False
        self._recorded: RecordedForward | None = None  # the current forward, if autograd records it
        self._recomputes = False  # the current forward runs within a backward (activation checkpointing)
        self._is_recomputed = False  # was recomputed once: a backward follows even an unrecorded forward
        self._unrecorded_before: list[FSDPState | None] = []  # predecessors of such unrecorded forwards
        self.training_state = TrainingState.IDLE
        self.forward_prefetch: tuple[FSDPState, ...] | None = None
        self.backward_prefetch: tuple[FSDPState, ...] | None = None
        self.root_ctx = RootContext()
        self._handles = self._register_hooks()

    @property
    def tree(self) -> tuple[FSDPState, ...]:
        """Every state in the tree; empty unless this is a root that has run."""
        states: tuple[FSDPState, ...] = self.root_ctx.states if self.is_root else ()
        return states

    def use_comm_ctx(self, ctx: FSDPCommContext) -> None:
        """Share ``ctx`` with other roots."""
        self.comm_ctx = ctx
        for unit in self.units:
            unit.comm_ctx = ctx

    def overlaps(self, states: Iterable[FSDPState]) -> bool:
        """Return whether one of ``states`` belongs to this root."""
        return any(state in self.tree for state in states)

    # ---- hooks on and off

    def _register_hooks(self) -> list[RemovableHandle]:
        handles: list[RemovableHandle] = []
        before, after = map(torch.compiler.disable, (self.pre_forward, self.post_forward))  # a graph break
        for module in self.modules:
            handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(after, prepend=False, always_call=True))
        return [*handles, *self._state_dict_hooks()]

    def _state_dict_hooks(self) -> list[RemovableHandle]:
        """Register the hooks that make state dicts hold shards and load into shards."""
        handles = [module.register_load_state_dict_post_hook(self._after_load) for module in self.modules]
        handles += [module.register_load_state_dict_pre_hook(_check_loaded) for module in self.modules]
        for module in self._owners():
            handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            handles.append(module.register_load_state_dict_pre_hook(self._before_state_dict))
        return handles

    def _owners(self) -> set[nn.Module]:
        """Return the modules that hold parameters: the user can call ``state_dict`` on each of them."""
        return {m for unit in self.units for p in unit.fsdp_params for m, _ in p.info.places}

    def remove_hooks(self) -> None:
        """Remove every hook from the modules."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def plain_modules(self) -> Iterator[None]:
        """Restore the modules' original classes and remove the hooks within the body; enter while sharded."""
        self.remove_hooks()
        classes = [type(m) for m in self.modules]
        for module, original in zip(self.modules, self.original_classes, strict=True):
            detach(module)
            module.__class__ = original
        try:
            yield
        finally:
            for module, cls in zip(self.modules, classes, strict=True):
                attach(module, self)
                module.__class__ = cls
            self._handles = self._register_hooks()

    def _before_state_dict(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        for unit in self.units:
            unit.reshard()

    def _after_load(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        for unit in self.units:
            unit.adopt_registered()

    # ---- becoming a root

    @unrecorded
    def lazy_init(self) -> None:
        """Make this state the root of the tree below it, on the first forward.

        Raises:
            RuntimeError: a module below ran before this root; a unit's module was removed from the tree; parameters
                are still on the meta device.
            ValueError: parameters were tied, or replaced by ones of another shape, after fully_shard.
            RanksDisagreeError: ranks hold different units.
        """
        names = module_names.names_below(self.modules)
        states = _states_of(names)
        units = units_of(states)
        ran = [m for state in states if state is not self and state.is_root is not None for m in state.modules]
        root_checks.check_tree(type(self.modules[0]).__name__, ran, units, names)
        if any(state.root_ctx.ends_manually for state in states if state is not self):
            raise RuntimeError(f"call set_manual_backward_finalization on the root, {type(self.modules[0]).__name__}")
        root_checks.check_not_tied(units, names)
        self._name_units(states, names)
        root_checks.check_no_meta(units)
        root_checks.check_ranks_agree(units)
        self.comm_ctx.choose_comms(units)
        self.root_ctx.states = states  # keep this RootContext: it holds the user's settings
        for state in states:
            state.is_root = state is self
            state.comm_ctx = self.comm_ctx
            state.root_ctx = self.root_ctx
            state.has_root()
        for state in states:
            for inner in _states_of(m for module in state.modules for m in module.modules()):
                if inner is not state:
                    inner.add_around(state)
        roots.add(self)
        explain_uncaught()

    def add_around(self, outer: FSDPState) -> None:
        """Note that ``outer``'s modules contain this call's; outermost first."""
        self._around = (*self._around, outer)

    def has_root(self) -> None:
        """Called once the root is known, as the tree's first forward begins."""

    def _name_units(self, states: Sequence[FSDPState], names: module_names.Names) -> None:
        """Name units and parameters from this root; keep its own units unsharded if its policy is automatic."""
        if self.auto_reshard:
            for unit in self.units:
                unit.set_reshard_after_forward(False)
        own = self._fsdp_param_group
        root_index = own.index if own is not None else -1
        for unit, name in _named(states, names):
            unit.lazy_init(name, root_index, self.comm_ctx)

    def name_units(self) -> None:
        """Name units and parameters below this call relative to it, until the first forward finds the root."""
        names = module_names.names_below(self.modules)
        for unit, name in _named([state for state in _states_of(names) if state.is_root is None], names):
            unit.take_name(name)
            unit.announce()

    # ---- forward

    def pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Unshard the units before ``module`` runs; return its arguments, moved, cast and hooked."""
        if is_transforming():
            raise NotImplementedError(
                f"{type(module).__name__} is sharded and cannot run within a transform of torch.func (grad, vjp, "
                "vmap ...): transform plain functions or modules inside it, use torch.autograd on its outputs, or "
                f"undo it with {self.undone_by}"
            )
        self.comm_ctx.check_no_finalization("forward")
        if self.root_ctx.final_callback_queued and not is_in_backward():
            self.root_ctx.end_failed_backward(self.comm_ctx)
        if self.training_state is TrainingState.PRE_BACKWARD:
            # activation checkpointing recomputes the forward within backward
            self._unshard(())
            for unit in self.units:
                unit.recomputes()
            return self._cast_inputs(args, kwargs)
        if self.is_root is None:
            self.lazy_init()
        if self._is_outermost:
            args, kwargs = self._on_device(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        is_first = self.training_state is not TrainingState.FORWARD or id(module) not in self._not_yet_run
        if is_first:
            self._unshard(self._begin_forward())
            self._enter_forward()
        self._not_yet_run.discard(id(module))
        # autograd reaches the inputs of the first module last, after all gradients of the unit
        return self._hook_inputs(args, kwargs) if is_first else (args, kwargs)

    def _begin_forward(self) -> Iterable[FSDPState]:
        """Note that a forward begins; return the states to prefetch."""
        probe.phase(Phase.FORWARD)
        self._recomputes = is_in_backward()
        self._handled = sys.exception()
        expected: tuple[FSDPState, ...] = ()
        if not self._recomputes:
            if self._is_outermost:
                self.root_ctx.end_failed_forward()
            if self.is_root:
                self.root_ctx.begin_forward(self.comm_ctx)
            elif not self.root_ctx.is_running:
                self.root_ctx.shards_changed(self.comm_ctx)
            expected = self.root_ctx.expected_after(self)
        return expected if self.forward_prefetch is None else self.forward_prefetch

    def _enter_forward(self) -> None:
        """Begin the forward of the units, which are unsharded."""
        for unit in self.units:
            unit.pre_forward(recomputed=self._recomputes)
        self.training_state = TrainingState.FORWARD
        self._not_yet_run = {id(m) for m in self.modules}
        self._backward_follows = False

    def _unshard(self, ahead: Iterable[FSDPState]) -> None:
        """Unshard this call's units and start prefetching those of ``ahead``.

        A prefetched unit is copied out first, which frees its staging for the next all-gather. With streams, that
        all-gather would wait for this copy, and so for the compute before it; there it is issued first.
        """
        units = self.units
        copies_first = any(u.is_unsharding for u in units) and not self.comm_ctx.streams.are_there
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
        """True at the entry to the model: its root, or an inner module called outside the root's forward."""
        return bool(self.is_root) or not self.root_ctx.is_running

    def _on_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Move the model's inputs from the host, where a data loader puts them, to the compute device."""
        device = self.comm_ctx.device
        if backend_of(device).is_host:
            return args, kwargs
        moved_args, moved_kwargs = map_tensors((args, kwargs), lambda t: t.to(device))
        return moved_args, moved_kwargs

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Dtype that floating-point inputs of forward are cast to; None: no cast."""
        return self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None

    def _cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return cast_floats(args, self.input_dtype), cast_floats(kwargs, self.input_dtype)

    def _hook_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Hook the inputs so that post-backward runs once their gradients are complete."""
        if not self.units or not torch.is_grad_enabled():
            return args, kwargs
        found = differentiable_in((args, kwargs))
        if not found:
            return args, kwargs
        outputs = RegisterPostBackwardFunction.apply(self, *found)
        hooked: dict[int, torch.Tensor] = {id(tensor): output for tensor, output in zip(found, outputs, strict=True)}

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return hooked.get(id(tensor), tensor)

        return map_tensors(args, put), map_tensors(kwargs, put)

    def post_forward(self, _module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401 - hook signature
        """Reshard the units as their policy is, if no module of the call has yet to run; return the hooked output."""
        with no_checks():
            return self._after_forward(output)

    def _after_forward(self, output: Any) -> Any:  # noqa: ANN401 - any structure
        if self.training_state is TrainingState.PRE_BACKWARD:
            return cast_floats(output, self.mp_policy.output_dtype)
        if output is None and self._has_failed():
            return output
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_in(output):
            self._hook_output(tensor)
        if not self._not_yet_run:  # otherwise another module of the call has yet to run
            if self.is_root:
                self.root_ctx.end_partial_forwards()
            self._end_forward()
            if self._recomputes:
                probe.phase(Phase.BACKWARD)
            elif self._is_outermost:
                self._end_outermost_forward()
        return cast_floats(output, self.mp_policy.output_dtype)

    def end_partial_forward(self) -> None:
        """End the forward if only some of the call's modules ran in it; no-op otherwise."""
        if self._not_yet_run:
            self._end_forward()

    def _end_forward(self) -> None:
        for unit in self.units:
            unit.post_forward(backward_follows=self._backward_follows, recomputed=self._recomputes)
        if self.units:
            self._note_forward()
        self._not_yet_run.clear()
        self._recorded = None  # from now on only the graph keeps it alive
        self._handled = None
        self.training_state = TrainingState.IDLE

    def _has_failed(self) -> bool:
        """Return whether the current forward raised; if so, end it without waiting for anything."""
        error = sys.exception()
        if error is None or error is self._handled:
            return False
        explain(error)
        self._handled = None
        if self._recomputes or isinstance(error, StepAborted | CollectiveFailed | RanksDisagreeError):
            return True  # the enclosing backward failed, or recovery rebuilds the groups and resets the iteration
        for unit in self.units:
            if unit.training_state is TrainingState.FORWARD:
                if self.root_ctx.raised_in == probe.NO_UNIT:  # inner modules come first
                    self.root_ctx.raised_in = unit.index
                unit.post_forward(backward_follows=False, recomputed=False)
        self._not_yet_run.clear()
        self._recorded = None
        self.training_state = TrainingState.IDLE
        if self._is_outermost:
            self.root_ctx.forward_failed = True
            self.root_ctx.forget_forwards(self.comm_ctx)
            probe.phase(Phase.IDLE)
        return True

    def _note_forward(self) -> None:
        """Record which forward ended just before; a recomputed forward takes over its original's predecessor."""
        if self._recomputes:
            self._is_recomputed = True
            if self._recorded is not None and self._unrecorded_before:
                self._recorded.before = self._unrecorded_before.pop()
        elif self._recorded is not None or self._is_recomputed:
            order = self.comm_ctx.post_forward_order
            before = order[-1] if order else None
            if self._recorded is not None:
                self._recorded.before = before
            else:
                self._unrecorded_before.append(before)
            order.append(self)

    def _end_outermost_forward(self) -> None:
        if not self._backward_follows:
            for unit in units_of(self.tree):
                if unit.is_unsharding:
                    unit.reshard()  # prefetched but unused; the shards may change before the next forward
            self.root_ctx.forget_forwards(self.comm_ctx)
        self.comm_ctx.comms.wait_for_readers()
        self.comm_ctx.comms.release_buffers()  # a step needs the most memory now, and nothing is in flight
        if not self._backward_follows:
            self.root_ctx.end_iteration()
        probe.phase(Phase.IDLE)

    def _hook_output(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            self._backward_follows = True
            if self._recorded is None:
                self._recorded = RecordedForward([unit.buffers.current for unit in self.units])
                self.comm_ctx.recorded.add(self._recorded)
            tensor.register_hook(functools.partial(self._pre_backward, self._recorded))
            base = base_of(tensor)
            if base is not None:  # an in-place write to a view gives it a new graph node, without its hooks
                base.register_hook(functools.partial(self._pre_backward_of_base, self._recorded))

    # ---- backward

    def _pre_backward_of_base(self, forward: RecordedForward, grad: torch.Tensor) -> torch.Tensor:
        return self._pre_backward(forward, grad) if forward in self.comm_ctx.recorded else grad

    def _pre_backward(self, forward: RecordedForward, grad: torch.Tensor) -> torch.Tensor:
        self.comm_ctx.recorded.discard(forward)
        self.root_ctx.expect_end_of_backward()
        for state in self._around:
            state.enter_backward_around()
        self.training_state = TrainingState.PRE_BACKWARD
        units = []
        for unit, buffers in zip(self.units, forward.buffer_sets, strict=True):
            if unit.training_state is TrainingState.PRE_BACKWARD:  # by another output or forward, or an inner grad
                unit.enter_backward(buffers)
            else:
                unit.pre_backward(buffers)
                units.append(unit)
        if units:
            before = () if forward.before is None else (forward.before,)
            self._backward_begins(before if self.backward_prefetch is None else self.backward_prefetch)
        for unit in units:
            unit.begin_backward()
        return grad

    def enter_backward_around(self) -> None:
        """Begin this call's backward if autograd reached an inner call without passing this call's outputs.

        No later hook would run before autograd needs these parameters.
        """
        for unit in self.units:
            if unit.pending_backwards and unit.training_state is TrainingState.IDLE:
                self.training_state = TrainingState.PRE_BACKWARD
                unit.pre_backward(unit.buffers.current)
                unit.begin_backward()

    def _inner_backward(self, unit: FSDPParamGroup) -> None:
        """Handle a gradient of ``unit`` that autograd reached without passing an output of the call."""
        self.root_ctx.expect_end_of_backward()
        unit.enter_inner_backward()

    def _backward_begins(self, ahead: Iterable[FSDPState]) -> None:
        """Start prefetching for the calls in ``ahead``, whose backward comes next."""
        _prefetch(ahead, backward=True)

    def after_post_backward(self) -> None:
        """Called after the post-backward of the call's units."""

    # ---- the end of an iteration

    def forget_forwards(self) -> None:
        """Drop the order of this iteration's forwards."""
        self._unrecorded_before.clear()

    def reset(self) -> None:
        """Drop this call's state of an iteration that raised."""
        for unit in self.units:
            unit.reset_iter_state()
        self._recorded = None
        self.training_state = TrainingState.IDLE
        self._not_yet_run.clear()
        self.forget_forwards()

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward.

        Raises:
            RuntimeError: this is not the root; only a whole tree can be reset.
        """
        if self.is_root is False:
            raise RuntimeError(
                f"reset_iter_state was called on a {type(self.modules[0]).__name__} inside an FSDP root; call it on "
                "the root"
            )
        self.root_ctx.reset(self.tree or (self,), self.comm_ctx)
        probe.phase(Phase.IDLE)

    # ---- names of torch's own state: its pipelining uses the last three

    @property
    def _is_root(self) -> bool | None:
        return self.is_root

    @property
    def _comm_ctx(self) -> FSDPCommContext:
        return self.comm_ctx

    def _lazy_init(self) -> None:
        self.lazy_init()

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        """The call's unit: the first one if its parameters are on several meshes, None if it has no parameters."""
        return self.units[0] if self.units else None

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        return self.units

    @property
    def _state_ctx(self) -> RootContext:
        return self.root_ctx

    def _root_post_backward_final_callback(self) -> None:
        self.root_ctx.end_of_backward()


def _prefetch(states: Iterable[FSDPState], *, backward: bool = False) -> None:
    """Start unsharding the units of ``states``."""
    for state in states:
        units = state.units
        for unit in reversed(units) if backward else units:
            if unit.unshard_in_backward or not backward:
                unit.unshard()


class RegisterPostBackwardFunction(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs after the module's own backward."""

    @staticmethod
    def forward(ctx: Any, state: FSDPState, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Return ``inputs`` unchanged."""
        ctx.state = state
        ctx.set_materialize_grads(False)  # an input the unit did not use gets no gradient instead of zeros
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Run the call's post-backward and pass the gradients through."""
        ctx.state.root_ctx.expect_end_of_backward()
        for unit in reversed(ctx.state.units):  # all gradients of their inputs and parameters are complete
            unit.post_backward()
        ctx.state.after_post_backward()
        return (None, *grads)


_ATTRIBUTE = "_workbench_fsdp_state"


def attach(module: nn.Module, state: FSDPState) -> None:
    """Store ``state`` on ``module``."""
    vars(module)[_ATTRIBUTE] = state
    set_composed(module, sharded=True)


def detach(module: nn.Module) -> None:
    """Remove the state from ``module``."""
    del vars(module)[_ATTRIBUTE]
    set_composed(module, sharded=False)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the ``fully_shard`` call on ``module`` itself; None without one."""
    state: FSDPState | None = vars(module).get(_ATTRIBUTE)  # getattr would find the state of a wrapped module
    return state


def roots_below(module: nn.Module) -> list[tuple[str, FSDPState]]:
    """Return the outermost ``fully_shard`` calls in ``module``'s tree, with their paths.

    If ``module`` itself is sharded, that is only its own call, at ``""``.
    """
    found: dict[FSDPState, str] = {}
    inner: set[nn.Module] = set()
    for path, each in module.named_modules():  # parents first
        state = state_of(each)
        if state is not None and each not in inner:
            found.setdefault(state, module_names.clean(path))
            inner.update(each.modules())
    return [(path, state) for state, path in found.items()]


def states_below(module: nn.Module) -> list[FSDPState]:
    """Return the state of every ``fully_shard`` call in ``module``'s tree, each once, parents first."""
    return list(_states_of(module.modules()))


def _named(states: Iterable[FSDPState], names: module_names.Names) -> Iterator[tuple[FSDPParamGroup, str]]:
    """Name the parameters of ``states`` and yield every unit with its name."""
    for state in states:
        name = ", ".join(names[m] for m in state.modules)
        for unit in state.units:
            for param in unit.fsdp_params:
                param.take_names(functools.partial(module_names.full_name, names))
            yield unit, name


def _states_of(modules: Iterable[nn.Module]) -> tuple[FSDPState, ...]:
    return tuple({id(s): s for m in modules if (s := state_of(m)) is not None}.values())


def units_of(states: Iterable[FSDPState]) -> list[FSDPParamGroup]:
    """Return the units of ``states``; a call on modules without parameters has none."""
    return [unit for state in states for unit in state.units]


def _check_loaded(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    *_: Any,  # noqa: ANN401 - hook signature
) -> None:
    """Check, before any is loaded, that a state dict has what sharded parameters below ``module`` can take.

    Raises:
        TypeError: it has a whole tensor, which would be assigned.
        ValueError: it has a DTensor of another mesh.
    """
    is_assigned = metadata.get("assign_to_params_buffers")
    names = module_names.names_below((module,))
    for unit in units_of(_states_of(names)):
        for param in unit.fsdp_params:
            meshes = {mesh.shape for mesh in param.meshes}
            for place, name in param.info.places:
                key = prefix + module_names.full_name(names, place, name)
                found = state_dict.get(key)
                if is_assigned and not isinstance(found, (DTensor, NoneType)):
                    raise TypeError(refusal_text.assigned_whole(key))
                if isinstance(found, DTensor) and len(meshes) == 1 and found.device_mesh.shape not in meshes:
                    raise ValueError(refusal_text.of_another_mesh(key, found.device_mesh.shape, *meshes))


# ---- the root


class RootContext:
    """Context that the calls of one model share, from the first forward of its root on.

    Attributes:
        states: every call in the tree, parents first.
        is_last_backward: the next backward ends the iteration (False: more micro-batches follow).
        ends_manually: :meth:`finalize_backward` ends the iteration, not the last backward.
        final_callback_queued: the current backward pass already has its end-of-backward callback.
        forward_failed: the last forward of the model raised.
        raised_in: index of the innermost unit whose forward raised; NO_UNIT if none did.
        post_optim_event: CUDA event after which the next forward may read shards; None: after all compute so far.
    """

    def __init__(self) -> None:
        self.states: tuple[FSDPState, ...] = ()
        self.is_last_backward = True
        self.ends_manually = False
        self._ends_manually: bool | None = None  # the same for this iteration; None until its first backward
        self.final_callback_queued = False
        self.forward_failed = False
        self.raised_in = probe.NO_UNIT
        self.post_optim_event: torch.cuda.Event | None = None
        self._last_forwards: list[FSDPState] = []  # forwards of the last iteration, in order
        self._forwards: list[FSDPState] = []

    def begin_forward(self, ctx: FSDPCommContext) -> None:
        """Begin the root's forward."""
        if self._forwards:
            self._last_forwards, self._forwards = self._forwards, []
        units = units_of(self.states)
        if any(unit.comm_choice.is_open for unit in units):
            ctx.choose_comms(units)
        self.shards_changed(ctx)

    def shards_changed(self, ctx: FSDPCommContext) -> None:
        """Make later all-gathers see writes to the shards since the last forward."""
        event, self.post_optim_event = self.post_optim_event, None  # it is valid for one optimizer step
        ctx.streams.shards_changed(event)

    @property
    def all_states(self) -> tuple[FSDPState, ...]:
        """Alias of :attr:`states` that torch's pipelining uses."""
        return self.states

    @property
    def is_running(self) -> bool:
        """True within the root's forward or a backward; else an inner module was called directly."""
        in_forward = bool(self.states) and self.states[0].training_state is TrainingState.FORWARD
        return in_forward or self.final_callback_queued

    def expected_after(self, state: FSDPState) -> tuple[FSDPState, ...]:
        """Record that the forward of ``state`` begins; return the state that followed it in the last iteration.

        Empty if this iteration took another path.
        """
        number, before = len(self._forwards), self._last_forwards
        self._forwards.append(state)
        if number + 1 < len(before) and before[number] is state:
            return (before[number + 1],)
        return ()

    def end_partial_forwards(self) -> None:
        """End the forward of every call that ran only some of its modules."""
        for state in self.states:
            if not state.is_root:
                state.end_partial_forward()

    def expect_end_of_backward(self) -> None:
        """Queue :meth:`end_of_backward` for the end of the current backward pass."""
        if not self.final_callback_queued:
            self.final_callback_queued = True
            if self._ends_manually is None:
                self._ends_manually = self.ends_manually
            queue_backward_final_callback(self.end_of_backward)

    def end_failed_forward(self) -> None:
        """Free units prefetched by a forward that raised: the shards may have changed since."""
        self.raised_in = probe.NO_UNIT
        if self.forward_failed:
            self.forward_failed = False
            for unit in units_of(self.states):
                if unit.is_unsharding:
                    unit.reshard()

    def end_failed_backward(self, ctx: FSDPCommContext) -> None:
        """End, on every rank, the iteration of a backward that raised: drop full gradients and reshard.

        Collectives in flight are awaited, since the groups are used again, and their results dropped.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: other ranks are at another point of the iteration.
            RuntimeError: a collective was abandoned, see :meth:`CommGroup.issue`.
        """
        for group in self._groups():
            group.usable_group(END)
        with torch.no_grad(), ctx.streams.reducing(after_compute=False):
            ctx.reductions.drain()
        ctx.join(all_streams=True)
        for unit in units_of(self.states):
            unit.reshard()
        ctx.comms.wait_for_readers()
        self.reset(self.states, ctx)
        self.end_iteration()

    def _groups(self) -> Iterable[CommGroup]:
        return dict.fromkeys(group for unit in units_of(self.states) for group in unit.groups)

    def end_iteration(self) -> None:
        """Restart the order check of the model's collectives; raises as :func:`process_groups.end_iteration`."""
        process_groups.end_iteration(self._groups())

    def end_of_backward(self) -> None:
        """Finish every unit of the tree, including those without hooked inputs and those that did not run."""
        for state in self.states:
            state.training_state = TrainingState.IDLE
        is_manual = bool(self._ends_manually)
        for unit in reversed(units_of(self.states)):
            if is_manual and unit.sync.reduce_grads:
                unit.leave_backward()
            elif unit.training_state is TrainingState.PRE_BACKWARD or unit.owes_reduction:
                unit.post_backward()
            if self.is_last_backward and not is_manual:
                unit.finalize_backward()
            unit.training_state = TrainingState.IDLE
        if not is_manual:
            self._finish_reductions(ends_iteration=self.is_last_backward)
        self.final_callback_queued = False  # only now: if a line above raises, the backward counts as failed
        probe.phase(Phase.IDLE)

    def _finish_reductions(self, *, ends_iteration: bool) -> None:
        ctx = self.states[0].comm_ctx
        with no_checks(), torch.no_grad(), ctx.streams.reducing(after_compute=False):
            ctx.reductions.finish()
        ctx.join(all_streams=True)
        ctx.comms.wait_for_readers()
        if not ctx.recorded:  # otherwise a backward follows
            ctx.comms.empty()
        for unit in units_of(self.states):
            unit.wait_for_host()
        if ends_iteration:
            self._ends_manually = None
            self.forget_forwards(ctx)
            self.end_iteration()

    # ---- an iteration that the caller ends

    def set_ends_manually(self, enabled: bool) -> None:
        """Set whether :meth:`finalize_backward` ends the iteration.

        Raises:
            RuntimeError: a backward of this iteration has begun with the other setting.
        """
        if self._ends_manually not in (None, enabled):
            raise RuntimeError(
                "set_manual_backward_finalization: a backward of this iteration has begun with "
                f"{self._ends_manually}; change it after finalize_backward() or reset_iter_state()"
            )
        self.ends_manually = enabled

    def finalize_backward(self, handle: object) -> None:
        """Reshard as the units' policies are and start the reductions that manual finalization postponed.

        Args:
            handle: passed to :meth:`wait_for_reductions` later.

        Raises:
            RuntimeError: finalization is not manual; a backward runs or has raised; see :meth:`check_no_finalization`.
        """
        ctx = self.states[0].comm_ctx
        ctx.check_no_finalization("finalize_backward")
        is_manual = self.ends_manually if self._ends_manually is None else self._ends_manually
        if not is_manual:
            raise RuntimeError(
                "finalize_backward: backward ends by itself; call set_manual_backward_finalization(True) before forward"
            )
        if self.final_callback_queued:
            raise RuntimeError(
                "finalize_backward: a backward still runs, or has raised; call it after backward, or reset_iter_state()"
            )
        ctx.finalization = handle
        for unit in reversed(units_of(self.states)):
            if unit.owes_reduction:
                unit.post_backward()
            unit.finalize_backward()
        probe.phase(Phase.IDLE)

    def wait_for_reductions(self, handle: object) -> None:
        """Wait for the reductions of :meth:`finalize_backward` and end the iteration.

        Raises:
            RuntimeError: the iteration was reset since.
        """
        ctx = self.states[0].comm_ctx
        if ctx.finalization is not handle:
            raise RuntimeError("the iteration was reset since finalize_backward: its gradients were dropped")
        self._finish_reductions(ends_iteration=True)
        ctx.finalization = None

    def forget_forwards(self, ctx: FSDPCommContext) -> None:
        """Clear the forward order at the end of an iteration."""
        ctx.post_forward_order.clear()
        for state in self.states:
            state.forget_forwards()

    def reset(self, states: Sequence[FSDPState], ctx: FSDPCommContext) -> None:
        """Drop the remains of an iteration that raised, without waiting for anything."""
        for state in states:
            state.reset()
        ctx.abandon()
        self.is_last_backward = True
        self._ends_manually = None
        self.final_callback_queued = self.forward_failed = False
        self._last_forwards, self._forwards = [], []  # they may differ between ranks now


roots: weakref.WeakSet[FSDPState] = weakref.WeakSet()
"""Every root that has run; recovery after a failure resets them."""


def raised_in() -> int:
    """Return the index of the innermost unit in which a model's last forward raised; NO_UNIT if none did."""
    return max((root.root_ctx.raised_in for root in tuple(roots)), default=probe.NO_UNIT)


def missed_grads() -> list[str]:
    """Return the names of all models' units with full gradients that no reduction took, outside a backward."""
    return [u.in_model(u.name) for root in tuple(roots) for u in units_of(root.tree) if u.has_missed_grads]


def unreduced_units() -> list[int]:
    """Return the indices of all models' units with gradients that wait for a reduction, outside a backward."""
    return [u.index for root in tuple(roots) for u in units_of(root.tree) if u.has_unreduced_grads or u.has_partial_sum]


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401 - hook signature
    """Reshard units whose parameters the optimizer stepped: their full parameters are stale."""
    stepped: set[int] = set()
    for unit in (unit for root in roots for unit in units_of(root.tree)):
        if unit.is_sharded and not unit.is_unsharding:
            continue
        stepped = stepped or {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(owned) in stepped for p in unit.fsdp_params for owned in p.owned):
            unit.reshard()


def _before_step(*_: Any) -> None:  # noqa: ANN401 - hook signature
    """Wait until other ranks have read the shards: without a reduction since, a read may still be under way."""
    for root in tuple(roots):
        root.comm_ctx.comms.wait_for_readers()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
