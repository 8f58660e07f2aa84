"""Bytes of all tensors of a process while a step runs, independent of what an engine announces."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.models import garbage
from workbench.models._torch_private import DispatchMode, local_of


class TensorMemory(DispatchMode):
    """Sums the storages of tensors after each operation within its body.

    Storages count as long as they exist, those that autograd holds too, if a tensor of them existed at the begin, or
    was an input or an output of an operation since.

    Attributes:
        begin_bytes: bytes at the begin.
        peak_bytes: the most bytes after any operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor):
                self._add(each)
        self.begin_bytes = self.peak_bytes = self.num_bytes()

    def num_bytes(self) -> int:
        """Return the bytes that exist now."""
        return sum(storage.nbytes() for storage in self._alive())

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        for key, weak in list(self._storages.items()):
            storage = weak()
            if storage is None:
                del self._storages[key]
            else:
                yield storage

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = local_of(tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a fake or functional tensor has none
            return
        self._storages[id(storage)] = weakref.ref(storage)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of any operation
        """Run an operation, and sum the storages after it."""
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, result)):
            if issubclass(type(each), torch.Tensor):
                self._add(each)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())
        return result


def tensor_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Run a step, and return the bytes of all tensors of this process before it, at its peak, and after it.

    Cycles of garbage are collected before and after, so that only what is held counts.
    """
    garbage.collect()
    with TensorMemory() as memory:
        step()
    garbage.collect()
    return {"before": memory.begin_bytes, "peak": memory.peak_bytes, "after": memory.num_bytes()}
