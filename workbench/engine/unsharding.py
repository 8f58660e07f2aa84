"""Undo ``fully_shard`` in place, or make a plain copy; optimizers are remapped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from workbench.engine import agreement
from workbench.engine._spmd_types import Annotation
from workbench.engine._torch import dtensor_of, local_of, share_grad_dtype, share_post_accumulate_hooks, spec_of
from workbench.engine.backends import is_of_kind
from workbench.engine.backends.memory_aliasing import is_same_storage
from workbench.engine.dtensor_param import DTensorParam
from workbench.engine.fsdp_state import FSDPState, detach, roots, state_of, states_below, units_of
from workbench.engine.param_group import FSDPParamGroup, TrainingState

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
NewParams = dict[nn.Parameter, nn.Parameter]


@torch.no_grad()
def unshard_module(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> NewParams:
    """Undo every ``fully_shard`` call in ``module``'s tree; collective: all ranks must call it.

    Parameters and gradients keep their values and become in place what they were before: plain tensors, or DTensors of
    tensor parallelism. Module classes and hooks are restored; post-accumulate-grad hooks and gradients move to the
    plain parameters. Optimizers that hold the sharded parameters continue with the plain ones, their state gathered.
    Nothing changes until every rank has gathered everything, so shards and the whole model are in memory at once. After
    any error or interrupt the model is sharded on every rank as before, or plain on every rank.

    Args:
        module: the root of the tree.
        optimizers: optimizers to remap.

    Returns:
        plain parameter for each sharded parameter.

    Raises:
        TypeError: ``optimizers`` holds anything but optimizers.
        ValueError: ``fully_shard`` sharded nothing in the tree, another API sharded something, or ``module`` is only a
            part of a root's tree.
        RuntimeError: gradients were accumulated without sync and not reduced since; an iteration is in progress.
        RanksDisagreeError: only some ranks hold a gradient or optimizer state, or have one of the errors above.
        CollectiveFailed: another rank was interrupted.
    """
    held = optimizers_in(optimizers, "unshard_module")
    states = states_below(module)
    units = units_of(states)

    def holds() -> agreement.Holdings:
        check_undoable(module, states, "unshard_module")
        for unit in units:
            unit.reshard()
            unit.adopt_registered()
        return agreement.units_holdings(module, units, held)

    ranks = agreement.Agreement("unshard_module", units)
    ranks.check(holds)
    check_gatherable(units, "unshard_module")
    params = [cast("DTensorParam", param) for unit in units for param in unit.params_as_defined]
    infos = {param.sharded_param: param.info for param in params}
    with ranks.all_or_none():
        plain = {param.sharded_param: _plain(param) for param in params}
        commits = [staged(optimizer, plain) for optimizer in held]
    for sharded, param in plain.items():
        infos[sharded].register(param)
        sharded.grad = None
    for unit in units:
        unit.retire()
    for state in states:
        undo(state)
        state.comm_ctx.release_buffers()
    for commit in commits:
        commit()
    return plain


def optimizers_in(optimizers: object, what: str) -> list[torch.optim.Optimizer]:
    """Return the optimizers passed to ``what`` as a list; raise TypeError for anything but optimizers."""
    given = list(optimizers) if isinstance(optimizers, Iterable) else []
    found = [o for o in given if isinstance(o, torch.optim.Optimizer)]
    if len(found) < len(given) or not isinstance(optimizers, Iterable):
        types = ", ".join(type(o).__name__ for o in given) or type(optimizers).__name__
        raise TypeError(f"{what} takes optimizers as a list of torch.optim.Optimizer, got {types}")
    return found


def check_undoable(
    module: nn.Module, states: Sequence[FSDPState], what: str, kind: type[FSDPState] = FSDPState
) -> None:
    """Raise as :func:`unshard_module` if ``what``, a function for ``kind``, cannot run; changes nothing."""
    name = type(module).__name__
    if not states:
        raise ValueError(f"{name} contains no module that {kind.made_by} was called on")
    others = {state.made_by: state.undone_by for state in states if type(state) is not kind}
    if others:
        made_by, undone_by = others.popitem()
        mixed = any(type(state) is kind for state in states)
        advice = f"a model with both cannot be undone; use only {kind.made_by}" if mixed else f"call {undone_by}"
        raise ValueError(f"{what} is for {kind.made_by}, but {name} contains modules sharded by {made_by}: {advice}")
    part_of = [type(root.modules[0]).__name__ for root in roots if root not in states and root.overlaps(states)]
    if part_of:
        raise ValueError(f"{name} is only a part of the FSDP root {part_of[0]}; call {what} on the root")
    busy = [type(s.modules[0]).__name__ for s in states if s.training_state is not TrainingState.IDLE]
    if busy:
        raise RuntimeError(
            f"{what}: the forward or backward of {busy[0]} is running or has raised; call it between iterations, and "
            "after an exception call reset_iter_state() on the root first"
        )
    units = units_of(states)
    held = [p.fqn for u in units for p in u.params_as_defined if p.has_full_grad or u.has_partial_sum]
    if held:
        raise RuntimeError(
            f"{name} has gradients that were accumulated without sync and are not reduced yet: {', '.join(held)}; "
            f"{kind.reduced_by}"
        )


def check_gatherable(units: Sequence[FSDPParamGroup], what: str) -> None:
    """Raise NotImplementedError if ``what`` cannot gather a parameter."""
    for param in (param for unit in units for param in unit.fsdp_params):
        if param.has_own_memory:
            raise NotImplementedError(
                f"{what} cannot gather parameter {param.fqn!r}, which defines its own all-gather: that exchanges "
                "what forward needs, and not the values of its shards"
            )
        if any(full.annotation is not None and full.annotation.splits_more for full in param.fulls):
            raise NotImplementedError(
                f"{what} cannot gather parameter {param.fqn!r}, which is annotated with spmd_types as split over ranks "
                "that fully_shard does not split it over"
            )


def _plain(param: DTensorParam) -> nn.Parameter:
    """Return the parameter in its form before fully_shard, with its current values, gradient and hooks."""
    sharded, like = param.sharded_param, param.full.param
    plain = nn.Parameter(state_like(like, sharded), requires_grad=sharded.requires_grad)
    share_grad_dtype(sharded, plain)
    if param.full.annotation is not None:
        param.full.annotation.put_on(plain)
    if sharded.grad is not None:
        plain.grad = state_like(like, sharded.grad)
    share_post_accumulate_hooks(sharded, plain)
    return plain


@torch.no_grad()
def plain_copy(module: M, memo: dict[int, Any], optimizers: Sequence[torch.optim.Optimizer] = ()) -> M:
    """Return an unsharded deep copy of ``module``, values and gradients gathered; collective.

    Parameters take their form from before ``fully_shard``: plain tensors, or DTensors of tensor parallelism.

    Args:
        module: the root of a sharded tree; it does not change.
        memo: filled as :func:`copy.deepcopy` does, with the copy of every object by the id of its original.
        optimizers: their state is gathered too, into ``memo``.

    Raises:
        RanksDisagreeError: only some ranks hold a gradient or optimizer state.
    """
    states = states_below(module)

    def holds() -> agreement.Holdings:
        for unit in units_of(states):
            unit.reshard()
        named = ((name, param) for name, param in module.named_parameters() if isinstance(param, DTensor))
        return agreement.holdings(named, optimizers)

    agreement.Agreement("the copy", units_of(states)).check(holds)
    check_gatherable(units_of(states), "the copy")
    managed = [cast("DTensorParam", param) for unit in units_of(states) for param in unit.fsdp_params]
    likes: dict[torch.Tensor, nn.Parameter] = {param.sharded_param: param.full.param for param in managed}
    annotations: dict[torch.Tensor, Annotation | None] = {p.sharded_param: p.full.annotation for p in managed}
    for old, like in likes.items():
        memo[id(old)] = plain = nn.Parameter(state_like(like, old), requires_grad=old.requires_grad)
        share_grad_dtype(old, plain)
        annotation = annotations[old]
        if annotation is not None:
            annotation.put_on(plain)
        if old.grad is not None:
            plain.grad = state_like(like, old.grad)
    for optimizer in optimizers:
        counted = _counted_by_kernels(optimizer)
        for each, state in optimizer.state.items():
            if each in likes:
                moved = _moved(state, likes[each], counts_there=each in counted)
                memo |= {id(value): moved[key] for key, value in state.items() if moved[key] is not value}
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(state.plain_modules())
        return copied(module, memo, lambda: copy.deepcopy(module, memo))


def copied(module: nn.Module, memo: dict[int, Any], make: Callable[[], T]) -> T:
    """Return the result of ``make``, a copy of ``module``; share attributes that cannot be copied.

    Such attributes are, for example, locks, files and process groups. Instead of a generator the copy gets a new one in
    the same state, and instead of a tensor within a graph its values.

    Args:
        module: plain, or with wrappers, whose own attributes are skipped.
        memo: filled as :func:`copy.deepcopy` does.
        make: deep-copies with ``memo``; called again if it fails.
    """
    before = dict(memo)
    try:
        return make()
    except Exception:  # noqa: BLE001 - an attribute's class may raise anything; the second make() raises again
        memo.clear()  # drop half-made copies
        memo |= before
    _share_uncopyable(module, memo)
    return make()


def _share_uncopyable(module: nn.Module, memo: dict[int, Any]) -> None:
    modules = {id(m): m for m in module.modules()}
    for m in modules.values():
        if state_of(m) is None:
            for name, value in vars(m).items():
                if name not in {"_parameters", "_buffers", "_modules"}:
                    _share(value, memo, modules)


def _share(value: Any, memo: dict[int, Any], modules: Mapping[int, nn.Module]) -> None:  # noqa: ANN401 - any attribute
    try:
        copy.deepcopy(value, {**memo, **modules})
    except Exception:  # noqa: BLE001 - the attribute's class may raise anything
        if isinstance(value, torch.Generator):
            memo[id(value)] = value.clone_state()
        elif isinstance(value, torch.Tensor):
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple, set, dict)) and value:
            for each in value.values() if isinstance(value, dict) else value:
                _share(each, memo, modules)
        else:
            memo[id(value)] = value


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a whole plain tensor: gathered if it is a DTensor (collective), otherwise copied."""
    return _gathered(tensor).clone() if isinstance(tensor, DTensor) else tensor.detach().clone()


