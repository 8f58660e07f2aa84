"""All uses of torch's private API in ``models/``: calls of c10d, and parameter groups of torch's ``fully_shard``.

Each function here has a test in ``tests/models/test_torch_private.py`` that fails when torch changes it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    _runtime_utils,
    fully_sharded_data_parallel,
)
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._common_utils import TrainingState as TrainingStateOfWrapper
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.engine.module_names import clean
from workbench.engine.process_groups import OWN
from workbench.events import Kind
from workbench.models.patches import RESULT, Patches, Watching

T = TypeVar("T")

Work = dist.Work
ParamGroup = _fsdp_param_group.FSDPParamGroup
State = _fsdp_state.FSDPState


class DispatchMode(TorchDispatchMode):
    """Mode whose ``__torch_dispatch__`` runs for every operation within its body; a compiler may look into it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True wraps each call in two functions
        return False


# ---- c10d


class FunctionalWork:
    """Stand-in for the work of a functional collective, which Python does not get."""

    def get_future(self) -> Any:  # noqa: ANN401 - never returns
        """Raise RuntimeError: the time of its end is not known."""
        raise RuntimeError("a functional collective has no future")

    def is_completed(self) -> bool:
        """Return True: at the end of a watch, a collective without a wait counts as ended."""
        return True


AnyWork: TypeAlias = Work | FunctionalWork


Tensors: TypeAlias = Sequence[torch.Tensor]
"""Inputs or outputs of a collective on this rank; a tensor that is both is among the inputs."""


class CallObserver(Protocol):
    """Observer of c10d's calls on this process."""

    def begin(
        self, group: dist.ProcessGroup, kind: Kind, inputs: Tensors, outputs: Tensors, *, is_async: bool, root: int = -1
    ) -> object:
        """Receive a call before it is made; return what identifies it. May block or raise: then it is not made.

        Args:
            group: its group.
            kind: its kind.
            inputs: what it sends, or both sends and receives.
            outputs: what it only receives.
            is_async: whether it is made to return at once.
            root: rank, within the group, that is the source or the destination of the call, or to which this rank sends
                or from which it receives; -1: unknown or none.
        """

    def issued(self, call: Any, work: AnyWork | None) -> None:  # noqa: ANN401 - what begin returned
        """Receive the work of a call that was made; None if c10d returned none."""

    def fills(self, call: Any, outputs: Tensors) -> None:  # noqa: ANN401 - what begin returned
        """Receive the tensors that a functional collective fills, if the call was made without hooks."""

    def wait(self, work: AnyWork, *args: Any, **kwargs: Any) -> Watching:  # noqa: ANN401
        """Watch a wait for a work."""

    def wait_for_tensor(self, tensor: torch.Tensor) -> Watching:
        """Watch a wait for the functional collective that fills a tensor."""


HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")
"""Whether process groups announce their calls, also those that C++ makes: torch 2.14 and newer."""

_HOOK_ID = 0x776F726B

# torch 2.14 has one name for all forms of a collective
_BY_HOOK = {
    "SEND": Kind.SEND,
    "RECV": Kind.RECV,
    "BROADCAST": Kind.BROADCAST,
    **dict.fromkeys(("ALLREDUCE", "ALLREDUCE_COALESCED"), Kind.ALL_REDUCE),
    "REDUCE": Kind.REDUCE,
    **dict.fromkeys(
        ("ALLGATHER", "ALLGATHER_BASE", "ALLGATHER_COALESCED", "ALLGATHER_INTO_TENSOR_COALESCED"), Kind.ALL_GATHER
    ),
    **dict.fromkeys(("REDUCE_SCATTER", "REDUCE_SCATTER_BASE", "REDUCE_SCATTER_TENSOR_COALESCED"), Kind.REDUCE_SCATTER),
    **dict.fromkeys(("ALLTOALL", "ALLTOALL_BASE"), Kind.ALL_TO_ALL),
    "BARRIER": Kind.BARRIER,
    "SCATTER": Kind.SCATTER,
    "GATHER": Kind.GATHER,
    **dict.fromkeys(("SPLIT", "NEW_WINDOW", "UNKNOWN")),  # no collectives
}


