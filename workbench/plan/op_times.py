"""How long each operation takes on a device: a roofline of its arithmetic and of the bytes that it reads and writes.

``t = max(flops / peak, bytes / rate)``, the least time that the device allows (Williams et al., "Roofline", 2009).
Arithmetic is counted for matrix products, convolutions and attention, by the formulas of
:mod:`torch.utils.flop_counter`; all else is bound by memory. Views and uninitialised memory take no time on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from workbench.base.machines import TF32, Machine
from workbench.engine._torch import (
    fake_device,
    is_fake,
    is_in_backward,
    local_of,
    named_groups,
    storage_of,
    without_fakes,
)
from workbench.engine.backends.simulated import SimulatedDevice, SimulatedWork
from workbench.events import Kind
from workbench.models._torch_private import HAS_HOOKS, DispatchMode, at_end_of_backward
from workbench.models.c10d import Call, CollectiveWatch
from workbench.plan.op_outcomes import OpOutcomes
from workbench.protocol.planning import PlannedRanks
from workbench.replay.collectives import ring_bytes

_KINDS = {
    "allreduce_": Kind.ALL_REDUCE,
    "allreduce_coalesced_": Kind.ALL_REDUCE,
    "broadcast_": Kind.BROADCAST,
    "reduce_": Kind.REDUCE,
    "allgather_": Kind.ALL_GATHER,
    "_allgather_base_": Kind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Kind.ALL_GATHER,
    "reduce_scatter_": Kind.REDUCE_SCATTER,
    "_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Kind.REDUCE_SCATTER,
    "alltoall_": Kind.ALL_TO_ALL,
    "alltoall_base_": Kind.ALL_TO_ALL,
    "barrier": Kind.BARRIER,
    "scatter_": Kind.SCATTER,
    "gather_": Kind.GATHER,
    "send": Kind.SEND,
    "recv_": Kind.RECV,
}
"""c10d's operators."""

_FUNCTIONAL = {
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "all_to_all_single": Kind.ALL_TO_ALL,
}
"""Operators of functional collectives."""

_DEVICE = torch.ops.prim.device.default


