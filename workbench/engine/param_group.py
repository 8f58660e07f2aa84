"""A unit in a step: parameters that one ``fully_shard`` call manages and communicates as one."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.tensor import Shard

from workbench.engine import collectives, probe
from workbench.engine.backends import backend_of
from workbench.engine.collectives import AllGatherState, DeviceCopyState
from workbench.engine.comm import AllGather
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import FSDPParam, ParamModuleInfo
from workbench.engine.policies import UnitPolicy
from workbench.engine.post_forward import PostForwardShard
from workbench.engine.tensors import unrecorded
from workbench.engine.unit import Unit
from workbench.engine.unshard_memory import Home
from workbench.events import Category, Edge, Kind, Phase, unit_words


class TrainingState(Enum):
    """Where a unit is in the step.

    FORWARD: between its pre- and post-forward hook. PRE_BACKWARD: its backward runs or is about to.
    POST_BACKWARD: its gradients are being taken. IDLE: none of these.
    """

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


class FSDPParamGroup(Unit):
    """A unit, and what it does in each phase of a step.

    Attributes:
        reshard_after_backward: free full parameters after backward.
        unshard_in_backward: False if backward does not need them, as an embedding's does not.
        pending_backwards: recorded forwards whose backward did not begin yet.
    """

    def __init__(
        self,
        params: Sequence[tuple[nn.Parameter, ParamModuleInfo, Shard]],
        mesh_info: FSDPMeshInfo,
        policy: UnitPolicy,
    ) -> None:
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.training_state = TrainingState.IDLE
        self.pending_backwards = 0
        self._all_gather: AllGatherState | DeviceCopyState | None = None
        self._post_forward: PostForwardShard | None = None
        self._recomputed_in: Home | None = None
        self._is_unsharding = False  # begun and not yet waited for
        self._grad_bytes = 0
        super().__init__(params, mesh_info, policy)

    # ---- unshard and reshard

    @property
    def is_unsharding(self) -> bool:
        """True between :meth:`unshard` and :meth:`wait_for_unshard`."""
        return self._is_unsharding

    @unrecorded
    def unshard(self) -> None:
        """Start making the parameters full; does nothing if they are or soon will be.

        Raises:
            RuntimeError: the unit was undone; a graph recorded before that cannot run backward any more.
        """
        if self.is_unsharded or self._is_unsharding:
            return
        self._check_not_retired()
        if self.is_sharded and not all(p.is_registered for p in self.fsdp_params):
            self.adopt_registered()
        probe.event(Kind.UNSHARD, Edge.BEGIN, self.index)
        shard, info = self._source()
        if info.shard_group is not None:
            with self.comm_ctx.streams.gathering():
                self._all_gather = collectives.foreach_all_gather(
                    shard, self.param_dtype, self.device, info.shard_group, self._gather(info), self._unit
                )
        elif shard.device != self.device:
            with self.comm_ctx.streams.gathering():
                self._all_gather = collectives.copy_to_device(shard, self.param_dtype, self.device, self._unit)
        self._is_unsharding = True

    def _check_not_retired(self) -> None:
        if self._retired:
            raise RuntimeError(
                f"unit {unit_words(self.name)!r} was undone by unshard_module or reshard_module; a backward through a "
                "forward from before that cannot run: run the forward again"
            )

    def _source(self) -> tuple[torch.Tensor, FSDPMeshInfo]:
        """Return the flat shard that full parameters are made from, and whose ranks hold the rest."""
        if self._post_forward is not None:
            return self._post_forward.flat, self._post_forward.mesh_info
        return self.shards.flat, self.mesh_info

    def _targets(self) -> Sequence[torch.Tensor]:
        """Return the full parameters' memory, cut as the flat shards are."""
        if self._post_forward is not None:
            return self._post_forward.by_rank(self._home.padded_fulls)
        return self._home.by_rank

    def _gather(self, info: FSDPMeshInfo) -> AllGather:
        # what was chosen is for the shards; the few ranks between forward and backward use what works anywhere
        return self.pair.gather if info is self.mesh_info else backend_of(self.device).pair().gather

    @unrecorded
    def wait_for_unshard(self) -> None:
        """Block until the full parameters are there and register them; does nothing if no unshard was begun.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
            RanksDisagreeError: ranks do different things.
        """
        if not self._is_unsharding:
            return
        shard, info = self._source()
        gathered = shard if self._all_gather is None else self._all_gather.wait()
        self._take_memory()
        rows = gathered.view(info.shard_mesh_size, -1) if gathered.numel() else gathered.view(info.shard_mesh_size, 0)
        collectives.foreach_all_gather_copy_out(rows, self._targets(), self._unit)
        self.comm_ctx.comms.has_read(self)
        self._drop_all_gather()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_unsharded()
        self._post_forward = None
        self._is_unsharding = False
        probe.event(Kind.UNSHARD, Edge.END, self.index)

    def _drop_all_gather(self) -> None:
        if self._all_gather is not None:
            self.comm_ctx.streams.was_read()
            self._all_gather.drop()
            self._all_gather = None

    def reshard(self) -> None:
        """Give the full parameters up; does nothing if they are not there.

        An all-gather that was started and never used is waited for first: its output is being written.
        """
        if self.is_sharded and not self._is_unsharding:
            return
        if self._all_gather is not None:
            self._all_gather.wait()
            self._drop_all_gather()
        self._to_sharded()

    def _to_sharded(self) -> None:
        self._is_unsharding = False
        probe.event(Kind.RESHARD, Edge.INSTANT, self.index)
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded()
        self._post_forward = None
        self._give_memory_back()

    @unrecorded
    def _reshard_after_forward(self) -> None:
        """Free full parameters, or keep them split over fewer ranks."""
        info = self.post_forward_mesh_info
        if info is None or not self.is_unsharded:
            return
        if info is self.mesh_info:
            self.reshard()
            return
        probe.event(Kind.RESHARD, Edge.INSTANT, self.index)
        self._post_forward = PostForwardShard(self.index, self.fsdp_params, info, self.param_dtype, self.device)
        self.comm_ctx.streams.shards_changed(None)
        self._give_memory_back()

    # ---- hooks of the step

    def pre_forward(self, *, recomputed: bool) -> None:
        """Before the unit's forward, full parameters there; ``recomputed``: within backward."""
        if recomputed:
            self.recomputes()
        self.training_state = TrainingState.FORWARD
        probe.event(Kind.FORWARD, Edge.BEGIN, self.index)

    def post_forward(self, *, backward_follows: bool, recomputed: bool) -> None:
        """After the unit's forward.

        Args:
            backward_follows: autograd has recorded it.
            recomputed: it ran within backward; its own backward comes at once, and needs the full parameters.
        """
        probe.event(Kind.FORWARD, Edge.END, self.index)
        if not recomputed:
            self._reshard_after_forward()
            self.pending_backwards += backward_follows
        self.training_state = TrainingState.IDLE

    @property
    def home(self) -> Home:
        """Where the full parameters are that what is recorded now points to."""
        return self._home

    def recomputes(self) -> None:
        """What a graph needs of a forward in backward is computed anew, from where the full parameters are now."""
        self._recomputed_in = self._home

    def go_to(self, home: Home) -> None:
        """Be in the home of the forward whose backward runs next, unless it was recomputed in another.

        Raises:
            RuntimeError: the unit was undone since.
        """
        self._check_not_retired()
        self._go_to(self._recomputed_in or home)

    def pre_backward(self, home: Home) -> None:
        """Before the backward of a forward that ran in ``home``: full parameters."""
        self.training_state = TrainingState.PRE_BACKWARD
        probe.phase(Phase.PRE_BACKWARD)
        self.go_to(home)
        if self.unshard_in_backward:
            self.unshard()
            self.wait_for_unshard()
        elif not self.is_unsharded:
            for fsdp_param in self.fsdp_params:
                fsdp_param.expect_grad()

    def begin_backward(self) -> None:
        """The unit's backward runs from now on."""
        self.pending_backwards = max(0, self.pending_backwards - 1)
        probe.phase(Phase.BACKWARD)
        probe.event(Kind.BACKWARD, Edge.BEGIN, self.index)

    def post_backward(self) -> None:
        """After the unit's backward: take the gradients, give the parameters up, start the reduction."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            probe.event(Kind.BACKWARD, Edge.END, self.index)
        self.training_state = TrainingState.POST_BACKWARD
        self._recomputed_in = None
        probe.phase(Phase.POST_BACKWARD)
        self._account_grads()
        if self.sync.reduce_grads:
            self._reduce()
        else:
            self._reshard_after_backward()  # first: what follows may need memory for gradients in another dtype
            for param in self.fsdp_params:
                param.accumulate_grad(self.reduce_dtype)
            self._account_grads()
        self.training_state = TrainingState.IDLE

    def _reshard_after_backward(self) -> None:
        if self.reshard_after_backward:
            self.reshard()

    def _reduce(self) -> None:
        self._reshard_after_backward()
        for param in self.fsdp_params:
            if param.accumulated_grad is not None:  # of earlier micro-batches: the last one's comes on top
                param.accumulate_grad(self.reduce_dtype)
            elif self.sync.reduce_unused:
                param.count_as_zero()
        self._account_grads()
        taken = [(p, grad) for p in self.fsdp_params if (grad := p.take_grad()) is not None]
        params, grads = [p for p, _ in taken], [grad for _, grad in taken]
        taken.clear()
        if params or self._reducer.owes_all_reduce:
            try:
                self._start_reduction(params, grads)
            finally:
                if not grads:  # emptied, their end was announced
                    self._grad_bytes = 0

    @unrecorded
    def _start_reduction(self, params: list[FSDPParam], grads: list[torch.Tensor]) -> None:
        ctx = self.comm_ctx
        with ctx.streams.reducing(after_compute=True):
            ctx.reductions.make_room()
            if params:
                ctx.comms.reduces(self.mesh_info.shard_group)
                reduction = self._reducer.start(params, grads, self.pair.reduce, self._unused(params))
            else:
                reduction = self._reducer.start_kept(self._unused([]))
            ctx.reductions.add(reduction)
        ctx.join()  # what backward allocates next may lie where these gradients were

    def _unused(self, reduced: list[FSDPParam]) -> list[str]:
        """Name the trainable parameters that are not among those reduced."""
        if len(reduced) == len(self.fsdp_params):
            return []
        return [p.fqn for p in self.params_as_defined if p.trainable and p not in reduced]

    # ---- gradients

    def _account_grads(self) -> None:
        """Announce the full gradients autograd has made since the last look."""
        num_bytes = sum(p.grad_bytes() for p in self.fsdp_params)
        probe.memory(Category.UNSHARDED_GRADS, self.index, num_bytes - self._grad_bytes)
        self._grad_bytes = num_bytes

    def wait_for_host(self) -> None:
        """Let offloaded gradients be on the host, for whoever steps with them."""
        self._reducer.wait_for_host()

    @property
    def owes_reduction(self) -> bool:
        """True if gradients of earlier micro-batches wait for the reduction that is wanted now."""
        has_full = any(p.has_full_grad for p in self.fsdp_params)
        return self.sync.reduce_grads and (has_full or self._reducer.owes_all_reduce)

    # ---- the rest

    def finalize_backward(self) -> None:
        """At the end of a backward pass: nothing of the iteration is left."""
        self._reshard_after_backward()
        self._recomputed_in = None
        self.pending_backwards = 0
        self.training_state = TrainingState.IDLE

    def reset_iter_state(self) -> None:
        """Drop what an iteration that raised has left, without waiting for anything."""
        probe.event(Kind.RESET, Edge.INSTANT, self.index)
        if self._all_gather is not None:
            with self.comm_ctx.streams.gathering():  # its memory is from there
                self._all_gather.abandon()
            self._all_gather = None
        self._recomputed_in = None
        self._reducer.take_kept()
        for fsdp_param in self.fsdp_params:
            fsdp_param.drop_grad()
        self._account_grads()
        if not self.is_sharded or self._is_unsharding:
            self._to_sharded()
        self._give_memory_back()
        self.pending_backwards = 0
        self.training_state = TrainingState.IDLE
