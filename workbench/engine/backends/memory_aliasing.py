"""Checks for tensors that share memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors begin at the same address."""
    return tensor.data_ptr() == other.data_ptr()


def is_same_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of the same storage."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def storages_nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the storages behind the tensors, each storage counted once."""
    storages = (plain.untyped_storage() for tensor in tensors for plain in _plain_tensors(tensor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a tensor subclass consists of, or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from _plain_tensors(getattr(tensor, name))
