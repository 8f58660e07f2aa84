"""Parameters and buffers in the memory that ``to_empty`` gave them, never written since."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine import refusal_text
from workbench.engine._torch import is_fake
from workbench.engine.full_param import local_tensor

_MADE = "_workbench_made_by_to_empty"
"""Attribute of a tensor: its version and digest then. A weak reference would keep torch from swapping the tensor."""

Place = tuple["weakref.ref[nn.Module]", str]
"""A module, and the name of a parameter in it."""

_ABSURD = 1e30
"""A value beyond this, or below its inverse and not 0, is no parameter: a pointer read as a number, for example."""


def at(place: Place) -> object:
    """Return what is at a place; None if there is nothing."""
    owner = place[0]()
    return None if owner is None else held(owner, place[1])


def held(owner: nn.Module, name: str) -> object:
    """Return what a module holds under a name, or None. It runs no property, as one may gather."""
    places: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers, vars(owner))
    return next((each[name] for each in places if name in each), None)


class LostTie(NamedTuple):
    """Places of one parameter that have several now.

    Attributes:
        places: the places.
        by: the call that replaced it.
    """

    places: tuple[Place, ...]
    by: str


class EmptiedTensors:
    """Marks each tensor that ``nn.Module.to_empty`` makes with its version and bytes, while it is installed.

    Attributes:
        lost_ties: ties that ``to_empty`` or ``load_state_dict(assign=True)`` undid.
    """

    def __init__(self) -> None:
        self._to_empty, self._load = nn.Module.to_empty, nn.Module.load_state_dict
        self.lost_ties: list[LostTie] = []

    def install(self) -> EmptiedTensors:
        """Mark tensors from now on."""
        self._to_empty, self._load = to_empty, load = nn.Module.to_empty, nn.Module.load_state_dict

        @functools.wraps(to_empty)
        def emptying(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - as the original
            with self._seeing_ties(module, "to_empty"):
                result = to_empty(module, *args, **kwargs)
            for tensor in (*module.parameters(), *module.buffers()):
                self.mark(tensor)
            return result

        @functools.wraps(load)
        def loading(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the original
            with self._seeing_ties(module, "load_state_dict(assign=True)"), _undone_if_half(module, load):
                return load(module, *args, **kwargs)

        nn.Module.to_empty = emptying  # type: ignore[method-assign,assignment]
        nn.Module.load_state_dict = loading  # type: ignore[method-assign,assignment]
        return self

    @contextmanager
    def _seeing_ties(self, module: nn.Module, by: str) -> Iterator[None]:
        """Note the ties that the body, a call ``by`` on a module, undoes."""
        tied = _tied(module)
        yield
        self.lost_ties = [tie for tie in self.lost_ties if all(owner() for owner, _ in tie.places)]
        self.lost_ties += [LostTie(places, by) for places in tied if len({id(at(place)) for place in places}) > 1]

    def remove(self) -> None:
        """Mark no more."""
        nn.Module.to_empty = self._to_empty  # type: ignore[method-assign]
        nn.Module.load_state_dict = self._load  # type: ignore[method-assign]

    @staticmethod
    def mark(tensor: torch.Tensor) -> None:
        """Mark a tensor as one that nothing has written yet."""
        setattr(tensor, _MADE, (tensor._version, digest(tensor)))

    @staticmethod
    def is_unwritten(tensor: torch.Tensor) -> bool:
        """Return whether a tensor certainly is as ``to_empty`` made it.

        Its version and its bytes are the same, and these bytes are no values that code would write. Equal bytes alone
        prove nothing: a write through ``.data`` leaves the version, and memory of an earlier model may have held the
        same values.
        """
        made = getattr(tensor, _MADE, None)
        is_same = made is not None and made == (tensor._version, digest(tensor))
        return is_same and _is_raw(local_tensor(tensor).detach(), is_vector=tensor.ndim < 2, of_param=_is_param(tensor))


@contextmanager
def _undone_if_half(module: nn.Module, load: Callable[..., object]) -> Iterator[None]:
    """Put back what a module had if the body, a ``load_state_dict``, assigns whole tensors to sharded parameters.

    torch's ``fully_shard`` raises then, when it meets the first of them, and can run no step after that.

    Raises:
        TypeError: it did; nothing is loaded.
    """
    names = {owner: name for name, owner in module.named_modules()}
    before = [(owner, name, tensor) for owner in names for name, tensor in _own_tensors(owner)]
    try:
        yield
    except AttributeError as error:
        now = {(owner, name): tensor for owner in names for name, tensor in _own_tensors(owner)}
        whole = [
            f"{names[owner]}.{name}".lstrip(".")
            for owner, name, tensor in before
            if isinstance(tensor, DTensor) and not isinstance(now.get((owner, name)), DTensor)
        ]
        if not whole:
            raise
        for owner, name, tensor in before:
            setattr(owner, name, tensor)
        load(module, {}, strict=False)  # has torch look at its parameters again
        raise TypeError(refusal_text.assigned_whole(whole[0])) from error


def _own_tensors(owner: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module itself, by name."""
    return [*owner.named_parameters("", False, False), *owner.named_buffers("", False, False)]


def _tied(module: nn.Module) -> list[tuple[Place, ...]]:
    """Return the places of each parameter that a module has at several."""
    places: dict[nn.Parameter, list[Place]] = {}
    for owner in module.modules():
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(param, []).append((weakref.ref(owner), name))
    return [tuple(found) for found in places.values() if len(found) > 1]


def _is_param(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _is_raw(local: torch.Tensor, *, is_vector: bool, of_param: bool) -> bool:
    """Return whether values are those of memory as it was allocated: all 0, not finite, or absurd.

    Vectors of zeros, such as biases, are usual parameters.
    """
    if local.is_meta or is_fake(local) or not local.numel():
        return False
    if not local.count_nonzero():
        return not (is_vector and of_param)
    if not local.is_floating_point():
        return False
    size = local.double().abs()
    return bool(((~size.isfinite()) | (size > _ABSURD) | ((size > 0) & (size < 1 / _ABSURD))).any())


def digest(tensor: torch.Tensor) -> int:
    """Return a checksum of this rank's bytes of a tensor: their sum, as words of 4 bytes where they divide it.

    0 for a tensor without bytes, such as one on the meta device or of a plan. The sum is taken on the tensor's device,
    and does not see an exchange of words; it sees that a tensor was drawn, trained or loaded differently.
    """
    local = local_tensor(tensor).detach()
    if local.is_meta or is_fake(local) or not local.numel() or local.layout is not torch.strided:
        return 0
    flat = local.contiguous().reshape(-1)
    words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
    return int(words.sum(dtype=torch.int64))