class OpTimes(DispatchMode):
    """Within the block, each operation of this thread adds its time to the device's current stream.

    Args:
        device: the device.
        ranks: whose device it is.
        calls: announces the collectives that the program itself issues.

    Attributes:
        offloads: whether the shards and gradients of the unit that communicates next are in the host's memory.
    """

    def __init__(self, device: SimulatedDevice, ranks: PlannedRanks, calls: CollectiveWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._ranks, self._calls = device, ranks, calls
        self.offloads = False
        self._outcomes = OpOutcomes(work_of)
        measured = ranks.machine.calibration
        self._dtensor_ns = measured.dtensor_ns if measured is not None else 0.0
        self._unit_ns = measured.unit_ns if measured is not None else 0.0
        self._is_reducer_at_work = False
        self._is_end_queued = False
        self._reducing: list[ReducerWork] = []  # of which C++ keeps only its own half, whose wait would never end
        self._under_way: dict[int, Any] = {}  # functional collectives, by the storage of their results

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's OpOverload
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of the operation
        """Run an operation, and add its time."""
        if any(issubclass(kind, DTensor) for kind in types):
            self._device.host.now_ns += round(self._dtensor_ns * num_dtensors(args))
            local = local_args(func, args, kwargs or {})
            if local is None:
                return NotImplemented  # which calls the same on its local tensors
            args = local
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs or {})
        if func is _DEVICE and is_fake(args[0]):  # autograd asks it all the time
            return fake_device(args[0])
        if self._calls.unit >= 0 and is_in_backward() and not any(map(is_fake, _tensors((args, kwargs)))):
            with without_fakes():  # which parameters were used: the reducer reads it
                return func(*args, **(kwargs or {}))
        result, work = self._outcomes.call(func, args, kwargs or {})
        if func.namespace == "_c10d_functional":
            self._call_functional(func, args, result)
        elif work is not None:
            self._compute(work)
        return result

    def _compute(self, work: OpWork) -> None:
        machine = self._ranks.machine
        self._device.host.now_ns += machine.launch_ns
        self._device.compute(round(_op_ns(work, machine)))

    def _communicate(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """Call a collective of c10d."""
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        outputs = _tensors([value for name, value in given.items() if name.startswith("output")])
        inputs = _tensors([value for name, value in given.items() if name.startswith(("input", "tensor"))])
        before, self._calls.is_paused = self._calls.is_paused, True  # torch calls hooks for tensors with data alone
        try:
            result = func(*args, **kwargs)
        finally:
            self._calls.is_paused = before
        call, work = self._issue(
            dist.ProcessGroup.unbox(given["process_group"]),
            _KINDS.get(func._overloadpacket.__name__),
            inputs,
            outputs,
            is_async=bool(given.get("async_op", True)),
            root=next((given[name] for name in ("root_rank", "dst", "src") if name in given), -1),
        )
        if not (self._is_reducer_at_work or self._calls.unit >= 0):
            return result
        if is_in_backward() and not self._is_end_queued:
            self._reducing.clear()
            self._is_end_queued = True
            at_end_of_backward(self._end_reductions)
        self._reducing.append(ReducerWork(inputs or outputs, partial(self._end, call, work)))
        boxed = self._reducing[-1].boxed()
        return (*result[:-1], boxed) if isinstance(result, tuple) else boxed

    @contextmanager
    def in_reducer(self) -> Iterator[None]:
        """In the body, torch's reducer is at work: integers that it makes have numbers, and it waits in C++."""
        self._is_reducer_at_work = True
        try:
            with NumbersOfReducer():  # type: ignore[no-untyped-call]
                yield
        finally:
            self._is_reducer_at_work = False

    def _end_reductions(self) -> None:
        """Let the host wait for the all-reduces of a backward, before the reducer copies what they have filled."""
        self._is_end_queued = False
        for each in self._reducing:
            each.wait()

    def _end(self, call: Call | None, work: SimulatedWork) -> None:
        work.wait()
        self._device.wait_until(work.until_ns)
        self._calls.ended(call, work.until_ns)

    def _call_functional(self, func: Any, args: tuple[Any, ...], result: Any) -> None:  # noqa: ANN401
        """Issue, or wait for, a functional collective, of which torch only makes the result if tensors have no data."""
        name = func._overloadpacket.__name__
        if name.startswith("wait_tensor"):
            for tensor in _tensors(args):
                if (work := self._under_way.pop(storage_of(tensor), None)) is not None:
                    work.wait()
        elif (kind := _FUNCTIONAL.get(name)) is not None:
            group = args[-1] if isinstance(args[-1], dist.ProcessGroup) else named_groups()[args[-1]]
            inputs, outputs = ([result], []) if kind is Kind.ALL_REDUCE else ([args[0]], [result])
            _, self._under_way[storage_of(result)] = self._issue(group, kind, inputs, outputs, is_async=True)

    def _issue(
        self,
        group: dist.ProcessGroup,
        kind: Kind | None,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        *,
        is_async: bool,
        root: int = -1,
    ) -> tuple[Call | None, SimulatedWork]:
        """Announce a collective, and add its time to the stream of its group."""
        call = None
        if HAS_HOOKS and kind is not None:  # torch calls no hook of a simulated group
            call = self._calls.begin(group, kind, inputs, outputs, is_async=is_async, root=root)
        ranks = tuple(dist.get_process_group_ranks(group))
        payload = 0 if kind is Kind.BARRIER else max(sum(t.nbytes for t in each) for each in (inputs, outputs))
        sent = ring_bytes(kind or Kind.ALL_GATHER, payload, len(ranks))
        self._device.host.now_ns += round(self._unit_ns)
        seconds = self._ranks.seconds(sent, ranks, kind.key if kind else "")
        if self.offloads and kind in {Kind.ALL_GATHER, Kind.REDUCE_SCATTER} and not self._device.runs_at_once:
            seconds += payload / len(ranks) / self._ranks.machine.host_rate  # of the shard, one before, one after
        self._device.communicate(group, round(seconds * 1e9))
        work = self._device.newest(group)
        self._calls.issued(call, work)
        if not is_async:
            for _ in self._calls.wait(work):
                work.wait()
        return call, work


class ReducerWork(dist.Work):
    """A collective that torch's reducer issues: in C++ it waits for the work, or for its future.

    Args:
        tensors: what it fills.
        end: called when the work is waited for; the future is done at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], end: Callable[[], None]) -> None:
        super().__init__()
        self._tensors, self._end = tensors, end

    def wait(self, *_: object) -> bool:
        """Wait for it."""
        self._end()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has what it fills."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class NumbersOfReducer(DispatchMode):
    """Within the block, new integers have numbers, which torch's reducer reads; other tensors have no data."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's OpOverload
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of the operation
        """Run an operation."""
        given = kwargs or {}
        tensors = _tensors((args, given))
        dtype = tensors[0].dtype if tensors else given.get("dtype") or torch.get_default_dtype()
        if dtype.is_floating_point or any(map(is_fake, tensors)):
            return func(*args, **given)
        with without_fakes():
            return func(*args, **given)


def local_args(
    func: Any,  # noqa: ANN401 - torch's OpOverload
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, ...] | None:
    """Return the local tensors of a fused optimizer's operation if it is the same on them; None if that is unknown.

    It is if all that belongs to a parameter is split in one way. DTensor derives that too, in a time that grows with
    the square of the number of parameters.
    """
    if not func._opname.startswith("_fused_") or func._schema.returns:
        return None
    if any(isinstance(arg, torch.Tensor) for arg in args) or any(isinstance(arg, DTensor) for arg in kwargs.values()):
        return None
    for of_param in zip_longest(*(arg for arg in args if isinstance(arg, (list, tuple)) and arg)):
        split = {(each.device_mesh, each.placements) for each in of_param if isinstance(each, DTensor)}
        if len(split) != 1 or any(placement.is_partial() for _, placements in split for placement in placements):
            return None
        if any(each is None or each.dim() for each in of_param if not isinstance(each, DTensor)):
            return None
    return tuple([_local(each) for each in arg] if isinstance(arg, (list, tuple)) else arg for arg in args)


def _local(value: object) -> object:
    return local_of(value) if isinstance(value, DTensor) else value


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in a nested structure, each storage's view once."""
    found = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return list({id(tensor): tensor for tensor in found}.values())


def _is_free(func: Any) -> bool:  # noqa: ANN401
    """Whether an operation only asks, makes another view, or memory without contents."""
    name = func._overloadpacket.__name__
    return (
        func.namespace == "prim"
        or bool(func.is_view)
        or name.startswith(("empty", "new_empty", "_local_scalar", "resize_", "set_"))
    )


def num_dtensors(args: object) -> int:
    """Return the number of DTensors among the arguments of an operation."""
    return sum(isinstance(leaf, DTensor) for leaf in tree_leaves(args))


class OpWork(NamedTuple):
    """The work of an operation: its name, the bytes that it reads and writes, its arithmetic, and the dtype of that."""

    op: str
    moved: int
    flops: int
    dtype: torch.dtype

    @property
    def amount(self) -> int:
        """Its arithmetic, or its bytes if that is not counted: the size at which it is measured."""
        return self.flops or self.moved

    @property
    def peak(self) -> str:
        """Name of the rate at which a device multiplies in its dtype."""
        if self.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            return TF32
        return str(self.dtype).removeprefix("torch.")


def _op_ns(work: OpWork, machine: Machine) -> float:
    """Return the device's time for an operation: as measured, or by the roofline if it, or the machine, was not."""
    if machine.calibration is not None:
        dtype = str(work.dtype).removeprefix("torch.")
        if (found := machine.calibration.op_ns_of(work.op, dtype, work.amount)) is not None:
            return found
    seconds = work.moved / machine.memory_rate
    if work.flops:
        seconds = max(seconds, work.flops / machine.peak(work.peak))
    return seconds * 1e9


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> OpWork | None:  # noqa: ANN401
    """Return what an operation does on the device; None: nothing."""
    if _is_free(func):
        return None
    tensors = _tensors((args, kwargs, result))
    formula = flop_registry.get(func._overloadpacket)
    return OpWork(
        op=str(func._overloadpacket),
        moved=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        flops=0 if formula is None else int(formula(*args, **kwargs, out_val=result)),
        dtype=next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), torch.float32),
    )
