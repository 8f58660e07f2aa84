"""The commands ``shard``, ``reshard`` and ``unshard`` on a rank."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from workbench import engine
from workbench.engine import (
    FSDPModule,
    MixedPrecisionPolicy,
    classic,
    fully_shard,
    reshard_module,
    reshard_unit,
    unshard_module,
)
from workbench.engine.classic import FullyShardedDataParallel
from workbench.engine.classic.unwrapping import unwrap
from workbench.engine.classic.wrapper_state import wrapper_states_below
from workbench.engine.fsdp_state import FSDPState, roots_below, state_of, states_below, units_of
from workbench.engine.mesh import _get_post_forward_mesh_info, mesh_info
from workbench.engine.model_check import check_same_lines
from workbench.engine.module_names import clean, named_params
from workbench.engine.unsharding import remap_optimizer
from workbench.errors import UsageError
from workbench.models import garbage, ours
from workbench.models.engines import OF_COMMANDS, WATCHED, class_name, is_wrapper
from workbench.models.ours import api_of, check_one_api
from workbench.models.plain_model import PlainModel, fully_shard_options, unchanged_on_error, wrapper_options
from workbench.protocol.breakpoints import chosen_units
from workbench.protocol.commands import Reshard, Shard, ShardReply, Unshard, UnshardReply
from workbench.protocol.policy import (
    CLASSIC,
    DTYPES,
    HYBRID,
    TORCH,
    ModelPolicy,
    PrecisionNames,
    as_mesh,
    check_not_classic,
    mesh_words,
    strategy_like,
)
from workbench.runtime import lint
from workbench.runtime.command_handlers import RankContext, does
from workbench.runtime.model_summary import (
    ParamSize,
    describe,
    describe_unit,
    described,
    sizes_of,
    unit_infos,
)
from workbench.runtime.namespace import exchange, find_module, lookup, module_names, optimizers_of, rebind

T = TypeVar("T")

_prefetch: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # set by a command; a new policy keeps it


@does(Shard)
def shard(command: Shard, rank: RankContext) -> ShardReply:
    """Apply ``fully_shard``, or the classic wrapper, to each module that becomes a unit and to the model; collective.

    Existing optimizers continue with the sharded parameters and sharded state.

    Raises:
        UsageError: there is no such model, it is already sharded, ``wrap`` names an unknown class, a pattern matches
            nothing, or the mesh does not hold all ranks.
        RanksDisagreeError: the ranks' models differ; nothing was sharded.
    """
    model, inner, ignored = chosen(command, dist.get_world_size())
    check_same_model(model, inner, rank.groups.mesh_of(()))
    mesh = rank.groups.mesh_of(command.mesh_shape)
    _make_groups(command, mesh)
    if command.engine == TORCH:
        kept = kept_dtypes(model, command.mp)
        sharded = _shard_by_torch(command, rank, PlainModel(model, tuple(inner), tuple(ignored), mesh, kept))
    else:
        sharded = _described(command, _shard(command, mesh, model, inner, ignored))
    garbage.collect()  # a model that this one replaces is a reference cycle
    rank.recorder.note_gone()
    sharded = replace(_linted(sharded, rank), first_step=rank.recorder.next_step)
    return sharded if command.wrap else replace(sharded, chosen=tuple(sorted({class_name(each) for each in inner})))


def _linted(reply: ShardReply, rank: RankContext) -> ShardReply:
    """Return the reply with what the rules of ``lint`` find in its model."""
    return replace(reply, lint=lint.checked({reply.model: find_module(reply.model)}, rank, after_shard=True))


def _shard(
    command: Shard, mesh: DeviceMesh, model: nn.Module, inner: Sequence[nn.Module], ignored: Sequence[nn.Parameter]
) -> tuple[nn.Module, int]:
    """Shard a plain model, without waiting for other ranks; if it is refused, the model is unchanged.

    Returns:
        the sharded model, and the number of optimizers that continue with it.
    """
    if command.api == CLASSIC:
        return _shard_classic(command, mesh, model, inner, ignored)
    policy = {"mesh": mesh, "ignored_params": ignored, **fully_shard_options(command, engine)}
    kept = kept_dtypes(model, command.mp)
    policy["mp_policy"] = replace(changed_precision(MixedPrecisionPolicy(), command.mp), param_dtype_override_fn=kept)
    optimizers, before = optimizers_of(model), dict(model.named_parameters())
    _apply(model, inner, policy)
    mapping = {before.pop(name): param for name, param in model.named_parameters()}
    for optimizer in optimizers:
        remap_optimizer(optimizer, mapping)
    _plan(model, command.prefetch)
    return model, len(optimizers)


def _shard_by_torch(command: Shard, rank: RankContext, plain: PlainModel) -> ShardReply:
    """Shard a plain model with torch's own FSDP; if it is refused, the model is unchanged.

    Raises:
        UsageError: tensor parallelism splits the model, or this torch has no such option here.
        TypeError, ValueError, ...: torch refuses.
    """
    split = [name for name, param in plain.model.named_parameters() if isinstance(param, DTensor)]
    if split:
        raise UsageError(
            f"{split[0]!r} of {command.model!r} is split by tensor parallelism, and the mesh of a command holds all "
            "ranks: call torch's fully_shard in a %%fsdp cell, with the mesh of the data-parallel dimension"
        )
    plan = rank.plan(command)  # refuses what torch may take, such as a parameter tied to one of another unit
    sizes = sizes_of(plain.model)
    ignored = plain.ignored_names
    left_out = [size for size in sizes if set(size.names) & ignored]
    optimizers = optimizers_of(plain.model)
    with unchanged_on_error(plain.model, optimizers):
        model = OF_COMMANDS[command.api].shard(command, plain, plan, rank.groups.device, optimizers)
    rebind(command.model, model)
    rank.watch.note([model])
    units = [unit for each in rank.watch.models_in(model) for unit in each.units]
    output = DTYPES.get(PrecisionNames.named(command.mp).get("output", ""), "")
    found = described(command.model, units, sizes, left_out, command.prefetch, output)
    return replace(found, optimizers=len(optimizers))


def _shard_classic(
    command: Shard, mesh: DeviceMesh, model: nn.Module, inner: Sequence[nn.Module], ignored: Sequence[nn.Parameter]
) -> tuple[nn.Module, int]:
    optimizers = optimizers_of(model)
    options = wrapper_options(command, classic) | {"ignored_states": ignored}
    if any(param.is_meta for param in model.parameters()):
        options["sync_module_states"] = True  # ranks may draw different numbers, and copies would stay different
    wrapper = ours.wrap(model, inner, mesh, optimizers, options)
    rebind(command.model, wrapper)
    _prefetch[wrapper] = command.prefetch
    return wrapper, len(optimizers)


def _described(command: Shard, sharded: tuple[nn.Module, int]) -> ShardReply:
    """Name the units of a newly sharded model, which makes ranks wait for each other, and describe it."""
    model, num_optimizers = sharded
    _name_units(model)
    return describe(command.model, model, prefetch=command.prefetch, optimizers=num_optimizers)


def chosen(command: Shard, world_size: int) -> tuple[nn.Module, list[nn.Module], list[nn.Parameter]]:
    """Return the model of ``command``, the modules that become units, innermost first, and the ignored parameters.

    Raises:
        UsageError: there is no such model, it is already sharded, ``wrap`` names an unknown class, a pattern matches
            nothing, or the mesh does not hold all ranks.
    """
    model = find_module(command.model)
    check_not_torchs(command.model, model)
    if is_sharded(model):
        raise UsageError(
            f"{command.model!r} is sharded already; change how: %fsdp reshard {command.model}, or undo it first: "
            f"%fsdp unshard {command.model}"
        )
    ran = [path for path, state in roots_below(model) if state._is_root]
    if ran:
        raise UsageError(
            f"{', '.join(ran)} of {command.model!r} {'are' if len(ran) > 1 else 'is'} sharded already, and ran "
            f"without the rest; unshard first: %fsdp unshard {command.model}"
        )
    inner = modules_of_classes(model, command.wrap)
    ignored = _matching(model, command.ignore, "--ignore ")
    _check_fits(command, world_size)
    return model, inner, ignored


@does(Reshard)
def reshard(command: Reshard, rank: RankContext) -> ShardReply:
    """Do as :func:`change_sharding`, and check a model that it has changed; collective."""
    done = replace(change_sharding(command, rank), first_step=rank.recorder.next_step)
    return _linted(done, rank) if done.is_changed and "." not in command.model else done


def change_sharding(command: Reshard, rank: RankContext) -> ShardReply:
    """Give a sharded model another policy or API, or one of its units another policy; collective.

    Optimizers and their state are carried over.

    Raises:
        UsageError: there is no such model or unit, it is not sharded, ``wrap`` names an unknown class, a mesh or number
            of ranks does not fit, the other API has no equivalent, or a unit cannot have the option on its own.
    """
    model, inner, only = chosen_again(command)
    if _changes_nothing(command, model, inner, only):
        return replace(_described_again(command, model, only), is_changed=False)
    if only is not None:
        return _reshard_unit(command, only)
    if is_anew(command, model):
        return _shard_anew(command, rank, model, inner)
    names = {class_name(module) for module in inner}
    policy = fully_shard_options(command, engine)
    if command.mesh:
        policy["mesh"] = rank.groups.mesh_of(command.mesh_shape)
    if names:
        policy["wrap"] = lambda module: class_name(module) in names
    if command.wrap or command.mp:
        policy["mp_policy"] = lambda module, now: precision_again(command, model, module, now)
    optimizers = optimizers_of(model)
    reshard_module(model, **policy, optimizers=optimizers)
    _name_units(model)
    ahead = _prefetch.get(model, 0) if command.prefetch is None else command.prefetch
    _plan(model, ahead)
    return _described_again(command, model, None)


def _described_again(command: Reshard, model: nn.Module, only: FSDPState | None) -> ShardReply:
    """Return the description of the model, or of its unit ``only``."""
    if only is not None:
        return describe_unit(command.model, only)
    num_optimizers = len(optimizers_of(model))
    return describe(command.model, model, prefetch=_prefetch.get(model, 0), optimizers=num_optimizers)


def _changes_nothing(command: Reshard, model: nn.Module, inner: Sequence[nn.Module], only: FSDPState | None) -> bool:
    """Return whether all options of ``command`` have the given values already; arguments of :func:`chosen_again`."""
    given = command.given
    now = policy_of(model) if only is None else policy_of(only.modules[0], [only])
    if now is None or (given.pop("wrap", ()) and set(inner) != set(units_now(model))):
        return False
    if command.mesh:
        given["mesh"] = mesh_words(*(1, *command.mesh_shape)[-2:])
    if command.mp:
        given["mp"] = now.mp and str(PrecisionNames.parse(now.mp).changed(command.mp))
    return all(value == getattr(now, name) != "" for name, value in given.items())


def _reshard_unit(command: Reshard, only: FSDPState) -> ShardReply:
    """Give one unit another policy: no memory, no communication, the same parameters."""
    policy = fully_shard_options(command, engine)
    if command.mp:
        policy["mp_policy"] = changed_precision(only.mp_policy, command.mp)
    reshard_unit(only.modules[0], **policy)
    return _described_again(command, only.modules[0], only)


def chosen_again(command: Reshard) -> tuple[nn.Module, list[nn.Module], FSDPState | None]:
    """Return what ``command`` applies to.

    Returns:
        the model; the modules that become units, innermost first (empty: the current ones); and, if the command is for
        one unit, the state of that unit.

    Raises:
        UsageError: there is no such model or unit, it is not sharded, ``wrap`` names an unknown class, a mesh or number
            of ranks does not fit, or a unit cannot have the option on its own.
    """
    found = _unit_in_model(command.model)
    if found is not None:
        whole, only = found
        _check_of_unit(command, whole)
        for unit in units_of([only]):
            _check_fits(command, unit.mesh_info.shard_mesh_size)
        return find_module(whole), [], only
    model = find_sharded(command.model)
    _check_is_one(command.model, model)
    inner = modules_of_classes(model, command.wrap) if command.wrap else []
    if is_anew(command, model):
        wanted = anew(command, model)
        _check_mesh(wanted, model)
        _check_fits(wanted, num_ranks(model), num_ranks(model))
        return model, inner, None
    try:
        check_not_classic(command.given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for info in unit_infos(model):
        _check_fits(command, info.shard_size)
    return model, inner, None


def _unit_in_model(name: str) -> tuple[str, FSDPState] | None:
    """Return the name of the sharded model that ``name`` begins with, and the state of the unit named by the rest.

    Example: ``model.blocks.2`` -> ``model``, and the state of its module ``blocks.2``. None: no sharded model.

    Raises:
        UsageError: there is no such variable, the model has no such unit, or it is classic, with one strategy for all.
    """
    parts = name.split(".")
    for end in range(1, len(parts)):
        whole, unit = ".".join(parts[:end]), ".".join(parts[end:])
        model = lookup(whole)
        if isinstance(model, FullyShardedDataParallel):
            raise UsageError(
                f"{name!r} is part of a classic model, which has a single policy; reshard the model: %fsdp reshard "
                f"{whole}"
            )
        if isinstance(model, nn.Module) and is_sharded(model):
            states = {path: state_of(module) for path, module in plain_modules(model)}
            units = {path: state for path, state in states.items() if state and units_of([state])}
            (path,) = chosen_units(unit, list(units))
            return whole, units[path]
    return None


UNIT_FIELDS = ("reshard_after_forward", "mp", "offload")
"""Options of a policy that each unit has on its own."""


def _check_of_unit(command: Reshard, whole: str) -> None:
    """Raise UsageError unless a unit can have the options of ``command`` on its own."""
    shared = [f"--{name.replace('_', '-')}" for name in command.given if name not in UNIT_FIELDS]
    if shared:
        own = ", ".join(f"--{name.replace('_', '-')}" for name in UNIT_FIELDS)
        raise UsageError(
            f"{command.model!r} is one unit, and a unit takes only {own}; for {', '.join(shared)} reshard the model: "
            f"%fsdp reshard {whole}"
        )


@does(Unshard)
def unshard(command: Unshard, rank: RankContext) -> UnshardReply:
    """Undo :func:`shard`; collective.

    Raises:
        UsageError: there is no such model, or it is not sharded.
    """
    model = find_sharded(command.model)
    check_one_api(command.model, model)
    optimizers, num_params = optimizers_of(model), sum(size.is_managed for size in sizes_of(model))
    _undo(command.model, model, optimizers)
    return UnshardReply(model=command.model, num_params=num_params, optimizers=len(optimizers))


def _undo(name: str, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """Make a sharded model plain again, and return the plain module."""
    if api_of(model) == CLASSIC:
        wrapped = [(state.wrapper, state.wrapped) for state in wrapper_states_below(model)]
        plain, _ = unwrap(model, optimizers)
        rebind(name, plain)
        exchange(wrapped)
    else:
        plain = model
        unshard_module(model, optimizers)
    _prefetch.pop(model, None)
    return plain


def _shard_anew(command: Reshard, rank: RankContext, model: nn.Module, inner: Sequence[nn.Module]) -> ShardReply:
    """Unshard a model and shard it again; restore the old policy if that is refused. Optimizers continue."""
    wanted, before = anew(command, model), anew(Reshard(model=command.model), model)
    now, ignored, own = units_now(model), _not_managed(model), mesh_beside_tp(model)
    mesh = own or rank.groups.mesh_of(wanted.mesh_shape)
    _make_groups(wanted, mesh)
    plain = _undo(command.model, model, optimizers_of(model))
    # from here until it is sharded no rank waits for another, so no rank can be interrupted alone
    try:
        sharded = _shard(wanted, mesh, plain, list(inner) or now, ignored)
    except BaseException:
        mesh = own or rank.groups.mesh_of(before.mesh_shape)
        _shard(before, mesh, find_module(command.model), now, ignored)
        raise
    return _described(wanted, sharded)


def mesh_beside_tp(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that a model is sharded over if tensor parallelism also splits it, else None.

    A cell has made this mesh together with that of tensor parallelism; the meshes of commands hold all ranks.
    """
    units = units_of(states_below(model))
    split = any(param.is_tensor_parallel for unit in units for param in unit.fsdp_params)
    return units[0].mesh_info.mesh if split else None