def _gathered(tensor: DTensor) -> torch.Tensor:
    """Gather on the mesh's device, wherever the shards are; on a single rank the result shares the shard's memory."""
    local, device_type = local_of(tensor), tensor.device_mesh.device_type
    if not (local.is_meta or is_of_kind(local, torch.device(device_type))):
        tensor = dtensor_of(local.detach().to(device_type), spec_of(tensor))
    return cast("DTensor", tensor.detach()).full_tensor()


def undo(state: FSDPState) -> None:
    """Restore the original classes of a call's modules and remove its hooks."""
    roots.discard(state)
    state.remove_hooks()
    for module, cls in zip(state.modules, state.original_classes, strict=True):
        detach(module)
        module.__class__ = cls


@torch.no_grad()
def remap_optimizer(optimizer: torch.optim.Optimizer, mapping: NewParams) -> None:
    """Replace the parameters of ``optimizer`` in place.

    State follows its parameter: gathered if the new one is plain (collective), split if it is a DTensor.

    Args:
        optimizer: holds some of the old parameters.
        mapping: new parameter for each old one, of the same full shape.
    """
    staged(optimizer, mapping)()


def staged(optimizer: torch.optim.Optimizer, mapping: NewParams) -> Callable[[], None]:
    """Do the part of :func:`remap_optimizer` that can fail (collective); return a function that does the rest."""
    counted = _counted_by_kernels(optimizer)
    states = {
        old: _moved(optimizer.state[old], new, counts_there=old in counted)
        for old, new in mapping.items()
        if old in optimizer.state
    }
    return partial(_commit, optimizer, mapping, states)