@functools.cache  # torch searches all names for that of a member
def _kind_of_hook(name: Any) -> Kind | None:  # noqa: ANN401 - a HookOpName
    return _BY_HOOK[name.name]


# methods of ProcessGroup: their kind, and how many of their first arguments are (outputs, inputs)
_BY_METHOD = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), (Kind.ALL_REDUCE, 0, 1)),
    "broadcast": (Kind.BROADCAST, 0, 1),
    "reduce": (Kind.REDUCE, 0, 1),
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
    "gather": (Kind.GATHER, 1, 1),
    "scatter": (Kind.SCATTER, 1, 1),
    "barrier": (Kind.BARRIER, 0, 0),
    "send": (Kind.SEND, 0, 1),
    **dict.fromkeys(("recv", "recv_anysource"), (Kind.RECV, 1, 0)),
}


def observe_calls(observer: CallObserver, changes: Patches) -> None:
    """Report every call of c10d to ``observer`` until ``changes`` are undone.

    With hooks (:data:`HAS_HOOKS`) these are all calls; else those that Python makes.
    """
    changes.wrap(Work, "wait", observer.wait)
    if HAS_HOOKS:
        for group in groups_so_far():
            if not group.group_name.startswith(OWN):
                _hook(group, observer, changes)
        changes.wrap(dist.ProcessGroup, "_set_group_name", _hook_new(observer, changes))
    else:
        _wrap_calls(observer, changes)
    _observe_tensor_waits(observer.wait_for_tensor, changes)


def at_first_group(patches: Patches, begin: Callable[[int, int], object]) -> None:
    """Call ``begin`` with this process's rank and the number of ranks when it makes its first process group."""

    def named(group: dist.ProcessGroup, name: Any) -> Watching:  # noqa: ANN401 - a GroupName
        yield
        patches.undo()
        begin(group.rank(), group.size())
        group._set_group_name(name)  # again: whatever watches since then hooks a group when it gets its name

    patches.wrap(dist.ProcessGroup, "_set_group_name", named)


def _wrap_calls(observer: CallObserver, changes: Patches) -> None:
    """Report the calls that Python makes, where process groups have no hooks."""
    for method, row in _BY_METHOD.items():
        names_peer = method != "recv_anysource"
        changes.wrap(dist.ProcessGroup, method, _reporting(observer, *row, names_peer=names_peer))
    for namespace in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for name, kind in _BY_OPERATOR.items():
            if hasattr(namespace, name):  # autograd has not all of them
                _wrap_operator(namespace, name, _calling(observer, kind), changes)


def _observe_tensor_waits(wait: Callable[..., Watching], changes: Patches) -> None:
    """Let ``wait(tensor)`` watch the waits for what functional collectives return; no work is told for them."""
    _wrap_operator(torch.ops._c10d_functional, "wait_tensor", wait, changes)


def _wrap_operator(namespace: Any, name: str, watcher: Callable[..., Watching], changes: Patches) -> None:  # noqa: ANN401
    original = getattr(namespace, name)
    changes.replace(namespace, name, _Operator(original, changes.guarded(original, watcher, f"torch.ops.{name}")))


def stop_observing_groups() -> None:
    """Remove the hooks from all groups; no-op where there are none."""
    for group in groups_so_far() if HAS_HOOKS else ():
        with suppress(RuntimeError, ValueError):  # a group may have been made by C++, without them
            group.unregister_pre_hook(_HOOK_ID)
            group.unregister_post_hook(_HOOK_ID)


def groups_so_far() -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups that exist."""
    return tuple(distributed_c10d._world.pg_map)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of a group; () if torch does not know them."""
    known = distributed_c10d._world.pg_group_ranks.get(group)
    return () if known is None else tuple(known)


def _hook_new(observer: CallObserver, changes: Patches) -> Callable[..., Watching]:
    """Every new group gets a name: hook it then, before its first call; the engine's own groups need no hooks."""

    def named(group: dist.ProcessGroup, name: str) -> Watching:
        if not name.startswith(OWN):
            _hook(group, observer, changes)
        yield

    return named