def num_ranks(model: nn.Module) -> int:
    """Return the number of ranks that a model is sharded over, or that a command would use; includes copies."""
    mesh = mesh_beside_tp(model)
    return dist.get_world_size() if mesh is None else int(mesh.size())


def _check_mesh(wanted: Shard, model: nn.Module) -> None:
    """Raise UsageError if ``wanted`` moves a model that tensor parallelism also splits to another mesh."""
    mesh = mesh_beside_tp(model)
    if mesh is None:
        return
    if any(unit.mesh_info.dp_mesh_dims is not None for unit in units_of(states_below(model))):
        raise UsageError(
            f"{wanted.model!r} was sharded with dp_mesh_dims, so its parameters are on the whole mesh; flat "
            "parameters do not support that: use --api fully_shard"
        )
    copies, size = (1, *mesh.shape)[-2:]
    is_other = bool(wanted.mesh_shape) and (1, *wanted.mesh_shape)[-2:] != (copies, size)
    if is_other or (wanted.api == CLASSIC and (mesh.ndim > 1) != (wanted.strategy in HYBRID)):
        raise UsageError(
            f"{wanted.model!r} is also split by tensor parallelism, so its mesh of shape {mesh_words(copies, size)} "
            f"cannot change; for another mesh or strategy run %fsdp unshard {wanted.model}, then shard it in a "
            "%%fsdp cell"
        )


