"""A unit: the parameters that one ``fully_shard`` call manages and communicates together."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial, reduce
from typing import cast

import torch

from workbench import events
from workbench.engine import probe, unit_collectives
from workbench.engine._spmd_types import no_checks
from workbench.engine.backends import backend_of
from workbench.engine.backends.copies import Grads
from workbench.engine.backends.full_memory import FullMemory
from workbench.engine.backends.page_pool import Region
from workbench.engine.comm import AllGather, CommPair
from workbench.engine.comm_choice import CommChoice
from workbench.engine.comm_context import FSDPCommContext
from workbench.engine.flat_shard import FlatShard, in_flat_order
from workbench.engine.full_param import FullParam
from workbench.engine.mesh import FSDPMeshInfo, _get_post_forward_mesh_info
from workbench.engine.param import FSDPParam, ShardedState
from workbench.engine.policies import UnitPolicy
from workbench.engine.post_forward import PostForwardShard
from workbench.engine.process_groups import CommGroup
from workbench.engine.reduction import GradientSync, Reducer, ReduceScatterState, ShardSum, foreach_reduce
from workbench.engine.refusal_text import used_after_reshard
from workbench.engine.shard_layout import rows_of
from workbench.engine.tensor_trees import unrecorded
from workbench.engine.unit_collectives import AllGatherState, DeviceCopyState, ScatteredShard, UnitId
from workbench.engine.unshard_memory import BufferSet, MemoryOfShards, UnitBuffers, UnshardMemory, buffers_in
from workbench.events import Category, Edge, Kind, Phase, unit_words

units: weakref.WeakValueDictionary[int, FSDPParamGroup] = weakref.WeakValueDictionary()
"""All units of this process by their indices."""


class TrainingState(Enum):
    """Where a unit is in the step.

    FORWARD: between its pre- and post-forward hook. PRE_BACKWARD: its backward runs or is about to.
    POST_BACKWARD: its gradients are being taken. IDLE: none of these.
    """

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


class FSDPParamGroup:
    """A unit: parameters that are gathered and reduced together.

    Handles their memory and communication in each phase of a step.

    Attributes:
        index: number of the unit in this process, never reused; equal on all ranks that make the same calls.
        name: path of its module from the root.
        above: path of the root in the user's model, if the root is only a part of it; ranks compare names without it.
        fsdp_params: its parameters, in flat shard order.
        params_as_defined: the same, in definition order.
        shards: this rank's flat shard, whose slots the sharded parameters are views of.
        policy: precision, offloading, resharding after forward.
        post_forward_mesh_info: ranks that share the parameters between forward and backward; None: they stay full.
        buffers: memory of its full parameters.
        comm_choice: the choice of its comm pair.
        comm_ctx: communication context shared with the other units of its root.
        sync: settings for gradient reduction.
        max_reductions: reduce-scatters in flight it allows; the largest value of all units applies.
        reshard_after_backward: free full parameters after backward.
        unshard_in_backward: False if backward does not need the full parameters, as for an embedding.
        keeps_dtype: modules compute in the shards' dtype, whatever the policy's ``param_dtype``.
        keeps_memory: the memory of full parameters stays allocated, and so at its address, while they are sharded.
        pending_backwards: recorded forwards whose backward has not begun.
        on_inner_grad: called before a gradient is accumulated that autograd reached without passing an output.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        policy: UnitPolicy,
        *,
        keeps_dtype: bool = False,
    ) -> None:
        self.keeps_dtype = keeps_dtype
        self.keeps_memory = False
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.training_state = TrainingState.IDLE
        self.pending_backwards = 0
        self.on_inner_grad: Callable[[FSDPParamGroup], None] | None = None
        self._all_gather: AllGatherState | DeviceCopyState | None = None
        self._post_forward: PostForwardShard | None = None
        self._recomputed_in: BufferSet | None = None
        self._is_unsharding = False  # started and not yet waited for
        self._grad_bytes = 0
        self.index = next(events.UNIT_INDICES)
        units[self.index] = self
        self.name = ""
        self.above = ""
        self.root_index = -1
        self.mesh_info = mesh_info
        self.device = mesh_info.device
        self.comm_ctx = FSDPCommContext(self.device)  # replaced by the root's
        self.sync = GradientSync()
        self.max_reductions = 1
        self.comm_choice = CommChoice(self.device)
        self._retired = False
        self.params_as_defined = list(params)
        order = in_flat_order([p.slot_numel for p in self.params_as_defined])
        self.fsdp_params = [self.params_as_defined[i] for i in order]
        for position, fsdp_param in enumerate(self.fsdp_params):
            fsdp_param.position = position
        for full in itertools.chain.from_iterable(param.fulls for param in self.fsdp_params):
            full.watch_grads(partial(_before_grad, weakref.ref(self), weakref.ref(full)))
        self.shards = FlatShard(self.index, self.fsdp_params)
        self.set_policy(policy)
        self.shards.fill(policy)
        self._bind()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded()
        self.shards.share_lease()
        self.announce()

    # ---- which form

    @property
    def state(self) -> ShardedState:
        """The form of the parameters that is registered."""
        return self.fsdp_params[0].state if self.fsdp_params else ShardedState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """True while the full parameters are registered on the modules."""
        return self.state is ShardedState.UNSHARDED

    @property
    def is_sharded(self) -> bool:
        """True while the sharded parameters are registered on the modules."""
        return self.state is ShardedState.SHARDED

    # ---- policy

    def set_policy(self, policy: UnitPolicy) -> None:
        """Use ``policy`` from the next forward on."""
        self.policy = policy
        self.set_reshard_after_forward(policy.reshard_after_forward)

    def change_policy(self, policy: UnitPolicy) -> None:
        """Switch to another policy while sharded; the shards stay in place."""
        self.set_policy(policy)
        self._reopen_comm_choice()
        self._bind()
        self.announce()

    def set_reshard_after_forward(self, value: bool | int) -> None:
        """Choose what happens to full parameters between forward and backward.

        Raises:
            TypeError, ValueError: see :func:`_get_post_forward_mesh_info`.
            NotImplementedError: a number of ranks, where tensor parallelism has split the parameters.
        """
        info = _get_post_forward_mesh_info(value, self.mesh_info)
        self.reshard_after_forward = value
        self.post_forward_mesh_info = info
        for param in self.fsdp_params:
            param.set_post_forward(None if info is None or info is self.mesh_info else info)

    # ---- dtypes and memory

    @property
    def orig_dtype(self) -> torch.dtype:
        """Dtype of the shards."""
        return self.fsdp_params[0].orig_dtype

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the full parameters."""
        wanted = None if self.keeps_dtype else self.policy.mp_policy.param_dtype
        return wanted if wanted is not None and self.orig_dtype.is_floating_point else self.orig_dtype

    @property
    def gather_dtype(self) -> torch.dtype:
        """Dtype of the all-gather."""
        return self.param_dtype

    @property
    def gather_nbytes(self) -> int:
        """Bytes that an all-gather makes on each rank, where they do not follow from shapes and dtypes; else 0."""
        return 0

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the reduction, where that does not depend on which gradients there are and in which dtype."""
        dtypes = {self.grad_dtype_of(p) or self.param_dtype for p in self.fsdp_params if p.trainable}
        return reduce(torch.promote_types, dtypes) if dtypes else self.param_dtype

    def grad_dtype_of(self, param: FSDPParam) -> torch.dtype | None:
        """Return the dtype in which full gradients of ``param`` are accumulated and reduced; None: any."""
        default = param.shard_grad_dtype if param.reduces_in_grad_dtype else self.param_dtype
        return self.policy.mp_policy.reduce_dtype or default

    @property
    def is_trained(self) -> bool:
        """True if one of its parameters takes a gradient now."""
        return any(p.trainable for p in self.fsdp_params)

    def _bind(self) -> None:
        """Create the unit's unshard memory, empty for now, and its reducer."""
        self._make_buffers()
        self._unit = UnitId(self.index, self.name)
        self._set_grad_dtypes()
        self._reducer = Reducer(
            unit=self._unit,
            mesh_info=self.mesh_info,
            offloads=self.policy.offloads,
            pins=self.policy.pins,
            sync=self.sync,
        )

    def _make_buffers(self) -> None:
        memory = UnshardMemory(self.index, self._make_memory())
        self.buffers = UnitBuffers(self.fsdp_params, buffers_in(memory, self.fsdp_params))

    def _set_grad_dtypes(self) -> None:
        for param in self.fsdp_params:
            param.keep_grad_dtype()
            param.accumulate_in(self.grad_dtype_of(param), self.param_dtype)

    def _make_memory(self) -> FullMemory:
        flat, size = self.shards.flat, self.mesh_info.shard_mesh_size
        is_full = size == 1 and flat.dtype == self.param_dtype and (flat.is_meta or not self.policy.offloads)
        computes_in_shard = is_full and all(param.computes_in_shard for param in self.fsdp_params)
        if computes_in_shard and isinstance(flat, torch.Tensor):
            return MemoryOfShards(flat)
        return backend_of(self.device).full_memory(self.shards.numel * size, self.param_dtype)

    @torch.no_grad()
    def adopt_registered(self, *, fresh: bool = False) -> None:
        """Adopt parameters that ``.to``, ``to_empty`` or a loader replaced while sharded; no-op if there are none.

        Args:
            fresh: replaced parameters are in newly allocated memory that nothing else refers to.

        Raises:
            TypeError: a parameter was replaced by a plain tensor.
            ValueError: parameters of the unit now differ in dtype or device.
        """
        if self.is_sharded and self.shards.adopt_registered(self.policy, fresh=fresh):
            self._reopen_comm_choice()
            self._bind()
            self.announce()

    # ---- comms

    def lazy_init(self, name: str, root_index: int, comm_ctx: FSDPCommContext) -> None:
        """Join a root: adopt its name for the unit and its communication context."""
        self.adopt_registered()
        self._set_grad_dtypes()
        self.take_name(name)
        self.root_index, self.comm_ctx = root_index, comm_ctx
        comm_ctx.reductions.max_scatters = max(comm_ctx.reductions.max_scatters, self.max_reductions)
        self.announce()

    def take_name(self, name: str) -> None:
        """Set the unit's name."""
        self.name = name
        self._unit = self._reducer.unit = UnitId(self.index, name)

    def set_above(self, above: str) -> None:
        """Describe the unit from now on as a part of a model in which the root has the path ``above``.

        One rank may have a module around the root that the others lack. So :attr:`name` and the names of parameters,
        which ranks compare, do not change.
        """
        if above != self.above:
            self.above = above
            self.announce()

    def in_model(self, name: str) -> str:
        """Return the path in the user's model, :attr:`above` included, of ``name``, a path from the root."""
        return ".".join(part for part in (self.above, name) if part)

    @property
    def title(self) -> str:
        """The unit's name in messages."""
        return unit_words(self.in_model(self.name))

    @property
    def comm(self) -> CommPair | None:
        """The unit's comm pair; None until chosen."""
        return self.comm_choice.chosen

    def use_comm(self, pair: CommPair) -> None:
        """Set the unit's comm pair."""
        self.comm_choice.settle(pair)
        self.announce()

    @property
    def shard_group(self) -> CommGroup | None:
        """The ranks that share one copy; None if there is only one."""
        return self.mesh_info.shard_group

    @property
    def groups(self) -> list[CommGroup]:
        """The process groups that the unit uses."""
        infos = (self.mesh_info, self.post_forward_mesh_info)
        groups = [group for info in infos if info is not None for group in (info.shard_group, info.replicate_group)]
        return [group for group in dict.fromkeys([*groups, self._reducer.scatter_group]) if group is not None]

    def separate_reductions(self, enable: bool) -> None:
        """Reduce-scatter in a process group of its own, or not; all ranks of the unit must call this together."""
        self.sync.separate_group = enable
        _ = self._reducer.scatter_group

    @property
    def shard_numel(self) -> int:
        """Elements of the flat shard."""
        return self.shards.numel

    @property
    def shard_region(self) -> Region | None:
        """Memory region of the flat shard, if its pages can be exchanged; else None."""
        return self.shards.region

    def _reopen_comm_choice(self) -> None:
        """Let the root choose a pair again, unless the user has; all ranks must call this together."""
        if not self.comm_choice.is_set_by_user:
            self.comm_choice.reopen()

    def allocate_from_group(self, enable: bool) -> None:
        """Let the backend allocate the communication buffers, if it can.

        Raises:
            ValueError: see :meth:`CommChoice.in_group_memory`.
        """
        pair = self.comm_choice.in_group_memory(self.mesh_info.shard_group if enable else None, self.title)
        if pair is not None:
            self.use_comm(pair)
        else:
            self.comm_choice.leave_group_memory()

    def set_max_reductions(self, n: int) -> None:
        """Allow ``n`` reduce-scatters in flight at once in the whole model."""
        self.max_reductions = n
        self.comm_ctx.reductions.max_scatters = n
        self._reopen_comm_choice()

    # ---- unshard and reshard

    @property
    def is_unsharding(self) -> bool:
        """True between :meth:`unshard` and :meth:`wait_for_unshard`."""
        return self._is_unsharding

    @unrecorded
    def unshard(self) -> None:
        """Start the all-gather; no-op if the parameters are unsharded or being unsharded.

        Raises:
            RuntimeError: the unit is retired; a graph recorded before that cannot run backward any more.
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
                self._all_gather = unit_collectives.foreach_all_gather(
                    shard, self.gather_dtype, self.device, info.shard_group, self._gather(info), self._unit
                )
        elif shard.device != self.device or isinstance(shard, ScatteredShard):
            with self.comm_ctx.streams.gathering():
                self._all_gather = unit_collectives.copy_to_device(shard, self.gather_dtype, self.device, self._unit)
        self._is_unsharding = True

    def _check_not_retired(self) -> None:
        if self._retired:
            raise RuntimeError(
                f"unit {self.title!r} was unsharded or resharded by unshard_module or reshard_module after this "
                "forward, so its backward cannot run: run the forward again"
            )

    def _source(self) -> tuple[torch.Tensor | ScatteredShard, FSDPMeshInfo]:
        """Return the flat shard to gather from and the mesh whose ranks hold the rest."""
        if self._post_forward is not None:
            return self._post_forward.flat, self._post_forward.mesh_info
        return self.shards.flat, self.mesh_info

    def _whole_shard(self) -> torch.Tensor:
        """Return the flat shard as ``[1, S]``, where it already is the full parameters."""
        shard, _ = self._source()
        return cast("torch.Tensor", shard).view(1, -1)

    def _targets(self, gathered: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return the full parameters' memory, split as ``gathered``."""
        num_ranks, buffers = [len(part) for part in gathered], self.buffers.current
        if self._post_forward is not None:
            return rows_of(self._post_forward.by_rank(buffers.padded_fulls), num_ranks)
        return buffers.rows_of(num_ranks)

    def _gather(self, info: FSDPMeshInfo) -> AllGather:
        # the root chose the pair for the shard group; the smaller post-forward group uses one that works anywhere
        return self.comm_choice.pair.gather if info is self.mesh_info else backend_of(self.device).pair().gather

    @unrecorded
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and register the full parameters; if already unsharded, mark them in use.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
            RanksDisagreeError: ranks issue different collectives.
        """
        if not self._is_unsharding:
            for fsdp_param in self.fsdp_params:
                fsdp_param.to_work()
            return
        gathered = [self._whole_shard()] if self._all_gather is None else self._all_gather.wait()
        self.buffers.take(self.comm_ctx.pages)
        if not self.buffers.current.memory.is_shards:
            unit_collectives.foreach_all_gather_copy_out(gathered, self._targets(gathered), self._unit)
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
        """Free the full parameters; no-op if sharded.

        Waits for an unused all-gather in flight first: its output is still being written.
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
        self._free_full()

    def _free_full(self) -> None:
        if not self.keeps_memory:
            self.buffers.give_back(self.comm_ctx.pages)

    @unrecorded
    def _reshard_after_forward(self) -> None:
        """Free the full parameters, or reshard them to fewer ranks."""
        info = self.post_forward_mesh_info
        if info is None or not self.is_unsharded:
            return
        if info is self.mesh_info:
            self.reshard()
            return
        probe.event(Kind.RESHARD, Edge.INSTANT, self.index)
        self._post_forward = PostForwardShard(self.index, self.fsdp_params, info, self.param_dtype, self.device)
        self.comm_ctx.streams.shards_changed(None)
        self._free_full()

    # ---- hooks of the step

    def pre_forward(self, *, recomputed: bool) -> None:
        """Begin the unit's forward, with the parameters unsharded; ``recomputed``: within backward."""
        if recomputed:
            self.recomputes()
        self.training_state = TrainingState.FORWARD
        for full in itertools.chain.from_iterable(param.fulls for param in self.fsdp_params):
            full.annotate()
        probe.event(Kind.FORWARD, Edge.BEGIN, self.index)

    def post_forward(self, *, backward_follows: bool, recomputed: bool) -> None:
        """End the unit's forward.

        Args:
            backward_follows: autograd recorded it.
            recomputed: it ran within backward; its own backward follows at once and needs the full parameters.
        """
        probe.event(Kind.FORWARD, Edge.END, self.index)
        if not recomputed:
            self._reshard_after_forward()
            self._rest()
            self.pending_backwards += backward_follows
        self.training_state = TrainingState.IDLE

    def recomputes(self) -> None:
        """Note that backward recomputes the forward, from the buffers that hold the full parameters now."""
        self._recomputed_in = self.buffers.current

    def switch_to(self, buffers: BufferSet) -> None:
        """Switch to the buffers of the forward whose backward runs next, or those it was recomputed in.

        Raises:
            RuntimeError: the unit was retired since.
        """
        self._check_not_retired()
        self.buffers.switch_to(self._recomputed_in or buffers, self.comm_ctx.pages)

    def pre_backward(self, buffers: BufferSet) -> None:
        """Prepare the backward of a forward that ran in ``buffers``: unshard the parameters."""
        self.training_state = TrainingState.PRE_BACKWARD
        probe.phase(Phase.PRE_BACKWARD)
        self.enter_backward(buffers)

    def enter_backward(self, buffers: BufferSet) -> None:
        """Switch to ``buffers`` and unshard there, if the backward of a forward that ran in it needs the values."""
        self.switch_to(buffers)
        if self.unshard_in_backward:
            self.unshard()
            self.wait_for_unshard()
        else:
            self._expect_grads()

    def _expect_grads(self) -> None:
        if not self.is_unsharded:
            for fsdp_param in self.fsdp_params:
                fsdp_param.expect_grad()

    def enter_inner_backward(self) -> None:
        """Begin a backward that reached the parameters without passing an output of the unit.

        The full parameters are not gathered: any operation that needs their values has run or raised by now.
        """
        self.training_state = TrainingState.PRE_BACKWARD
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_work()
        self._expect_grads()
        self.begin_backward()

    def begin_backward(self) -> None:
        """Begin the unit's backward."""
        self.pending_backwards = max(0, self.pending_backwards - 1)
        probe.phase(Phase.BACKWARD)
        probe.event(Kind.BACKWARD, Edge.BEGIN, self.index)

    def post_backward(self) -> None:
        """End the unit's backward: take the gradients, reshard, start the reduction."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            probe.event(Kind.BACKWARD, Edge.END, self.index)
        else:  # these are gradients of earlier backwards
            for fsdp_param in self.fsdp_params:
                fsdp_param.to_work()
        self.training_state = TrainingState.POST_BACKWARD
        self._recomputed_in = None
        probe.phase(Phase.POST_BACKWARD)
        self._account_grads()
        if self.sync.reduce_grads:
            self._reduce()
        else:
            self._reshard_after_backward()  # first: a cast of the gradients may need the memory
            with no_checks():
                for param in self.fsdp_params:
                    param.accumulate_grad(self.grad_dtype_of(param))
            self._account_grads()
        self._rest()
        self.training_state = TrainingState.IDLE

    def leave_backward(self) -> None:
        """End the unit's backward; its gradients, if any, wait for a later :meth:`post_backward`."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            probe.event(Kind.BACKWARD, Edge.END, self.index)
            self._account_grads()
            self._rest()

    def _rest(self) -> None:
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_rest()

    def _reshard_after_backward(self) -> None:
        if self.reshard_after_backward:
            self.reshard()
        if not self.comm_ctx.recorded:  # no further backward gathers: leave the memory to gradients
            self.comm_ctx.pages.release()

    @unrecorded
    def _reduce(self) -> None:
        self._reshard_after_backward()
        if self._complete_grads():
            self._account_grads()
        params = [p for p in self.fsdp_params if p.has_full_grad]
        if not (params or self._reducer.owes_all_reduce):
            return
        grads = [p.take_grads() for p in params]
        ctx, unused = self.comm_ctx, self._unused(params)
        try:
            with ctx.streams.reducing(after_compute=True):
                ctx.reductions.make_room()
                if params:
                    ctx.comms.reduces(self)
                    started = self._start_reduction(params, grads, unused)
                else:
                    started = self._reducer.all_reduce_kept(unused)
                ctx.reductions.add(started)
        finally:
            if not grads:  # foreach_reduce emptied the list and announced the freed bytes
                self._grad_bytes = 0
        ctx.join()  # backward's next allocation may reuse the memory of these gradients

    def _start_reduction(
        self, params: list[FSDPParam], grads: list[Grads], unused: list[str]
    ) -> ReduceScatterState | ShardSum:
        present = ((param, grad) for param, own in zip(params, grads, strict=True) for grad in own if grad is not None)
        dtype = self._reducer.dtype_with(self.grad_dtype_of(param) or grad.dtype for param, grad in present)
        choice = self.comm_choice  # a pair that the engine chose is for one dtype
        is_fit = dtype == self.reduce_dtype or choice.is_set_by_user
        reducer = choice.pair.reduce if is_fit else backend_of(self.device).pair().reduce
        return foreach_reduce(self._reducer, params, grads, reducer, unused, dtype)

    def _complete_grads(self) -> bool:
        """Add accumulated gradients, and zeros for unused parameters if set; return whether anything changed."""
        added = False
        for param in self.fsdp_params:
            if param.has_accumulated_grad:  # from earlier micro-batches: add the last one's
                param.accumulate_grad(self.grad_dtype_of(param))
                added = True
            elif self.sync.reduce_unused:
                param.count_as_zero()
                added = True
        return added

    def _unused(self, reduced: list[FSDPParam]) -> list[str]:
        """Return the names of the trainable parameters not in ``reduced``."""
        if len(reduced) == len(self.fsdp_params):
            return []
        return [p.fqn for p in self.params_as_defined if p.trainable and p not in reduced]

    # ---- gradients

    def _account_grads(self) -> None:
        """Announce the change in bytes of full gradients since the last call."""
        num_bytes = sum(p.grad_bytes() for p in self.fsdp_params)
        probe.memory(Category.UNSHARDED_GRADS, self.index, num_bytes - self._grad_bytes)
        self._grad_bytes = num_bytes

    def wait_for_host(self) -> None:
        """Wait until offloaded gradients are on the host, ready for the optimizer."""
        self._reducer.wait_for_host()

    @property
    def owes_reduction(self) -> bool:
        """True if gradients of earlier micro-batches wait for a reduction that is now enabled."""
        has_full = any(p.has_full_grad for p in self.fsdp_params)
        return self.sync.reduce_grads and (has_full or self._reducer.owes_all_reduce)

    @property
    def has_partial_sum(self) -> bool:
        """True if gradients summed over the shard ranks wait for an all-reduce."""
        return self._reducer.kept is not None

    @property
    def has_unreduced_grads(self) -> bool:
        """True if full gradients were left after the last post-backward, such as those of a micro-batch."""
        return self._grad_bytes > 0

    @property
    def has_missed_grads(self) -> bool:
        """True if reduction is enabled and autograd made full gradients after the last post-backward."""
        return self.sync.reduce_grads and sum(p.grad_bytes() for p in self.fsdp_params) > self._grad_bytes

    # ---- the rest

    def finalize_backward(self) -> None:
        """Clear the unit's iteration state at the end of the last backward."""
        self._reshard_after_backward()
        self._recomputed_in = None
        self.pending_backwards = 0
        self.training_state = TrainingState.IDLE

    def drop_full_grads(self) -> None:
        """Drop the full gradients that were not reduced."""
        self._reducer.take_kept()
        for fsdp_param in self.fsdp_params:
            fsdp_param.drop_grad()
        self._account_grads()

    def reset_iter_state(self) -> None:
        """Drop the remains of an iteration that raised, without waiting for anything."""
        probe.event(Kind.RESET, Edge.INSTANT, self.index)
        if self._all_gather is not None:
            with self.comm_ctx.streams.gathering():  # its memory was allocated in that stream
                self._all_gather.abandon()
            self._all_gather = None
        self._recomputed_in = None
        self.drop_full_grads()
        if not self.is_sharded or self._is_unsharding:
            self._to_sharded()
        self.buffers.give_back(self.comm_ctx.pages)
        self.pending_backwards = 0
        self.training_state = TrainingState.IDLE

    def retire(self) -> None:
        """Mark the unit undone and drop its storage now; reference cycles would hold it until garbage collection."""
        self._retired = True
        self.on_inner_grad = None
        self.announce()
        self.fsdp_params, self.params_as_defined = [], []
        del self.shards, self.buffers

    def __del__(self) -> None:
        if getattr(self, "_grad_bytes", 0):  # of a model that was dropped while its gradients accumulated
            probe.memory(Category.UNSHARDED_GRADS, self.index, -self._grad_bytes)

    def announce(self) -> None:
        """Send the probe the unit's current description."""
        if probe.active is not None:
            probe.active.unit(self.describe_in_model())

    def describe_in_model(self) -> events.Unit:
        """Return the probe's description, with all names as paths in the user's model."""
        known = self.describe()
        if not self.above:
            return known
        params = tuple(
            replace(
                param,
                fqn=self.in_model(param.fqn),
                parts=tuple(replace(part, fqn=self.in_model(part.fqn)) for part in param.parts),
            )
            for param in known.params
        )
        return replace(known, name=self.in_model(known.name), params=params)

    def describe(self) -> events.Unit:
        """Return the description with names from the root, as ranks compare it."""
        return events.Unit(
            index=self.index,
            name=self.name,
            root=self.root_index,
            params=tuple(p.describe() for p in self.params_as_defined),
            reshard_after_forward=self.reshard_after_forward,
            shard_size=self.mesh_info.shard_mesh_size,
            replicate_size=self.mesh_info.replicate_mesh_size,
            compute_dtype=str(self.param_dtype).removeprefix("torch."),
            reduce_dtype=str(self.reduce_dtype).removeprefix("torch."),
            compute_itemsize=self.param_dtype.itemsize,
            reduce_itemsize=self.reduce_dtype.itemsize,
            gather_nbytes=self.gather_nbytes,
            offload=self.policy.offloads,
            comm=self.comm.name if self.comm is not None and self.mesh_info.data_parallel_size > 1 else "",
            retired=self._retired,
        )


def _before_grad(unit_ref: weakref.ref[FSDPParamGroup], full_ref: weakref.ref[FullParam], grad: torch.Tensor) -> None:
    """Call the unit's ``on_inner_grad`` unless its backward has begun, or the unit runs forward.

    Raises:
        RuntimeError: the gradient belongs to the placeholder that a full parameter holds while its unit is sharded.
    """
    unit, full = unit_ref(), full_ref()  # weak: the hook's parameter belongs to the unit
    if unit is not None and full is not None and not full.is_open and not grad.dim() and full.data.dim():
        raise RuntimeError(used_after_reshard(unit.in_model(full.fqn), unit.title))
    if unit is not None and unit.training_state is TrainingState.IDLE and unit.on_inner_grad is not None:
        unit.on_inner_grad(unit)
