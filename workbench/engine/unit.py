"""What a unit is: its parameters, its policy, where they lie in memory and how they travel.

What it does in a step is in ``param_group.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import Shard

from workbench import events
from workbench.engine import probe
from workbench.engine.backends import backend_of
from workbench.engine.collectives import UnitId
from workbench.engine.comm import (
    CUSTOM,
    OF_GROUP,
    SET_BY_USER,
    AllGather,
    CommPair,
    ReduceScatter,
    group_pair,
)
from workbench.engine.comm_context import FSDPCommContext
from workbench.engine.flat_shard import FlatShard, in_flat_order
from workbench.engine.mesh import FSDPMeshInfo, _get_post_forward_mesh_info
from workbench.engine.param import FSDPParam, ParamModuleInfo, ShardedState
from workbench.engine.policies import UnitPolicy
from workbench.engine.reduction import GradientSync, Reducer
from workbench.engine.tensors import unrecorded
from workbench.engine.unshard_memory import Home, UnshardMemory

_indices = itertools.count()

units: WeakValueDictionary[int, Unit] = WeakValueDictionary()
"""All units of this process by their indices."""


class Unit:
    """Parameters that are gathered and reduced together: where they lie, and how they travel.

    Attributes:
        index: number of the unit in this process, never reused; equal on all ranks that make the same calls.
        name: path of its module from the root.
        fsdp_params: its parameters, in the order of the flat shard.
        params_as_defined: the same, in the order of their definition.
        shards: this rank's slots, what ``sharded_param`` s are views of.
        policy: precision, offloading, what happens between forward and backward.
        post_forward_mesh_info: over which ranks parameters lie then; None: they stay full.
        comm: what it communicates with; None until that is chosen.
        needs_comm: the root has yet to choose.
        comm_ctx: what it shares with the other units of its root.
        sync: what happens to gradients.
        max_reductions: reduce-scatters in flight it allows; the largest of all units counts.
    """

    def __init__(
        self,
        params: Sequence[tuple[nn.Parameter, ParamModuleInfo, Shard]],
        mesh_info: FSDPMeshInfo,
        policy: UnitPolicy,
    ) -> None:
        self.index = next(_indices)
        units[self.index] = self
        self.name = ""
        self.root_index = -1
        self.mesh_info = mesh_info
        self.device = mesh_info.device
        self.comm_ctx = FSDPCommContext(self.device)  # exchanged for the root's
        self.sync = GradientSync()
        self.max_reductions = 1
        self.comm: CommPair | None = None
        self.needs_comm = True
        self._retired = False
        self.params_as_defined = [FSDPParam(*placed, mesh_info) for placed in params]
        order = in_flat_order([p.slot_numel for p in self.params_as_defined])
        self.fsdp_params = [self.params_as_defined[i] for i in order]
        for position, fsdp_param in enumerate(self.fsdp_params):
            fsdp_param.position = position
        self.shards = FlatShard(self.index, self.fsdp_params)
        self.set_policy(policy)
        self.shards.fill([params[i][0] for i in order], policy)
        self._bind()
        for fsdp_param in self.fsdp_params:
            fsdp_param.to_sharded()
        self.shards.share_lease()
        self.announce()

    # ---- which form

    @property
    def state(self) -> ShardedState:
        """Which form of the parameters is registered."""
        return self.fsdp_params[0].state if self.fsdp_params else ShardedState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """True while the full parameters are registered on the modules."""
        return self.state is ShardedState.UNSHARDED

    @property
    def is_sharded(self) -> bool:
        """True while the shards are."""
        return self.state is ShardedState.SHARDED

    # ---- policy

    def set_policy(self, policy: UnitPolicy) -> None:
        """Use ``policy`` from the next forward on."""
        self.policy = policy
        self.set_reshard_after_forward(policy.reshard_after_forward)

    def change_policy(self, policy: UnitPolicy) -> None:
        """Use another policy while sharded; parameters stay where they are."""
        self.set_policy(policy)
        self._choose_comm_again()
        self._bind()
        self.announce()

    def set_reshard_after_forward(self, value: bool | int) -> None:
        """Choose what happens to full parameters between forward and backward.

        Raises:
            TypeError, ValueError: see :func:`_get_post_forward_mesh_info`.
            NotImplementedError: fewer ranks for parameters that tensor parallelism has split.
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
        wanted = self.policy.mp_policy.param_dtype
        return wanted if wanted is not None and self.orig_dtype.is_floating_point else self.orig_dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the reduction."""
        return self.policy.mp_policy.reduce_dtype or self.param_dtype

    @property
    def is_trained(self) -> bool:
        """True if one of its parameters takes a gradient now."""
        return any(p.trainable for p in self.fsdp_params)

    def _bind(self) -> None:
        """Give the unit memory for its full parameters, empty for now."""
        self._usual = self._make_home()
        self._show(self._usual)
        self._unit = UnitId(self.index, self.name)
        self._reducer = Reducer(
            unit=self._unit,
            mesh_info=self.mesh_info,
            dtype=self.reduce_dtype,
            orig_dtype=self.orig_dtype,
            offloads=self.policy.offloads,
            pins=self.policy.pins,
            sync=self.sync,
        )

    def _make_home(self) -> Home:
        numel = self.shards.numel * self.mesh_info.shard_mesh_size
        memory = UnshardMemory(self.index, numel, self.param_dtype, self.device)
        with memory.present() as full:
            padded_fulls = full.split([p.full_numel for p in self.fsdp_params])
            pairs = list(zip(self.fsdp_params, padded_fulls, strict=True))
            by_rank = [p.layout.by_rank(padded_full) for p, padded_full in pairs]
            return Home(memory, padded_fulls, by_rank, [p.view_in(padded_full) for p, padded_full in pairs])

    def _show(self, home: Home) -> None:
        """Let the unsharded parameters be those in ``home``."""
        self._home = home
        for fsdp_param, view in zip(self.fsdp_params, home.views, strict=True):
            fsdp_param.show(view)

    @unrecorded
    def _go_to(self, home: Home) -> None:
        """Be in ``home``, into which the graph points that runs next; it may be one from before another policy."""
        before = self._home
        if before is home:
            return
        if before.memory.is_held:
            home.memory.take(self.comm_ctx.pages)
            home.memory.full.copy_(before.memory.full)
            before.memory.give_back(self.comm_ctx.pages)
        self._show(home)

    def _take_memory(self) -> None:
        """Get ready to be filled."""
        self._home.memory.take(self.comm_ctx.pages)

    def _give_memory_back(self) -> None:
        """Let go; what is recorded from now on is where the present policy wants it."""
        if self._home.memory.give_back(self.comm_ctx.pages) and self._home is not self._usual:
            self._show(self._usual)

    @torch.no_grad()
    def adopt_registered(self) -> None:
        """Take over parameters that ``.to``, ``to_empty`` or a loader replaced while sharded; else do nothing.

        Raises:
            TypeError: a parameter was replaced by a plain tensor.
            ValueError: parameters of the unit now differ in dtype or device.
        """
        if self.is_sharded and self.shards.adopt_registered(self.policy):
            self._choose_comm_again()
            self._bind()
            self.announce()

    # ---- comms

    def lazy_init(self, name: str, root_index: int, comm_ctx: FSDPCommContext) -> None:
        """Join a root: take its names and its communication context."""
        self.adopt_registered()
        self.name, self.root_index, self.comm_ctx = name, root_index, comm_ctx
        comm_ctx.reductions.max_scatters = max(comm_ctx.reductions.max_scatters, self.max_reductions)
        self._unit = self._reducer.unit = UnitId(self.index, name)
        self.announce()

    def use_comm(self, pair: CommPair) -> None:
        """Communicate with ``pair`` from now on."""
        self.comm, self.needs_comm = pair, False
        self.announce()

    def _choose_comm_again(self) -> None:
        """Let the root choose at its next forward; all ranks come to this together."""
        if self.comm is None or self.comm.name not in SET_BY_USER:
            self.comm, self.needs_comm = None, True

    @property
    def pair(self) -> CommPair:
        """What the unit communicates with; what works between any ranks until its root has chosen."""
        if self.comm is None:
            self.comm = backend_of(self.device).pair()
        return self.comm

    def set_custom(self, gather: AllGather | None = None, reduce: ReduceScatter | None = None) -> None:
        """Communicate with an object of the user's."""
        pair = self.pair if self.pair.name == CUSTOM else backend_of(self.device).pair()
        self.use_comm(CommPair(gather or pair.gather, reduce or pair.reduce, CUSTOM))

    def allocate_from_group(self, enable: bool) -> None:
        """Let the backend allocate what is communicated, if it allocates anything; see :func:`group_pair`.

        Raises:
            ValueError: it communicates with an object of the user's, which allocates by itself.
        """
        if self.comm is not None and self.comm.name == CUSTOM:
            raise ValueError(
                f"unit {events.unit_words(self.name)!r} communicates with a custom "
                f"{type(self.comm.gather).__name__} and {type(self.comm.reduce).__name__}, which allocate by "
                "themselves: set_allocate_memory_from_process_group_for_comm does not go with set_custom_all_gather or "
                "set_custom_reduce_scatter"
            )
        group = self.mesh_info.shard_group
        pair = group_pair(group, self.device) if enable and group is not None else None
        if pair is not None:
            self.use_comm(pair)
        elif self.comm is not None and self.comm.name == OF_GROUP:
            self.comm, self.needs_comm = None, True

    def set_max_reductions(self, n: int) -> None:
        """Allow ``n`` reduce-scatters in flight at once in the whole model."""
        self.max_reductions = n
        self.comm_ctx.reductions.max_scatters = n
        self._choose_comm_again()

    # ---- the rest

    def retire(self) -> None:
        """The unit was undone: announce it and let go of its storage, which cycles would keep until collected."""
        self._retired = True
        self.announce()
        self.fsdp_params, self.params_as_defined = [], []
        del self.shards, self._home, self._usual

    def announce(self) -> None:
        """Tell the probe what this unit is now."""
        if probe.active is not None:
            probe.active.unit(self.describe())

    def describe(self) -> events.Unit:
        """Return the probe's description."""
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
            offload=self.policy.offloads,
            comm=self.comm.name if self.comm is not None and self.mesh_info.data_parallel_size > 1 else "",
            retired=self._retired,
        )
