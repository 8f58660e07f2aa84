"""Replace the ``fully_shard`` calls of a sharded tree; restore the old ones if anything fails.

The new calls run on the meta device, where they cost nothing; then they receive the shards. A parameter whose shards
stay in place is handed over as the same object, with its gradient, hooks and optimizer state. For another mesh a new
parameter is made from the old one, which is gathered: one tensor at a time is whole. The old state is released last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from workbench.engine import probe
from workbench.engine._torch import (
    dtensor_of,
    local_of,
    set_local,
    share_grad_dtype,
    share_post_accumulate_hooks,
    spec_of,
    with_dtype,
)
from workbench.engine.agreement import Agreement
from workbench.engine.api import fully_shard
from workbench.engine.comm import CUSTOM
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.fsdp_state import FSDPState, attach, detach, roots, state_of, states_below, units_of
from workbench.engine.managed_params import mark_taken
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.policies import UnitPolicy
from workbench.engine.reduction import set_sharded_grads
from workbench.engine.shard_placement import ShardPlacementResult
from workbench.engine.unsharding import NewParams, laid_out, staged, undo
from workbench.events import Category

CPU = torch.device("cpu")
Place = tuple[int, str]  # id of a module, name in it


@dataclass(frozen=True, kw_only=True)
class ShardCall:
    """A ``fully_shard`` call to make.

    Attributes:
        modules: its modules.
        mesh: its mesh; None: all ranks.
        policy: its policy.
        auto_reshard: ``reshard_after_forward`` is omitted.
        origin: the state its modules were in before, whose settings it takes.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh | None
    policy: UnitPolicy
    auto_reshard: bool
    origin: FSDPState

    @property
    def regroups(self) -> bool:
        """True if other parameters than now are to keep their dtype."""
        was, wanted = self.origin.mp_policy, self.policy.mp_policy
        return wanted.param_dtype_override_fn is not was.param_dtype_override_fn

    def apply(
        self,
        placement: Callable[[nn.Parameter], ShardPlacementResult],
        ignored: Sequence[nn.Parameter],
        keeps: Callable[[ShardCall, nn.Parameter], torch.dtype | None],
    ) -> None:
        """Make the call; ``keeps`` returns what the policy's ``param_dtype_override_fn`` is to."""
        wanted = self.policy.mp_policy
        override = None if wanted.param_dtype_override_fn is None else partial(keeps, self)
        fully_shard(
            list(self.modules) if len(self.modules) > 1 else self.modules[0],
            mesh=self.mesh,
            reshard_after_forward=None if self.auto_reshard else self.policy.reshard_after_forward,
            shard_placement_fn=placement,
            mp_policy=replace(wanted, param_dtype_override_fn=override),
            offload_policy=self.policy.offload_policy,
            ignored_params=ignored,
        )
        cast("FSDPState", state_of(self.modules[0])).mp_policy = wanted


