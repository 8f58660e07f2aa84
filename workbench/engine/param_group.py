"""A unit: the parameters that one ``fully_shard`` call manages and communicates as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from workbench.engine import collectives, probe
from workbench.engine._torch import local_of
from workbench.engine.collectives import AllGatherState, ReduceScatterState
from workbench.engine.comm import default_pair
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import FSDPParam, ParamModuleInfo, ShardedState, check_uniform
from workbench.engine.probe import Category, Edge, Kind, Phase, UnitInfo

_indices = itertools.count()


class TrainingState(Enum):
    """Where a unit is in the step.

    FORWARD: between its pre- and post-forward hook. PRE_BACKWARD: its backward runs or is about to.
    POST_BACKWARD: its gradients are being taken. IDLE: none of these.
    """

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


@dataclass
class FSDPCommContext:
    """What the units of one root share.

    Attributes:
        end_of_backward: what the root does when a backward pass has ended.
        post_forward_order: units whose forward ended, in that order; backward runs it in reverse.
        reducing: the unit whose reduction is in flight; there is at most one.
        final_callback_queued: the current backward pass already has its end-of-backward callback.
    """

    end_of_backward: Callable[[], None]
    post_forward_order: list[FSDPParamGroup] = field(default_factory=list)
    reducing: FSDPParamGroup | None = None
    final_callback_queued: bool = False


class FSDPParamGroup:
    """See the module docstring.

    Attributes:
        index: number of the unit in this process, never reused; equal on all ranks that make the same calls.
        name: path of its module from the root.
        fsdp_params: its parameters.
        flat_shard: ``[S]``, this rank's slots one after another; what ``sharded_param`` s are views of.
        reshard_after_forward: free the full parameters between forward and backward.
        reshard_after_backward: free them after backward.
        reduce_grads: reduce at the end of backward (False: keep adding up full gradients).
    """

    def __init__(
        self, params: Sequence[tuple[nn.Parameter, ParamModuleInfo]], mesh: FSDPMeshInfo, reshard_after_forward: bool
    ) -> None:
        self.index = next(_indices)
        self.name = ""
        self.root_index = -1
        self.mesh_info = mesh
        self.comm_ctx = FSDPCommContext(end_of_backward=lambda: None)  # exchanged for the root's
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduce_grads = True
        self.training_state = TrainingState.IDLE
        self._is_unsharding = False  # begun and not yet waited for
        self._all_gather: AllGatherState | None = None
        self._reduce: ReduceScatterState | None = None
        self._post_forward_indices: list[int] = []
        self._retired = False
        self._grad_bytes = 0
        self.fsdp_params = [FSDPParam(p, info, mesh) for p, info in params]
        self._init_shards([p for p, _ in params])
        self.announce()

    # ---- storage

    @property
    def slot_numel(self) -> int:
        """S, elements of the flat shard."""
        return sum(p.slot_numel for p in self.fsdp_params)

    def _slots(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(flat.split([p.slot_numel for p in self.fsdp_params]))

    def _new_flat(self, like: torch.Tensor) -> torch.Tensor:
        # zeros: padding travels in collectives, it must not hold signalling garbage
        flat = torch.zeros(self.slot_numel, dtype=like.dtype, device=like.device)
        self._shard_lease = probe.Lease(Category.SHARDED_PARAMS, self.index, 0 if flat.is_meta else flat.nbytes)
        return flat

    def _share_lease(self) -> None:
        """Let the shards count as alive as long as anyone holds one of the parameters."""
        for fsdp_param in self.fsdp_params:
            local_of(fsdp_param.registered())._workbench_lease = self._shard_lease  # type: ignore[attr-defined]

    @torch.no_grad()
    def _init_shards(self, params: list[nn.Parameter]) -> None:
        self.flat_shard = self._new_flat(params[0])
        for fsdp_param, full, slot in zip(self.fsdp_params, params, self._slots(self.flat_shard), strict=True):
            fsdp_param.shard_from(full, slot, requires_grad=full.requires_grad)
        self._bind_unsharded()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded()
        self._share_lease()

    def _bind_unsharded(self) -> None:
        numel = self.slot_numel * self.mesh_info.shard_size
        self._full = torch.empty(numel, dtype=self.flat_shard.dtype, device=self.flat_shard.device)
        sizes = [p.slot_numel * self.mesh_info.shard_size for p in self.fsdp_params]
        self._padded_fulls = self._full.split(sizes)
        for fsdp_param, padded_full in zip(self.fsdp_params, self._padded_fulls, strict=True):
            fsdp_param.bind(padded_full)
        self._resize_full(0)

    def _resize_full(self, numel: int) -> None:
        # autograd's saved tensors point at this storage: it is emptied and refilled, never replaced
        self._full.untyped_storage().resize_(numel * self._full.element_size())

    def _owns_registered(self) -> bool:
        storage = self.flat_shard.untyped_storage().data_ptr()
        return all(
            local_of(p.registered()).untyped_storage().data_ptr() == storage
            or p.local_view(self.flat_shard).numel() == 0
            for p in self.fsdp_params
        )

    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Take over parameters that ``.to``, ``to_empty`` or a loader replaced while sharded; else do nothing.

        Raises:
            TypeError: a parameter was replaced by a plain tensor.
            ValueError: parameters of the unit now differ in dtype or device.
        """
        if self.is_unsharded:
            return
        locals_ = [local_of(p.registered()) for p in self.fsdp_params]
        check_uniform([(p.fqn, local) for p, local in zip(self.fsdp_params, locals_, strict=True)])
        if self._owns_registered() and locals_[0].dtype == self.flat_shard.dtype:
            return
        self.flat_shard = self._new_flat(locals_[0])
        for fsdp_param, slot in zip(self.fsdp_params, self._slots(self.flat_shard), strict=True):
            fsdp_param.adopt(slot)
        self._share_lease()
        self._bind_unsharded()
        self.announce()

    # ---- unshard and reshard

    @property
    def is_unsharded(self) -> bool:
        """True while the full parameters are registered on the modules."""
        return bool(self.fsdp_params) and self.fsdp_params[0].state is ShardedState.UNSHARDED

    def unshard(self) -> None:
        """Start making the parameters full; does nothing if they are or soon will be.

        Raises:
            RuntimeError: the unit was undone; a graph recorded before that cannot run backward any more.
        """
        if self.is_unsharded or self._is_unsharding:
            return
        if self._retired:
            raise RuntimeError(
                f"unit {self.name or '(root)'!r} was undone by unshard_module; a backward through a forward from "
                "before that cannot run: run the forward again"
            )
        if not all(p.is_registered for p in self.fsdp_params):
            self.adopt_registered()
        probe.event(Kind.UNSHARD, Edge.BEGIN, self.index)
        group = self.mesh_info.group
        if group is not None:
            gather, _ = default_pair(self.flat_shard.device)
            self._all_gather = collectives.foreach_all_gather(self.flat_shard, group, gather, self.index)
        self._is_unsharding = True

    @torch.no_grad()
    def wait_for_unshard(self) -> None:
        """Block until the full parameters are there and register them; does nothing if no unshard was begun.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
        """
        if not self._is_unsharding:
            return
        gathered = self._gathered().view(self.mesh_info.shard_size, self.slot_numel)
        self._resize_full(self._full.numel())
        probe.memory(Category.UNSHARDED_PARAMS, self.index, self._full.nbytes)
        collectives.foreach_all_gather_copy_out(gathered, self.fsdp_params, self._padded_fulls, self.index)
        self._drop_all_gather()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_unsharded()
        self._is_unsharding = False
        probe.event(Kind.UNSHARD, Edge.END, self.index)

    def _gathered(self) -> torch.Tensor:
        """Return the all-gather's output ``[F * S]``; on a single rank that is the flat shard itself."""
        group = self.mesh_info.group
        if group is None or self._all_gather is None:
            return self.flat_shard
        collectives.wait_for_all_gather(self._all_gather, group, self.index)
        return self._all_gather.output

    def _drop_all_gather(self) -> None:
        if self._all_gather is not None:
            probe.memory(Category.ALL_GATHER_BUFFERS, self.index, -self._all_gather.output.nbytes)
            self._all_gather = None

    def reshard(self) -> None:
        """Give the full parameters up; does nothing if they are not there.

        An all-gather that was started and never used is waited for first: its output is being written.
        """
        if not self.is_unsharded and not self._is_unsharding:
            return
        if self._is_unsharding:
            self._gathered()
            self._drop_all_gather()
        self._to_sharded()

    def _to_sharded(self) -> None:
        self._is_unsharding = False
        probe.event(Kind.RESHARD, Edge.INSTANT, self.index)
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded()
        self._free_full()

    def _free_full(self) -> None:
        if self._full.untyped_storage().nbytes():
            self._resize_full(0)
            probe.memory(Category.UNSHARDED_PARAMS, self.index, -self._full.nbytes)

    # ---- hooks of the step

    def pre_forward(self) -> None:
        """Before the unit's forward: full parameters."""
        self.training_state = TrainingState.FORWARD
        probe.phase(Phase.FORWARD)
        self.unshard()
        self.wait_for_unshard()
        probe.event(Kind.FORWARD, Edge.BEGIN, self.index)

    def post_forward(self, *, reshard: bool, backward_follows: bool) -> None:
        """After the unit's forward."""
        probe.event(Kind.FORWARD, Edge.END, self.index)
        if reshard:
            self.reshard()
        if backward_follows:
            self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
            self.comm_ctx.post_forward_order.append(self)
        self.training_state = TrainingState.IDLE

    def pre_backward(self) -> None:
        """Before the unit's backward: full parameters, and the next unit's all-gather on its way."""
        self.training_state = TrainingState.PRE_BACKWARD
        probe.phase(Phase.PRE_BACKWARD)
        self.unshard()
        self.wait_for_unshard()
        self._prefetch_backward()
        probe.phase(Phase.BACKWARD)
        probe.event(Kind.BACKWARD, Edge.BEGIN, self.index)

    def _prefetch_backward(self) -> None:
        """Start the all-gather of the unit whose forward ended just before this one's."""
        if self._post_forward_indices:
            index = self._post_forward_indices.pop() - 1
            if index >= 0:
                self.comm_ctx.post_forward_order[index].unshard()

    def post_backward(self) -> None:
        """After the unit's backward: take the gradients, give the parameters up, start the reduction."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            probe.event(Kind.BACKWARD, Edge.END, self.index)
        self.training_state = TrainingState.POST_BACKWARD
        probe.phase(Phase.POST_BACKWARD)
        self._account_grads()
        params, grads = self._take_grads() if self.reduce_grads else ([], [])
        if self.reshard_after_backward:
            self.reshard()
        if params:
            try:
                self._start_reduce(params, grads)
            finally:
                if not grads:  # emptied, their end was announced
                    self._grad_bytes = 0
        self.training_state = TrainingState.IDLE

    # ---- gradients

    def _account_grads(self) -> None:
        """Announce the full gradients autograd has made since the last look."""
        grads = (p.unsharded_param.grad for p in self.fsdp_params)
        num_bytes = sum(g.nbytes for g in grads if g is not None)
        probe.memory(Category.UNSHARDED_GRADS, self.index, num_bytes - self._grad_bytes)
        self._grad_bytes = num_bytes

    @property
    def owes_reduction(self) -> bool:
        """True if full gradients of earlier micro-batches wait for the reduction that is wanted now."""
        return self.reduce_grads and any(p.has_full_grad for p in self.fsdp_params)

    def _take_grads(self) -> tuple[list[FSDPParam], list[torch.Tensor]]:
        params = [p for p in self.fsdp_params if p.unsharded_param.grad is not None]
        grads = [p.unsharded_param.grad for p in params if p.unsharded_param.grad is not None]
        for param in params:
            param.unsharded_param.grad = None
        return params, grads

    @torch.no_grad()
    def _start_reduce(self, params: list[FSDPParam], grads: list[torch.Tensor]) -> None:
        group = self.mesh_info.group
        if group is None:
            collectives.keep_whole_grads(params, grads, self.index)
            return
        if self.comm_ctx.reducing is not None:
            self.comm_ctx.reducing.finish_reduce()
        _, reduce = default_pair(grads[0].device)
        self._reduce = collectives.foreach_reduce(params, grads, group, reduce, self.index)
        self.comm_ctx.reducing = self

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Wait for the unit's reduction, if one is in flight, and set the sharded gradients."""
        group = self.mesh_info.group
        if self._reduce is not None and group is not None:
            collectives.finish_reduce(self._reduce, group, self.index)
        self._reduce = self.comm_ctx.reducing = None

    # ---- the rest

    def finalize_backward(self) -> None:
        """At the end of a backward pass: nothing of the iteration is left."""
        if self.reshard_after_backward:
            self.reshard()
        self._post_forward_indices.clear()
        self.training_state = TrainingState.IDLE

    def reset_iter_state(self) -> None:
        """Drop what an iteration that raised has left, without waiting for anything."""
        probe.event(Kind.RESET, Edge.INSTANT, self.index)
        self._drop_all_gather()
        if self._reduce is not None:
            probe.memory(Category.REDUCE_SCATTER_BUFFERS, self.index, -self._reduce.num_bytes)
            self._reduce = None
        for fsdp_param in self.fsdp_params:
            fsdp_param.unsharded_param.grad = None
        self._account_grads()
        if self.is_unsharded or self._is_unsharding:
            self._to_sharded()
        self._free_full()
        self._post_forward_indices.clear()
        self.training_state = TrainingState.IDLE

    def retire(self) -> None:
        """The unit was undone: announce it and let go of its storage, which cycles would keep until collected."""
        self._retired = True
        self.announce()
        self.fsdp_params = []
        self._padded_fulls = ()
        del self.flat_shard, self._full, self._shard_lease

    def announce(self) -> None:
        """Tell the probe what this unit is now."""
        if probe.active is not None:
            probe.active.unit(self.describe())

    def describe(self) -> UnitInfo:
        """Return the probe's description."""
        return UnitInfo(
            index=self.index,
            name=self.name,
            root=self.root_index,
            params=tuple(p.describe() for p in self.fsdp_params),
            reshard_after_forward=self.reshard_after_forward,
            shard_size=self.mesh_info.shard_size,
            retired=self._retired,
        )
