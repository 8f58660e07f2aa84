"""Optimizer state dicts, keyed by parameter names without wrappers: full, sharded or local (flat); and loading them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine._torch import gather_old_shards, is_of_old_shards
from workbench.engine.agreement import Agreement, Holdings, Rows, describe_state
from workbench.engine.classic.cost_warnings import caution
from workbench.engine.classic.flat_param import FlatParam, FlatSlice
from workbench.engine.classic.full_params import CPU
from workbench.engine.classic.options import OptimStateKeyType, StateDictType, check_kind
from workbench.engine.classic.param_states import split_states, whole_states
from workbench.engine.classic.shard_inventory import flats_holdings, is_gathered, sharded_flats
from workbench.engine.classic.state_dict import check_local, split_over
from workbench.engine.classic.state_dict_settings import settings_of
from workbench.engine.classic.wrapper_mesh import Route, route_over
from workbench.engine.classic.wrapper_state import wrapper_states_below
from workbench.engine.module_names import clean, full_name, names_below
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.unsharding import full_tensor, state_like

StateDict = dict[str, Any]
"""``{"state": {parameter: {key: value}}, "param_groups": [{"params": parameters, option: value}]}``."""

OptimInput = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""The constructor argument of an optimizer: parameters, or groups."""

Key = int | str
"""A parameter's key in an optimizer's own state dict: its index over all groups, or a name with keyed optimizers."""


