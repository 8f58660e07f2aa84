"""Tensors in a module's arguments and results (containers, dataclasses), and the grad mode for the engine's own."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import is_dataclass
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from workbench.engine._spmd_types import no_checks

P = ParamSpec("P")
R = TypeVar("R")


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` without autograd or type checks, and outside inference mode: training can use its tensors."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        outside = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with no_checks(), outside, torch.no_grad():
            return function(*args, **kwargs)

    return run


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield each tensor in nested containers, and in the attributes of objects, once."""
    return _find(value, _all_children)


def differentiable_in(value: object) -> list[torch.Tensor]:
    """Return the tensors that :func:`map_tensors` reaches in ``value`` and that need a gradient, each once."""
    return [tensor for tensor in _find(value, _children) if tensor.requires_grad]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401 - any structure
    """Return ``value`` with ``change`` applied once to every tensor in nested containers and dataclasses.

    Containers are dict, list, tuple, set, frozenset and deque, their subclasses, and nodes registered with torch's
    pytrees. Containers with a changed tensor are copied without calling their constructors, and keep their class and
    attributes; they may contain themselves. If nothing changes, ``value`` itself is returned.
    """
    if type(value) is dict and not value:
        return value
    if type(value) is tuple and all(isinstance(each, torch.Tensor) for each in value):  # the common case, in every hook
        found = tuple(map(change, value))
        return value if all(new is old for new, old in zip(found, value, strict=True)) else found
    old = list(_find(value, _children))
    new = list(map(change, old))
    if all(mine is theirs for mine, theirs in zip(new, old, strict=True)):
        return value
    return _Copy(old, new).of(value)


_CONTAINERS = (dict, list, tuple, set, frozenset, deque)

_BUILT_IN = frozenset({dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict})
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type, nn.Module, FunctionType, ModuleType)


def _find(value: object, children: Callable[[object], Sequence[object]]) -> Iterator[torch.Tensor]:
    todo, seen = [value], {}
    while todo:
        each = todo.pop()
        if isinstance(each, _ATOMS) or id(each) in seen:
            continue
        seen[id(each)] = each  # a reference, so that no other object gets its id
        if isinstance(each, torch.Tensor):
            yield each
        else:
            todo.extend(reversed(children(each)))


def _children(value: object) -> Sequence[object]:
    """Return the contents of a container or dataclass; empty for other objects."""
    if type(value) in _BUILT_IN:
        return _items(value)
    if _is_container(value):
        return [*_items(value), *_attributes(value).values()]
    nodes, _ = _registered(value)
    if nodes is not None:
        return nodes
    return list(_attributes(value).values()) if is_dataclass(value) else ()


def _all_children(value: object) -> Sequence[object]:
    """Return the contents of a container, or all attributes of another object."""
    return _children(value) or list(_attributes(value).values())


def _is_container(value: object) -> bool:
    """Return whether ``value`` is a built-in container or of a subclass; not a C struct such as torch.max's result."""
    return isinstance(value, _CONTAINERS) and not hasattr(type(value), "n_sequence_fields")


def _items(value: object) -> list[object]:
    base = _base(value)
    return list(base.values(value) if issubclass(base, dict) else base.__iter__(value))


def _base(value: object) -> Any:  # noqa: ANN401 - a class whose methods take ``value``
    """Return the built-in class that holds the items of a container."""
    return next(cls for cls in type(value).__mro__ if cls in _BUILT_IN)


def _registered(value: object) -> tuple[list[object] | None, TreeSpec | None]:
    """Return the children and spec of a node of torch's pytrees; None for both if ``value`` is not a node."""
    nodes, spec = tree_flatten(value, is_leaf=lambda each: each is not value)
    is_node = not (len(nodes) == 1 and nodes[0] is value)
    return (nodes, spec) if is_node else (None, None)


def _attributes(value: object) -> dict[str, object]:
    """Return an object's attributes in ``__dict__`` and slots; without ``__dict__`` if that is the object itself."""
    own = _own_dict(value)
    found = {} if own is value else dict(own)
    for cls in type(value).__mro__:
        for name in vars(cls) if "__slots__" in vars(cls) else ():
            slot = vars(cls)[name]
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    found[name] = slot.__get__(value)
    return found


def _own_dict(value: object) -> dict[str, object]:
    """Return ``__dict__`` without calling the class's ``__getattr__``; empty if there is none."""
    try:
        found: dict[str, object] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found


class _Copy:
    """Copies containers with replaced tensors; fills copies late where possible, so containers may hold themselves."""

    def __init__(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
        self._copies: dict[int, tuple[object, object]] = {
            id(mine): (mine, theirs) for mine, theirs in zip(old, new, strict=True)
        }
        self._empty: list[tuple[Any, Any]] = []

    def of(self, value: Any) -> Any:  # noqa: ANN401 - any structure
        """Return the copy of ``value``."""
        copied = self._copy(value)
        self._fill()
        return copied

    def _copy(self, value: Any) -> Any:  # noqa: ANN401
        if id(value) not in self._copies:
            if all(self._is_same(tensor) for tensor in _find(value, _children)):
                return value
            self._copies[id(value)] = value, value  # a tuple within itself via a pytree node stays
            self._copies[id(value)] = value, self._made(value)
        return self._copies[id(value)][1]

    def _is_same(self, tensor: torch.Tensor) -> bool:
        old, new = self._copies[id(tensor)]
        return new is old

    def _made(self, value: Any) -> Any:  # noqa: ANN401
        if _is_container(value):
            made = self._container(value)
        else:
            nodes, spec = _registered(value)
            if nodes is not None and spec is not None:
                copies = [self._copy(node) for node in nodes]
                self._fill()  # its constructor may read them
                return tree_unflatten(copies, spec)
            made = copy.copy(value)  # a dataclass
        self._empty.append((value, made))
        return made

    def _container(self, value: Any) -> Any:  # noqa: ANN401
        """Return a container of the class of ``value``: a tuple or frozenset with its items, others empty."""
        base = _base(value)
        if base in {tuple, frozenset}:
            return base.__new__(type(value), map(self._copy, base.__iter__(value)))
        made = base.__new__(type(value))
        if base is defaultdict:
            base.__init__(made, value.default_factory)
        elif base is deque:
            base.__init__(made, maxlen=value.maxlen)
        return made

    def _fill(self) -> None:
        while self._empty:
            value, made = self._empty.pop()
            if _is_container(value):
                self._put_items(value, made)
            if _own_dict(value) is value:
                made.__dict__ = made
            own = _own_dict(made)
            for name, each in _attributes(value).items():
                if name in _own_dict(value):
                    own[name] = self._copy(each)
                else:
                    object.__setattr__(made, name, self._copy(each))  # a slot; works for a frozen dataclass too

    def _put_items(self, value: Any, made: Any) -> None:  # noqa: ANN401
        base = _base(value)
        if issubclass(base, dict):
            for key, each in base.items(value):
                base.__setitem__(made, key, self._copy(each))
        elif base is set:
            base.update(made, map(self._copy, base.__iter__(value)))
        elif base not in {tuple, frozenset}:
            base.extend(made, map(self._copy, base.__iter__(value)))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:  # noqa: ANN401 - any structure
    """Return ``value`` with its floating-point tensors cast to ``dtype``; None: unchanged."""
    if dtype is None:
        return value
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)
