"""Checks for tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from workbench.engine._torch import is_fake, storage_of

_BITS = 48
"""Of an offset into a storage without data."""


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's first element; for one without data, a number that stands for it."""
    if is_fake(tensor):
        return storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def storage_address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; for one without data, a number that stands for it."""
    return storage_of(tensor) << _BITS if is_fake(tensor) else tensor.untyped_storage().data_ptr()


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors begin at the same address."""
    return address_of(tensor) == address_of(other)


def is_same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same storage."""
    return storage_address(tensor) == storage_address(other)


def storages_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the storages behind the tensors, each storage counted once."""
    plain = [each for tensor in tensors for each in _plain_tensors(tensor)]
    return sum({storage_address(each): each.untyped_storage().nbytes() for each in plain}.values())


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor subclass consists of, or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(getattr(tensor, name))
