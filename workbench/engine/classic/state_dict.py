"""State dicts of wrappers: full, sharded or local (flat); saved and loaded one unit at a time.

``nn.Module`` saves and loads state dicts child by child, in the same order. Each wrapper handles its own unit: while
its modules save or load, temporary parameters replace their shards, so hooks and overrides of the modules see what they
would see in an unsharded model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from workbench.engine._torch import dtensor_of, gather_old_shards, is_of_old_shards, local_of, make_spec, root_mesh
from workbench.engine.agreement import Agreement, Holdings, describe
from workbench.engine.classic.flat_param import FlatParam, FlatSlice
from workbench.engine.classic.flat_places import FLAT_PARAM
from workbench.engine.classic.full_params import whole_parts
from workbench.engine.classic.options import (
    FullStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from workbench.engine.classic.shard_inventory import is_gathered, sharded_flat, sharded_flats
from workbench.engine.classic.wrapper_state import WrapperState, check_idle, is_first, wrapper_states_below
from workbench.engine.flat_shard import in_own_storage
from workbench.engine.fsdp_state import units_of
from workbench.engine.mesh import names_of
from workbench.engine.module_names import WRAPPED, Names, clean, full_name, names_below
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.tensor_trees import unrecorded
from workbench.engine.unsharding import full_tensor, laid_out

LOCAL, SHARDED = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def settings_for(state: WrapperState) -> StateDictSettings:
    """Return a wrapper's effective settings: SHARDED becomes FULL if nothing is split; with NO_SHARD LOCAL does too."""
    current = state.settings
    copies = state.strategy is ShardingStrategy.NO_SHARD
    is_whole = {LOCAL: copies, SHARDED: copies or (state.flat is not None and state.flat.flat_layout.is_whole)}
    if not is_whole.get(current.state_dict_type, False):
        return current
    config = FullStateDictConfig(offload_to_cpu=current.state_dict_config.offload_to_cpu)
    return StateDictSettings.of(StateDictType.FULL_STATE_DICT, config)


def keys_of(names: Names, flat: FlatParam) -> Iterator[tuple[str, FlatSlice, nn.Parameter]]:
    """Yield (key, part, optimizer's parameter) for every registration of every parameter in a flat parameter."""
    for part in flat.parts:
        for module, name in part.info.places:
            owned = part.held if flat.use_orig_params else flat.sharded_param
            yield full_name(names, module, name), part, owned


def named_flat(state: WrapperState) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a wrapper's flat parameter once under each of its parameters' names; nothing with ``use_orig_params``.

    ``torch.distributed.checkpoint.state_dict`` queries the names of an optimizer's parameters, and inserts names that
    are missing in the state dict to load. So a flat parameter found in that dict means that a parameter is missing.
    """
    flat = state.flat
    if flat is not None and not flat.use_orig_params and not state.is_summoned:
        yield from ((key, owned) for key, _, owned in keys_of(names_below([state.wrapper]), flat))


def as_saved(root: WrapperState) -> nn.Module:
    """Return a module with an empty parameter for each name in a tree's state dict, with the same ``requires_grad``.

    ``torch.distributed.checkpoint.state_dict`` uses these names to remove frozen parameters. The module is empty on a
    rank that gets no state dict.
    """
    saved = nn.Module()
    if not root.was_kept:
        return saved
    names, owned = names_below([root.wrapper]), set[nn.Parameter]()
    for state in wrapper_states_below(root.wrapper):
        flat = state.flat
        if flat is None:
            continue
        owned.update(flat.owned)
        for part, trains in zip(flat.parts, flat.trains, strict=True):
            for module, name in part.info.places:
                key = full_name(names, module, name)
                saved._parameters[key] = nn.Parameter(torch.empty(0), requires_grad=trains)
    for module in names:
        for name, param in module._parameters.items():
            if param is not None and param not in owned:
                saved._parameters[full_name(names, module, name)] = param
    return saved


# ---- saving


@contextmanager
def shown(state: WrapperState) -> Iterator[None]:
    """In the body, a wrapper's modules hold the values for its state dict; collective, except for LOCAL."""
    check_idle([state], "state_dict")
    check_local([state], settings_for(state).state_dict_type)
    buffers = [(module, name, module._buffers[name]) for module, name in state.original_buffer_dtypes]
    for module, name, buffer in buffers:
        if buffer is not None:
            module._buffers[name] = buffer.to(state.original_buffer_dtypes[module, name])
    try:
        found = sharded_flat(state)
        if found is None:
            yield
            return
        unit, flat = found
        flat.stand_in(_values(unit, flat, settings_for(state).state_dict_type))
        try:
            yield
        finally:
            flat.stand_down()
    finally:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@unrecorded
