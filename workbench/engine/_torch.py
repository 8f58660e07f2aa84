"""All uses of torch's private API in the engine, and nothing else.

Each function here has a test in ``tests/engine/test_torch_private.py`` that fails when torch changes it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import FrameType, SimpleNamespace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable
from torch.distributed import Store, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

OLDEST, NEWEST = (2, 13), (2, 15)
"""Oldest and newest version of torch, major and minor, that the tests run on."""

Spec = DTensorSpec
BatchNorm = _BatchNorm
"""Base class of every batch norm: 1 to 3 dimensions, synchronised, and lazy."""


def untried(version: str = torch.__version__) -> str:
    """Return a warning if the tests do not run on this version of torch, "" if they do."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if OLDEST <= (major, minor) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, tried)) for tried in (OLDEST, NEWEST))
    return f"the workbench is tested with torch {oldest} to {newest}, not with {version}; some features may fail"


if untried():
    warnings.warn(untried(), stacklevel=2)


REDUCES_IN_GRAD_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""Without ``reduce_dtype``, torch's ``fully_shard`` reduces in parameters' ``grad_dtype``, not in ``param_dtype``."""


def has_own_grad_dtype(param: torch.Tensor) -> bool:
    """Return whether ``grad_dtype`` was set on ``param``: otherwise it is the parameter's dtype, also a later one.

    Before torch 2.15, setting it to the parameter's dtype does not count.
    """
    return bool(getattr(param, "_has_grad_dtype_override", param.grad_dtype != param.dtype))


def share_grad_dtype(old: torch.Tensor, new: torch.Tensor) -> None:
    """Set ``grad_dtype`` of ``new`` as on ``old``; no-op if it was never set there."""
    if has_own_grad_dtype(old):
        new.grad_dtype = old.grad_dtype


def queue_backward_final_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` at the end of the current backward pass.

    Raises:
        RuntimeError: outside a backward pass.
    """
    Variable._execution_engine.queue_callback(callback)  # type: ignore[no-untyped-call,attr-defined,unused-ignore]


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass: a forward that runs there is recomputed for a checkpoint."""
    return int(torch._C._current_graph_task_id()) != -1


def make_spec(mesh: DeviceMesh, placements: Sequence[Placement], like: torch.Tensor) -> Spec:
    """Return the spec of a DTensor with the global shape, stride and dtype of ``like``."""
    return DTensorSpec(mesh, tuple(placements), TensorMeta(like.shape, like.stride(), like.dtype))


def with_dtype(spec: Spec, dtype: torch.dtype) -> Spec:
    """Return ``spec`` for elements of another dtype."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, dtype))


def spec_of(dtensor: DTensor) -> Spec:
    """Return the spec of a DTensor."""
    return dtensor._spec


def shards_along(spec: Spec, dim: int) -> int:
    """Return the number of ranks that tensor dimension ``dim`` is split over."""
    return int(spec.num_shards_map[dim])


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of an axis that splits ``dim`` after another has split it into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor) if split_factor > 1 else Shard(dim)


def splits(placement: Placement, dim: int) -> bool:
    """Return whether an axis with this placement splits tensor dimension ``dim``."""
    return isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the 1-D mesh ``name`` over all ranks of ``mesh``, which has named axes; created at the first call."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` is a slice of; itself if it is none."""
    return mesh._get_root_mesh()