def _make_groups(command: Shard, mesh: DeviceMesh) -> None:
    """Make the process groups that ``command`` needs; collective."""
    info = mesh_info(mesh)
    after_forward = fully_shard_options(command, engine).get("reshard_after_forward")
    if after_forward is not None:
        _get_post_forward_mesh_info(after_forward, info)


def is_anew(command: Reshard, model: nn.Module) -> bool:
    """Return whether a change of policy unshards the model and shards it again: if it is or becomes classic."""
    return CLASSIC in {api_of(model), command.api}


def units_now(model: nn.Module) -> list[nn.Module]:
    """Return the modules in ``model`` that are units, without their wrappers, innermost first."""
    units = {m.module if isinstance(m, FullyShardedDataParallel) else m for s in states_below(model) for m in s.modules}
    return [module for path, module in reversed(list(plain_modules(model))) if path and module in units]


def _not_managed(model: nn.Module) -> list[nn.Parameter]:
    owned = {p for unit in units_of(states_below(model)) for param in unit.fsdp_params for p in param.owned}
    return [param for param in model.parameters() if param not in owned]


def anew(command: Reshard, model: nn.Module) -> Shard:
    """Return the command that shards the plain model as ``command`` wants; options not given keep their current value.

    Raises:
        UsageError: the other API has no equivalent of the current policy, or the units differ.
    """
    policy = policy_of(model)
    assert policy is not None
    try:
        return Shard(**policy.changed(command.model, command.given | {"wrap": ()}))
    except ValueError as error:
        raise UsageError(str(error)) from error


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded as a whole, with either API."""
    return isinstance(model, (FSDPModule, FullyShardedDataParallel))


def check_not_torchs(name: str, model: nn.Module) -> None:
    """Raise UsageError if another engine runs a part of the model ``name``."""
    others = [each.engine.name for each in WATCHED if each.runs(model)]
    if others:
        raise UsageError(
            f"{name!r} is run by {' and '.join(others)}, and this needs the workbench's engine. To use it, run the "
            f"cell that builds the model without it, and then: %fsdp shard {name}"
        )


def find_sharded(name: str) -> nn.Module:
    """Return the sharded model that ``name`` refers to, sharded as a whole or in parts.

    Raises:
        UsageError: there is none, or nothing in it is sharded.
    """
    model = find_module(name)
    check_not_torchs(name, model)
    if not states_below(model):
        raise UsageError(f"{name!r} is not sharded; shard it first: %fsdp shard {name}")
    return model


def _check_is_one(name: str, model: nn.Module) -> None:
    """Raise UsageError if a model is sharded in parts."""
    if not is_sharded(model):
        paths = [path for path, _ in roots_below(model)]
        raise UsageError(
            f"{name!r} is not sharded as a whole: {', '.join(paths)} are sharded separately, each with its own "
            f"policy; reshard one of them: %fsdp reshard {name}.{paths[0]}"
        )


def _check_fits(command: Shard | Reshard, shard_size: int, world_size: int | None = None) -> None:
    """Raise UsageError unless ``command`` fits the number of ranks; ``world_size`` defaults to all ranks."""
    try:
        command.check_fits(world_size or dist.get_world_size(), shard_size)
    except ValueError as error:
        raise UsageError(str(error)) from error


def policy_of(model: nn.Module, only: Sequence[FSDPState] = ()) -> ModelPolicy | None:
    """Return the policy that ``model`` is sharded with, as a whole or in parts; None if it is not sharded.

    With ``only``, return that of these units of it.
    """
    roots = [root for _, root in roots_below(model)]
    if not roots:
        return None
    states = only or states_below(model)
    units = [unit.describe() for unit in units_of(states)]
    after_forward = {
        _after_forward(state, unit.reshard_after_forward) for state in states for unit in units_of([state])
    }
    offload: set[bool | None] = {unit.offload for unit in units}
    mesh = _shared({mesh_words(unit.replicate_size, unit.shard_size) for unit in units}, "")
    after = _shared(after_forward, "")
    api = api_of(model)
    like = strategy_like(as_mesh(mesh), after) if mesh else ""
    return ModelPolicy(
        api=api,
        strategy=ours.strategy_of(model) if api == CLASSIC else like,
        orig_params=ours.has_originals(model),
        wrap=tuple(sorted({class_name(m) for state in states for m in state.modules if state not in roots})),
        mesh=mesh,
        reshard_after_forward=after,
        mp=_shared({_precision_words(_cast_at_root(roots[0], state)) for state in states}, ""),
        offload=_shared(offload, None),
        prefetch=_prefetch.get(model, 0),
    )


def _after_forward(state: FSDPState, of_unit: bool | int) -> str | int:
    """Return the command's word or number for a unit's ``reshard_after_forward``."""
    if state.auto_reshard:
        return "auto"
    return str(of_unit).lower() if isinstance(of_unit, bool) else of_unit


def _shared(values: set[T], otherwise: T) -> T:
    """Return the only one of ``values``, or ``otherwise``."""
    return next(iter(values)) if len(values) == 1 else otherwise


def _cast_at_root(root: FSDPState, state: FSDPState) -> MixedPrecisionPolicy:
    """Return the policy that a command gave ``state``: :func:`_cast_only_at` moved its output dtype to the root."""
    policy, output = state.mp_policy, root.mp_policy.output_dtype
    return policy if policy.output_dtype is not None else replace(policy, output_dtype=output)


def _precision_words(policy: MixedPrecisionPolicy) -> str:
    """Return the user notation of ``policy``; empty: one of its dtypes, or its choice of parameters, has none."""
    words = {None: "", **{getattr(torch, name): word for word, name in DTYPES.items()}}
    dtypes = (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)
    kept = policy.param_dtype_override_fn
    if not (all(dtype in words for dtype in dtypes) and (kept is None or isinstance(kept, KeptDtypes))):
        return ""
    param, reduce, output = (words[dtype] for dtype in dtypes)
    return str(PrecisionNames(param=param, reduce=reduce, output=output, keep=kept.globs if kept is not None else ""))


@dataclass(frozen=True)
class KeptDtypes:
    """A ``param_dtype_override_fn``: parameters that compute in their own dtype.

    Attributes:
        globs: as in :attr:`PrecisionNames.keep`.
        params: ids of the plain parameters, which live until they are sharded, when they are asked for.
    """

    globs: str
    params: frozenset[int]

    def __call__(self, param: nn.Parameter) -> torch.dtype | None:
        """Return the dtype of a parameter that keeps it; None for another."""
        return param.dtype if id(param) in self.params else None


def kept_dtypes(model: nn.Module, mp: str) -> KeptDtypes | None:
    """Return which parameters of a plain model keep their dtype under ``mp``; None if it names none.

    Raises:
        UsageError: a pattern matches none.
    """
    names = PrecisionNames.parse(mp)
    if not names.keep:
        return None
    return KeptDtypes(names.keep, frozenset(map(id, _matching(model, names.kept, "--mp keep="))))


def changed_precision(now: MixedPrecisionPolicy, mp: str) -> MixedPrecisionPolicy:
    """Return ``now`` with the dtypes that ``mp`` names replaced."""
    named = PrecisionNames.named(mp)
    kept = {"param_dtype_override_fn": None} if named.pop("keep", None) == "" else {}
    dtypes = {f"{what}_dtype": getattr(torch, DTYPES[name]) if name else None for what, name in named.items()}
    given: dict[str, Any] = {**dtypes, **kept}
    return replace(now, **given)


def precision_again(
    command: Reshard, model: nn.Module, module: nn.Module, now: MixedPrecisionPolicy
) -> MixedPrecisionPolicy:
    """Return the new precision of one unit under ``command``, which is for all of ``model``.

    Args:
        command: may name only some dtypes. If the output dtype is one of them, inner units no longer keep their own.
        model: the sharded model.
        module: a module that is or becomes a unit.
        now: its own precision, or that of the unit that contains it.
    """
    given = changed_precision(now, command.mp) if command.mp else now
    keeps = state_of(module) is not None and (not command.mp or "output" not in PrecisionNames.named(command.mp))
    return given if keeps else _cast_only_at(model, given, module)


def _cast_only_at(model: nn.Module, policy: MixedPrecisionPolicy, module: nn.Module) -> MixedPrecisionPolicy:
    """Return the policy of ``module``, which casts its output only if it is the model."""
    return policy if module is model else replace(policy, output_dtype=None)


def _plan(model: nn.Module, ahead: int) -> None:
    """Set explicit prefetch lists, and clear earlier ones."""
    if ahead or _prefetch.get(model):
        ours.set_prefetch(model, ahead)
    _prefetch[model] = ahead


def check_same_model(model: nn.Module, inner: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Check that the plain model and the modules to wrap are equal on all ranks, before any change.

    Raises:
        RanksDisagreeError: they differ; raised on every rank.
    """
    info = mesh_info(mesh)
    if info.shard_group is None:
        return
    names = {id(m): name for name, m in model.named_modules()}
    lines = [f"{name} {list(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    lines += [f"unit {names[id(m)]}" for m in inner]
    check_same_lines(lines, info.shard_group)


def _apply(model: nn.Module, inner: Sequence[nn.Module], policy: dict[str, Any]) -> None:
    """Shard inner modules first; if one is refused, undo all."""
    try:
        for module in [*inner, model]:
            fully_shard(module, **{**policy, "mp_policy": _cast_only_at(model, policy["mp_policy"], module)})
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        if any(state_of(m) is not None for m in model.modules()):
            unshard_module(model)
        raise


def _name_units(model: nn.Module) -> None:
    """Name the units now, unless that would have to wait for parameters."""
    state = state_of(model)
    if state is not None and state._is_root is None and not any(p.is_meta for p in model.parameters()):
        state._lazy_init()


def modules_of_classes(model: nn.Module, wrap: Sequence[str]) -> list[nn.Module]:
    """Return the inner modules of these classes, of the repeated block's without any, innermost first.

    Raises:
        UsageError: the model contains no module of a class in ``wrap``.
    """
    names = set(wrap) or repeated_class(model)
    inner = [module for path, module in plain_modules(model) if path]
    counts = Counter(map(class_name, inner))
    unknown = names - counts.keys()
    if unknown:
        there = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        near = [close for name in sorted(unknown) for close in get_close_matches(name, counts, n=1)]
        meant = f"; did you mean {', '.join(near)}?" if near else ""
        raise UsageError(
            f"the model has no module of class {', '.join(sorted(unknown))}; its classes are: {there}{meant}"
        )
    return [module for module in reversed(inner) if class_name(module) in names]


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a tree with their names, both without wrappers, parents before children."""
    for path, module in model.named_modules():
        if not is_wrapper(module):
            yield clean(path), module


def class_names() -> list[str]:
    """Return the classes that ``wrap`` may name: modules with parameters and a forward inside the cells' models."""
    try:
        models = map(find_module, module_names())
        return sorted({own for model in models for own, _ in possible_units(model, sizes_of(model))})
    except (RuntimeError, UsageError):  # a cell is building or dropping one at this moment
        return []


def possible_units(model: nn.Module, sizes: Sequence[ParamSize]) -> list[tuple[str, int]]:
    """Return class and number of elements of each inner module with parameters and a forward (not a ModuleList)."""
    below: Counter[str] = Counter()
    for size in sizes:
        below.update(dict.fromkeys(size.above, size.numel))
    inner = [(path, m) for path, m in plain_modules(model) if path and type(m).forward is not nn.Module.forward]
    return [(class_name(m), below[path]) for path, m in inner if below[path]]


def repeated_class(model: nn.Module) -> set[str]:
    """Return the class of the longest list of equal children, the repeated block of a model; may be empty.

    A list within such a list does not count, such as the experts of a block: the block is gathered as a whole. But two
    large parts, such as an encoder and a decoder, are not the repeated block if they have longer lists.
    """
    lists = [m for m in model.modules() if isinstance(m, _LISTS) and len(m) > 1]
    equal = [m for m in lists if len({class_name(child) for child in m}) == 1 and not isinstance(m[0], _LISTS)]
    inner = {each for m in equal if len(m) > 2 for child in m for each in child.modules()}
    best = max((m for m in equal if m not in inner), key=len, default=None)
    return {class_name(best[0])} if best is not None else set()


_LISTS = (nn.ModuleList, nn.Sequential)


def _matching(model: nn.Module, patterns: Sequence[str], option: str) -> list[nn.Parameter]:
    """Return the parameters whose names match a glob pattern of ``option``.

    Raises:
        UsageError: a pattern matches none.
    """
    params = dict(named_params(model))
    matches = {pattern: fnmatch.filter(params, pattern) for pattern in patterns}
    for pattern, names in matches.items():
        if not names:
            raise UsageError(f"{option}{pattern} matches no parameter; parameters: {', '.join(params)}")
    return [params[name] for names in matches.values() for name in names]