def _values(unit: FSDPParamGroup, flat: FlatParam, kind: StateDictType) -> list[torch.Tensor | None]:
    if kind is LOCAL:
        return [None] * len(flat.parts)
    wholes = whole_parts(unit, flat, flat.slot)
    if kind is not SHARDED:
        return [*flat.as_global([in_own_storage(whole) for whole in wholes])]
    return [split_over(unit, part, whole, flat.slot.device) for part, whole in zip(flat.parts, wholes, strict=True)]


def split_over(unit: FSDPParamGroup, part: FlatSlice, whole: torch.Tensor, place: torch.device) -> DTensor:
    """Return a part's tensor as a DTensor, sharded along dim 0 over the unit's shard ranks and replicated over copies.

    Collective over the ranks of tensor parallelism that have split the part. If they split dim 0, they split the
    shards, as with torch's wrapper. A part that they leave alone is replicated over them.

    Args:
        unit: the unit whose mesh is used.
        part: the parameter.
        whole: tensor of :attr:`FlatSlice.shape`.
        place: device of the shards.
    """
    info = unit.mesh_info
    placements = (Shard(0),) if info.shard_mesh_dim is None else info.placements(Shard(0))
    if part.mesh is None or part.tp_spec is None:
        return laid_out(whole, *_with_tensor_parallelism(info.mesh, placements), place)
    return laid_out(part.as_global(whole), part.mesh, (*placements, *part.tp_spec.placements), place)


