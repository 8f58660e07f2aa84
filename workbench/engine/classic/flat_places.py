"""The places on modules where a flat parameter and its parts are registered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from workbench.engine._torch import (
    drop_own_parameter,
    has_own_setattr,
    parameter_of,
    put_parameter,
    set_own_parameter,
)
from workbench.engine.param import ParamModuleInfo

FLAT_PARAM = "_flat_param"
"""Name of the flat parameter on the wrapped module."""


class FlatPlaces:
    """Registers parameters of one flat parameter on modules.

    A module's own ``__setattr__`` is called, unless FSDP_USE_UNSAFE_SETATTR=1 was set.

    Args:
        owner: the wrapped module.
        infos: the places of each part, in order.
    """

    def __init__(self, owner: nn.Module, infos: Sequence[ParamModuleInfo]) -> None:
        self._owner = owner
        self._infos = infos
        self._calls_setattr = os.environ.get("FSDP_USE_UNSAFE_SETATTR") != "1"
        self._has_setattr = self._calls_setattr and any(has_own_setattr(module) for module, _ in self._all())

    def _all(self) -> Iterator[tuple[nn.Module, str]]:
        return (place for info in self._infos for place in info.places)

    def flat(self) -> nn.Parameter | None:
        """Return the flat parameter registered now."""
        return parameter_of(self._owner, FLAT_PARAM)

    def original(self, index: int) -> nn.Parameter | None:
        """Return the parameter registered now in the first place of a part."""
        return parameter_of(self._infos[index].module, self._infos[index].name)

    def clear(self) -> None:
        """Remove the parameters of all parts."""
        for module, name in self._all():
            del module._parameters[name]

    def put(self, params: Sequence[nn.Parameter]) -> None:
        """Register a parameter for each part."""
        for info, param in zip(self._infos, params, strict=True):
            if self._calls_setattr:
                info.register(param)
                continue
            for module, name in info.places:
                put_parameter(module, name, param)

    def put_flat(self, flat: nn.Parameter, away: Sequence[torch.Tensor]) -> None:
        """Register ``flat`` on the wrapped module and set a placeholder for each part as an attribute."""
        set_own_parameter(self._owner, FLAT_PARAM, flat)
        for info, placeholder in zip(self._infos, away, strict=True):
            for module, name in info.places:
                vars(module)[name] = placeholder

    def expose(self, params: Sequence[nn.Parameter]) -> None:
        """Set a parameter for each part as an attribute, not registered."""
        for info, param in zip(self._infos, params, strict=True):
            for module, name in info.places:
                if self._has_setattr and has_own_setattr(module):
                    setattr(module, name, param)
                    module._parameters.pop(name, None)  # it must not be a parameter of the module
                vars(module)[name] = param

    def replace(
        self,
        params: Sequence[nn.Parameter | None],
        module_of: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        """Register a parameter for each part on ``module_of(module)`` of its modules, in place of what is there."""
        drop_own_parameter(module_of(self._owner), FLAT_PARAM)
        for info, param in zip(self._infos, params, strict=True):
            for module, name in info.places:
                vars(module_of(module)).pop(name, None)
                module_of(module)._parameters[name] = param

    def lend(self, params: Sequence[nn.Parameter | None]) -> None:
        """Register temporary parameters in place of what is there; None leaves a part without one."""
        self.replace(params)
        if self._has_setattr:
            for info, param in zip(self._infos, params, strict=True):
                if param is not None:
                    info.register(param)
