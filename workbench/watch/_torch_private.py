"""All uses of torch's private API in ``watch/``: calls of c10d, and parameter groups of torch's ``fully_shard``.

Each function here has a test in ``tests/watch/test_torch_private.py`` that fails when torch changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from workbench.events import Kind

Work = dist.Work
ParamGroup = _fsdp_param_group.FSDPParamGroup
State = _fsdp_state.FSDPState


class Replacements:
    """Attributes of torch's classes and modules that are replaced for a while."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, object]] = []

    def wrap(self, owner: type | ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace ``owner.name`` with a function that calls ``wrapper(original, *args)``.

        Raises:
            AttributeError: this version of torch has no such function.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            return wrapper(original, *args, **kwargs)

        self._undo.append((owner, name, vars(owner).get(name, original)))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put all originals back."""
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


# ---- c10d


class Tensors(NamedTuple):
    """Tensors of a collective on this rank; where one tensor is both, it is among the inputs."""

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


class CallObserver(Protocol):
    """Observer of c10d's calls on this process."""

    def begin(self, group: dist.ProcessGroup, kind: Kind, tensors: Tensors, *, is_async: bool) -> object:
        """Receive a call before it is made; return what identifies it. May block or raise: then it is not made."""

    def issued(self, call: Any, work: Work | None) -> None:  # noqa: ANN401 - what begin returned
        """Receive the work of a call that was made; None if c10d returned none."""

    def failed(self, call: Any) -> None:  # noqa: ANN401 - what begin returned
        """The call raised."""

    def wait(self, original: Callable[..., bool], work: Work, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
        """Call ``original(work, ...)``, which waits for a work."""


HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
"""Whether process groups announce their calls, also those that C++ makes: torch 2.14 and newer."""

_HOOK_ID = 0x776F726B

_BY_HOOK = {
    "SEND": Kind.SEND,
    "RECV": Kind.RECV,
    "BROADCAST": Kind.BROADCAST,
    "ALLREDUCE": Kind.ALL_REDUCE,
    "REDUCE": Kind.REDUCE,
    "ALLGATHER": Kind.ALL_GATHER,
    "REDUCE_SCATTER": Kind.REDUCE_SCATTER,
    "ALLTOALL": Kind.ALL_TO_ALL,
    "BARRIER": Kind.BARRIER,
    "SCATTER": Kind.SCATTER,
    "GATHER": Kind.GATHER,
}

# methods of ProcessGroup: their kind, and how many of their first arguments are (outputs, inputs)
_BY_METHOD = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), (Kind.ALL_REDUCE, 0, 1)),
    **dict.fromkeys(("broadcast",), (Kind.BROADCAST, 0, 1)),
    **dict.fromkeys(("reduce",), (Kind.REDUCE, 0, 1)),
    **dict.fromkeys(
        (
            *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
            *("all_gather_single", "all_gather_single_coalesced"),
        ),
        (Kind.ALL_GATHER, 1, 1),
    ),
    **dict.fromkeys(
        (
            *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
            *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
        ),
        (Kind.REDUCE_SCATTER, 1, 1),
    ),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), (Kind.ALL_TO_ALL, 1, 1)),
    **dict.fromkeys(("gather",), (Kind.GATHER, 1, 1)),
    **dict.fromkeys(("scatter",), (Kind.SCATTER, 1, 1)),
    **dict.fromkeys(("barrier",), (Kind.BARRIER, 0, 0)),
    **dict.fromkeys(("send",), (Kind.SEND, 0, 1)),
    **dict.fromkeys(("recv", "recv_anysource"), (Kind.RECV, 1, 0)),
}


def observe_calls(observer: CallObserver, changes: Replacements) -> None:
    """Report every call of c10d to ``observer`` until ``changes`` are undone.

    With hooks (:data:`HAS_HOOKS`) these are all calls; else those that Python makes.
    """
    changes.wrap(Work, "wait", observer.wait)
    if HAS_HOOKS:
        for group in groups_so_far():
            _hook(group, observer)
        changes.wrap(dist.ProcessGroup, "_set_group_name", _hook_new(observer))
        return
    for method, row in _BY_METHOD.items():
        if hasattr(dist.ProcessGroup, method):
            changes.wrap(dist.ProcessGroup, method, _reporting(observer, *row))


def stop_observing_groups() -> None:
    """Remove the hooks from all groups; no-op where there are none."""
    for group in groups_so_far() if HAS_HOOKS else ():
        with suppress(RuntimeError, ValueError):  # a group may have been made by C++, without them
            group.unregister_pre_hook(_HOOK_ID)  # type: ignore[attr-defined]
            group.unregister_post_hook(_HOOK_ID)  # type: ignore[attr-defined]


def groups_so_far() -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups that exist."""
    return tuple(distributed_c10d._world.pg_map)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group; () if torch does not know them."""
    known = distributed_c10d._world.pg_group_ranks.get(group)
    return () if known is None else tuple(known)


def _hook_new(observer: CallObserver) -> Callable[..., Any]:
    """Every new group gets a name: hook it then, before its first call."""

    def named(original: Callable[..., Any], group: dist.ProcessGroup, *args: Any) -> Any:  # noqa: ANN401
        _hook(group, observer)
        return original(group, *args)

    return named


