"""State dicts of wrappers: whole, split or flat; made and loaded one unit at a time.

``nn.Module`` asks every child for its state dict and hands every child what is to be loaded, in the same order. Each
wrapper answers for its own unit: while its modules are asked, they have other parameters in the place of their shards,
so hooks and overrides of the modules see what they would see in a model that is not sharded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from workbench.engine._torch import dtensor_of, gather_old_shards, is_of_old_shards, local_of, make_spec
from workbench.engine.agreement import Agreement, Holdings, describe
from workbench.engine.classic.flat_param import FLAT_PARAM, FlatParam, FlatSlice
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
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.root_checks import WRAPPED, Names, full_name, names_below
from workbench.engine.tensor_trees import unrecorded
from workbench.engine.unsharding import full_tensor, laid_out

LOCAL, SHARDED = StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
_CHECKPOINTED = (
    "_checkpoint_wrapped_module"  # torch's wrapper for activation checkpointing takes it out of names itself
)


def key_of(name: str) -> str:
    """Return what a state dict calls a parameter: its name without wrappers of any kind."""
    return ".".join(part for part in name.split(".") if part not in {WRAPPED, _CHECKPOINTED})


def settings_for(state: WrapperState) -> StateDictSettings:
    """Return what one wrapper's state dict is: whole where nothing is split; with NO_SHARD LOCAL is so too."""
    said = state.settings
    copies = state.strategy is ShardingStrategy.NO_SHARD
    is_whole = {LOCAL: copies, SHARDED: copies or (state.flat is not None and state.flat.is_whole)}
    if not is_whole.get(said.state_dict_type, False):
        return said
    config = FullStateDictConfig(offload_to_cpu=said.state_dict_config.offload_to_cpu)
    return StateDictSettings.of(StateDictType.FULL_STATE_DICT, config)


def keys_of(names: Names, flat: FlatParam) -> Iterator[tuple[str, FlatSlice, nn.Parameter]]:
    """Yield key, part and what an optimizer holds of every parameter of a flat one, for each of its places."""
    for part in flat.parts:
        for module, name in part.info.places:
            owned = part.held if flat.use_orig_params else flat.sharded_param
            yield key_of(full_name(names, module, name)), part, owned


def named_flat(state: WrapperState) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the flat parameter of one wrapper by the name of each of its parameters; with the originals nothing.

    ``torch.distributed.checkpoint.state_dict`` asks which names there are of what an optimizer holds, and puts into
    what is to be loaded what it was told and not given: one found there means that a parameter is missing.
    """
    flat = state.flat
    if flat is not None and not flat.use_orig_params and not state.is_summoned:
        yield from ((key, owned) for key, _, owned in keys_of(names_below([state.wrapper]), flat))


def as_saved(root: WrapperState) -> nn.Module:
    """Return a module that has a parameter by each name in the state dict of a tree, trained where that one is.

    ``torch.distributed.checkpoint.state_dict`` takes frozen ones out by these names, where there is anything.
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
                key = key_of(full_name(names, module, name))
                saved._parameters[key] = nn.Parameter(torch.empty(0), requires_grad=trains)
    for module in names:
        for name, param in module._parameters.items():
            if param is not None and param not in owned:
                saved._parameters[key_of(full_name(names, module, name))] = param
    return saved


# ---- made


@contextmanager
def shown(state: WrapperState) -> Iterator[None]:
    """Within the body the modules of one wrapper have what its state dict is to hold; collective, but for LOCAL."""
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
    """Return a part's tensor split along dim 0 over the ranks that share it, or of copies over all.

    Collective over the ranks of tensor parallelism that have split the part: on dim 0 they split the shards then, as
    they do with torch's wrapper.

    Args:
        unit: whose ranks.
        part: whose parameter it is like.
        whole: of :attr:`Part.shape`.
        place: where shards are.
    """
    info = unit.mesh_info
    placements = (Shard(0),) if info.shard_mesh_dim is None else info.placements(Shard(0))
    if part.mesh is None or part.tp_spec is None:
        return laid_out(whole, info.mesh, placements, place)
    return laid_out(part.as_global(whole), part.mesh, (*placements, *part.tp_spec.placements), place)


def check_local(states: Iterable[WrapperState], kind: StateDictType) -> None:
    """Check that the state dicts of wrappers can be of a type.

    Raises:
        RuntimeError: it is LOCAL_STATE_DICT, and tensor parallelism has split a parameter of one.
    """
    flats = [state.flat for state in states if state.flat is not None]
    split = next((part for flat in flats for part in flat.parts if part.tp_spec is not None), None)
    if kind is LOCAL and split is not None:
        raise RuntimeError(
            f"LOCAL_STATE_DICT: parameter {split.fqn!r} is a DTensor of tensor parallelism, so that flat parameters "
            "differ between its ranks and have no place in a checkpoint: use SHARDED_STATE_DICT or FULL_STATE_DICT"
        )


def own_values(state: WrapperState, prefix: str) -> dict[str, DTensor]:
    """Return what a wrapper itself has in its state dict: with LOCAL its part of the flat parameter, padding left out.

    It is the wrapper's own memory, as a DTensor ``[numel]`` of all parts.
    """
    flat = state.flat
    if flat is None or state.is_summoned or settings_for(state).state_dict_type is not LOCAL:
        return {}
    info, local = flat.mesh_info, flat.slot[: flat.own_numel].detach()
    like = torch.empty(flat.layout.numel, dtype=local.dtype, device="meta")
    return {f"{prefix}{FLAT_PARAM}": dtensor_of(local, make_spec(info.mesh, info.placements(Shard(0)), like))}