class Replacement:
    """Replaces the calls of a tree; after any error the tree is unchanged.

    Attributes:
        mapping: new parameter for each one that could not be handed over as the same object.
    """

    def __init__(self, module: nn.Module, calls: Sequence[ShardCall], mesh_info: FSDPMeshInfo | None) -> None:
        self.mapping: NewParams = {}
        self._module = module
        self._calls = calls
        self._mesh_info = mesh_info  # None: that of each parameter
        self._old = states_below(module)
        self._params = [cast("DTensorParam", p) for unit in units_of(self._old) for p in unit.params_as_defined]
        self._by_place = {(id(m), name): p for p in self._params for m, name in p.info.places}
        self._classes = [(m, type(m), state) for state in self._old for m in state.modules]

    @torch.no_grad()
    def run(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Agreement) -> None:
        """Replace the calls on all ranks; collective. After any error the tree is unchanged on every rank."""
        for state in self._old:
            state.comm_ctx.comms.wait_for_readers()
        for unit in units_of(self._old):
            unit.reshard()
            unit.adopt_registered()
        managed = {p.sharded_param for p in self._params}
        ignored = [p for p in self._module.parameters() if p not in managed]
        locals_ = [local_of(cast("DTensor", p.sharded_param)) for p in self._params]
        with ExitStack() as stack:
            stack.callback(self._put_back, locals_)
            with ranks.all_or_none():
                self._apply(ignored)
                new = self._new_states()
                for unit in units_of(new):
                    self._fill(unit)
                self._carry(new)
                commits = [staged(optimizer, self.mapping) for optimizer in optimizers]
            stack.pop_all()
        self._commit(new)
        for commit in commits:
            commit()

    # ---- the new calls

    def _apply(self, ignored: Sequence[nn.Parameter]) -> None:
        for module, _, state in self._classes:
            detach(module)
            module.__class__ = state.original_classes[state.modules.index(module)]
        stand_ins = [(_stand_in(param), param) for param in self._params]
        for stand_in, param in stand_ins:
            param.info.register(stand_in)
        by_id = {id(stand_in): param for stand_in, param in stand_ins}

        def placement(param: nn.Parameter) -> ShardPlacementResult:
            old = by_id[id(param)]
            return ShardPlacementResult(Shard(old.layout.dim), self._mesh_info or old.mesh_info)

        kept = {p for unit in units_of(self._old) if unit.keeps_dtype for p in unit.fsdp_params}

        def keeps(call: ShardCall, param: nn.Parameter) -> torch.dtype | None:
            old, fn = by_id[id(param)], call.policy.mp_policy.param_dtype_override_fn
            if call.regroups and fn is not None:
                return fn(old.sharded_param)
            return param.dtype if old in kept else None  # the function knew the parameters from before fully_shard

        for call in reversed(self._calls):
            call.apply(placement, ignored, keeps)

    def _new_states(self) -> list[FSDPState]:
        """Return the new calls' states, in the order of the calls.

        Raises:
            ValueError: a parameter would no longer be sharded.
        """
        states = [cast("FSDPState", state_of(call.modules[0])) for call in self._calls]
        taken = {place for unit in units_of(states) for p in unit.fsdp_params for place in map(_key, p.info.places)}
        lost = [p.fqn for p in self._params if not taken.issuperset(map(_key, p.info.places))]
        if lost:
            raise ValueError(
                f"reshard_module: {', '.join(lost)} would be in no unit, because they are not below the "
                f"{type(self._module).__name__} it was called on; call it on a common parent of all modules of a list"
            )
        return states

    # ---- parameters and gradients

    def _old_of(self, param: DTensorParam) -> DTensorParam:
        return self._by_place[_key((param.info.module, param.info.name))]

    def _fill(self, unit: FSDPParamGroup) -> None:
        """Give a new unit its shards."""
        device = CPU if unit.policy.offloads else unit.device
        params = [cast("DTensorParam", param) for param in unit.fsdp_params]
        pairs = [(param, self._old_of(param)) for param in params]
        is_new = []
        for param, old in pairs:
            given = self._handed_over(param, old, device)
            is_new.append(given is not old.sharded_param)
            param.info.register(given)
        unit.adopt_registered(fresh=all(is_new))
        moved = [(param, grad) for param, old in pairs if (grad := self._grad_to_move(param, old)) is not None]
        if moved:
            _set_grads(unit, moved, device)

    def _handed_over(self, param: DTensorParam, old: DTensorParam, device: torch.device) -> nn.Parameter:
        """Return the parameter that replaces the new unit's meta parameter."""
        source = cast("DTensor", old.sharded_param)
        local = local_of(source)
        same_layout = (source.device_mesh, source.placements) == (param.spec.mesh, param.spec.placements)
        if same_layout and (local.is_meta or local.device == device):
            return old.sharded_param
        if local.is_meta:
            new = param.sharded_param
        else:
            data = laid_out(source, param.spec.mesh, param.spec.placements, device)
            new = nn.Parameter(data, requires_grad=old.trainable)
            share_grad_dtype(old.sharded_param, new)
        share_post_accumulate_hooks(old.sharded_param, new)
        self.mapping[old.sharded_param] = new
        return new

    def _grad_to_move(self, param: DTensorParam, old: DTensorParam) -> DTensor | None:
        return None if param.sharded_param is old.sharded_param else cast("DTensor | None", old.sharded_param.grad)

    # ---- user settings

    def _carry(self, new: Sequence[FSDPState]) -> None:
        """Copy the settings of the old calls to the new ones and initialise roots that were; collective."""
        for call, state in zip(self._calls, new, strict=True):
            _carry_unit_settings(call.origin, state)
            if call.origin.modules == state.modules:
                ahead = call.origin.forward_prefetch
                state.forward_prefetch = None if ahead is None else self._followers(ahead)
                behind = call.origin.backward_prefetch
                state.backward_prefetch = None if behind is None else self._followers(behind)
        inner = {m for state in new for top in state.modules for m in top.modules() if m not in state.modules}
        for call, state in zip(self._calls, new, strict=True):
            if not inner.issuperset(state.modules):
                _carry_root_settings(call.origin, state)

    def _followers(self, targets: Sequence[FSDPState]) -> tuple[FSDPState, ...]:
        """Return the states that replaced ``targets``, without those that no longer exist."""
        found = (target if target not in self._old else state_of(target.modules[0]) for target in targets)
        followers = zip(targets, found, strict=True)
        return tuple(state for old, state in followers if state is not None and state.modules == old.modules)

    # ---- the end

    def _put_back(self, locals_: Sequence[torch.Tensor]) -> None:
        new = [state for state in states_below(self._module) if state not in self._old]
        for unit in units_of(new):
            unit.retire()
        for state in new:
            undo(state)
        for module, cls, state in self._classes:
            attach(module, state)
            module.__class__ = cls
        for param, local in zip(self._params, locals_, strict=True):
            set_local(cast("DTensor", param.sharded_param), local)
            param.info.register(param.sharded_param)
        self.mapping.clear()

    def _commit(self, new: Sequence[FSDPState]) -> None:
        for state in new:
            owner = ", ".join(cls.__name__ for cls in state.original_classes)
            for unit in state.units:
                mark_taken([(p.sharded_param, p.info) for p in unit.fsdp_params], owner, type(state))
        for old in self._old:
            ctx = old.comm_ctx
            ctx.post_forward_order[:] = [s for s in ctx.post_forward_order if s not in self._old]
            for unit in old.units:
                unit.retire()
            roots.discard(old)
            old.remove_hooks()
        for param in self.mapping:
            param.grad = None