def _hook(group: dist.ProcessGroup, observer: CallObserver) -> None:
    calls: dict[int, object] = {}

    def pre(call: Any) -> None:  # noqa: ANN401 - PreHookArgs
        kind = _BY_HOOK.get(call.name.name)
        if kind is not None:
            tensors = Tensors(call.input_tensors, call.output_tensors)
            calls[call.op_id] = observer.begin(group, kind, tensors, is_async=call.async_op)

    def post(call: Any) -> None:  # noqa: ANN401 - PostHookArgs
        if call.op_id in calls:
            observer.issued(calls.pop(call.op_id), call.work)

    group.register_pre_hook(_HOOK_ID, pre)  # type: ignore[attr-defined]
    group.register_post_hook(_HOOK_ID, post)  # type: ignore[attr-defined]


def _reporting(observer: CallObserver, kind: Kind, outputs: int, inputs: int) -> Callable[..., Any]:
    def call(original: Callable[..., Any], group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        given = args[: outputs + inputs]
        tensors = Tensors(inputs=tuple(_flat(given[outputs:])), outputs=tuple(_flat(given[:outputs])))
        options = (*args[outputs + inputs :], *kwargs.values())
        is_async = next((bool(each.asyncOp) for each in options if hasattr(each, "asyncOp")), True)
        one = observer.begin(group, kind, tensors, is_async=is_async)
        try:
            work = original(group, *args, **kwargs)
        except BaseException:
            observer.failed(one)
            raise
        observer.issued(one, work)
        return work

    return call


def _flat(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for each in given:
            yield from _flat(each)


# ---- fully_shard

foreach = _fsdp_param_group
"""The module in which a parameter group looks up ``foreach_all_gather`` and its relatives."""


def root_of(group: ParamGroup) -> nn.Module:
    """Return the root of the model of a group; before its first forward, the group's own module."""
    states = _state_of(group)._state_ctx.all_states
    root: nn.Module = (states[0] if states else _state_of(group))._modules[0]
    return root


def _state_of(group: ParamGroup) -> State:
    state: State = group.modules[0]._get_fsdp_state()  # type: ignore[operator]
    return state


def groups_below(model: nn.Module) -> Iterator[tuple[str, ParamGroup]]:
    """Yield the parameter groups of a model, in the order of its modules, with the paths of their modules."""
    for path, module in model.named_modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for group in () if state is None else _groups_of(state):
            if id(group.modules[0]) == id(module):  # a group of several modules is met at each of them
                yield path, group


def _groups_of(state: Any) -> Sequence[ParamGroup]:  # noqa: ANN401 - differs by version
    several = getattr(state, "_fsdp_param_groups", None)  # torch 2.13
    if several is not None:
        return tuple(several)
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def renew(group: ParamGroup) -> None:
    """Give a group the process groups that its mesh has now, and forget the iteration that was under way."""
    for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
        info.__post_init__()
    group._all_gather_result = None
    state = _state_of(group)
    for part in (group, state):
        part._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    group._post_forward_indices.clear()
    group.comm_ctx.post_forward_order.clear()
    group.comm_ctx.all_gather_state = None
    for param in group.fsdp_params:
        full = getattr(param, "_unsharded_param", None)
        if full is not None:
            full.grad = None
        param.unsharded_accumulated_grad = None
    group._to_sharded()


def will_unshard(group: ParamGroup) -> bool:
    """Return whether ``unshard`` would start an all-gather now."""
    is_backward = group._training_state == TrainingState.PRE_BACKWARD
    is_wanted = group.unshard_in_backward or not is_backward
    return group._all_gather_result is None and not group.is_unsharded and is_wanted


def is_gathering(group: ParamGroup) -> bool:
    """Return whether an all-gather was started and not yet waited for."""
    return group._all_gather_result is not None


def is_in_forward(group: ParamGroup) -> bool:
    """Return whether a module of the group runs its forward."""
    return group._training_state == TrainingState.FORWARD


def is_in_backward(group: ParamGroup) -> bool:
    """Return whether the backward of the group has begun."""
    return group._training_state == TrainingState.PRE_BACKWARD


def shape_of(param: Any) -> tuple[int, ...]:  # noqa: ANN401 - an FSDPParam
    """Return the shape that FSDP shards: under tensor parallelism this rank's part."""
    return tuple(param._orig_size)


def full_of(param: Any) -> torch.Tensor | None:  # noqa: ANN401 - an FSDPParam
    """Return the unsharded parameter of an FSDPParam in the unsharded state, else None."""
    return param._unsharded_param if param.sharded_state.name == "UNSHARDED" else None


def full_grads_of(param: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - an FSDPParam
    """Return the gradients of the unsharded parameter: the newest, then what was accumulated before it."""
    full = getattr(param, "_unsharded_param", None)
    found = (None if full is None else full.grad, param.unsharded_accumulated_grad)
    return tuple(grad for grad in found if grad is not None)


def module_of(param: Any) -> tuple[nn.Module, str]:  # noqa: ANN401 - an FSDPParam
    """Return the module that has the parameter, and its name there."""
    return param._module_info.module, param._module_info.param_name


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, the same object each time."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