def _hook(group: dist.ProcessGroup, observer: CallObserver, changes: Patches) -> None:
    calls: dict[int, object] = {}
    alive = weakref.ref(group)  # the group holds the hooks: with itself in them, it and its threads would never end

    def pre(call: Any) -> None:  # noqa: ANN401 - PreHookArgs
        kind, group = _kind_of_hook(call.name), alive()
        if kind is not None and group is not None:
            calls[call.op_id] = observer.begin(
                group, kind, call.input_tensors, call.output_tensors, is_async=call.async_op, root=call.root
            )

    def post(call: Any) -> None:  # noqa: ANN401 - PostHookArgs
        if call.op_id in calls:
            observer.issued(calls.pop(call.op_id), call.work)

    group.register_pre_hook(_HOOK_ID, changes.hook(pre, "the calls of a process group"))
    group.register_post_hook(_HOOK_ID, changes.hook(post, "the works of a process group"))


def _reporting(
    observer: CallObserver, kind: Kind, outputs: int, inputs: int, *, names_peer: bool = True
) -> Callable[..., Watching]:
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Watching:  # noqa: ANN401
        given, filled = _tensors(args[outputs : outputs + inputs]), _tensors(args[:outputs])
        options = (*args[outputs + inputs :], *kwargs.values())
        is_async = next((bool(each.asyncOp) for each in options if hasattr(each, "asyncOp")), True)
        numbers = [getattr(each, "rootRank", each) for each in options]  # its options, or the number alone
        root = next((each for each in numbers if type(each) is int), -1) if names_peer else -1
        one = observer.begin(group, kind, given, filled, is_async=is_async, root=root)
        observer.issued(one, (yield RESULT))

    return call


# functional collectives: DTensor calls them, and no method of ProcessGroup in Python; their last argument is the group
_BY_OPERATOR = {
    **dict.fromkeys(("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"), Kind.ALL_REDUCE),
    **dict.fromkeys(
        ("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"), Kind.ALL_GATHER
    ),
    **dict.fromkeys(
        ("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"), Kind.REDUCE_SCATTER
    ),
    "all_to_all_single": Kind.ALL_TO_ALL,
    **dict.fromkeys(("broadcast", "broadcast_"), Kind.BROADCAST),
}


class _Operator:
    """An operator of torch whose calls are observed; else it is as the original, with its overloads."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:  # noqa: ANN401 - an OpOverloadPacket
        self._original, self._call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
        # what is compiled calls the original
        return (self._original if torch.compiler.is_compiling() else self._call)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as the original
        return getattr(self._original, name)


def _calling(observer: CallObserver, kind: Kind) -> Callable[..., Watching]:
    def call(*args: Any, **kwargs: Any) -> Watching:  # noqa: ANN401
        given, name = _tensors(args[:1]), kwargs.get("group_name", args[-1])
        if not given or not isinstance(name, str):
            return
        group = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
        gathered = given * group.size() if kind is Kind.ALL_GATHER else ()
        root = kwargs.get("src", args[1] if len(args) > 1 else -1) if kind.info.has_root else -1
        one = observer.begin(group, kind, given, gathered, is_async=True, root=root)
        result = yield RESULT
        if one is not None:
            observer.issued(one, FunctionalWork())
            observer.fills(one, tuple(_flat(result)))

    return call


def _tensors(given: tuple[object, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors in ``given``, of which most calls have one that is no list."""
    first, *others = given or (None,)
    return (first,) if isinstance(first, torch.Tensor) and not others else tuple(_flat(given))


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
        for group in () if state is None else state._fsdp_param_groups:
            if id(group.modules[0]) == id(module):  # a group of several modules is met at each of them
                yield clean(path), group


def policies_below(
    model: nn.Module,
) -> Iterator[tuple[tuple[nn.Module, ...], MixedPrecisionPolicy, Sequence[ParamGroup]]]:
    """Yield the modules, the policy and the groups of each call of ``fully_shard`` on a part of a model."""
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        if state is not None and state._modules[0] is module:
            yield tuple(state._modules), state._mp_policy, tuple(state._fsdp_param_groups)


@contextmanager
def plain_modules(model: nn.Module) -> Iterator[None]:
    """Give the modules of a model their own classes and hooks, without those of ``fully_shard``, within the body."""
    with ExitStack() as last:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                last.callback(setattr, module, "__class__", type(module))
                module.__class__ = type(module).__bases__[1]  # the first is FSDPModule
                forwards = {name: value for name, value in vars(module).items() if _is_forward_method(value)}
                last.callback(vars(module).update, forwards)
                for name in forwards:
                    del vars(module)[name]
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                last.callback(_refill, hooks, dict(hooks))
                own = [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == State.__module__]
                for key in own:
                    del hooks[key]
        yield


