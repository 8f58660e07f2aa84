""":class:`FSDPModule`, the methods that ``fully_shard`` mixes into a module's class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self, cast, overload

import torch
from torch import nn

from workbench.engine._torch import has_own_grad_dtype
from workbench.engine.comm import AllGather, ReduceScatter
from workbench.engine.fsdp_state import FSDPState, RootContext, state_of, states_below, units_of
from workbench.engine.param_group import FSDPParamGroup


class UnshardHandle:
    """Handle returned by ``unshard(async_op=True)``."""

    def __init__(self, units: Sequence[FSDPParamGroup]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait until the module's full parameters are registered.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
            RanksDisagreeError: ranks issue different collectives.
        """
        for unit in self._units:
            unit.wait_for_unshard()
        for unit in self._units:  # perhaps no reduction follows, and the shards may be written next
            unit.comm_ctx.comms.wait_for_readers()


class GradientReductionHandle:
    """Handle returned by ``finalize_backward(async_op=True)``."""

    def __init__(self, root: RootContext | None) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until the gradients are reduced; no-op from the second call on.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
            RanksDisagreeError: ranks issue different collectives.
            RuntimeError: ``reset_iter_state`` was called since.
        """
        if self._root is not None:
            self._root.wait_for_reductions(self)
            self._root = None


class FSDPModule:
    """Methods that ``fully_shard`` adds to a module; flags must be bools (TypeError)."""

    def __copy__(self) -> Self:
        new = object.__new__(type(self))
        vars(new).update(vars(self))
        return new

    def _get_fsdp_state(self) -> FSDPState:
        """Return the state of the call that made this module an FSDP module."""
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AttributeError(f"no fully_shard state on this {type(self).__name__}")
        return state

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own unit (not its children's).

        Args:
            async_op: only start it and return a handle to wait with.
        """
        handle = UnshardHandle(_own_units(self))
        for unit in _own_units(self):
            unit.comm_ctx.streams.shards_changed(self._get_fsdp_state().root_ctx.post_optim_event)
            unit.unshard()
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's own unit; call it before you write to parameters by hand."""
        for unit in _own_units(self):
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward; call it on the root."""
        self._get_fsdp_state().reset_iter_state()

    def release_buffers(self) -> None:
        """Free the memory kept for the next step; call it on the root, between steps."""
        self._get_fsdp_state().comm_ctx.release_buffers()

    # ---- schedule

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward ends the iteration, or more micro-batches follow; call it on the root."""
        self._get_fsdp_state().root_ctx.is_last_backward = _flag(is_last_backward, "set_is_last_backward")

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether :meth:`finalize_backward` ends the iteration, not the last backward; call it on the root.

        It takes the place of :meth:`set_is_last_backward`. The settings of synchronisation and resharding apply.

        Raises:
            RuntimeError: this is not the root; a backward of this iteration has begun with the other setting.
        """
        _flag(enabled, "set_manual_backward_finalization")
        self._root_context("set_manual_backward_finalization").set_ends_manually(enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = ...) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients and reshard, as the settings are now, after all backwards of the iteration.

        Call it on the root, after :meth:`set_manual_backward_finalization`. No-op before the first forward.

        Args:
            async_op: only start the reductions and return a handle to wait with, before gradients are used or another
                forward.

        Raises:
            RuntimeError: this is not the root; finalization is not manual; a backward runs or has raised; the handle
                of another call, on a root that shares communication with this one, was not waited for.
        """
        root = self._root_context("finalize_backward")
        handle = GradientReductionHandle(root if root.states else None)
        if root.states:
            root.finalize_backward(handle)
        if async_op:
            return handle
        handle.wait()
        return None

    def _root_context(self, what: str) -> RootContext:
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError(f"call {what} on the root, not on a {type(self).__name__} inside it")
        return state.root_ctx

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to free full parameters between forward and backward, from the next forward on.

        Raises:
            TypeError: not a bool.
        """
        _flag(reshard_after_forward, "set_reshard_after_forward")
        for state in _states(self, recurse=recurse):
            state.auto_reshard = False
            for unit in state.units:
                unit.set_reshard_after_forward(reshard_after_forward)
                unit.announce()

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Set whether to free full parameters after backward, or keep them for the next micro-batch."""
        _flag(reshard_after_backward, "set_reshard_after_backward")
        for unit in units_of(_states(self, recurse=recurse)):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule] | None) -> None:
        """Prefetch ``modules``, in this order, while this module's forward runs.

        Empty: no prefetch, the default of torch's engine. None, the default: the module that ran next in the last
        iteration.

        Raises:
            TypeError: one of them is not an FSDP module.
        """
        ahead = None if modules is None else _states_of(modules, "set_modules_to_forward_prefetch")
        self._get_fsdp_state().forward_prefetch = ahead

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Prefetch ``modules``, in this order, while this module's backward runs; empty: the one that ran before.

        Raises:
            TypeError: one of them is not an FSDP module.
        """
        before = _states_of(modules, "set_modules_to_backward_prefetch")
        self._get_fsdp_state().backward_prefetch = before or None

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether to gather this module's parameters in backward: an embedding's backward does not read them."""
        for unit in _own_units(self):
            unit.unshard_in_backward = _flag(unshard_in_backward, "set_unshard_in_backward")

    def set_post_optim_event(self, event: torch.cuda.Event | None) -> None:
        """Make the next forward's all-gathers on CUDA wait for ``event`` instead of all earlier compute (None).

        Call it on the root after every optimizer step.
        """
        if event is not None and not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event takes a torch.Event or None, got {event!r}")
        self._get_fsdp_state().root_ctx.post_optim_event = event

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of full parameters stays allocated, at its address, after they are resharded."""
        for unit in units_of(_states(self, recurse=recurse)):
            unit.keeps_memory = _flag(keep, "set_keep_unsharded_storage")

    # ---- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, recurse: bool = True) -> None:
        """Set whether backward ends with a reduction, or accumulates full gradients (accumulation without sync).

        With replicas this applies to both steps of the reduction and overrides :meth:`set_requires_all_reduce`.
        """
        sync = _flag(requires_gradient_sync, "set_requires_gradient_sync")
        for unit in units_of(_states(self, recurse=recurse)):
            unit.sync.reduce_grads = unit.sync.all_reduce_grads = sync

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether to reduce zeros for parameters without a gradient: ranks may use different ones (experts)."""
        for unit in units_of(_states(self, recurse=recurse)):
            unit.sync.reduce_unused = _flag(reduce_scatter_unused_params, "set_reduce_scatter_unused_params")

    def set_requires_all_reduce(self, requires_all_reduce: bool, recurse: bool = True) -> None:
        """Set whether to all-reduce reduced shards over replicas, or accumulate them."""
        for unit in units_of(_states(self, recurse=recurse)):
            unit.sync.all_reduce_grads = _flag(requires_all_reduce, "set_requires_all_reduce")

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of this module's gradients by ``factor`` instead of the number of ranks with different data.

        Raises:
            TypeError, ValueError: not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"set_gradient_divide_factor takes a number, got {factor!r}")
        if not 0 < factor < math.inf:
            raise ValueError(f"set_gradient_divide_factor takes a finite number above 0, got {factor!r}")
        for unit in _own_units(self):
            unit.sync.divide_factor = float(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether the backend uses only sums, and the engine divides."""
        for unit in _own_units(self):
            unit.sync.force_sum = _flag(enable, "set_force_sum_reduction_for_comms")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, recurse: bool = True) -> None:
        """Limit the reduce-scatters in flight, each of which holds an input buffer; the model shares one limit.

        Raises:
            TypeError: not an int.
            ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers takes an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers takes 1 or more buffers, got {max_input_buffers}")
        for unit in units_of(_states(self, recurse=recurse)):
            unit.set_max_reductions(max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter in a process group of its own, so that it does not wait for an all-gather; collective."""
        for unit in units_of(_states(self, recurse=recurse)):
            unit.separate_reductions(_flag(enable, "set_separate_reduce_scatter_group"))

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call ``hook`` with this module's reduced shard ``[S]`` before it is divided, in ``stream`` if given.

        Raises:
            ValueError: the module's parameters are on several meshes; a stream with replicas, whose all-reduce has one.
        """
        if not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of the reduced shard, got {hook!r}")
        units = _one_mesh(self, "set_all_reduce_hook")
        for unit in units:
            if stream is not None and unit.mesh_info.replicate_mesh_size > 1:
                raise ValueError(
                    "set_all_reduce_hook: with replicas the hook runs in the stream of their all-reduce; pass no stream"
                )
            unit.sync.all_reduce_hook, unit.sync.hook_stream = hook, stream

    # ---- communication

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this module's parameters with ``comm``.

        Raises:
            ValueError: the module's parameters are on several meshes.
        """
        _check_comm(comm, "set_custom_all_gather")
        for unit in _one_mesh(self, "set_custom_all_gather"):
            unit.use_comm(unit.comm_choice.custom(gather=comm))

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this module's gradients with ``comm``.

        Raises:
            ValueError: the module's parameters are on several meshes.
        """
        _check_comm(comm, "set_custom_reduce_scatter")
        for unit in _one_mesh(self, "set_custom_reduce_scatter"):
            unit.use_comm(unit.comm_choice.custom(reduce=comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the backend allocate communication buffers (zero-copy transfers), if it can; gloo cannot.

        Raises:
            ValueError: the unit has a custom all-gather or reduce-scatter, which allocates its own buffers.
        """
        for unit in _own_units(self):
            unit.allocate_from_group(_flag(enable, "set_allocate_memory_from_process_group_for_comm"))

    # ---- the rest

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert parameters (``.to``, ``.double`` ...), then adopt the new ones."""
        module = cast("nn.Module", self)
        units = units_of(states_below(module))
        for unit in units:
            unit.reshard()
        params = [param for unit in units for param in unit.fsdp_params if has_own_grad_dtype(param.owned[0])]
        grads = [(param, param.owned[0].grad) for param in params if param.owned[0].grad is not None]
        for param, _ in grads:
            param.owned[0].grad = None  # its dtype does not follow the parameter's
        super()._apply(fn, recurse)  # type: ignore[misc]
        for unit in units:
            unit.adopt_registered(fresh=True)
        for param, grad in grads:
            param.owned[0].grad = grad.to(param.owned[0].device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise NotImplementedError(
            "an FSDP module cannot be deep-copied: copy the plain module before fully_shard, or after unshard_module"
        )


def _own_units(module: FSDPModule) -> list[FSDPParamGroup]:
    return module._get_fsdp_state().units


def _states(module: FSDPModule, *, recurse: bool) -> list[FSDPState]:
    return states_below(cast("nn.Module", module)) if recurse else [module._get_fsdp_state()]


def _one_mesh(module: FSDPModule, what: str) -> list[FSDPParamGroup]:
    units = _own_units(module)
    num_meshes = len({unit.mesh_info for unit in units})
    if num_meshes > 1:
        raise ValueError(
            f"{what}: the parameters of this {type(module).__name__} are on {num_meshes} meshes, and one object "
            "supports only one mesh"
        )
    return units


def _flag(value: object, what: str) -> bool:
    """Return ``value``, an argument of the setter ``what``; raise TypeError for anything but a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} takes True or False, got {value!r}")
    return value


def _check_comm(comm: object, what: str) -> None:
    if isinstance(comm, type) or not callable(comm) or not hasattr(comm, "allocate"):
        raise TypeError(f"{what} takes a callable with a method allocate, got {comm!r:.60}")


def _states_of(modules: Sequence[object], what: str) -> tuple[FSDPState, ...]:
    if not isinstance(modules, Sequence) or isinstance(modules, str):
        raise TypeError(f"{what} takes a list of modules, got {type(modules).__name__}")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(f"{what} takes modules that fully_shard was called on, got {type(module).__name__}")
    return tuple(module._get_fsdp_state() for module in cast("Sequence[FSDPModule]", modules))


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``cls`` with FSDPModule mixed in, one per class.

    Calling it makes a plain module: ``sequential[:2]`` and ``type(module)(...)`` expect a new, unsharded one.
    """

    def new(_sharded: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - arguments of cls
        return cls(*args, **kwargs)

    if cls not in _classes:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__new__": new}
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _classes[cls]
