"""Modules and parameters that a wrapper ignores."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from workbench.engine.classic.flat_param import FlatParameter


class IgnoredStates:
    """Modules and parameters that a wrapper leaves as they are.

    Attributes:
        modules: the ignored modules and all modules in them.
        params: parameters of these modules, and individually ignored ones.
    """

    def __init__(self, modules: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> None:
        self.modules = {m for module in modules for m in module.modules()}
        own = (p for m in self.modules for p in m.parameters(recurse=False) if not isinstance(p, FlatParameter))
        self.params = {*params, *own}

    @property
    def ids(self) -> frozenset[int]:
        """Ids of the parameters and of the modules' buffers."""
        buffers = (b for m in self.modules for b in m.buffers(recurse=False))
        return frozenset(map(id, (*self.params, *buffers)))

    @classmethod
    def of(cls, module: nn.Module, modules: object, states: object) -> IgnoredStates:
        """Return the ignored states for the arguments ``ignored_modules`` and ``ignored_states``.

        Raises:
            TypeError: an argument contains something other than modules or parameters.
            ValueError: both are given, or the wrapped module itself is ignored.
        """
        if modules is not None and states is not None:
            raise ValueError("FullyShardedDataParallel takes ignored_modules or ignored_states, not both")
        if states is None:
            given = _listed("ignored_modules", modules, (nn.Module,), "modules")
        else:
            given = _listed("ignored_states", states, (nn.Module, nn.Parameter), "modules or parameters")
        if any(one is module for one in given):
            raise ValueError("the wrapped module itself is ignored; leave the wrapper out instead")
        named = [one for one in given if isinstance(one, nn.Parameter)]
        return cls([one for one in given if isinstance(one, nn.Module)], named)


def _listed(what: str, given: object, kinds: tuple[type, ...], allowed: str) -> list[object]:
    if given is None:
        return []
    if isinstance(given, (torch.Tensor, nn.Module)) or not isinstance(given, Iterable):
        raise TypeError(f"{what} takes a list or a set, got a {type(given).__name__}: put it into [...]")
    found = list(given)
    wrong = [one for one in found if not isinstance(one, kinds)]
    if wrong:
        raise TypeError(f"{what} takes {allowed}; it contains a {type(wrong[0]).__name__}")
    return found