def is_kept(state: WrapperState) -> bool:
    """Return whether this rank is to get the state dict of a wrapper, or only helps to make it."""
    config = settings_for(state).state_dict_config
    if not (isinstance(config, FullStateDictConfig) and config.rank0_only):
        return True
    return is_first(state)


def finish(state: WrapperState, made: MutableMapping[str, Any], prefix: str) -> None:
    """Let what a wrapper has put into ``made``, under names with ``prefix``, be where and called as it should be."""
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


# ---- loaded


def with_versions(module: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``state_dict`` so that modules inside of wrappers find the versions that were saved with them."""
    versions = getattr(state_dict, "_metadata", None)
    if versions is None:
        return state_dict
    known = {name: dict(versions[key_of(name)]) for name, _ in module.named_modules() if key_of(name) in versions}
    copy = OrderedDict(state_dict)
    copy._metadata = {**versions, **known}  # type: ignore[attr-defined]
    return copy


@contextmanager
def loading(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[None]:
    """Within the body the wrappers in the tree of ``module`` load a state dict; collective if it holds split values.

    Then the body loads on every rank, or no rank has loaded anything: what each has of the model is copied before.
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
        if not str(error).startswith("Error(s) in loading state_dict"):  # torch's: the names that match are loaded
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
            end_load(state, keep=False)  # of those that were not reached


def begin_load(state: WrapperState, state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Let the modules of one wrapper take ``state_dict``, which is changed; collective if it holds DTensors.

    Raises:
        RuntimeError: within an iteration; a value has not the shape of its parameter, here or in a wrapper below.
            Nothing has changed then.
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
        flat.slot[: flat.own_numel].copy_(_local(value))
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
    """Return a value of a state dict as the module of its parameter takes it: whole, or split by tensor parallelism."""
    if is_of_old_shards(value):
        value = gather_old_shards(value, device)
    if part.tp_spec is not None:
        return part.as_global(part.local_part(value))
    return full_tensor(value) if isinstance(value, DTensor) else value


def _own_pieces(flat: FlatParam) -> list[torch.Tensor]:
    """Return whole parameters that have this rank's values where its pieces are: no other ones are read again."""
    whole = flat.slot.new_zeros(flat.full_numel)
    begin, end = flat.bounds
    whole[begin:end] = flat.slot
    return flat.parts_of(flat.layout.full_view(whole))


def end_load(state: WrapperState, *, keep: bool) -> None:
    """Let the modules of one wrapper have their shards again, with the values that were loaded if these are kept."""
    if state.is_loading:
        state.is_loading = False
        flat = state.flat
        if flat is None:
            return
        if keep and settings_for(state).state_dict_type is not LOCAL:
            flat.take_values()
        flat.stand_down()
    if state._is_root is not None:
        state.has_root()  # buffers may be other ones


def check_fits(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Check that the wrappers in the tree of ``module`` can take ``state_dict``.

    Raises:
        RuntimeError: a value has not the shape of its parameter; a LOCAL_STATE_DICT is of another sharding, lacks a
            wrapper, or is of parameters that tensor parallelism has split.
    """
    names = names_below([module])
    wrong: list[str] = []
    for state in wrapper_states_below(module):
        flat = state.flat
        if flat is None:
            continue
        check_local([state], settings_for(state).state_dict_type)
        if settings_for(state).state_dict_type is LOCAL:
            _check_flat(flat, prefix + key_of(full_name(names, state.wrapper, FLAT_PARAM)), state_dict)
            continue
        for key, part, owned in keys_of(names, flat):
            value, shape = state_dict.get(prefix + key), part.global_shape
            if isinstance(value, torch.Tensor) and value is not owned and value.shape != shape:
                wrong.append(f"{prefix + key!r} has shape {list(value.shape)} and its parameter {list(shape)}")
    if wrong:
        raise RuntimeError(f"size mismatch: in the state dict {'; '.join(wrong)}; nothing was loaded")


def _check_flat(flat: FlatParam, key: str, state_dict: Mapping[str, Any]) -> None:
    advice = "LOCAL_STATE_DICT is for the same sharding alone; save and load SHARDED_STATE_DICT or FULL_STATE_DICT"
    if key not in state_dict:
        raise RuntimeError(f"the state dict has no flat parameter {key!r}: {advice}, or set the type that was saved")
    value = state_dict[key]
    came, expected = len(_local(value)), flat.own_numel
    if came != expected or (isinstance(value, DTensor) and value.numel() != flat.layout.numel):
        ranks = f" over {value.device_mesh.size()} ranks" if isinstance(value, DTensor) else ""
        raise RuntimeError(
            f"flat parameter {key!r} has {flat.layout.numel} elements, {expected} of them on this rank; in the state "
            f"dict it has {value.numel()}{ranks}, {came} of them here: {advice}"
        )


def _local(value: torch.Tensor) -> torch.Tensor:
    return local_of(value) if isinstance(value, DTensor) else value