def _refill(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    hooks.clear()
    hooks.update(before)


def _is_forward_method(value: object) -> bool:
    """Return whether an attribute is what ``register_fsdp_forward_method`` makes."""
    code = getattr(getattr(value, "__func__", None), "__code__", None)
    return code is not None and code.co_qualname.startswith("register_fsdp_forward_method.")


def ranks_of_group(group: ParamGroup) -> tuple[Ranks, Ranks]:
    """Return the ranks that share a copy of a group's parameters with this one, and those with the same shard."""
    shard, replicate = (
        getattr(group.mesh_info, f"{axis}_process_group", None)
        if getattr(group.mesh_info, f"{axis}_mesh_dim", None) is not None
        else None
        for axis in ("shard", "replicate")
    )
    return _ranks(shard), _ranks(replicate)


Ranks: TypeAlias = tuple[int, ...]


def _ranks(group: dist.ProcessGroup | None) -> Ranks:
    return (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))


def renew(group: ParamGroup) -> None:
    """Give a group the process groups that its mesh has now, and forget its model's iteration that was under way."""
    for info in filter(None, (group.mesh_info, group.post_forward_mesh_info)):
        info.__post_init__()
    states = _state_of(group)._state_ctx.all_states
    for each in (group, *(other for state in states for other in state._fsdp_param_groups)):
        each._all_gather_result = None  # else it is waited for, and its process group was aborted
        drop_full_grads(each)
    if states:
        states[0]._reset_iter_state()
    else:  # no forward has made a root known, which knows the state of an iteration
        group._to_sharded()


def has_partial_sum(group: ParamGroup) -> bool:
    """Return whether gradients were reduced within one of several copies, and not yet between them."""
    return group._partial_reduce_output is not None


def drop_full_grads(group: ParamGroup) -> None:
    """Drop a group's gradients that were not reduced, or not between copies."""
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        full = getattr(param, "_unsharded_param", None)
        if full is not None:
            full.grad = None
        if not _FOLLOWS_GRAD_DTYPE:
            setattr(param, "unsharded_accumulated_grad", None)  # noqa: B010 - a property that can only be read in 2.15


def will_unshard(group: ParamGroup) -> bool:
    """Return whether ``unshard`` would start an all-gather now."""
    is_backward = group._training_state == TrainingState.PRE_BACKWARD
    is_wanted = group.unshard_in_backward or not is_backward
    return group._all_gather_result is None and not group.is_unsharded and is_wanted


@contextmanager
def prefetched_first(model: FSDPModule, module: Any) -> Iterator[None]:  # noqa: ANN401 - another FSDPModule
    """Let the forward of ``model`` prefetch ``module`` before all else in the body."""
    state, first = model._get_fsdp_state(), module._get_fsdp_state()
    before = state._states_to_forward_prefetch
    state._states_to_forward_prefetch = [first, *(each for each in before if each is not first)]
    try:
        yield
    finally:
        state._states_to_forward_prefetch = before


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


def form_of(param: Any) -> torch.Tensor:  # noqa: ANN401 - an FSDPParam
    """Return a tensor of the form that the parameter had before ``fully_shard``, without values: a DTensor if split."""
    local = local_of(param.sharded_param).new_empty(0)
    spec = param._unsharded_dtensor_spec
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def mesh_of(param: Any) -> DeviceMesh:  # noqa: ANN401 - an FSDPParam
    """Return the mesh over which ``fully_shard`` splits the parameter, and averages its gradient."""
    mesh: DeviceMesh = param.mesh_info.mesh
    return mesh


def is_on_one_mesh(param: Any) -> bool:  # noqa: ANN401 - an FSDPParam
    """Return whether ``fully_shard`` got a mesh that has the dimensions of tensor parallelism too."""
    return bool(getattr(param.mesh_info, "is_spmd_mesh", False))