def _with_tensor_parallelism(
    mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return a wrapper's mesh with the axis of tensor parallelism beside it, and placements that replicate over it.

    Meshes that have no such axis, or several other axes, such as one of pipeline stages, are returned as they are.
    """
    whole, own = root_mesh(mesh), dict(zip(names_of(mesh), placements, strict=True)) if names_of(mesh) else {}
    if whole.ndim != mesh.ndim + 1 or not own.keys() <= set(names_of(whole)):
        return mesh, tuple(placements)
    return whole, tuple(own.get(name, Replicate()) for name in names_of(whole))


def check_local(states: Iterable[WrapperState], kind: StateDictType) -> None:
    """Check that wrappers can make state dicts of type ``kind``.

    Raises:
        RuntimeError: ``kind`` is LOCAL_STATE_DICT and tensor parallelism has split a parameter.
    """
    flats = [state.flat for state in states if state.flat is not None]
    split = next((part for flat in flats for part in flat.parts if part.tp_spec is not None), None)
    if kind is LOCAL and split is not None:
        raise RuntimeError(
            f"LOCAL_STATE_DICT: parameter {split.fqn!r} is a DTensor of tensor parallelism, so flat parameters "
            "differ between its ranks and cannot be in a checkpoint: use SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def own_values(state: WrapperState, prefix: str) -> dict[str, DTensor]:
    """Return a wrapper's own state dict entries: with LOCAL its shard of the flat parameter, without padding.

    The value is a DTensor ``[numel]`` of all parts that shares the wrapper's memory.
    """
    flat = state.flat
    if flat is None or state.is_summoned or settings_for(state).state_dict_type is not LOCAL:
        return {}
    info, local = flat.mesh_info, flat.slot[: flat.flat_layout.own_numel].detach()
    like = torch.empty(flat.layout.numel, dtype=local.dtype, device="meta")
    return {f"{prefix}{FLAT_PARAM}": dtensor_of(local, make_spec(info.mesh, info.placements(Shard(0)), like))}


def is_kept(state: WrapperState) -> bool:
    """Return whether this rank gets a wrapper's state dict, rather than only taking part in its collectives."""
    config = settings_for(state).state_dict_config
    if not (isinstance(config, FullStateDictConfig) and config.rank0_only):
        return True
    return is_first(state)


def finish(state: WrapperState, made: MutableMapping[str, Any], prefix: str) -> None:
    """Rename a wrapper's entries in ``made``, those with ``prefix``, to names without wrappers; offload them if set."""
    offload = settings_for(state).state_dict_config.offload_to_cpu
    for key in [key for key in made if key.startswith(prefix)]:
        value = made.pop(key)
        made[_without_wrapper(key, prefix)] = value.cpu() if offload and isinstance(value, torch.Tensor) else value
    versions = getattr(made, "_metadata", {})
    inner = f"{prefix}{WRAPPED}"
    for name in [name for name in versions if name == inner or name.startswith(f"{inner}.")]:
        versions[_without_wrapper(f"{name}.", prefix)[:-1]] = versions.pop(name)


def _without_wrapper(key: str, prefix: str) -> str:
    return prefix + key.removeprefix(prefix).removeprefix(f"{WRAPPED}.")


# ---- loading


def with_versions(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state_dict`` with version metadata under the names that modules in wrappers look up."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return state_dict
    known = {name: dict(versions[clean(name)]) for name, _ in module.named_modules() if clean(name) in versions}
    copy = OrderedDict(state_dict)
    copy._metadata = {**versions, **known}  # type: ignore[attr-defined]
    return copy


@contextmanager
def loading(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Load a state dict into the wrappers of ``module``'s tree in the body; collective if it has sharded values.

    In that case either every rank loads or none does: each rank first copies its part of the model.
    """
    states = wrapper_states_below(module)
    if not any(map(is_gathered, state_dict.values())):
        with _ending(states):
            yield
        return

    def holds() -> Holdings:
        check_idle(states, "load_state_dict")
        check_fits(module, state_dict, "")
        return Holdings({key: describe(value) for key, value in state_dict.items() if is_gathered(value)})

    ranks = Agreement("load_state_dict", units_of(states))
    ranks.check(holds)
    flats = [flat for _, flat in sharded_flats(states)]
    tensors = [*(flat.slot for flat in flats), *module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with ranks.all_or_none(), _ending(states):
            yield
    except BaseException as error:
        if not str(error).startswith("Error(s) in loading state_dict"):  # torch's error: matching names were loaded
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
        raise


@contextmanager
def _ending(states: Iterable[WrapperState]) -> Iterator[None]:
    try:
        yield
    finally:
        for state in states:
            end_load(state, keep=False)  # for wrappers that the load did not reach


def begin_load(state: WrapperState, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Prepare a wrapper's modules to load ``state_dict``, which is modified; collective if it has DTensors.

    Raises:
        RuntimeError: an iteration is in progress; a value does not have its parameter's shape, here or in a wrapper
            below. Nothing is changed.
    """
    if not state.is_summoned:
        check_idle([state], "load_state_dict")
        check_fits(state.wrapper, state_dict, prefix)
        _stand_in_for_load(state, state_dict, prefix)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state_dict.pop(key)


@unrecorded
def _stand_in_for_load(state: WrapperState, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    found = sharded_flat(state)
    if found is None:
        return
    unit, flat = found
    if settings_for(state).state_dict_type is LOCAL:
        value = state_dict.pop(f"{prefix}{FLAT_PARAM}")
        flat.slot[: flat.flat_layout.own_numel].copy_(_local(value))
        flat.stand_in([None] * len(flat.parts))
    else:
        for key, part, owned in keys_of(names_below([state.wrapper]), flat):
            value = state_dict.get(prefix + key)
            if value is owned:
                del state_dict[prefix + key]
            elif isinstance(value, torch.Tensor):
                state_dict[prefix + key] = _to_load(part, value, unit.device)
        flat.stand_in(flat.as_global(_own_pieces(flat)))
    state.is_loading = True


def _to_load(part: FlatSlice, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a state dict's value in the form that the module loads: whole, or split by tensor parallelism."""
    if is_of_old_shards(value):
        value = gather_old_shards(value, device)
    if part.tp_spec is not None:
        return part.as_global(part.local_part(value))
    return full_tensor(value) if isinstance(value, DTensor) else value


def _own_pieces(flat: FlatParam) -> list[torch.Tensor]:
    """Return whole parameters with this rank's values in its pieces and zeros elsewhere, which are never read."""
    whole = flat.slot.new_zeros(flat.full_numel)
    begin, end = flat.flat_layout.bounds
    whole[begin:end] = flat.slot
    return flat.parts_of(flat.layout.full_view(whole))


def end_load(state: WrapperState, *, keep: bool) -> None:
    """Put the shards back on a wrapper's modules; with ``keep``, copy the loaded values into them."""
    if state.is_loading:
        state.is_loading = False
        flat = state.flat
        if flat is None:
            return
        if keep and settings_for(state).state_dict_type is not LOCAL:
            flat.take_values()
        flat.stand_down()
    if state.is_root is not None:
        state.has_root()  # buffers may have been replaced


def check_fits(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Check that the wrappers in the tree of ``module`` can load ``state_dict``.

    Raises:
        RuntimeError: a value does not have its parameter's shape; a LOCAL_STATE_DICT has another sharding, lacks a
            wrapper, or is used with parameters that tensor parallelism has split.
    """
    names = names_below([module])
    wrong: list[str] = []
    for state in wrapper_states_below(module):
        flat = state.flat
        if flat is None:
            continue
        check_local([state], settings_for(state).state_dict_type)
        if settings_for(state).state_dict_type is LOCAL:
            _check_flat(flat, prefix + full_name(names, state.wrapper, FLAT_PARAM), state_dict)
            continue
        for key, part, owned in keys_of(names, flat):
            value, shape = state_dict.get(prefix + key), part.global_shape
            if isinstance(value, torch.Tensor) and value is not owned and value.shape != shape:
                wrong.append(f"{prefix + key!r} has shape {list(value.shape)} and its parameter {list(shape)}")
    if wrong:
        raise RuntimeError(f"size mismatch: in the state dict {'; '.join(wrong)}; nothing was loaded")


def _check_flat(flat: FlatParam, key: str, state_dict: Mapping[str, Any]) -> None:
    advice = "LOCAL_STATE_DICT loads into the same sharding only; save and load SHARDED_STATE_DICT or FULL_STATE_DICT"
    if key not in state_dict:
        raise RuntimeError(
            f"the state dict has no flat parameter {key!r}: {advice}, or set the state dict type it was saved with"
        )
    value = state_dict[key]
    came, expected = len(_local(value)), flat.flat_layout.own_numel
    if came != expected or (isinstance(value, DTensor) and value.numel() != flat.layout.numel):
        ranks = f" over {value.device_mesh.size()} ranks" if isinstance(value, DTensor) else ""
        raise RuntimeError(
            f"flat parameter {key!r} has {flat.layout.numel} elements, {expected} of them on this rank; in the state "
            f"dict it has {value.numel()}{ranks}, {came} of them here: {advice}"
        )


def _local(value: torch.Tensor) -> torch.Tensor:
    return local_of(value) if isinstance(value, DTensor) else value