def _key(place: tuple[nn.Module, str]) -> Place:
    return id(place[0]), place[1]


def _stand_in(param: DTensorParam) -> nn.Parameter:
    """Return a parameter on the meta device like the original, unsharded one."""
    like = param.full.param
    data = torch.empty(param.layout.shape, dtype=param.orig_dtype, device="meta")
    if isinstance(like, DTensor):
        data = dtensor_of(data, with_dtype(spec_of(like), param.orig_dtype))
    stand_in = nn.Parameter(data, requires_grad=param.trainable)
    share_grad_dtype(param.sharded_param, stand_in)
    return stand_in


def _set_grads(unit: FSDPParamGroup, grads: Sequence[tuple[DTensorParam, DTensor]], device: torch.device) -> None:
    """Set the old parameters' gradients on the new ones, in one flat tensor for each dtype."""
    for dtype in dict.fromkeys(grad.dtype for _, grad in grads):
        own = [(param, grad) for param, grad in grads if grad.dtype == dtype]
        sizes = [param.slot_numel for param, _ in own]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        handle = probe.BufferHandle(Category.SHARDED_GRADS, unit.index, flat.nbytes)
        for (param, grad), slot in zip(own, flat.split(sizes), strict=True):
            param.local_view(slot).copy_(local_of(laid_out(grad, param.spec.mesh, param.spec.placements, device)))
        set_sharded_grads([param for param, _ in own], flat, handle)


def _carry_unit_settings(old: FSDPState, new: FSDPState) -> None:
    for unit in new.units:
        same_mesh = [u for u in old.units if u.mesh_info == unit.mesh_info]
        for was in (same_mesh or old.units)[:1]:
            vars(unit.sync).update(vars(was.sync))
            unit.reshard_after_backward = was.reshard_after_backward
            unit.unshard_in_backward = was.unshard_in_backward
            unit.keeps_memory = was.keeps_memory
            unit.max_reductions = was.max_reductions
            if was.comm is not None and was.comm.name == CUSTOM:
                unit.use_comm(was.comm)


def _carry_root_settings(old: FSDPState, new: FSDPState) -> None:
    new.use_comm_ctx(old.comm_ctx)
    if old.is_root is not None:
        new.lazy_init()
    new.root_ctx.is_last_backward = old.root_ctx.is_last_backward
    new.root_ctx.ends_manually = old.root_ctx.ends_manually
    new.root_ctx.post_optim_event = old.root_ctx.post_optim_event