class OptimStateDicts:
    """The functions of ``FullyShardedDataParallel`` that make and load optimizer state dicts.

    Names are those of the model without wrappers; a parameter that several modules share has its first name. The full
    state is the same with and without ``use_orig_params`` and on any number of ranks, and equals that of torch's
    wrapper.
    """

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return an optimizer's state dict of the type that is set; collective, gathering one tensor at a time.

        - FULL_STATE_DICT: whole tensors by name; with ``rank0_only`` empty on the other ranks.
        - SHARDED_STATE_DICT: DTensors over the wrapper's mesh, by name. Numbers stay as they are, and so does the state
          of pieces if one rank has whole parameters.
        - LOCAL_STATE_DICT: the optimizer's own dict, of flat parameters or pieces.

        The state of parameters that tensor parallelism has split is a DTensor over its axis, in SHARDED_STATE_DICT over
        that axis as well.

        Args:
            model: the root of a tree with wrappers.
            optim: optimizer of its parameters, including parameters of the model that are in no wrapper.
            optim_state_dict: the optimizer's state dict, keyed by names or indices; None: ``optim.state_dict()``.
            group: the group whose rank 0 is "rank 0"; None: all ranks, or under tensor parallelism the wrapper's mesh.

        Raises:
            ValueError: the tree has no wrapper, wrappers differ in type, the optimizer holds a parameter that is not in
                the model, or state has a tensor that is neither split like its parameter nor a single number.
            RuntimeError: LOCAL_STATE_DICT with tensor parallelism.
        """
        settings, given = settings_of(model), optim.state_dict() if optim_state_dict is None else optim_state_dict
        config = settings.optim_state_dict_config
        check_local(wrapper_states_below(model), settings.state_dict_type)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            moved = {key: _on(CPU if config.offload_to_cpu else None, state) for key, state in given["state"].items()}
            return {**given, "state": moved}
        return _by_names(
            model,
            optim,
            given,
            is_split=settings.state_dict_type is StateDictType.SHARDED_STATE_DICT,
            device=CPU if config.offload_to_cpu else None,
            is_kept=not getattr(config, "rank0_only", False) or _is_first(_route_below(model, group)),
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: StateDict,
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Convert a result of :meth:`optim_state_dict` to the input of ``optim.load_state_dict``; collective.

        State of parameters that the optimizer does not hold is dropped; state that belongs to no parameter stays.

        Args:
            model: the root of a tree with wrappers.
            optim: optimizer of its parameters.
            optim_state_dict: from :meth:`optim_state_dict` with any sharding, from torch's wrapper, or from a plain
                model with names as keys; not modified. With ``rank0_only``, only rank 0's is used.
            is_named_optimizer: the optimizer's keys are parameter names.
            load_directly: also load the result.
            group: as in :meth:`optim_state_dict`.

        Raises:
            RuntimeError: LOCAL_STATE_DICT with tensor parallelism.
            ValueError: the dict has no ``state``, is keyed by indices, has groups of other parameters, has a tensor
                whose shape differs from its parameter's, or without ``use_orig_params`` has different numbers within
                one flat parameter.
        """
        settings = settings_of(model)
        check_local(wrapper_states_below(model), settings.state_dict_type)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            result = _checked_local(model, optim, optim_state_dict)
        else:
            first = getattr(settings.optim_state_dict_config, "rank0_only", False)
            route = _route_below(model, group) if first else None
            result = to_load(model, optim, optim_state_dict, is_named=is_named_optimizer, route=route)
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return whole tensors by name, on the CPU, as :meth:`optim_state_dict` does; ``optim_input`` only warns."""
        _warn_of_input(optim_input)
        is_kept = not rank0_only or _is_first(_route_below(model, group))
        return _by_names(model, optim, optim.state_dict(), is_split=False, device=CPU, is_kept=is_kept)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> StateDict:
        """Return DTensors by name, on the CPU, as :meth:`optim_state_dict` does; ``group`` has no effect."""
        del group
        return _by_names(model, optim, optim.state_dict(), is_split=True, device=CPU, is_kept=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: StateDict,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Return a state dict for the optimizer to load, from whole tensors that all ranks have.

        Without ``optim`` the optimizer is one of ``optim_input``, which is deprecated, or of ``model.parameters()``.
        """
        optim = _optimizer_of(optim_input, optim)
        return to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
    ) -> StateDict:
        """Return a state dict for the optimizer to load, from DTensors; collective."""
        return to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: StateDict | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> StateDict:
        """Return a state dict for the optimizer to load, from rank 0's whole tensors; others pass None. Collective.

        See :meth:`shard_full_optim_state_dict` for ``optim_input`` and ``optim``.
        """
        optim = _optimizer_of(optim_input, optim)
        return to_load(model, optim, full_optim_state_dict or {}, route=_route_below(model, group))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: StateDict,
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> StateDict:
        """Convert keys from parameter names to indices over the optimizer's groups, or back.

        Args:
            optim_state_dict: state dict of whole tensors; not modified.
            optim_state_key_type: the wanted kind of keys.
            model: the model, without wrappers.
            optim_input: constructor argument of an optimizer, used without ``optim``; deprecated.
            optim: the optimizer; None without ``optim_input``: one of ``model.parameters()``.

        Raises:
            TypeError: the key type is not the class of this package.
            ValueError: keys are of both kinds, or are unknown to the model or optimizer; the model has wrappers.
        """
        optim = _optimizer_of(optim_input, optim)
        check_kind("optim_state_key_type", optim_state_key_type, OptimStateKeyType)
        if wrapper_states_below(model):
            raise ValueError(
                f"rekey_optim_state_dict takes a model without wrappers; {type(model).__name__} contains wrappers"
            )
        keys = [*optim_state_dict["state"], *(k for group in _groups_of(optim_state_dict) for k in group["params"])]
        kinds = {type(key) for key in keys}
        if len(kinds) > 1 or not kinds <= {int, str}:
            raise ValueError(f"keys must be all names or all indices, got {', '.join(map(repr, keys))}")
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        if kinds <= {str if to_names else int}:
            return optim_state_dict
        names = {param: clean(name) for name, param in model.named_parameters()}
        by_place = {i: names[param] for i, param in enumerate(_held(model, optim)) if param in names}
        new = by_place if to_names else {name: i for i, name in by_place.items()}
        unknown = [key for key in keys if key not in new]
        if unknown:
            raise ValueError(f"{type(model).__name__} and its optimizer have no parameter {unknown[0]!r}")
        groups = [
            {**group, "params": sorted(new[k] for k in group["params"])} for group in _groups_of(optim_state_dict)
        ]
        states = {new[key]: state for key, state in optim_state_dict["state"].items()}
        return {"state": states, **({"param_groups": groups} if "param_groups" in optim_state_dict else {})}


