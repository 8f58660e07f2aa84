"""A flat parameter: the parameters of a unit, flattened, concatenated, and split evenly over the ranks.

Terms (slot, piece) and geometry are in ``flat_layout.py``.

If tensor parallelism has split a parameter, the flat parameter holds this rank's part of it, and numel counts only that
part. Modules compute with a DTensor of it, as without the wrapper; its gradient is stored here as this rank's part too.
An optimizer always gets plain tensors: the flat parameter, or pieces.

Unlike torch's, a flat parameter has no gaps between its parameters, and modules compute with separate parameters in the
unsharded memory, not with views that autograd tracks: their gradients need not be concatenated first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench.engine._torch import (
    Spec,
    dtensor_of,
    local_of,
    set_local,
    share_post_accumulate_hooks,
    spec_of,
    with_dtype,
)
from workbench.engine.backends.copies import Grads
from workbench.engine.backends.memory_aliasing import is_same_memory
from workbench.engine.classic.flat_layout import FlatLayout
from workbench.engine.classic.flat_placeholders import ExposedGrad, FlatPlaceholder, Unreduced, reduced_grad
from workbench.engine.classic.flat_places import FLAT_PARAM, FlatPlaces
from workbench.engine.dtensor_param import joined_with_tp
from workbench.engine.full_param import FullParam, FullView, local_tensor
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import FSDPParam, ParamModuleInfo, ShardedState
from workbench.engine.shard_layout import ShardLayout
from workbench.engine.unsharding import laid_out
from workbench.events import FlatPart, Param, ParamTensors

TPGroups = tuple[dist.ProcessGroup, ...]
"""Process groups over which tensor parallelism has split a parameter."""


class FlatParameter(nn.Parameter):
    """A rank's slot ``[c]`` of a flat parameter, padding included; an optimizer holds it in place of many parameters.

    Attributes:
        _fqns: names of its parameters, relative to the wrapped module; Accelerate reads them.
        _fsdp_flattened: True; Lightning reads it.
    """

    _fqns: Sequence[str] = ()
    _fsdp_flattened = True


@dataclass(eq=False)
class FlatSlice:
    """One parameter within a flat parameter.

    Attributes:
        info: where the parameter is registered.
        original: the original parameter object.
        held: with ``use_orig_params`` the optimizer's parameter, this rank's piece: the original itself, or a separate
            parameter instead of a DTensor, which cannot be a piece; otherwise empty.
        index: its place among the parameters of the flat parameter.
        shape: shape in the flat parameter: its own, or that of this rank's part in tensor parallelism.
        global_shape: shape of the whole parameter.
        fqn: name relative to the root, or to the wrapped module until the root is known.
        tp_spec: how tensor parallelism has split it; None if it has not.
        mesh: the wrapper's mesh joined with that of tensor parallelism; None without tensor parallelism.
    """

    info: ParamModuleInfo
    original: nn.Parameter
    held: nn.Parameter
    index: int
    shape: torch.Size
    global_shape: torch.Size
    fqn: str
    tp_spec: Spec | None = None
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, param: nn.Parameter, info: ParamModuleInfo, index: int, mesh: FSDPMeshInfo) -> FlatSlice:
        """Return the slice for ``param``.

        Raises:
            ValueError: ``param`` is a DTensor whose mesh cannot be joined with the wrapper's.
        """
        if not isinstance(param, DTensor):
            return cls(info, param, param, index, param.shape, param.shape, info.path)
        held = nn.Parameter(local_of(param).detach(), requires_grad=param.requires_grad)
        share_post_accumulate_hooks(param, held)
        joined = joined_with_tp(info.path, param, mesh)
        return cls(info, param, held, index, held.shape, param.shape, info.path, spec_of(param), joined)

    def describe(self, first: int, *, trainable: bool) -> FlatPart:
        """Return the probe's description; ``first`` is the index of its first element in the flat parameter."""
        return FlatPart(
            fqn=self.fqn,
            shape=tuple(self.shape),
            global_shape=tuple(self.global_shape),
            first=first,
            trainable=trainable,
        )

    # ---- tensor parallelism

    def as_global(self, local: torch.Tensor) -> torch.Tensor:
        """Return a tensor of :attr:`shape` as the DTensor that it is a part of; return other tensors as they are."""
        if self.tp_spec is None or local.shape != self.shape:
            return local
        return dtensor_of(local, with_dtype(self.tp_spec, local.dtype))

    def local_part(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor-parallel part of ``value``, which has the global shape; a view if possible.

        Collective if ``value`` is a DTensor whose layout differs from the parameter's.
        """
        if self.tp_spec is None:
            return value
        return local_of(laid_out(value, self.tp_spec.mesh, self.tp_spec.placements, value.device))

    @property
    def tp_groups(self) -> TPGroups:
        """The process groups over which tensor parallelism has split the parameter."""
        spec = self.tp_spec
        if spec is None:
            return ()
        return tuple(spec.mesh.get_group(axis) for axis, each in enumerate(spec.placements) if each.is_shard())

    def show(self, whole: torch.Tensor) -> nn.Parameter:
        """Return a parameter with the data ``whole``, of :attr:`shape`: the held one, or a DTensor instead of it."""
        if self.tp_spec is not None:
            return nn.Parameter(self.as_global(whole), requires_grad=self.held.requires_grad)
        self.held.data = whole
        return self.held

    def hold(self, piece: torch.Tensor) -> None:
        """Set the held parameter's data to ``piece``, and empty the original if it is a DTensor."""
        self.held.data = piece
        if isinstance(self.original, DTensor):
            set_local(self.original, piece.new_empty(0))

    def give_back(self, whole: torch.Tensor) -> None:
        """Set the original's data to ``whole``, of :attr:`shape`, permanently."""
        if isinstance(self.original, DTensor):
            set_local(self.original, whole)
        else:
            self.original.data = whole
        vars(self.original).pop("_workbench_handle", None)


class FlatParam(FSDPParam):
    """A managed parameter that combines many.

    Attributes:
        parts: the parameters, in the order of their definition.
        flat_layout: where they lie in the ranks' slots.
        use_orig_params: the originals stay on the modules and in the optimizer, each as its piece; otherwise one
            :class:`FlatParameter` on the wrapped module replaces them.
        grad_dtype: dtype of sharded gradients; None: the shard's dtype.
    """

    computes_in_shard = True

    def __init__(
        self,
        given: Sequence[tuple[nn.Parameter, ParamModuleInfo]],
        owner: nn.Module,
        mesh: FSDPMeshInfo,
        *,
        use_orig_params: bool,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        self.parts = [FlatSlice.of(param, info, index, mesh) for index, (param, info) in enumerate(given)]
        shapes = [part.shape for part in self.parts]
        self.flat_layout = FlatLayout.of(shapes, mesh.shard_mesh_size, mesh.shard_mesh_rank)
        self.use_orig_params = use_orig_params
        self.grad_dtype = grad_dtype
        self.places = FlatPlaces(owner, [info for _, info in given])
        self._shown: list[ExposedGrad] = []  # until the modules compute again
        super().__init__(
            ParamModuleInfo(owner, FLAT_PARAM, FLAT_PARAM),
            ShardLayout(torch.Size([self.flat_layout.numel]), 0, mesh.shard_mesh_size),
            mesh,
            given[0][0].dtype,
            [FullParam(part.fqn, part.tp_spec) for part in self.parts],
        )

    @property
    def owned(self) -> Sequence[nn.Parameter]:
        """The optimizer's parameters: the held pieces, or the flat parameter."""
        return [part.held for part in self.parts] if self.use_orig_params else (self.sharded_param,)

    @property
    def meshes(self) -> Sequence[DeviceMesh]:
        """The joined meshes of the parts that tensor parallelism has split."""
        return [part.mesh for part in self.parts if part.mesh is not None]

    @property
    def global_shape(self) -> Sequence[int]:
        """``[numel]`` before tensor parallelism split parts."""
        return (sum(part.global_shape.numel() for part in self.parts),)

    @property
    def owns_wholes(self) -> bool:
        """True if the optimizer holds parameters in their original shapes, on which updates and state may depend."""
        return self.flat_layout.is_whole and self.use_orig_params

    @property
    def trains(self) -> list[bool]:
        """For each full parameter, whether it requires a gradient now."""
        if self.use_orig_params:
            return [part.held.requires_grad for part in self.parts]
        return [self.sharded_param.requires_grad] * len(self.parts)

    def take_names(self, full_name: Callable[[nn.Module, str], str]) -> None:
        """Set the names to ``full_name(module, name)`` of where each parameter is registered."""
        self.fqn = full_name(self.info.module, self.info.name)
        for part, full in zip(self.parts, self.fulls, strict=True):
            part.fqn = full.fqn = full_name(part.info.module, part.info.name)

    @property
    def infos(self) -> Sequence[ParamModuleInfo]:
        """Where the parts are registered while they are unsharded."""
        return [part.info for part in self.parts]

    @property
    def is_here(self) -> list[bool]:
        """Whether this rank has elements of each parameter in :attr:`owned`, or all of an empty one."""
        if not self.use_orig_params:
            return [True]
        pieces = zip(self.parts, self._pieces, strict=True)
        is_whole = self.flat_layout.is_whole
        return [bool(piece.numel()) or (is_whole and part.tp_spec is None) for part, piece in pieces]

    def parts_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts as views of ``full`` ``[numel]``, each in its :attr:`FlatSlice.shape`."""
        return self.flat_layout.parts_of(full)

    def as_global(self, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert the result of :meth:`parts_of` for modules: DTensors for parts that tensor parallelism has split."""
        return [part.as_global(local) for part, local in zip(self.parts, locals_, strict=True)]

    # ---- sharded

    def local_view(self, slot: torch.Tensor) -> torch.Tensor:
        """Return the slot: every rank's slot has the same length, padding included."""
        return slot

    @property
    def first(self) -> torch.Tensor:
        """The first part."""
        return local_tensor(self.parts[0].original)

    def shard_from(self, slot: torch.Tensor) -> None:
        """Copy this rank's pieces of the originals into ``slot``, and create ``sharded_param`` from it."""
        for part, piece in zip(self.parts, self.flat_layout.pieces_of(slot), strict=True):
            if not slot.is_meta:
                piece.copy_(self.flat_layout.piece_of_full(part.index, local_tensor(part.original).detach()))
        requires_grad = any(part.original.requires_grad for part in self.parts)
        self.sharded_param = FlatParameter(slot, requires_grad=requires_grad)
        self.sharded_param._fqns = [part.info.path for part in self.parts]
        if not self.use_orig_params:
            self.places.clear()
            for part in self.parts:  # an optimizer may hold the originals until it switches to the flat parameter
                part.hold(slot.new_empty(0))
        self._lie_in(slot)

    def _lie_in(self, slot: torch.Tensor) -> None:
        self._slot = slot
        self._pieces = self.flat_layout.pieces_of(slot)
        self.orig_dtype = slot.dtype
        self.sharded_param.data = slot
        if self.use_orig_params:
            for part, piece in zip(self.parts, self._pieces, strict=True):
                part.hold(piece)

    @property
    def holders(self) -> Sequence[torch.Tensor]:
        """The optimizer's parameters."""
        return self.owned

    @property
    def is_on_modules(self) -> bool:
        """True if the parameters on the modules are the ones of this object, wherever they are stored."""
        if not self.use_orig_params:
            return self.places.flat() is self.sharded_param
        return all(self.places.original(part.index) is part.held for part in self.parts)

    @property
    def is_registered(self) -> bool:
        """True if the parameters on the modules are the ones of this object, stored in this rank's slot."""
        if not self.is_on_modules:
            return False
        if not self.use_orig_params:
            return is_same_memory(self.sharded_param, self._slot)
        return all(
            part.held.dtype == self.orig_dtype
            and (part.held.shape == piece.shape and (not piece.numel() or is_same_memory(part.held, piece)))
            for part, piece in zip(self.parts, self._pieces, strict=True)
        )

    def registered(self) -> nn.Parameter:
        """Return the flat parameter registered now; with ``use_orig_params`` the one behind the originals.

        Raises:
            TypeError: it was removed from its module.
            ValueError: it was replaced by one of another size.
        """
        if self.use_orig_params:
            return self.sharded_param
        param = self.places.flat()
        if param is None:
            raise TypeError(
                f"flat parameter {self.fqn!r} was removed from its module; to undo the wrapping call "
                "workbench.engine.classic.unwrap"
            )
        if param.shape != self.sharded_param.shape:
            raise ValueError(
                f"flat parameter {self.fqn!r} of shape {list(self.sharded_param.shape)} was replaced by one of shape "
                f"{list(param.shape)}; copy values in with summon_full_params, or load a state dict"
            )
        return param

    def registered_local(self) -> torch.Tensor:
        """Return the flat parameter registered now, or the first of the originals."""
        return self._original(self.parts[0]) if self.use_orig_params else self.registered()

    def _original(self, part: FlatSlice) -> nn.Parameter:
        param = self.places.original(part.index)
        if param is None:
            raise TypeError(f"parameter {part.fqn!r} was removed from its module after wrapping")
        return param

    def adopt(self, slot: torch.Tensor) -> None:
        """Move the registered parameters, with their current values, into ``slot``."""
        if self.use_orig_params:
            self._adopt_originals(slot)
        else:
            self.sharded_param = self.registered()
            if not self.sharded_param.is_meta and not is_same_memory(self.sharded_param, slot):
                slot.copy_(self.sharded_param.detach())
        self._lie_in(slot)
        self.register(self.sharded_param)

    def _adopt_originals(self, slot: torch.Tensor) -> None:
        for part, piece in zip(self.parts, self.flat_layout.pieces_of(slot), strict=True):
            param = self._original(part)
            if param.shape not in {piece.shape, part.global_shape}:
                raise ValueError(
                    f"parameter {part.fqn!r} was replaced by one of shape {list(param.shape)}; it must have its full "
                    f"shape {list(part.global_shape)}, or that of this rank's piece, {list(piece.shape)}"
                )
            is_piece = param.shape == piece.shape and not isinstance(param, DTensor)
            if part.tp_spec is None:
                part.original = part.held = param
            elif is_piece:
                part.held = param
            if not param.is_meta and piece.numel() and not (is_piece and is_same_memory(param, piece)):
                values = param.detach()
                piece.copy_(values if is_piece else self.flat_layout.piece_of_full(part.index, part.local_part(values)))

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shard.

        Accelerate sets this after it has given the flat parameter data of another dtype; the setter updates the
        originals.
        """
        return self.orig_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, _: torch.dtype) -> None:
        if self.use_orig_params:
            for part, piece in zip(self.parts, self.flat_layout.pieces_of(self.sharded_param.detach()), strict=True):
                part.hold(piece)

    def keep(self) -> None:
        """Adopt the registered flat parameter in its current memory."""
        self.sharded_param = self.registered()
        self._lie_in(self.sharded_param.detach())
        self.register(self.sharded_param)

    @property
    def writes_back(self) -> bool:
        """Whether values that replace the originals' pieces are copied to the slot."""
        return self.use_orig_params

    @property
    def local(self) -> torch.Tensor:
        """This rank's slot ``[c]``, padding included."""
        return self._slot

    def register(self, form: nn.Parameter) -> None:
        """Register the originals on their modules, or ``form`` on the wrapped module and placeholders on the others."""
        if self.use_orig_params:
            self.places.put(self.owned)
        else:
            self.places.put_flat(form, self._away)

    def show(self, views: Sequence[FullView]) -> None:
        """Use ``views`` as the full parameters from now on."""
        super().show(views)
        self._away = [FlatPlaceholder.of(full) for full in self.fulls]

    def register_full(self) -> None:
        """Put the full parameters on the modules: as parameters with ``use_orig_params``, otherwise as attributes."""
        put = self.places.put if self.use_orig_params else self.places.expose
        put([full.param for full in self.fulls])

    def to_rest(self) -> None:
        """Expose accumulated gradients in ``.grad``; with ``use_orig_params``, put the held pieces on the modules."""
        if not self._shown and self.has_full_grad:
            self._shown = list(self._show_grads())
        if self.use_orig_params and self.state is ShardedState.UNSHARDED:
            self.register(self.sharded_param)

    def to_work(self) -> None:
        """Undo :meth:`to_rest`."""
        self._take_grads_back()
        if self.use_orig_params and self.state is ShardedState.UNSHARDED:
            self.register_full()

    def to_unsharded(self) -> None:
        """Register the full parameters; their memory must be filled."""
        self._take_grads_back()
        super().to_unsharded()

    def post_forward_form(self, slot: torch.Tensor, mesh: FSDPMeshInfo) -> nn.Parameter:
        """Raise NotImplementedError: after forward, a flat parameter is either whole or fully sharded."""
        raise NotImplementedError(f"flat parameter {self.fqn!r} cannot be resharded to fewer ranks after forward")

    # ---- whole parameters outside of a step

    @property
    def slot(self) -> torch.Tensor:
        """This rank's slot ``[c]``, padding included."""
        return self._slot

    @property
    def pieces(self) -> Sequence[torch.Tensor]:
        """The piece of each part in the slot; the same objects until the slot changes."""
        return self._pieces

    def grad_slot(self) -> torch.Tensor:
        """Return this rank's slot ``[c]`` of the gradient; zeros where there is none."""
        slot = torch.zeros_like(self._slot, dtype=self.grad_dtype)
        if not self.use_orig_params:
            return slot if self.sharded_param.grad is None else self.sharded_param.grad
        for part, piece in zip(self.parts, self.flat_layout.pieces_of(slot), strict=True):
            if part.held.grad is not None:
                piece.copy_(part.held.grad)
        return slot

    def show_wholes(self, wholes: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None) -> None:
        """Put whole parameters in other memory on the modules, and with ``use_orig_params`` whole gradients."""
        if not self.use_orig_params:
            self.stand_in(self.as_global(wholes))
            return
        self._grads = [part.held.grad for part in self.parts]
        self._summoned = []
        for part, whole in zip(self.parts, wholes, strict=True):
            part.held.grad = None
            self._summoned.append(part.show(whole))
        self.places.put(self._summoned)
        for part, shown, had, grad in zip(self.parts, self._summoned, self._grads, grads or (), strict=False):
            shown.grad = None if had is None and not shown.requires_grad else part.as_global(grad)

    @torch.no_grad()
    def hide_wholes(self, *, write_back: bool) -> None:
        """Undo :meth:`show_wholes`; with ``write_back``, keep the current values."""
        if write_back:
            self.take_values()
        if not self.use_orig_params:
            self.stand_down()
            return
        for part, piece, shown, had in zip(self.parts, self._pieces, self._summoned, self._grads, strict=True):
            whole, shown.grad = shown.grad, None
            part.hold(piece)
            part.held.requires_grad_(shown.requires_grad)
            if had is not None and whole is not None and write_back:
                had.copy_(self.flat_layout.piece_of_full(part.index, part.local_part(whole)))
            part.held.grad = had
        self._summoned = []
        self.register(self.sharded_param)

    def stand_in(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Put temporary parameters on the modules, one for each of ``tensors``; None leaves a part without one."""
        each = zip(tensors, self.trains, strict=True)
        params = [None if tensor is None else nn.Parameter(tensor, requires_grad=trains) for tensor, trains in each]
        self.places.lend(params)

    def stand_down(self) -> None:
        """Undo :meth:`stand_in`."""
        if not self.use_orig_params:
            self.places.clear()
        self.register(self.sharded_param)

    @torch.no_grad()
    def take_values(self) -> None:
        """Copy this rank's pieces of the whole parameters on the modules into the slot."""
        for part, piece in zip(self.parts, self._pieces, strict=True):
            piece.copy_(self.flat_layout.piece_of_full(part.index, part.local_part(self._original(part).detach())))

    # ---- unwrapping

    def give_back(self, wholes: Sequence[torch.Tensor]) -> None:
        """Put the originals, with whole values, back on their modules permanently."""
        for part, whole in zip(self.parts, wholes, strict=True):
            part.give_back(whole)
        self.places.replace([part.original for part in self.parts])

    def unreadable(self) -> Sequence[torch.Tensor]:
        """Return the placeholders that modules have as attributes while the parameters are sharded."""
        return () if self.use_orig_params else self._away

    # ---- gradients

    def accumulate_grad(self, dtype: torch.dtype | None) -> None:
        """Accumulate full gradients until their reduction, in the wider of its ``dtype`` and their own.

        Torch's wrapper accumulates in their own dtype, which is inaccurate in low precision; ``fully_shard``
        accumulates in the dtype of the reduction.
        """
        own = self.fulls[0].param.dtype
        super().accumulate_grad(own if dtype is None else torch.promote_types(dtype, own))

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield copies as :meth:`FlatLayout.copy_in_pairs` does."""
        return self.flat_layout.copy_in_pairs(grads, slots, first_rank)

    def drop_grad(self) -> None:
        """Drop full gradients."""
        self._take_grads_back()
        super().drop_grad()

    def _show_grads(self) -> Iterator[ExposedGrad]:
        """Expose unreduced gradients, or placeholders, in ``.grad`` of the owned parameters; yield what was exposed."""
        if self.use_orig_params:
            owned = [(part.held, part.fqn, [full]) for part, full in zip(self.parts, self.fulls, strict=True)]
        else:
            owned = [(self.sharded_param, self.fqn, list(self.fulls))]
        for param, fqn, fulls in owned:
            if not any(full.has_grad for full in fulls):
                continue
            before = param.grad
            grads = fulls[0].grads
            is_whole = self.owns_wholes and fulls[0].tp_spec is None  # a DTensor's gradient may be a partial sum
            is_its_own = is_whole and before is None and len(grads) == 1 and grads[0].dtype == param.dtype
            param.grad = grads[0] if is_its_own else Unreduced.of(param, fqn)
            yield ExposedGrad(param, param.grad, before, fulls)

    def _take_grads_back(self) -> None:
        shown, self._shown = self._shown, []
        for each in shown:
            each.take_back()

    def add_sharded_grad(self, local_grad: torch.Tensor, handle: object) -> None:
        """Accumulate ``local_grad`` ``[c]`` into the flat parameter's gradient, or its pieces into the originals'."""
        if not self.use_orig_params:
            self._add(self.sharded_param, local_grad, handle)
            return
        for part, piece in zip(self.parts, self.flat_layout.pieces_of(local_grad), strict=True):
            if part.held.requires_grad and piece.numel():
                self._add(part.held, piece, handle)

    def _add(self, param: nn.Parameter, grad: torch.Tensor, handle: object) -> None:
        if param.grad is not None:
            param.grad.add_(grad)
            return
        param.grad = grad
        if self.grad_dtype is not None:
            param.grad.data = grad.to(self.grad_dtype)
        param.grad._workbench_handle = handle  # type: ignore[attr-defined]

    def grads_by_groups(self, param: nn.Parameter, grad: torch.Tensor) -> Iterator[tuple[TPGroups, torch.Tensor]]:
        """Yield (:attr:`FlatSlice.tp_groups`, gradient) for an owned parameter's gradient, piece by piece if flat."""
        if not self.is_tensor_parallel:
            yield (), grad
        elif self.use_orig_params:
            yield next(part.tp_groups for part in self.parts if part.held is param), grad
        else:
            pairs = zip(self.parts, self.flat_layout.pieces_of(grad), strict=True)
            yield from ((part.tp_groups, piece) for part, piece in pairs if piece.numel())

    # ---- for the probe

    def tensors(self) -> dict[str, ParamTensors]:
        """Return this rank's current tensors of the flat parameter and of each part, by name."""
        rank, slot_grad = self.mesh_info.shard_mesh_rank, reduced_grad(self.sharded_param)
        found = {
            self.fqn: ParamTensors(
                shard=self.sharded_param,
                shard_rank=rank,
                full=self._full_now(),
                sharded_grad=slot_grad,
                places=self.info.places,
            )
        }
        grads = [None] * len(self.parts) if slot_grad is None else self.flat_layout.pieces_of(slot_grad)
        for part, full, piece, grad in zip(self.parts, self.fulls, self._pieces, grads, strict=True):
            found[part.fqn] = ParamTensors(
                shard=part.held if self.use_orig_params else piece,
                shard_rank=rank,
                full=local_tensor(full.param) if full.is_open else None,
                freed=full.freed,
                full_grads=full.grads,
                sharded_grad=reduced_grad(part.held) if self.use_orig_params else grad,
                places=part.info.places,
            )
        return found

    def _full_now(self) -> torch.Tensor | None:
        """Return a view ``[numel]`` of all parts, which are contiguous while unsharded; None if they are sharded."""
        first = self.fulls[0]
        return local_tensor(first.param).detach().as_strided((self.layout.numel,), (1,)) if first.is_open else None

    def describe(self) -> Param:
        """Return the probe's description, with the parts."""
        parts = zip(self.parts, self.flat_layout.spans, self.trains, strict=True)
        return replace(
            super().describe(),
            parts=tuple(part.describe(span.first, trainable=trains) for part, span, trains in parts),
            use_orig_params=self.use_orig_params,
        )
