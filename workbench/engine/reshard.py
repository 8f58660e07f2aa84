"""``reshard_module`` and ``reshard_unit``: change how a live, trained model is sharded, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from workbench.engine.agreement import Agreement, Holdings, units_holdings
from workbench.engine.backends import backend_of
from workbench.engine.fsdp_state import FSDPState, roots, state_of, states_below, units_of
from workbench.engine.mesh import FSDPMeshInfo, _get_post_forward_mesh_info, mesh_info
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.policies import MixedPrecisionPolicy, OffloadPolicy, UnitPolicy
from workbench.engine.replacement import Replacement, ShardCall
from workbench.engine.unsharding import NewParams, check_gatherable, check_undoable, optimizers_in


class Unchanged:
    """Default of arguments: keep the model's current setting."""

    def __repr__(self) -> str:
        """Return ``KEEP``."""
        return "KEEP"


KEEP: Final = Unchanged()

PolicyFn = Callable[[nn.Module, MixedPrecisionPolicy], MixedPrecisionPolicy]


@torch.no_grad()
def reshard_module(
    module: nn.Module,
    *,
    wrap: Callable[[nn.Module], bool] | Unchanged = KEEP,
    mesh: DeviceMesh | Unchanged = KEEP,
    reshard_after_forward: bool | int | Unchanged | None = KEEP,
    mp_policy: MixedPrecisionPolicy | PolicyFn | Unchanged = KEEP,
    offload_policy: OffloadPolicy | Unchanged = KEEP,
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> NewParams:
    """Change how a sharded model is sharded, in place; collective: all ranks must call it, between iterations.

    Parameters, gradients and optimizer state keep their values, and omitted arguments keep the current settings.
    Training continues bit-identically unless the change affects numerics: precision, or the order of sums (replicas).

    - ``reshard_after_forward``, ``mp_policy``, and ``offload_policy`` where shards are on the CPU anyway, apply from
      the next forward on. No memory, no communication.
    - ``wrap`` makes new units from the existing parameters, which stay the same objects in the same memory. No memory,
      no communication; from then on each all-gather first copies a unit's shards together.
    - ``mesh``, and ``offload_policy`` on a GPU, make new parameters, which ``optimizers`` continue with. Old and new
      shards of parameters, gradients and optimizer state are in memory at once. For another mesh each of these tensors
      is gathered, one at a time, so one whole tensor is in memory too.

    User settings stay: the dims of ``shard_placement_fn``, ignored, frozen and tied parameters, module hooks,
    post-accumulate-grad hooks of parameters, and all setters of :class:`FSDPModule`. A new unit takes the settings of
    the unit its module was in; prefetch lists drop modules that are no longer units. Other hooks and attributes of
    replaced parameters are lost, and so is ``set_allocate_memory_from_process_group_for_comm``. A graph recorded before
    cannot run backward afterwards.

    Args:
        module: the root of the tree.
        wrap: returns whether a module below ``module`` becomes a unit; ``module`` always is one.
        mesh: as for ``fully_shard``, like the next three; must hold the ranks the model is on now.
        reshard_after_forward: as for ``fully_shard``.
        mp_policy: as for ``fully_shard``; or a function of a module that is to be a unit and of its current policy, or
            that of the unit it is in, that returns the new policy.
        offload_policy: as for ``fully_shard``.
        optimizers: optimizers that hold the parameters; any others would keep the old ones.

    Returns:
        new parameter for each old one that was replaced.

    Raises:
        TypeError, ValueError: an argument ``fully_shard`` would refuse; nothing in the tree is sharded; ``module`` is
            only a part of a root's tree; a mesh of other ranks.
        NotImplementedError: another mesh for parameters on different ranks (experts); an int for parameters that
            tensor parallelism has split.
        RuntimeError: gradients were accumulated without sync and not reduced since; an iteration is in progress.

        RanksDisagreeError: only some ranks hold a gradient or optimizer state that has to move, or have one of the
            errors above.
        CollectiveFailed: another rank was interrupted.

    After an error the model is unchanged on every rank.
    """
    change = PolicyUpdate(wrap, mesh, reshard_after_forward, mp_policy, offload_policy)
    change.check_types()
    held = optimizers_in(optimizers, "reshard_module")
    states = states_below(module)
    units = units_of(states)

    def holds() -> Holdings:
        check_undoable(module, states, "reshard_module")
        if isinstance(change.mesh, Unchanged):
            return Holdings()  # gathers nothing
        for unit in units:
            unit.reshard()
            unit.adopt_registered()
        return units_holdings(module, units, held)

    ranks = Agreement("reshard_module", units)
    ranks.check(holds)
    info = change.checked_mesh(units)
    calls = [change.of(call) for call in _calls(module, states, change)]
    if not (change.makes_units(units) or any(call.regroups for call in calls)):
        _set_policies(calls)
        return {}
    check_gatherable(units, "reshard_module")
    replacement = Replacement(module, calls, info)
    replacement.run(held, ranks)
    return replacement.mapping


@torch.no_grad()
def reshard_unit(
    module: nn.Module,
    *,
    reshard_after_forward: bool | int | Unchanged | None = KEEP,
    mp_policy: MixedPrecisionPolicy | Unchanged = KEEP,
    offload_policy: OffloadPolicy | Unchanged = KEEP,
) -> None:
    """Change the policy of one ``fully_shard`` call, in place; all ranks must call it, between iterations.

    No memory, no communication, same parameters; units below and above do not change. Omitted arguments keep the
    current settings.

    Args:
        module: a module that ``fully_shard`` was called on.
        reshard_after_forward: as for ``fully_shard``.
        mp_policy: as for ``fully_shard``; modules that run next get ``output_dtype``, or this unit's compute dtype.
        offload_policy: as for ``fully_shard``; can change only where shards are on the CPU anyway.

    Raises:
        TypeError, ValueError: an argument ``fully_shard`` would refuse; it was not called on ``module``; shards would
            have to move: use :func:`reshard_module`.
        NotImplementedError: an int for parameters that tensor parallelism has split.
        RuntimeError: gradients were accumulated without sync and not reduced since; an iteration is in progress.

    After an error the model is unchanged.
    """
    change = PolicyUpdate(KEEP, KEEP, reshard_after_forward, mp_policy, offload_policy)
    change.check_types()
    state = state_of(module)
    if state is None:
        raise ValueError(f"reshard_unit: fully_shard was not called on this {type(module).__name__}")
    root = next((top.modules[0] for top in roots if top.overlaps([state])), module)
    check_undoable(root, states_below(root), "reshard_unit")
    if change.makes_units(state.units):
        raise ValueError(
            f"reshard_unit: offload_policy moves shards, which is possible only for the whole {type(root).__name__}: "
            "call reshard_module on it"
        )
    call = change.of(_call_of(state, state.modules, None))
    if call.regroups:
        raise ValueError(
            f"reshard_unit: another param_dtype_override_fn makes other units, for which all of {type(root).__name__} "
            "is needed: call reshard_module on it"
        )
    _set_policies([call])


@dataclass(frozen=True)
class PolicyUpdate:
    """The arguments of :func:`reshard_module` and :func:`reshard_unit`; :data:`KEEP` where omitted."""

    wrap: Callable[[nn.Module], bool] | Unchanged
    mesh: DeviceMesh | Unchanged
    reshard_after_forward: bool | int | Unchanged | None
    mp_policy: MixedPrecisionPolicy | PolicyFn | Unchanged
    offload_policy: OffloadPolicy | Unchanged

    def check_types(self) -> None:
        """Raise TypeError for values that :func:`fully_shard` would refuse."""
        if not isinstance(self.wrap, Unchanged) and not callable(self.wrap):
            raise TypeError(f"wrap must be a function of a module that returns True or False, got {self.wrap!r}")
        if not isinstance(self.mesh, (Unchanged, DeviceMesh)):
            raise TypeError(f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(self.mesh).__name__}")
        if not isinstance(self.reshard_after_forward, (Unchanged, int, type(None))):
            raise TypeError(
                f"reshard_after_forward must be True, False, an int or None, got {self.reshard_after_forward!r}"
            )
        if not isinstance(self.mp_policy, (Unchanged, MixedPrecisionPolicy)) and not callable(self.mp_policy):
            raise TypeError(f"mp_policy must be a workbench.engine.MixedPrecisionPolicy, got {self.mp_policy!r}")
        if not isinstance(self.offload_policy, (Unchanged, OffloadPolicy)):
            raise TypeError(f"offload_policy must be a workbench.engine.OffloadPolicy, got {self.offload_policy!r}")

    def checked_mesh(self, units: Sequence[FSDPParamGroup]) -> FSDPMeshInfo | None:
        """Return the mesh info of the new mesh; None: each parameter keeps its mesh.

        Raises:
            ValueError: a mesh that ``fully_shard`` would refuse, or of other ranks than the units'; an all-reduce hook
                with its own stream, which replicas do not allow.
            NotImplementedError: units are on different ranks.
        """
        if isinstance(self.mesh, Unchanged):
            return None
        wanted = _ranks(self.mesh)
        for unit in units:
            present = _ranks(unit.mesh_info.mesh)
            if present != _ranks(units[0].mesh_info.mesh):
                raise NotImplementedError(
                    f"parameter {unit.fsdp_params[0].fqn!r} is on ranks {present}, others on "
                    f"{_ranks(units[0].mesh_info.mesh)}; reshard_module cannot give them one mesh: undo it with "
                    "unshard_module and call fully_shard again"
                )
            if present != wanted:
                raise ValueError(
                    f"the model is on ranks {present}, but the mesh has ranks {wanted}; both need the same ranks"
                )
            if unit.sync.hook_stream is not None and self.mesh.ndim > 1:
                raise ValueError(
                    f"unit {unit.title!r} has an all-reduce hook with a stream, which replicas do not allow; call "
                    "set_all_reduce_hook without a stream first"
                )
        return mesh_info(self.mesh)

    def makes_units(self, units: Sequence[FSDPParamGroup]) -> bool:
        """Return whether new units are needed, and not only another policy for the existing ones."""
        moves = not isinstance(self.offload_policy, Unchanged) and any(
            not backend_of(unit.device).is_host and unit.policy.offload_policy != self.offload_policy for unit in units
        )
        return moves or not (isinstance(self.wrap, Unchanged) and isinstance(self.mesh, Unchanged))

    def of(self, call: ShardCall) -> ShardCall:
        """Return ``call`` with the update applied."""
        given: dict[str, Any] = {}
        if not isinstance(self.mp_policy, Unchanged):
            given["mp_policy"] = _precision(self.mp_policy, call)
        if not isinstance(self.offload_policy, Unchanged):
            given["offload_policy"] = self.offload_policy
        auto = call.auto_reshard
        if not isinstance(self.reshard_after_forward, Unchanged):
            auto = self.reshard_after_forward is None
            given["reshard_after_forward"] = True if auto else self.reshard_after_forward
        policy = replace(call.policy, **given) if given else call.policy
        mesh = call.mesh if isinstance(self.mesh, Unchanged) else self.mesh
        return replace(call, mesh=mesh, policy=policy, auto_reshard=auto)


def _precision(policy: MixedPrecisionPolicy | PolicyFn, call: ShardCall) -> MixedPrecisionPolicy:
    module = call.modules[0]
    found = policy if isinstance(policy, MixedPrecisionPolicy) else policy(module, call.policy.mp_policy)
    if not isinstance(found, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must return a MixedPrecisionPolicy for {type(module).__name__}, got {found!r}")
    return found


def _ranks(mesh: DeviceMesh) -> list[int]:
    return sorted(map(int, tree_leaves(mesh.mesh.tolist())))


# ---- which calls


def _calls(module: nn.Module, states: Sequence[FSDPState], change: PolicyUpdate) -> list[ShardCall]:
    """Return the calls for the tree, parents first, with the current policies."""
    units = units_of(states)
    some_mesh = units[0].mesh_info.mesh if units else None
    chosen = change.wrap
    if isinstance(chosen, Unchanged):
        return [_call_of(state, state.modules, some_mesh) for state in states]
    origin_of = origins(module, states[0])
    inner = [m for m in module.modules() if m is not module and chosen(m)]
    return [_call_of(origin_of[m], (m,), some_mesh) for m in (module, *inner)]


def origins(module: nn.Module, top: FSDPState) -> dict[nn.Module, FSDPState]:
    """Return each module's state: its own, that of the nearest module above it, or ``top``."""
    by_name: dict[str, FSDPState] = {}
    found: dict[nn.Module, FSDPState] = {}
    for name, m in module.named_modules():
        above = by_name[name.rpartition(".")[0]] if name else top
        by_name[name] = found[m] = state_of(m) or above
    return found


def _call_of(state: FSDPState, modules: tuple[nn.Module, ...], some_mesh: DeviceMesh | None) -> ShardCall:
    """Return a call with the mesh and policy of ``state``, including changes made by setters."""
    policy, mesh = UnitPolicy(mp_policy=state.mp_policy), some_mesh
    for unit in state.units[:1]:
        mesh = unit.mesh_info.mesh
        reshard = unit.policy.reshard_after_forward if state.auto_reshard else unit.reshard_after_forward
        policy = replace(unit.policy, mp_policy=state.mp_policy, reshard_after_forward=reshard)
    return ShardCall(modules=modules, mesh=mesh, policy=policy, auto_reshard=state.auto_reshard, origin=state)


# ---- another policy for the existing units


def _set_policies(calls: Sequence[ShardCall]) -> None:
    """Set each call's policy on its units.

    Raises:
        ValueError, NotImplementedError: a unit cannot take its policy; no unit is changed then.
    """
    for call in calls:
        for unit in call.origin.units:
            _check_fits(unit, call.policy.reshard_after_forward)
    for call in calls:
        state = call.origin
        keeps = call.auto_reshard and state.is_root
        reshard = False if keeps else call.policy.reshard_after_forward
        for unit in state.units:
            unit.reshard()  # a forward without a backward may have left it unsharded
            unit.change_policy(replace(call.policy, reshard_after_forward=reshard))
        state.auto_reshard = call.auto_reshard
        state.mp_policy = call.policy.mp_policy


def _check_fits(unit: FSDPParamGroup, reshard_after_forward: bool | int) -> None:
    size = unit.mesh_info.shard_mesh_size
    if isinstance(reshard_after_forward, bool) or reshard_after_forward in {1, size}:
        return
    if reshard_after_forward < 1 or size % reshard_after_forward:
        _get_post_forward_mesh_info(reshard_after_forward, unit.mesh_info)  # raises; a valid value would make groups
    split = [p.fqn for p in unit.fsdp_params if p.is_tensor_parallel]
    if split:
        raise NotImplementedError(
            f"parameter {split[0]!r} is a DTensor of tensor parallelism; reshard_after_forward as a number of ranks "
            "needs plain parameters: use True or False"
        )
