"""Communication hooks: functions that ``register_comm_hook`` uses instead of the engine's gradient reduction.

A hook takes a state and this rank's ``grad`` ``[S]``, which it may overwrite. If parameters are sharded over F ranks,
it also takes ``output`` ``[S / F]`` and writes this rank's part of the average there; otherwise it writes the average
to ``grad``. Like the engine's waits, those of the hooks here end when the step is aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from workbench.engine.backends import backend_of
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.comm import Allocator
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.reduction import factor_before

CommHook = Callable[..., object]


class HookReduceScatter(Allocator):
    """A reduce-scatter that calls a hook; it completes when the hook returns."""

    def __init__(self, state: object, hook: CommHook) -> None:
        self._state = state
        self._hook = hook

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> None:
        """Have the hook write this rank's part ``[S]`` of the average of ``input_tensor`` ``[F * S]`` to the output."""
        del group, op, async_op  # the hook's state has the group, and the hook chooses the operation
        self._hook(self._state, input_tensor, output_tensor)


def install(unit: FSDPParamGroup, state: object, hook: CommHook) -> None:
    """Make ``hook`` reduce the gradients of a unit from now on."""
    unit.sync.comm_hook = partial(hook, state)
    if unit.shard_group is not None:
        unit.use_comm(unit.comm_choice.custom(reduce=HookReduceScatter(state, hook)))


class DefaultState:
    """State of a hook that averages.

    Args:
        process_group: the ranks whose gradients are averaged.

    Attributes:
        process_group: the same.
        world_size: number of its ranks.
        gradient_predivide_factor: divisor of gradients before the sum: about the square root of the number of ranks, so
            that neither the sum overflows nor its parts underflow.
        gradient_postdivide_factor: divisor of the sum.

    Raises:
        ValueError: there is no process group, or this rank is not in it.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(
                f"{type(self).__name__} takes the process group to average over, got None; for all ranks pass "
                "torch.distributed.group.WORLD"
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        if self.world_size < 1:
            raise ValueError(f"{type(self).__name__}: rank {dist.get_rank()} is not in the process group")
        self.gradient_predivide_factor = factor_before(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """State of a hook that sends gradients in a lower precision.

    Args:
        process_group: the ranks whose gradients are averaged.
        parameter_type: dtype of the result.

    Raises:
        ValueError: as :class:`DefaultState`, or ``parameter_type`` is not a floating-point dtype.
        TypeError: ``parameter_type`` is not a dtype.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        if not isinstance(parameter_type, torch.dtype):
            raise TypeError(f"LowPrecisionState: parameter_type must be a torch.dtype, got {parameter_type!r}")
        if not parameter_type.is_floating_point:
            raise ValueError(f"LowPrecisionState: parameter_type must be a floating-point dtype, got {parameter_type}")
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` in place, in its own dtype."""
    _divide(grad, state.gradient_predivide_factor)
    all_reduce(grad, dist.ReduceOp.SUM, state.process_group, "all-reduce of a communication hook")
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Write this rank's part of the average of ``grad`` to ``output``, in the dtype of both.

    Raises:
        ValueError: ``grad`` does not have ``world_size`` times the elements of ``output``.
    """
    if grad.numel() != output.numel() * state.world_size:
        raise ValueError(
            f"reduce_scatter_hook: grad must have {state.world_size} times the {output.numel()} elements of output, "
            f"one part for each rank, got {grad.numel()}; pad it"
        )
    _divide(grad, state.gradient_predivide_factor)
    work = dist.reduce_scatter_single(output, grad, op=dist.ReduceOp.SUM, group=state.process_group, async_op=True)
    _wait(work, output.device, state.process_group, "reduce-scatter of a communication hook")
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average in float16, with the result in ``state.parameter_type``; see :func:`bf16_compress_hook`."""
    _average_in(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average in bfloat16, with the result in ``state.parameter_type``.

    Args:
        state: the process group, and the dtype of the result.
        grad: ``[S]`` in any floating-point dtype; without ``output`` it becomes the average.
        output: ``[S / F]``; becomes this rank's part of the average.
    """
    _average_in(torch.bfloat16, state, grad, output)


def _average_in(dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None) -> None:
    sent = grad.to(dtype)
    if output is None:
        allreduce_hook(state, sent)
        _put(sent, grad, state.parameter_type)
        return
    received = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
    reduce_scatter_hook(state, sent, received)
    _put(received, output, state.parameter_type)


def _put(result: torch.Tensor, into: torch.Tensor, dtype: torch.dtype) -> None:
    """Set ``into`` to the result in ``dtype``; in its own memory if it has that dtype, otherwise in new memory."""
    if into.dtype == dtype:
        into.copy_(result)  # a no-op if they are the same tensor
    else:
        into.data = result.to(dtype)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1:
        tensor.div_(factor)


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, what: str) -> None:
    """Reduce a tensor over the ranks of a group, in place.

    Raises:
        StepAborted: the wait was cancelled.
        CollectiveFailed: a peer died or left; the message names ``what``.
    """
    _wait(dist.all_reduce(tensor, op=op, group=group, async_op=True), tensor.device, group, what)


def _wait(work: AsyncWork | None, device: torch.device, group: dist.ProcessGroup, what: str) -> None:
    pending = backend_of(device).transport(group).pending(work, what)
    pending.wait()
    pending.finish()