def _commit(
    optimizer: torch.optim.Optimizer, mapping: NewParams, states: dict[nn.Parameter, dict[str, object]]
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [mapping.get(p, p) for p in group["params"]]
    for old, state in states.items():
        del optimizer.state[old]
        optimizer.state[mapping[old]] = state


def _moved(state: dict[str, Any], param: torch.Tensor, *, counts_there: bool) -> dict[str, Any]:
    """Return an optimizer's state in the layout of ``param``; unchanged values are the same objects.

    ``counts_there``: a kernel reads the step count, which must be on the device of ``param``.
    """
    moved = {key: state_like(param, value) for key, value in state.items()}
    count = moved.get("step")
    if counts_there and isinstance(count, torch.Tensor) and not isinstance(count, DTensor):
        moved["step"] = count.to(local_of(param).device if isinstance(param, DTensor) else param.device)
    return moved


def _counted_by_kernels(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    """Return the parameters whose step count a kernel reads: with ``fused`` or ``capturable``."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {param for group in groups for param in group["params"]}


def state_like(param: torch.Tensor, value: Any) -> Any:  # noqa: ANN401 - optimizer state holds anything
    """Return a value of optimizer state in the layout and on the device of ``param``; a plain tensor for a plain one.

    A DTensor of another shape than the parameter's (a factor, a norm) is replicated on the parameter's mesh; a plain
    value of another shape (a step count) is returned unchanged.
    """
    if not isinstance(param, DTensor):
        return full_tensor(value) if isinstance(value, DTensor) else value
    if not isinstance(value, torch.Tensor) or not (isinstance(value, DTensor) or value.shape == param.shape):
        return value
    placements = param.placements if value.shape == param.shape else (Replicate(),) * param.device_mesh.ndim
    return laid_out(value, param.device_mesh, placements, local_of(param).device)


def laid_out(value: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], place: torch.device) -> DTensor:
    """Return a whole tensor, or a DTensor of another layout (collective), split over ``mesh``, shards on ``place``."""
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        return dtensor_of(local_of(value).detach().to(place), spec_of(value))
    whole = _gathered(value) if isinstance(value, DTensor) else value.detach()
    split = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    local = local_of(split)
    if is_same_storage(local, whole):
        local = local.clone()
    return dtensor_of(local.to(place), spec_of(split))
