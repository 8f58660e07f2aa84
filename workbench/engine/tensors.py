"""Tensors in what a module takes and returns (containers, dataclasses); in which mode the engine makes its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """Let autograd record nothing of ``function``.

    What it makes lasts: a later training step can use it, also if the caller is in inference mode.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(), torch.no_grad():
            return function(*args, **kwargs)

    return run


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, and in the attributes of objects that are none (dataclasses ...)."""
    todo, seen = [value], set()
    while todo:
        for leaf in tree_leaves(todo.pop()):
            if isinstance(leaf, torch.Tensor):
                yield leaf
            elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
                seen.add(id(leaf))
                todo.extend(_attributes(leaf))


def _attributes(value: object) -> list[object]:
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(getattr(value, "__dict__", {}).values())


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401 - any structure
    """Return ``value`` with ``change`` applied to every tensor in nested containers and dataclasses.

    ``value`` itself is returned where nothing changed.
    """
    if type(value) is dict and not value:
        return value
    if type(value) is tuple and all(isinstance(each, torch.Tensor) for each in value):  # most arguments: at every hook
        found = tuple(map(change, value))
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    leaves, spec = tree_flatten(value)
    changed = [_map_leaf(leaf, change) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return tree_unflatten(changed, spec)


def differentiable_in(value: object) -> list[torch.Tensor]:
    """Return the tensors that :func:`map_tensors` reaches in ``value`` and that need a gradient, in its order."""
    found: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_tensors(value, look)
    return found


def _map_leaf(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        old = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
        new = {name: map_tensors(value, change) for name, value in old.items()}
        if any(new[name] is not old[name] for name in old):
            return replace(leaf, **new)
    return leaf


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401 - any structure
    """Return ``value`` with its floating-point tensors cast to ``dtype``; None: as it is."""
    if dtype is None:
        return value
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)