def _warn_of_input(optim_input: OptimInput | None) -> None:
    if optim_input is not None:
        caution("optim_input is deprecated: pass the optimizer as optim= instead", FutureWarning)


def _optimizer_of(optim_input: OptimInput | None, optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return ``optim``, or without one an optimizer with the groups of ``optim_input``.

    Raises:
        TypeError, ValueError: no optimizer can be made of ``optim_input``.
    """
    _warn_of_input(optim_input)
    if optim is not None or optim_input is None:
        return optim
    groups: list[Any] = [dict(each) if isinstance(each, dict) else each for each in optim_input]  # SGD adds options
    return torch.optim.SGD(groups, lr=0.0)  # never steps; only holds the groups and their order


def _held(model: nn.Module, optim: torch.optim.Optimizer | None) -> list[nn.Parameter]:
    """Return the parameters in an optimizer's order."""
    return list(model.parameters()) if optim is None else [p for group in optim.param_groups for p in group["params"]]


def _groups_of(state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [copy.deepcopy(group) for group in state_dict.get("param_groups", ())]


@dataclass(frozen=True)
class NamedParams:
    """The parameters of a model with wrappers that optimizers can hold, with their names.

    Attributes:
        flats: (unit, flat parameter, names of its parts), sharded.
        names: names of each parameter that an optimizer can hold; several for a flat parameter.
        registered: name of each parameter including wrappers, as keyed optimizers use it.
    """

    flats: list[tuple[FSDPParamGroup, FlatParam, list[str]]]
    names: dict[nn.Parameter, list[str]]
    registered: dict[nn.Parameter, str]

    @classmethod
    def of(cls, model: nn.Module) -> NamedParams:
        """Collect the parameters below ``model``; this reshards its wrappers."""
        modules = names_below((model,))
        flats: list[tuple[FSDPParamGroup, FlatParam, list[str]]] = []
        names: dict[nn.Parameter, list[str]] = {}
        for unit, flat in sharded_flats(wrapper_states_below(model)):
            parts = [full_name(modules, part.info.module, part.info.name) for part in flat.parts]
            flats.append((unit, flat, parts))
            if flat.use_orig_params:
                names |= {param: [name] for param, name in zip(flat.owned, parts, strict=True)}
            else:
                names[flat.sharded_param] = parts
        registered = {param: name for name, param in model.named_parameters()}
        return cls(flats, {param: [clean(name)] for param, name in registered.items()} | names, registered)

    @property
    def units(self) -> list[tuple[FSDPParamGroup, FlatParam]]:
        """(unit, flat parameter) pairs."""
        return [(unit, flat) for unit, flat, _ in self.flats]

    @property
    def others(self) -> dict[str, nn.Parameter]:
        """Parameters that are in no wrapper, by name."""
        managed = {param for _, flat, _ in self.flats for param in flat.owned}
        return {names[0]: param for param, names in self.names.items() if param not in managed}

    def order(self, held: Iterable[nn.Parameter], ranks: Agreement) -> list[str]:
        """Return the names of an optimizer's parameters in the order of the first rank's optimizer; collective.

        Names that only this rank has come last.
        """
        own = [name for param in held for name in self.names[param]]
        first: list[str] = json.loads(ranks.texts(json.dumps(own))[0])
        return list(dict.fromkeys([*first, *own]))

    def as_saved(self, order: Iterable[str], found: Collection[Key]) -> list[str]:
        """Return the names in ``found``, in the order in which torch's wrapper saves their state.

        That is ``order``, or with ``use_orig_params`` alphabetical within each wrapper: the same on all ranks, which
        may go through the result with a collective for each value.
        """
        if not any(flat.use_orig_params for _, flat, _ in self.flats):
            return [name for name in order if name in found]
        by_wrapper = [sorted(name for name in names if name in found) for _, _, names in self.flats]
        return [*sorted(name for name in self.others if name in found), *chain.from_iterable(sorted(by_wrapper))]

    def keys(self, model: nn.Module, optim: torch.optim.Optimizer | None, *, is_named: bool) -> dict[nn.Parameter, Key]:
        """Return the key of each parameter in the optimizer's own state dict.

        Raises:
            ValueError: the optimizer holds a parameter that is not in the model.
        """
        held = _held(model, optim)
        lost = [param for param in held if param not in self.names]
        if lost:
            raise ValueError(
                f"the optimizer holds parameters that are not in {type(model).__name__}, {len(lost)} in all, one of "
                f"shape {list(lost[0].shape)}: create it from model.parameters() after wrapping"
            )
        return {param: self.registered[param] if is_named else i for i, param in enumerate(held)}


def _by_names(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    given: StateDict,
    *,
    is_split: bool,
    device: torch.device | None,
    is_kept: bool,
) -> StateDict:
    """Return state by name, whole or split, on ``device`` or the compute device; collective."""
    named = NamedParams.of(model)
    keys: dict[nn.Parameter, Key] = {}
    states: dict[nn.Parameter, dict[str, Any]] = {}

    def holds() -> Holdings:
        used = [key for group in given.get("param_groups", ()) for key in group["params"]] or given["state"]
        is_named = not set(named.registered.values()).isdisjoint(used)
        keys.update(named.keys(model, optim, is_named=is_named))
        states.update({param: given["state"][key] for param, key in keys.items() if key in given["state"]})
        return flats_holdings(named.units, model, [(type(optim).__name__, states)], held=keys)

    ranks = Agreement("optim_state_dict", (unit for unit, _ in named.units))
    ranks.check(holds)
    order = named.order(keys, ranks)
    found: dict[Key, Any] = {}
    for unit, flat, names in named.flats:
        splits = is_split and not flat.owns_wholes
        keep = partial(_split_over, unit, device) if splits else partial(_copied_to, device)
        wholes = whole_states(unit, flat, states, keep if is_kept else _dropped)
        found |= {name: _on(device, w) for name, w in zip(names, wholes, strict=True) if w is not None}
    if not is_kept:
        return {}
    own = {name: copy.deepcopy(states[param]) for name, param in named.others.items() if param in states}
    found |= {name: _on(device, state) for name, state in own.items()}
    found = {name: found[name] for name in named.as_saved(order, found)}
    owned = set(keys.values())
    found |= {key: value for key, value in given["state"].items() if key not in owned}  # belongs to no parameter
    params = {key: param for param, key in keys.items()}
    groups = _groups_of(given)
    for group in groups:
        group["params"] = [name for key in group["params"] for name in named.names[params[key]]]
    return {"state": found, **({"param_groups": groups} if "param_groups" in given else {})}


def _split_over(
    unit: FSDPParamGroup, device: torch.device | None, part: FlatSlice, whole: torch.Tensor
) -> torch.Tensor:
    return split_over(unit, part, whole, device or whole.device)


def _copied_to(device: torch.device | None, part: FlatSlice, whole: torch.Tensor) -> torch.Tensor:
    return part.as_global(whole.to(device or whole.device, copy=True))


def _dropped(_: FlatSlice, __: torch.Tensor) -> None:
    """Keep nothing."""


def _on(device: torch.device | None, state: Any) -> Any:  # noqa: ANN401 - optimizer state holds anything
    """Return state with plain tensors moved to ``device``; None: leave them where they are."""
    if device is None or not isinstance(state, dict):
        return state
    return {
        key: value.to(device) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    given: StateDict,
    *,
    is_named: bool = False,
    route: Route | None = None,
) -> StateDict:
    """Return the state of flat parameters or pieces by the optimizer's own keys; collective.

    Args:
        model: the root of a tree with wrappers.
        optim: optimizer of its parameters; None: as for an optimizer of ``model.parameters()``.
        given: state by parameter name.
        is_named: the optimizer's keys are names too.
        route: all ranks load the state given on the route's first rank; None: each rank loads its own.
    """
    named = NamedParams.of(model)
    device = named.flats[0][0].device if named.flats else CPU
    fetch: Callable[[Any], Any] = partial(_gathered, device)
    if route is not None:
        given, fetch = _broadcast_by_first(given, route), partial(_sent_by_first, device, route)
    keys: dict[nn.Parameter, Key] = {}

    def holds() -> Holdings:
        _check_by_names(given)
        keys.update(named.keys(model, optim, is_named=is_named))
        wrapped = {name for _, _, names in named.flats for name in names}
        states = given["state"] if route is None else {}
        together = {name: own for name, own in states.items() if name in wrapped or _is_split_over_ranks(own)}
        rows: Rows = {str(name): _described(own) for name, own in together.items()}
        for i, each in enumerate(given.get("param_groups", ()) if route is None else ()):
            rows[f"group {i}"] = f"{len(wrapped.intersection(each['params']))} parameters"
        return Holdings(held=_groups_held(named, optim), given=rows)

    ranks = Agreement("optim_state_dict_to_load", (unit for unit, _ in named.units))
    ranks.check(holds)
    state = given["state"]
    found: dict[Key, Any] = {}
    for _, flat, names in named.flats:
        split = split_states(flat, [state.get(name) for name in names], fetch)
        found |= {keys[param]: own for param, own in split.items() if param in keys}
    for name, param in named.others.items():
        if name in state and param in keys:
            found[keys[param]] = _fetched(state[name], partial(_like, param, fetch))
    found = {keys[param]: found[keys[param]] for param in named.names if param in keys and keys[param] in found}
    known = {name for names in named.names.values() for name in names}
    found |= {key: _fetched(value, fetch) for key, value in state.items() if key not in known}
    if is_named and optim is not None:  # a keyed optimizer also has state for empty pieces
        had = {key: optim.state[param] for param, key in keys.items() if param in optim.state}
        found |= {key: copy.deepcopy(own) for key, own in had.items() if key not in found}
    if "param_groups" not in given:
        return {"state": found}
    return {"state": found, "param_groups": _groups_to_load(_groups_of(given), named, keys, optim)}


def _check_by_names(given: StateDict) -> None:
    if "state" not in given:
        raise ValueError(
            f"an optimizer's state dict has the key 'state'; this one has {', '.join(map(repr, given)) or 'nothing'}"
        )
    if any(isinstance(key, int) for key in given["state"]):
        raise ValueError(
            "this state dict is keyed by parameter index: convert the keys to names with "
            "rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model without wrappers)"
        )


def _groups_held(named: NamedParams, optim: torch.optim.Optimizer | None) -> Rows:
    """Return the optimizer's group of each wrapped parameter, by name; empty without an optimizer.

    Other parameters may exist on this rank only.
    """
    if optim is None:
        return {}
    groups = {param: i for i, group in enumerate(optim.param_groups) for param in group["params"]}
    kind = type(optim).__name__
    wrapped = {clean(name): p for p, name in named.registered.items() if clean(name) not in named.others}
    return {name: f"{kind}, group {groups[p]}" if p in groups else "none" for name, p in wrapped.items()}


def _is_split_over_ranks(state: Any) -> bool:  # noqa: ANN401 - optimizer state holds anything
    """Return whether to load a parameter's state is collective."""
    return any(map(is_gathered, state.values())) if isinstance(state, dict) else is_gathered(state)


def _described(state: Any) -> str:  # noqa: ANN401 - optimizer state holds anything
    """Describe values, in the order in which they are gathered."""
    return describe_state(state if isinstance(state, dict) else {"value": state})


def _fetched(state: Any, fetch: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - optimizer state holds anything
    if not isinstance(state, dict):
        return fetch(state)
    fetched = {key: fetch(state[key]) for key in sorted(state)}  # in the same order on all ranks
    return {key: fetched[key] for key in state}


def _like(param: nn.Parameter, fetch: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401 - any state
    return state_like(param, fetch(value))


def _groups_to_load(
    groups: list[dict[str, Any]],
    named: NamedParams,
    keys: Mapping[nn.Parameter, Key],
    optim: torch.optim.Optimizer | None,
) -> list[dict[str, Any]]:
    """Return groups with the optimizer's own keys, in the optimizer's order.

    Parameters in no wrapper that the groups leave out stay in the optimizer's groups, without state.
    """
    key_of = {name: keys[param] for param, names in named.names.items() if param in keys for name in names}
    held = list(keys.values()) if optim is None else None
    saved = {name for group in groups for name in group["params"]}
    new = {keys[param] for name, param in named.others.items() if param in keys and name not in saved}
    if optim is not None and len(groups) != len(optim.param_groups):
        raise ValueError(f"the state dict has {len(groups)} parameter groups, the optimizer {len(optim.param_groups)}")
    for i, group in enumerate(groups):
        unknown = [name for name in group["params"] if name not in key_of]
        if unknown:
            raise ValueError(f"group {i} of the state dict holds {unknown[0]!r}, which the optimizer does not have")
        order = held if optim is None else [keys[param] for param in optim.param_groups[i]["params"]]
        wanted = {key_of[name] for name in group["params"]} | new.intersection(() if optim is None else order or ())
        if optim is not None and set(order or ()) != wanted:
            differ = sorted(name for name, key in key_of.items() if key in wanted ^ set(order or ()))
            raise ValueError(
                f"group {i} of the state dict and of the optimizer hold different parameters; only one of them holds "
                f"{', '.join(map(repr, differ))}. The parameters of one flat parameter share a group; with "
                "use_orig_params=True their groups can differ"
            )
        group["params"] = [key for key in order or () if key in wanted]
    return groups


def _checked_local(model: nn.Module, optim: torch.optim.Optimizer, given: StateDict) -> StateDict:
    """Return a LOCAL_STATE_DICT after checking that it has this sharding."""
    named = NamedParams.of(model)
    is_named = any(isinstance(key, str) for key in given["state"])
    for param, key in named.keys(model, optim, is_named=is_named).items():
        for what, value in given["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() not in {1, param.numel()}:
                raise ValueError(
                    f"optimizer state {what!r} of {named.registered[param]!r} has {value.numel()} elements, this "
                    f"rank's shard {param.numel()}: a LOCAL_STATE_DICT loads into the same sharding only; for "
                    "another sharding save FULL_STATE_DICT or SHARDED_STATE_DICT"
                )
    return given


# ---- values of other ranks


@dataclass(frozen=True)
class SentTensor:
    """Placeholder for a tensor that rank 0 will send."""

    shape: torch.Size
    dtype: torch.dtype


def _gathered(device: torch.device, value: Any) -> Any:  # noqa: ANN401 - optimizer state holds anything
    """Return a split value whole; torch's ``load_sharded_optimizer_state_dict`` produces ShardedTensors."""
    if isinstance(value, DTensor):
        return full_tensor(value)
    return gather_old_shards(value, device) if is_of_old_shards(value) else value


def _route_below(model: nn.Module, group: dist.ProcessGroup | None) -> Route:
    """Return the route from one rank to all ranks that need its state.

    Under tensor parallelism each rank has a different part, so the route begins at the first rank of the wrappers'
    mesh.
    """
    states = wrapper_states_below(model)
    if group is not None or not any(state.flat is not None and state.flat.is_tensor_parallel for state in states):
        return [group]
    return route_over(states[0].mesh)


def _is_first(route: Route) -> bool:
    return all(dist.get_rank(group) == 0 for group in route)


def _broadcast_by_first(given: StateDict, route: Route) -> StateDict:
    """Broadcast rank 0's state dict, with a :class:`SentTensor` in place of each tensor; rank 0 keeps its own."""
    is_first = _is_first(route)
    received: list[Any] = [None]
    given = given or {}
    if is_first:
        states = {name: _announced(state) for name, state in given.get("state", {}).items()}
        received = [{**given, "state": states} if "state" in given else given]
    for group in route:
        dist.broadcast_object_list(received, group_src=0, group=group)
    return given if is_first else received[0]


def _announced(state: Any) -> Any:  # noqa: ANN401 - optimizer state holds anything
    if isinstance(state, dict):
        return {key: _announced(value) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    return SentTensor(state.shape, state.dtype) if state.ndim else state.cpu()


def _sent_by_first(device: torch.device, route: Route, value: Any) -> Any:  # noqa: ANN401 - any
    if isinstance(value, SentTensor):
        value = torch.empty(value.shape, dtype=value.dtype, device=device)
    elif not isinstance(value, torch.Tensor) or not value.ndim:
        return value
    sent: torch.Tensor = _gathered(device, value).to(device).contiguous()
    for group in route:
        dist.broadcast(sent, group_src=0, group=group)
    return sent
