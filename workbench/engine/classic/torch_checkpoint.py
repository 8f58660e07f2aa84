"""Support for wrappers in ``torch.distributed.checkpoint.state_dict``: the calls that it makes to torch's wrapper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.classic.optim_state import NamedParams, OptimStateDicts, StateDict, to_load
from workbench.engine.classic.options import StateDictSettings, StateDictType
from workbench.engine.classic.state_dict_settings import settings_of
from workbench.engine.classic.wrapper_mesh import HYBRID, Route, route_over
from workbench.engine.classic.wrapper_state import WrapperState, wrapper_states_below


class Checkpoints:
    """Replacement for torch's wrapper class in those calls; the type and configs passed to it are torch's own."""

    @staticmethod
    def fsdp_modules(module: nn.Module) -> Sequence[nn.Module]:
        """Return the wrappers in the tree of ``module``, parents first."""
        return [state.wrapper for state in wrapper_states_below(module)]

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,  # noqa: ANN401 - torch's enum
        state_dict_config: object,
        optim_state_dict_config: object,
    ) -> Iterator[None]:
        """Use torch's type and configs for the state dicts of all wrappers in the body, whatever each was set to."""
        kind = StateDictType[state_dict_type.name]
        ours = StateDictSettings.of(kind).configs()
        given = zip(ours, (state_dict_config, optim_state_dict_config), strict=True)
        configs: list[Any] = [config(**vars(came)) for config, came in given]
        settings = StateDictSettings(kind, *configs)
        states = wrapper_states_below(module)
        before = [state.settings for state in states]
        for state in states:
            state.settings = settings
        try:
            yield
        finally:
            for state, had in zip(states, before, strict=True):
                state.settings = had

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: StateDict, group: object = None
    ) -> StateDict:
        """Return an optimizer's state by parameter name; see ``FullyShardedDataParallel.optim_state_dict``."""
        del group
        return OptimStateDicts.optim_state_dict(model, optim, optim_state_dict, _first_holder(model))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: StateDict, group: object = None
    ) -> StateDict:
        """Return the state dict for an optimizer; see ``FullyShardedDataParallel.optim_state_dict_to_load``.

        torch passes groups with only the names that both the optimizer and the checkpoint have. Each group gets the
        optimizer's full list of names, and keeps its current options unless the checkpoint has them.
        """
        del group
        given = optim_state_dict
        if given.get("param_groups"):
            names = NamedParams.of(model).names
            of_optim = [(group, [n for p in group["params"] for n in names[p]]) for group in optim.param_groups]
            groups = [
                {**had, **came, "params": held}
                for (had, held), came in zip(of_optim, given["param_groups"], strict=True)
            ]
            given = {**given, "param_groups": groups}
        is_first_ranks = getattr(settings_of(model).optim_state_dict_config, "rank0_only", False)
        return to_load(model, optim, given, route=_route_to_all(model) if is_first_ranks else None)


def _route_to_all(model: nn.Module) -> Route:
    """Return the route from one rank to all ranks, including those of tensor parallelism."""
    flats = [state.flat for state in wrapper_states_below(model) if state.flat is not None]
    mesh = next((mesh for flat in flats for mesh in flat.meshes), None)
    return [_first_holder(model)] if mesh is None else route_over(mesh)


def _first_holder(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group whose first rank has full state dicts; None: the group of all ranks."""
    state: WrapperState = wrapper_states_below(model)[0]
    return None if state.strategy in HYBRID else state.mesh.get_group(-1 % state.mesh.ndim)
