"""Memory for full parameters that can be freed while tensors still point into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from workbench.engine._torch import allow_reading, forbid_reading
from workbench.engine.backends.page_pool import SparePages


class FullMemory(Protocol):
    """Memory that can be freed while tensors still point into it.

    Attributes:
        tensor: ``[numel]``; empty at first.
    """

    tensor: torch.Tensor

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which views of :attr:`tensor` can be made although it is empty."""

    def fill(self, spare: SparePages) -> None:
        """Make the memory writable, from spare pages if there are any; its contents are unspecified."""

    def empty(self, spare: SparePages) -> None:
        """Free the memory; later reads return NaN or raise an error."""


class ResizedMemory:
    """A storage that is resized to free and refill it; the device's allocator caches the memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_bytes = numel * dtype.itemsize
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._shrink()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Return a context in which views of :attr:`tensor` can be made although it is empty."""
        self._grow()
        yield
        self._shrink()

    def fill(self, _spare: SparePages) -> None:
        """Make the memory writable; its contents are unspecified."""
        self._grow()

    def empty(self, _spare: SparePages) -> None:
        """Free the memory; later reads raise an error."""
        self._shrink()

    def _grow(self) -> None:
        if not self.tensor.is_meta:
            allow_reading(self.tensor)
            self.tensor.untyped_storage().resize_(self._num_bytes)

    def _shrink(self) -> None:
        if not self.tensor.is_meta:
            self.tensor.untyped_storage().resize_(0)
            forbid_reading(self.tensor, "a full parameter was read after its unit was resharded")