def joined_mesh(*meshes: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the axes of all ``meshes``, which must be named and come from one mesh.

    Raises:
        RuntimeError: the meshes do not come from one mesh.
        TypeError: an axis has no name.
    """
    return DeviceMesh._concatenate(list(meshes))


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """Wrap ``local`` as a DTensor without any check.

    ``DTensor.from_local`` does the same in 20-50 us with checks and autograd; this runs once per gradient and step.
    """
    return DTensor(local, spec, requires_grad=False)


def local_of(dtensor: DTensor) -> torch.Tensor:
    """Return the tensor object that a DTensor wraps (``to_local`` returns a new view for a parameter)."""
    return dtensor._local_tensor


def set_local(dtensor: DTensor, local: torch.Tensor) -> None:
    """Replace the tensor a DTensor wraps; its shape must match the spec; the spec takes its dtype."""
    dtensor._local_tensor = local
    dtensor._spec = with_dtype(dtensor._spec, local.dtype)


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the memory that a tensor is a view of, also after it was freed."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    number: int = local.untyped_storage()._cdata
    return number


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor, after waiting if a pending DTensor collective produces it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_of_old_shards(tensor: object) -> bool:
    """Return whether ``tensor`` is a ShardedTensor, which torch's first FSDP makes without a device mesh."""
    return isinstance(tensor, torch.Tensor) and callable(getattr(tensor, "local_shards", None))


def gather_old_shards(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the whole of a ShardedTensor on ``device``; collective among the ranks that have a part of it."""
    old = cast("Any", tensor)
    whole = torch.zeros(old.size(), dtype=old.dtype, device=device)
    for shard in old.local_shards():
        sizes = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
        whole[tuple(slice(first, first + size) for first, size in sizes)] = shard.tensor.to(device)
    dist.all_reduce(whole.view(-1).view(torch.uint8), group=old._process_group)  # as bytes: any dtype, and keeps -0.0
    return whole


_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


class Checkpointed(Protocol):
    """Methods that ``torch.distributed.checkpoint.state_dict`` calls on its wrapper class."""

    @staticmethod
    def fsdp_modules(module: nn.Module) -> Sequence[nn.Module]:
        """Return the wrappers in the tree of ``module``."""

    @staticmethod
    def state_dict_type(*args: Any, **settings: Any) -> AbstractContextManager[None]:  # noqa: ANN401 - torch's classes
        """Return a context manager that applies ``settings`` to the wrappers."""

    @staticmethod
    def optim_state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - passed on
        """Return the state of an optimizer by parameter name."""

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:  # noqa: ANN401 - passed on
        """Return a state dict that an optimizer can load."""


class _Wrappers:
    """Replaces the wrapper class in ``torch.distributed.checkpoint.state_dict``: dispatches to it or to ours."""

    def __init__(self, theirs: Any, kind: type[nn.Module], ours: Checkpointed) -> None:  # noqa: ANN401 - torch's class
        self._theirs, self._kind, self._ours = theirs, kind, ours

    def __instancecheck__(self, module: object) -> bool:
        return isinstance(module, (self._theirs, self._kind))

    def _engine_of(self, model: nn.Module) -> Any:  # noqa: ANN401 - a class or an object that has its methods
        return self._ours if self._ours.fsdp_modules(model) else self._theirs

    def fsdp_modules(self, module: nn.Module) -> Sequence[nn.Module]:
        return cast("Sequence[nn.Module]", self._engine_of(module).fsdp_modules(module))

    def state_dict_type(self, *, module: nn.Module, **settings: Any) -> Any:  # noqa: ANN401 - a context manager
        return self._engine_of(module).state_dict_type(module=module, **settings)

    def optim_state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        return self._engine_of(model).optim_state_dict(model, *args, **kwargs)

    def optim_state_dict_to_load(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        return self._engine_of(model).optim_state_dict_to_load(model, *args, **kwargs)


def tell_checkpoints(kind: type[nn.Module], ours: Checkpointed) -> None:
    """Make ``torch.distributed.checkpoint.state_dict``, the caller, treat modules of ``kind`` as its own wrappers.

    It calls its one wrapper class for everything except whether a module is sharded.

    Args:
        kind: the wrapper class; holds the wrapped module under the same attribute as torch's.
        ours: the methods for ``kind``.

    Raises:
        NotImplementedError: this version of torch has other names there.
    """
    checkpoints = cast("Any", sys.modules.get(_CHECKPOINTS))
    if checkpoints is None or isinstance(getattr(checkpoints, "FSDP", None), _Wrappers):
        return
    is_sharded = getattr(checkpoints, "_get_module_fsdp_state_if_fully_sharded_module", None)
    if is_sharded is None or not hasattr(checkpoints, "FSDP"):
        oldest, newest = (".".join(map(str, tried)) for tried in (OLDEST, NEWEST))
        raise NotImplementedError(
            f"{_CHECKPOINTS} of torch {torch.__version__} differs from that of {oldest} to {newest} and does not "
            f"support {kind.__name__}: call state_dict, optim_state_dict and optim_state_dict_to_load of "
            f"{kind.__name__} instead"
        )
    checkpoints.FSDP = _Wrappers(checkpoints.FSDP, kind, ours)
    checkpoints._get_module_fsdp_state_if_fully_sharded_module = lambda module: (
        module if isinstance(module, kind) else is_sharded(module)
    )


_TRAVERSALS = frozenset({"named_parameters", "named_modules", "_named_members"})


def traversal_of_checkpoints() -> str:
    """Return the method through which ``torch.distributed.checkpoint.state_dict`` reached the calling method.

    The caller is an override of ``named_parameters`` or ``named_modules``. Those of ``nn.Module`` call each other, and
    overrides, also of modules around, call those of their base class; the answer is the first of these calls: such as
    ``named_parameters`` in ``named_modules``, if that module lists parameters. "" if it is not that module that asks.
    Frames of ``torch.compile`` between them do not count.
    """
    global _traversal_untraced  # noqa: PLW0603 - made at the first call, because making it loads Dynamo
    if _traversal_untraced is None:
        _traversal_untraced = torch.compiler.disable(_traversal)  # Dynamo cannot trace a look at the frames
    return _traversal_untraced()


_traversal_untraced: Callable[[], str] | None = None


def _traversal() -> str:
    frame: FrameType | None = sys._getframe(1)
    method = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name.removeprefix("torch_dynamo_resume_in_").partition("_at_")[0]
        if not module.startswith("torch._dynamo") and module != __name__:
            if name not in _TRAVERSALS:
                return method if module == _CHECKPOINTS else ""
            method = name
        frame = frame.f_back
    return ""


def set_own_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Register a parameter of the engine's own, hidden from ``torch.distributed.checkpoint.state_dict``.

    That module leaves out names in the non-persistent set, buffers or not; the module itself still saves them.
    """
    module._parameters[name] = param
    module._non_persistent_buffers_set.add(name)


def drop_own_parameter(module: nn.Module, name: str) -> None:
    """Undo :func:`set_own_parameter`; no-op if it was never called."""
    module._parameters.pop(name, None)
    module._non_persistent_buffers_set.discard(name)


def premultiplied_sum(factor: float) -> object:
    """Return NCCL's reduction that multiplies by ``factor`` before it sums."""
    return dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of, if that has a ``grad_fn``; else None."""
    base = tensor._base
    return base if base is not None and base.grad_fn is not None else None


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` (grad, vjp, jvp, vmap ...), which wraps every tensor, is active."""
    return bool(torch._C._are_functorch_transforms_active())


def set_composed(module: nn.Module, *, sharded: bool) -> None:
    """Mark ``module`` as sharded, or not, for torch's composable functions (``replicate``)."""
    registry: dict[str, object] = vars(module).setdefault(REGISTRY_KEY, {})
    if sharded:
        registry["fully_shard"] = RegistryItem()
    else:
        del registry["fully_shard"]
    if not registry:
        del vars(module)[REGISTRY_KEY]


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` was called on ``module`` itself."""
    return "replicate" in vars(module).get(REGISTRY_KEY, ())


def tell_pipelining(kind: type[object], state_of: Callable[[nn.Module], object]) -> None:
    """Make ``torch.distributed.pipelining``, if imported, treat modules of ``kind`` as torch's FSDP modules.

    It unshards, reshards and reduces FSDP modules itself, once a step. Before torch 2.15 it does so through a stage's
    state: ``_state_ctx.all_states``, their ``_fsdp_param_groups`` and ``_root_post_backward_final_callback``.

    Args:
        kind: the class mixed into the modules.
        state_of: returns a module's state; None for a module of another kind.
    """
    names = ("stage", "schedules")
    stage, schedules = (cast("Any", sys.modules.get(f"torch.distributed.pipelining.{name}")) for name in names)
    if stage is None or schedules is None or issubclass(kind, stage.FSDPModule):
        return
    theirs = getattr(stage, "fully_shard", None)
    if theirs is not None:
        stage.fully_shard = SimpleNamespace(state=lambda module: state_of(module) or theirs.state(module))
    stage.FSDPModule = schedules.FSDPModule = (stage.FSDPModule, kind)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the parameter registered under ``name``, without the search of ``nn.Module.__getattr__``."""
    return module._parameters.get(name)


def set_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Replace a registered parameter without the checks of ``nn.Module.__setattr__``: runs 4 times a step for each.

    A custom ``__setattr__`` of the module's class is called.
    """
    if has_own_setattr(module):
        setattr(module, name, param)
    else:
        put_parameter(module, name, param)


def has_own_setattr(module: nn.Module) -> bool:
    """Return whether a module's class overrides ``__setattr__``."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def put_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """Replace a registered parameter without calling any method of the module."""
    module._parameters[name] = param


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters by which autograd detects changes of saved tensors."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has sizes and a storage, but no data."""
    return isinstance(tensor, FakeTensor)


def has_constant(fake: torch.Tensor) -> bool:
    """Return whether torch knows the numbers in a tensor without data."""
    return cast("Any", fake).constant is not None


def fake_device(fake: torch.Tensor) -> torch.device:
    """Return the device that a tensor without data is said to be on."""
    device: torch.device = cast("Any", fake).fake_device
    return device


def make_fake(form: tuple[Any, ...], like: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor without data as an operation on ``like`` would.

    Args:
        form: its shape, stride, offset and dtype.
        like: a tensor without data.
        base: the tensor whose storage it has; None: a new one.
    """
    shape, stride, offset, dtype = form
    with torch._C._DisableTorchDispatch():
        if base is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = torch.empty((), dtype=dtype, device="meta").set_(base.untyped_storage(), offset, shape, stride)
    return FakeTensor(cast("Any", like).fake_mode, made, fake_device(like))


NO_VALUE = (DataDependentOutputException, DynamicOutputShapeException)
"""Errors of operations on tensors without data whose result depends on values."""

_NO_KERNEL = re.compile(r"no fake impl registered for <CustomOpDef\((\S+?)\)>")


def lacking_kernel(error: RuntimeError) -> str:
    """Return the operation without a fake kernel that ``error`` is about, such as ``"mine::scale"``; else empty."""
    if isinstance(error, UnsupportedOperatorException):
        return str(error.func.name()).partition(".")[0]
    found = _NO_KERNEL.search(str(error))
    return found[1] if found else ""


@contextmanager
def fakes() -> Iterator[Callable[[Any], Any]]:
    """In the body, new tensors have sizes and storages, but no data.

    Yields:
        a function that returns a nested structure with such tensors in place of others.
    """
    mode, swap = FakeTensorMode(allow_non_fake_inputs=True), torch.utils.swap_tensors

    def swap_unknown(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.fake_tensor_converter.tensor_memo.clear()  # torch swaps no tensor that something refers to weakly
        swap(first, second)  # type: ignore[no-untyped-call]

    make_mesh, mesh_of = DeviceMesh.__init__, DeviceMesh.mesh
    torch.utils.swap_tensors = swap_unknown
    mine = {
        "__init__": lambda mesh, *args, **kwargs: _make_mesh(mesh, make_mesh, *args, **kwargs),
        "mesh": property(_with_data(mesh_of.fget)),  # type: ignore[attr-defined]
    }
    for name, value in mine.items():
        setattr(DeviceMesh, name, value)
    try:
        with mode:
            yield partial(tree_map_only, torch.Tensor, lambda t: t if is_fake(t) else mode.from_tensor(t))
    finally:
        torch.utils.swap_tensors = swap
        for name, original in (("__init__", make_mesh), ("mesh", mesh_of)):
            setattr(DeviceMesh, name, original)


def _make_mesh(mesh: DeviceMesh, make: Callable[..., None], device_type: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """Make a mesh of real ranks; ``init_device_mesh`` has made its own identity among fakes."""
    with without_fakes():
        ranks = kwargs.get("_rank_map")
        if ranks is not None and is_fake(ranks):
            kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
        make(mesh, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _with_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with numbers, such as those of ranks, as one that does so among fakes."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of the function
        with without_fakes():
            return function(*args, **kwargs)

    return run


def without_fakes() -> AbstractContextManager[object]:
    """Return a context in which new tensors have data, also while others are made without."""
    return cast("AbstractContextManager[object]", unset_fake_temporarily())


def forbid_reading(tensor: torch.Tensor, reason: str) -> None:
    """Make every read of ``tensor``, or of a tensor that shares its storage, raise RuntimeError with ``reason``.

    Works in CUDA builds; a no-op elsewhere.
    """
    if _can_forbid:
        torch._C._set_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata, reason)


def allow_reading(tensor: torch.Tensor) -> None:
    """Undo :func:`forbid_reading`; no-op if it was never called."""
    if _can_forbid:
        torch._C._clear_storage_data_ptr_access_error_msg(tensor.untyped_storage()._cdata)


_can_forbid = hasattr(torch._C, "_clear_storage_data_ptr_access_error_msg")


def call_post_accumulate_hooks(param: nn.Parameter) -> None:
    """Call the hooks registered with ``param.register_post_accumulate_grad_hook``."""
    hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for hook in list(hooks.values()):
        hook(param)


def has_post_accumulate_hooks(param: nn.Parameter) -> bool:
    """Return whether ``param`` has post-accumulate-grad hooks."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def drop_post_accumulate_hooks(param: nn.Parameter) -> None:
    """Remove the post-accumulate-grad hooks of ``param``."""
    (getattr(param, "_post_accumulate_grad_hooks", None) or {}).clear()


def has_grad_hooks(param: nn.Parameter) -> bool:
    """Return whether the user has called ``param.register_hook``."""
    return bool(param._backward_hooks)


def share_post_accumulate_hooks(old: nn.Parameter, new: nn.Parameter) -> None:
    """Share the post-accumulate-grad hooks of ``old`` with ``new``, so that the user's handles still remove them."""
    hooks = getattr(old, "_post_accumulate_grad_hooks", None)
    if hooks is not None:
        new._post_accumulate_grad_hooks = hooks


def group_allocator(group: dist.ProcessGroup | None, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """Return the allocator (numel, dtype, device) of ``group``'s backend for collectives; None if it has none."""
    backend = None if group is None else group._get_backend(device)
    if backend is None or not backend.supports_tensor_alloc(device):
        return None

    def allocate(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return backend.allocate_tensor(numel, dtype=dtype, device=device)

    return allocate


def chunk_cat(tensors: Sequence[torch.Tensor], num_chunks: int, out: torch.Tensor) -> None:
    """Copy chunk r of every tensor, split along dim 0 as by torch.chunk and zero-padded, into row r of ``out``.

    ``out`` is ``[num_chunks, ...]`` and may have another dtype. On CUDA this is one kernel for all tensors.
    """
    torch._chunk_cat(list(tensors), dim=0, num_chunks=num_chunks, out=out)


def default_store() -> Store:
    """Return the store of the default process group; a new object after every ``init_process_group``.

    Raises:
        ValueError: there is no default process group.
    """
    return distributed_c10d._get_default_store()


init_default_group, destroy_all_groups = dist.init_process_group, dist.destroy_process_group
"""The functions themselves: in the user's code on ranks, others have their names."""


def abort_process_groups() -> None:
    """Destroy all process groups without waiting for their work; ends NCCL kernels that wait for a peer."""
    distributed_c10d._abort_process_group()  # type: ignore[no-untyped-call,unused-ignore]


def named_groups() -> dict[str, dist.ProcessGroup]:
    """Return this process's groups by name, in order of creation; the default group is first."""
    world = distributed_c10d._world
    return {str(world.pg_names[group]): group for group in world.pg_map}


def name_groups_from(number: int) -> int:
    """Raise the number of the next group to at least ``number``; return that number."""
    world = distributed_c10d._world
    world.group_count = max(world.group_count, number)
    return world.group_count


def reset_group_names() -> None:
    """Name the next group as the first one; an ``init_process_group`` that raised has used up a name."""
    distributed_c10d._world.group_count = 0


def new_group(ranks: Sequence[int], name: str, device_type: str = "cpu") -> dist.ProcessGroup:
    """Create a process group under the given name; exactly its ranks must call this, together.

    It uses the default group's backend for ``device_type``, or all its backends.

    ``new_group(use_local_synchronization=True)`` names a group after the number of groups this process has created: if
    one rank created another group before, the ranks wait for each other for ever.

    Args:
        ranks: global ranks, in group order.
        name: an unused name, the same on all ranks.
        device_type: type of the tensors to communicate; empty: any.
    """
    of_default = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][0]
    backend = dist.BackendConfig(dist.Backend(of_default)).get_device_backend_map().get(device_type, of_default)
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        backend,
        default_store(),
        name,  # type: ignore[arg-type]
        timeout=distributed_c10d._get_default_timeout(backend),
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)


class GradScalerWithFlags(GradScaler):
    """torch's GradScaler with a hook for the flags of an optimizer's gradients: one per device, 1 for inf or NaN."""

    def share_flags(self, flags: Sequence[torch.Tensor], device: torch.device) -> None:
        """Change the flags in place; each is a 0-dimensional float32 tensor, and there is at least one.

        Args:
            flags: flags of the devices that hold gradients.
            device: device of the scale.
        """
        raise NotImplementedError

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, _allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Return the flags; allow float16, which torch refuses: sharded gradients may have that dtype."""
        flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, True) or {found_inf.device: found_inf}
        self.share_flags(list(flags.values()), found_inf.device)
        return flags
