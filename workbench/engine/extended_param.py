"""Parameters whose tensors define their own all-gather, as those of float8 training do.

A tensor subclass with ``fsdp_pre_all_gather`` returns the tensors that ranks exchange instead of its shard, and its
``fsdp_post_all_gather`` makes the full parameter from what they gathered. Such parameters are units of their own.
Layouts (F = shard ranks; b = bytes of one exchanged tensor of this rank, B = sum of b over the unit)::

    all-gather output   [F, B]  row r = the exchanged tensors of rank r, as bytes
    memory of the unit  for each exchanged tensor [F, b] and padding up to a multiple of ALIGNMENT bytes
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from workbench.engine import probe
from workbench.engine._torch import allow_reading, dtensor_of, forbid_reading, local_of
from workbench.engine.backends import backend_of
from workbench.engine.backends.full_memory import FullMemory
from workbench.engine.backends.memory_aliasing import is_same_storage
from workbench.engine.comm import AllGather
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.full_param import FullParam, FullView, local_tensor
from workbench.engine.mesh import FSDPMeshInfo, names_of
from workbench.engine.param import ParamModuleInfo
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.policies import MixedPrecisionPolicy
from workbench.engine.refusal_text import used_after_reshard
from workbench.engine.unit_collectives import ScatteredShard
from workbench.engine.unshard_memory import BufferSet
from workbench.events import Category

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
ALIGNMENT = 64


def gathers_itself(param: torch.Tensor) -> bool:
    """Return whether the tensor of ``param`` defines its own all-gather."""
    return hasattr(local_tensor(param), PRE)


def check_extension(path: str, param: torch.Tensor) -> None:
    """Raise TypeError if the tensor of parameter ``path`` defines its own all-gather only in part."""
    tensor = local_tensor(param)
    found = [name for name in (PRE, POST, RELEASES) if hasattr(tensor, name)]
    if found and not {PRE, POST} <= set(found):
        raise TypeError(
            f"parameter {path!r} is a {type(tensor).__name__}, which defines {' and '.join(found)}; an all-gather of "
            f"its own needs both {PRE} and {POST}"
        )


class ExtendedFull(FullParam):
    """A full parameter that ``fsdp_post_all_gather`` makes, and later refills in place.

    Attributes:
        outputs: what ranks gathered, in the dtypes of the exchanged tensors; views of the unit's memory.
        own: tensors of the full parameter that are not in the unit's memory.
    """

    outputs: tuple[torch.Tensor, ...] = ()
    own: tuple[torch.Tensor, ...] = ()

    def __init__(self, fqn: str, shape: torch.Size, *args: Any) -> None:  # noqa: ANN401 - see FullParam
        super().__init__(fqn, *args)
        self._shape = shape
        self.make: Callable[..., Any] | None = None  # fsdp_post_all_gather, with all but ``out``
        self._values: torch.Tensor | None = None  # the full parameter as first made
        self.param = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)

    def view_of(self, full: torch.Tensor, *, requires_grad: bool) -> FullView:
        """Return the view of memory ``full``, bytes, in which the next :meth:`open` makes the parameter."""
        self._values, self.own = None, ()
        return self.numbered(full)

    def show(self, view: FullView) -> None:
        """Use ``view``."""
        self._view = view

    def _show_values(self, *, requires_grad: bool) -> None:
        make = cast("Callable[..., Any]", self.make)
        self.make = None
        if self._values is not None:
            for tensor in self.own:
                allow_reading(tensor)
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            if type(self._values) is torch.Tensor:
                self._inner.data = self._values
            make(out=self.param)
            return
        tensor, inner = make()
        if tensor.shape != self._shape:  # padded
            tensor = tensor.as_strided(self._shape, _contiguous(self._shape))
        self.own = tuple(t for t in inner if not is_same_storage(t, self._view.data))
        self._values = tensor
        self._make(tensor, requires_grad=requires_grad)

    def _hide_values(self) -> None:
        if type(self._values) is torch.Tensor:
            self._inner.data = self._nothing

    def expect_grad(self) -> None:
        """No-op: the tensor keeps its shape, also without values."""

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=self.param.dtype, device=self._view.data.device)

    def take_grad(self) -> torch.Tensor | None:
        """Return this rank's gradient in the full shape and clear it; None without one.

        Raises:
            NotImplementedError: the gradient is a tensor subclass.
        """
        grad = super().take_grad()
        if grad is not None and type(grad) is not torch.Tensor:
            raise NotImplementedError(
                f"the gradient of parameter {self.fqn!r}, which defines its own all-gather, is a "
                f"{type(grad).__name__}: only plain gradients can be reduced; return one from its backward"
            )
        return grad

    def free_own(self) -> int:
        """Free the tensors that are not in the unit's memory; return their bytes."""
        num_bytes = self.own_nbytes
        for tensor in self.own:
            tensor.untyped_storage().resize_(0)
            forbid_reading(tensor, used_after_reshard(self.fqn, "this parameter"))
        return num_bytes

    @property
    def own_nbytes(self) -> int:
        """Bytes of the tensors that are not in the unit's memory, now."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.own)


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class ExtendedParam(DTensorParam):
    """A managed parameter whose tensor defines its own all-gather; its shard is in the tensor's own memory.

    Attributes:
        exchanged: shape and dtype of each tensor that this rank exchanges; empty before the first all-gather.
        releases: the full parameter needs nothing of what was gathered.
    """

    has_own_memory = True

    def __init__(self, param: nn.Parameter, info: ParamModuleInfo, shard: Shard, mesh: FSDPMeshInfo) -> None:
        if shard.dim:
            raise NotImplementedError(
                f"parameter {info.path!r} defines its own all-gather ({PRE}), which joins rows of dim 0; it cannot be "
                f"split along dim {shard.dim}: return Shard(0) for it"
            )
        super().__init__(param, info, shard, mesh)
        self.exchanged: list[tuple[torch.Size, torch.dtype]] = []
        self._plain_nbytes = self.full_numel * param.dtype.itemsize
        self.releases = self._asked_release()

    def _make_full(self, *args: Any) -> FullParam:  # noqa: ANN401 - see FullParam
        return ExtendedFull(self.info.path, self.layout.shape, *args)

    def _asked_release(self) -> bool:
        answer = getattr(self.first, RELEASES, bool)()
        if not isinstance(answer, bool):
            raise TypeError(f"{RELEASES} of parameter {self.fqn!r} must return a bool, got {answer!r}")
        return answer

    def set_post_forward(self, mesh: FSDPMeshInfo | None) -> None:
        """Accept None only.

        Raises:
            NotImplementedError: ``mesh`` is one of fewer ranks.
        """
        if mesh is not None:
            raise NotImplementedError(
                f"parameter {self.fqn!r} defines its own all-gather ({PRE}), so it cannot be split over fewer ranks "
                "after forward: use reshard_after_forward=True or False"
            )
        super().set_post_forward(mesh)

    def shard_from(self, slot: torch.Tensor) -> None:
        """Create ``sharded_param`` from this rank's rows of the original parameter; ``slot`` gives the device."""
        param, self._given = cast("nn.Parameter", self._given), None
        full = local_tensor(param).detach()
        parts, rank = full.chunk(self.layout.num_shards), self.mesh_info.shard_mesh_rank
        local = full.new_zeros(self.layout.local_shape(rank))
        if local.numel():
            local.copy_(parts[rank])
        if not local.is_meta and slot.device != local.device:
            local = local.to(slot.device)
            local = local.pin_memory() if slot.is_pinned() else local
        self.sharded_param = nn.Parameter(dtensor_of(local, self.spec), requires_grad=param.requires_grad)
        self.keep_grad_dtype()
        self._local = local_of(cast("DTensor", self.sharded_param))
        self.info.register(self.sharded_param)

    # ---- what ranks exchange

    def exchange(self, policy: MixedPrecisionPolicy, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the tensors that this rank exchanges, as bytes.

        Args:
            policy: passed on to ``fsdp_pre_all_gather``.
            dtype: dtype of the full parameter.

        Raises:
            TypeError: the shard no longer defines its own all-gather, or has another signature.
        """
        shard = cast("Any", self._local)
        if self._local.device != self.mesh_info.device:
            shard = shard.to(self.mesh_info.device, non_blocking=True)
        if not hasattr(shard, PRE):
            raise TypeError(
                f"parameter {self.fqn!r} was replaced by a plain tensor after fully_shard, and its unit gathers what "
                f"{PRE} returns: load values with param.copy_(dtensor), or replace it before fully_shard"
            )
        arguments: tuple[object, ...] = (self._shard_mesh(), self.layout.shape, _contiguous(self.layout.shape))
        arguments += (self.info.module, policy)
        count = len(inspect.signature(shard.fsdp_pre_all_gather).parameters)
        if count not in {1, len(arguments)}:
            raise TypeError(
                f"{PRE} of parameter {self.fqn!r} takes {count} arguments; it may take (mesh) or "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        tensors, metadata = shard.fsdp_pre_all_gather(*arguments[:count])
        self.exchanged = [(tensor.shape, tensor.dtype) for tensor in tensors]
        full = cast("ExtendedFull", self.full)

        def make(**out: object) -> object:
            return shard.fsdp_post_all_gather(self._outputs(full.data), metadata, dtype, **out)

        full.make = make
        return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]

    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.mesh_info.mesh
        return mesh if mesh.ndim == 1 else mesh[names_of(mesh)[cast("int", self.mesh_info.shard_mesh_dim)]]

    @property
    def memory_nbytes(self) -> list[int]:
        """Bytes of memory for the gathered form of each exchanged tensor, padding included."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.exchanged]
        gathered = [self.layout.num_shards * size for size in sizes] or [self._plain_nbytes]
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in gathered]

    def rows_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return views ``[F, b]`` of the unit's memory, one for each exchanged tensor."""
        size = self.layout.num_shards
        sizes = [size * math.prod(shape) * dtype.itemsize for shape, dtype in self.exchanged]
        parts = memory.split(self.memory_nbytes)
        return [part[:used].view(size, -1) for part, used in zip(parts, sizes, strict=True)] if sizes else []

    def views_in(self, padded_full: torch.Tensor) -> list[FullView]:
        """Return the view of the parameter's part of the unit's memory."""
        return [self.full.view_of(padded_full, requires_grad=self.trainable)]

    def _outputs(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what ranks gathered: each exchanged tensor, with F times as many rows.

        ``.data`` gives each its own version counter: a later all-gather is no change of a saved tensor.
        """
        rows = zip(self.rows_in(memory), self.exchanged, strict=True)
        return tuple(each.data.view(-1).view(dtype).view(-1, *shape[1:]) for each, (shape, dtype) in rows)


class ExtendedParamGroup(FSDPParamGroup):
    """A unit of parameters that define their own all-gather. It gathers bytes."""

    _counted = 0  # bytes of full parameters outside of the unit's memory, as announced

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype of the all-gather."""
        return torch.uint8

    @property
    def gather_nbytes(self) -> int:
        """Bytes that an all-gather makes on each rank; 0 before the first one."""
        return sum(rows.nbytes for rows in self.buffers.current.by_rank)

    @property
    def _extended(self) -> list[ExtendedParam]:
        return cast("list[ExtendedParam]", self.fsdp_params)

    def _make_memory(self) -> FullMemory:
        numel = sum(map(sum, (param.memory_nbytes for param in self._extended)))
        for param in self._extended:
            param.full_numel = sum(param.memory_nbytes)
        return backend_of(self.device).full_memory(numel, torch.uint8)

    def _source(self) -> tuple[ScatteredShard, FSDPMeshInfo]:
        """Return the bytes that this rank exchanges; make other memory if their number changed."""
        before = [param.exchanged for param in self._extended]
        policy = self.policy.mp_policy
        tensors = [t for param in self._extended for t in param.exchange(policy, self.param_dtype)]
        if [param.exchanged for param in self._extended] != before:
            self._make_buffers()
            self.announce()

        def pairs(slots: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return zip(slots, tensors, strict=True)

        sizes = [tensor.numel() for tensor in tensors]
        return ScatteredShard(sizes, torch.uint8, self.device, pairs), self.mesh_info

    def _gather(self, info: FSDPMeshInfo) -> AllGather:
        # the root chose the pair for shards in the dtype of the parameters
        return super()._gather(info) if self.comm_choice.is_set_by_user else backend_of(self.device).pair().gather

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, let the parameters' own code make the full ones, and register them."""
        was_unsharding = self.is_unsharding
        super().wait_for_unshard()
        if was_unsharding:
            probe.memory(Category.UNSHARDED_PARAMS, self.index, self._own_nbytes() - self._counted)
            self._counted = self._own_nbytes()
            if all(param.releases for param in self._extended):
                self.buffers.give_back(self.comm_ctx.pages)

    def _own_nbytes(self) -> int:
        return sum(cast("ExtendedFull", param.full).own_nbytes for param in self._extended)

    def _free_full(self) -> None:
        super()._free_full()
        if not self.keeps_memory:
            freed = sum(cast("ExtendedFull", param.full).free_own() for param in self._extended)
            probe.memory(Category.UNSHARDED_PARAMS, self.index, -freed)
            self._counted -= freed

    def switch_to(self, buffers: BufferSet) -> None:
        """Check that the full parameters are those of the forward whose backward runs next.

        Raises:
            RuntimeError: they are not, or the unit was retired.
        """
        if buffers is not self.buffers.current:
            raise RuntimeError(
                f"unit {self.title!r} got other parameters or another policy between this forward and its backward, "
                "and its parameters define their own all-gather: run the forward again"
            )
        super().switch_to(buffers)