def full_of(param: Any) -> torch.Tensor | None:  # noqa: ANN401 - an FSDPParam
    """Return the unsharded parameter of an FSDPParam in the unsharded state, else None."""
    return param._unsharded_param if param.sharded_state.name == "UNSHARDED" else None


def freed_of(param: Any) -> torch.Tensor | None:  # noqa: ANN401 - an FSDPParam
    """Return the unsharded parameter of an FSDPParam whose memory was freed, else None."""
    full: torch.Tensor | None = getattr(param, "_unsharded_param", None)
    is_held = param.sharded_state.name == "UNSHARDED" or getattr(param, "keep_unsharded_storage", False)
    return None if is_held else full


def full_grads_of(param: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - an FSDPParam
    """Return the gradients of the unsharded parameter: the newest, then what was accumulated before it."""
    full = getattr(param, "_unsharded_param", None)
    found = (None if full is None else full.grad, None if _FOLLOWS_GRAD_DTYPE else param.unsharded_accumulated_grad)
    return tuple(grad for grad in found if grad is not None)


def full_grads_nbytes(group: ParamGroup) -> int:
    """Return the bytes of :func:`full_grads_of` of all parameters: a plain loop, called for each unit in each step."""
    nbytes = 0
    for param in group.fsdp_params:
        full = getattr(param, "_unsharded_param", None)
        if full is not None and full.grad is not None:
            nbytes += full.grad.nbytes
        if not _FOLLOWS_GRAD_DTYPE and param.unsharded_accumulated_grad is not None:
            nbytes += param.unsharded_accumulated_grad.nbytes
    return nbytes


_FOLLOWS_GRAD_DTYPE = hasattr(FSDPParam, "unsharded_grad_dtype")
"""Whether gradients accumulate in the parameter's ``grad_dtype``, and are reduced in it by default: torch 2.15."""


def dtypes_of(param: Any) -> tuple[torch.dtype, torch.dtype]:  # noqa: ANN401 - an FSDPParam
    """Return the dtype of an FSDPParam's forward and backward, and that in which its gradient is reduced."""
    own, policy = param.sharded_param.dtype, param.mp_policy
    compute = (own.is_floating_point and policy.param_dtype) or own
    default = (param.sharded_param.grad_dtype or compute) if _FOLLOWS_GRAD_DTYPE else compute
    return compute, policy.reduce_dtype or default


def keeps_full(group: ParamGroup) -> bool:
    """Return whether resharding a group frees no memory."""
    return any(getattr(param, "keep_unsharded_storage", False) for param in group.fsdp_params)


def module_of(param: Any) -> tuple[nn.Module, str]:  # noqa: ANN401 - an FSDPParam
    """Return the module that has the parameter, and its name there."""
    return param._module_info.module, param._module_info.param_name


def places_of(param: Any) -> tuple[tuple[nn.Module, str], ...]:  # noqa: ANN401 - an FSDPParam
    """Return every module that has the parameter, and its name there; the first is :func:`module_of`."""
    info = param._module_info
    return (module_of(param), *zip(info.shared_modules, info.shared_param_names, strict=True))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, the same object each time."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


# ---- the classic wrapper

Handle = FlatParamHandle
handle_functions = _runtime_utils
"""The module in which the classic wrapper looks up the functions of a backward."""
wrapper_functions = fully_sharded_data_parallel
"""The module in which the classic wrapper looks up the functions of a forward."""


def handles_below(model: nn.Module) -> Iterator[tuple[str, Handle]]:
    """Yield the flat parameters of a model, in the order of its modules, with the paths of their modules."""
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            _wrappers[module._handle] = weakref.ref(module)
            yield clean(path), module._handle


def ranks_of_handle(handle: Handle) -> tuple[Ranks, Ranks | None]:
    """Return what :func:`ranks_of_group` does, for a flat parameter; None: unknown."""
    if not handle.uses_sharded_strategy:
        return (dist.get_rank(),), _ranks(handle.process_group)
    wrapper = _wrapper_of(handle)
    replicas = None if wrapper is None else _ranks(getattr(wrapper, "_inter_node_pg", None))
    return _ranks(handle.process_group), replicas


def is_left_unaveraged(handle: Handle) -> bool:
    """Return whether torch does not average the gradients of a parameter that it replicates.

    With one rank in each shard group, torch turns ``HYBRID_SHARD`` into ``NO_SHARD`` and reduces within that group.
    """
    between = getattr(_wrapper_of(handle), "_inter_node_pg", None)
    return not handle.uses_sharded_strategy and between is not None and handle.process_group.size() < between.size()


def module_of_handle(handle: Handle) -> nn.Module:
    """Return the module whose parameters are in a flat parameter."""
    return handle._fully_sharded_module


def checkpoint_wrappers_below(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model that torch's wrapper of activation checkpointing holds, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, CheckpointWrapper):
            yield clean(path), module._checkpoint_wrapped_module


def _wrapper_of(handle: Handle) -> FullyShardedDataParallel | None:
    """Return the wrapper of a flat parameter that :func:`handles_below` has met."""
    found = _wrappers.get(handle)
    return None if found is None else found()


_wrappers: weakref.WeakKeyDictionary[Handle, weakref.ref[FullyShardedDataParallel]] = weakref.WeakKeyDictionary()


def will_gather(handle: Handle) -> bool:
    """Return whether ``unshard`` of a flat parameter would gather it."""
    return handle.needs_unshard()


def is_recomputing(handle: Handle) -> bool:
    """Return whether the backward of a flat parameter has begun: a forward now recomputes activations."""
    return handle._training_state == HandleTrainingState.BACKWARD_PRE


def has_begun_backward(handle: Handle) -> bool:
    """Return whether the hook before the backward has run for a flat parameter."""
    return getattr(handle, "_ran_pre_backward_hook", False)


class FlatParamFacts(NamedTuple):
    """A handle's description of its flat parameter.

    Attributes:
        numel: elements, without the padding at its end.
        shard_numel: elements of a rank's shard, padded.
        shard_size: ranks that share one copy.
        copies: copies whose gradients are averaged.
        reshards: whether it is freed between forward and backward.
        dtype: of the shard.
        compute_dtype: of forward and backward.
        reduce_dtype: of the reduction.
        names: of the parameters inside, relative to their wrapper's module.
        shapes: of these.
        firsts: index of the first element of each.
        trainable: whether it takes a gradient.
    """

    numel: int
    shard_numel: int
    shard_size: int
    copies: int
    reshards: bool
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    trainable: bool


def facts_of(handle: Handle) -> FlatParamFacts:
    """Return what a handle knows of its flat parameter."""
    flat = handle.flat_param
    size = handle.process_group.size() if handle.uses_sharded_strategy else 1
    ends = list(itertools.accumulate(flat._numels_with_padding))
    strategy = handle._sharding_strategy.name
    return FlatParamFacts(
        numel=flat._unpadded_unsharded_size.numel(),
        shard_numel=flat._local_shard.numel() if hasattr(flat, "_local_shard") else flat.numel(),
        shard_size=size,
        copies=math.prod(group.size() for group in averaging_groups_of(handle)) // size,
        reshards=strategy not in {"SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"},
        dtype=flat.dtype,
        compute_dtype=handle._fwd_bwd_param_dtype or flat.dtype,
        reduce_dtype=handle._reduce_dtype or handle._fwd_bwd_param_dtype or flat.dtype,
        names=tuple(flat._fqns),
        shapes=tuple(tuple(shape) for shape in flat._shapes),
        firsts=tuple(
            end - numel
            for end, numel, is_padding in zip(ends, flat._numels_with_padding, flat._is_padding_mask, strict=True)
            if not is_padding
        ),
        trainable=flat.requires_grad,
    )


def flat_shard_of(handle: Handle) -> torch.Tensor:
    """Return this rank's shard of a flat parameter, one-dimensional and padded."""
    flat = handle.flat_param
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard


def flat_full_of(handle: Handle) -> torch.Tensor | None:
    """Return the whole flat parameter; None while it is sharded, as it is until its first forward."""
    flat = handle.flat_param
    if handle.uses_sharded_strategy and (not hasattr(flat, "_full_param_padded") or handle.needs_unshard()):
        return None
    full: torch.Tensor = flat._full_param_padded if handle.uses_sharded_strategy else flat.data
    return full[: flat._unpadded_unsharded_size.numel()]


def flat_freed_of(handle: Handle) -> torch.Tensor | None:
    """Return the memory of the whole flat parameter after it was freed; None while it has values, or without any."""
    freed: torch.Tensor | None = getattr(handle.flat_param, "_full_param_padded", None)
    return freed if freed is not None and handle.uses_sharded_strategy and handle.needs_unshard() else None


def flat_places_of(handle: Handle) -> tuple[tuple[nn.Module, str], ...]:
    """Return the module that has each parameter inside a flat parameter, and its name there."""
    return tuple((info.module, info.param_name) for info in handle.flat_param._param_infos)


def flat_grad_of(handle: Handle) -> torch.Tensor | None:
    """Return the gradient of the whole flat parameter; None if there is none, or only that of the shard."""
    grad = handle.flat_param.grad
    whole = grad is not None and grad.numel() == handle.flat_param._unpadded_unsharded_size.numel()
    return grad if whole and handle.uses_sharded_strategy else None


def flat_sharded_grad_of(handle: Handle) -> torch.Tensor | None:
    """Return the gradient of this rank's shard of a flat parameter; None if there is none."""
    flat = handle.flat_param
    saved: torch.Tensor | None = getattr(flat, "_saved_grad_shard", None)
    if saved is None and flat.grad is not None and flat_grad_of(handle) is None:
        return flat.grad
    return saved


def shard_rank_of(handle: Handle) -> int:
    """Return the index of this rank's shard of a flat parameter."""
    return handle.rank if handle.uses_sharded_strategy else 0


def renew_handle(handle: Handle, new_of: Mapping[int, dist.ProcessGroup]) -> None:
    """Give a flat parameter and its wrapper new process groups, and forget the iteration that was under way."""
    for owner in (handle, _wrapper_of(handle)):
        for name in ("process_group", "_fake_process_group", "_inter_node_pg"):
            new = new_of.get(id(getattr(owner, name, None)))
            if new is not None:
                setattr(owner, name, new)
    forget_iteration(handle)


def forget_iteration(handle: Handle) -> None:
    """Free the whole flat parameter, drop its gradients, and forget the iteration that was under way."""
    wrapper = _wrapper_of(handle)
    if wrapper is not None:
        wrapper.training_state = TrainingStateOfWrapper.IDLE
        if hasattr(wrapper, "_post_backward_callback_queued"):  # a root
            wrapper._post_backward_callback_queued = False  # type: ignore[assignment]
    handle._training_state = HandleTrainingState.IDLE
    for name in ("_prefetched", "_ran_pre_backward_hook", "_needs_pre_backward_unshard"):
        setattr(handle, name, False)
    flat: Any = handle.flat_param
    flat._post_backward_called = False
    for each in {flat, *held_of(handle)}:
        each.grad = None
    hooked = flat.__dict__.pop("_post_backward_hook_state", None)
    if hooked is not None:
        hooked[-1].remove()
    flat.__dict__.pop("_saved_grad_shard", None)  # the reduced gradient of an iteration that was not finished
    reshard_handle(handle)


def reshard_handle(handle: Handle) -> None:
    """Free the whole flat parameter; no-op where every rank holds it."""
    if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_local_shard"):  # else nothing has run yet
        handle.reshard(free_unsharded_flat_param=True)


def held_of(handle: Handle) -> tuple[nn.Parameter, ...]:
    """Return what an optimizer holds: the flat parameter, or with ``use_orig_params`` a parameter for each part."""
    flat: Any = handle.flat_param
    return tuple(flat._params) if handle._use_orig_params else (flat,)


def all_places_of(handle: Handle) -> Iterator[tuple[int, nn.Module, str]]:
    """Yield the index of each part of a flat parameter, with every module that has it and its name there."""
    places = flat_places_of(handle)
    index = {place: number for number, place in enumerate(places)}
    yield from ((number, *place) for number, place in enumerate(places))
    for shared in handle.flat_param._shared_param_infos:
        yield index[shared.prim_module, shared.prim_param_name], shared.module, shared.param_name


def plain_module(wrapped: nn.Module) -> None:
    """Remove a flat parameter from a copy of the module that had it."""
    wrapped._parameters.pop("_flat_param", None)


def is_split_otherwise(handle: Handle) -> bool:
    """Return whether tensor parallelism splits a parameter inside a flat parameter."""
    return any(extension is not None for extension in handle.flat_param._param_extensions)


def averaging_groups_of(handle: Handle) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which the gradient of a flat parameter is averaged, one after the other."""
    wrapper = _wrapper_of(handle) if handle.uses_sharded_strategy else None
    between = getattr(wrapper, "_inter_node_pg", None)
    return (handle.process_group,) if between is None else (handle.process_group, between)


def gathered_flat(handle: Handle, shard: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that is sharded like a flat parameter, with padding; collective.

    Args:
        handle: of the flat parameter.
        shard: this rank's part, ``[shard_numel]``.
    """
    if not handle.uses_sharded_strategy:
        return shard
    whole = shard.new_empty(shard.numel() * handle.process_group.size())
    parts = list(whole.chunk(handle.process_group.size()))
    dist.all_gather(parts, shard.contiguous(), group=handle.process_group)
    return whole


def objects_of_shards(handle: Handle, value: T) -> list[T]:
    """Return the value of each rank that shares a flat parameter with this one; collective."""
    found: list[T] = [value] * handle.process_group.size()
    dist.all_gather_object(found, value, group=handle.process_group)
    return found


def wrappers_below(model: nn.Module) -> Iterator[tuple[FullyShardedDataParallel, bool, Handle | None]]:
    """Yield the wrappers of a model, outer before inner, whether each is a root, and its flat parameter if any."""
    inner: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            yield module, module not in inner, module._handle
            inner.update(module.modules())


# ---- DistributedDataParallel


def num_buckets(model: DistributedDataParallel) -> int:
    """Return the number of buckets of gradients, each averaged by one all-reduce; 0 while it is unknown.

    In its first backward a model has one bucket; then it makes others, in the order in which gradients came.
    """
    data = model._get_ddp_logging_data() if HAS_HOOKS else {}
    return len([size for size in str(data.get("rebuilt_bucket_sizes", "")).split(",") if size.strip()])


@contextmanager
def around_reducers(at_work: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """In the body, let models make and rebuild their buckets within ``at_work``, on the device of their parameters."""
    names = ("__init__", "_pre_forward")
    begin, prepare = before = tuple(getattr(DistributedDataParallel, name) for name in names)

    def make(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        given = inspect.signature(begin).bind(*args, **kwargs)
        given.arguments.update(device_ids=None, output_device=None)
        with at_work():
            begin(*given.args, **given.kwargs)

    def before_forward(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own
        with at_work():
            return prepare(model, *args, **kwargs)

    try:
        for name, replacement in zip(names, (make, before_forward), strict=True):
            setattr(DistributedDataParallel, name, replacement)
        yield
    finally:
        for name, original in zip(names, before, strict=True):
            setattr(DistributedDataParallel, name, original)


def renew_replicas(model: DistributedDataParallel, new_of: Mapping[int, dist.ProcessGroup]) -> None:
    """Give a model a new process group and a new reducer, as if it had been unpickled."""
    new = new_of.get(id(model.process_group))
    if new is not None:
        model.process_group = new
        model.__setstate__(model.__getstate__())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the running backward has computed all gradients, after what was queued before it."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def tensors_in(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a forward returns."""
    yield from (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


# ---- autograd


next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number of the next node that this thread's autograd makes; they ascend."""


def node_number(node: torch.autograd.graph.Node) -> int:
    """Return the number of a node of a graph, in the order in which its thread made them."""
    return int(node._sequence_nr())


def kept_by(node: torch.autograd.graph.Node) -> Iterator[object]:
    """Yield what a node keeps for its backward, without unpacking it; nothing if it has been freed.

    Each is a tensor, or what the program's own hooks on saved tensors returned instead.
    """
    try:
        for name in names_of_kept(type(node)):
            found = getattr(node, name)
            for each in found if isinstance(found, (tuple, list)) else (found,):
                if each is not None and (kept := each.data) is not None:
                    yield kept
    except RuntimeError:  # its backward has run
        return


@functools.cache
def names_of_kept(kind: type) -> tuple[str, ...]:
    """Return the attributes of a kind of node that hold what it keeps."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view is of; a tensor that is no view itself."""
    return tensor if tensor._base is None else tensor._base


def own_hooks() -> object:
    """Return the hooks on saved tensors that are in effect; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
