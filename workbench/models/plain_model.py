"""A plain model that a command shards with an engine of torch, which changes nothing if it is refused."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from workbench.engine.module_names import named_params
from workbench.protocol.policy import DTYPES


@dataclass(frozen=True)
class PlainModel:
    """A plain model, and what of it a command shards.

    Attributes:
        model: the plain model.
        inner: modules in it that become units, innermost first.
        ignored: parameters that stay whole.
        mesh: the mesh over which it is sharded.
        kept: the policy's ``param_dtype_override_fn``.
    """

    model: nn.Module
    inner: tuple[nn.Module, ...]
    ignored: tuple[nn.Parameter, ...]
    mesh: DeviceMesh
    kept: Callable[[nn.Parameter], torch.dtype | None] | None = None

    @property
    def ignored_names(self) -> set[str]:
        """Names of the ignored parameters in the model, while it is plain."""
        left_out = {id(param) for param in self.ignored}
        return {name for name, param in named_params(self.model, repeats=True) if id(param) in left_out}


@contextmanager
def unchanged_on_error(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """If the body raises, restore the modules, parameters and optimizers, which torch then leaves half changed."""
    modules = [
        (module, type(module), {name: (value, _copied(value)) for name, value in vars(module).items()})
        for module in model.modules()
    ]
    values = [(param, param.data) for param in model.parameters()]
    groups = [(group, list(group["params"])) for optimizer in optimizers for group in optimizer.param_groups]
    states = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    try:
        yield
    except BaseException:
        for module, cls, attributes in modules:
            module.__class__ = cls
            vars(module).clear()
            for name, (value, content) in attributes.items():
                if isinstance(value, dict):  # the same object: handles of hooks refer to it
                    value.clear()
                    value.update(content)
                vars(module)[name] = value
        for param, data in values:
            param.data = data
        for group, params in groups:
            group["params"] = params
        for optimizer, state in states:
            optimizer.state.clear()
            optimizer.state.update(state)
        raise


def _copied(value: object) -> Any:  # noqa: ANN401 - a dict, or nothing
    return dict(value) if isinstance(value, dict) else None


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of the user notation ``name``; None if it is empty."""
    return getattr(torch, DTYPES[name]) if name else None


@contextmanager
def warnings_in_plain_words() -> Iterator[None]:
    """Print the warnings of the body, each message once, without the source line of ours that triggered it."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for message in dict.fromkeys(str(each.message) for each in caught):
        sys.stderr.write(f"{message}\n")
