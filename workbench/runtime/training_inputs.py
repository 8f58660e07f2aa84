"""What the first training forwards got, so that ``lint`` sees ranks that train on the same batches of a DataLoader.

Only inputs tell it: whatever rows a loader draws, a program may give each rank its own part of them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.hooks import RemovableHandle

from workbench.engine._torch import is_fake
from workbench.models.sharded_model import checksum

_MAX_FORWARDS = 4


@dataclass(frozen=True)
class IteratedLoader:
    """A loader, which may be gone: an iterator of it needs it no more.

    Attributes:
        number: its id.
        loader: the loader.
        dataset: the class of its data set.
        is_stream: whether that is an IterableDataset.
        splits_rows: whether its sampler gives each rank its own rows.
    """

    number: int
    loader: weakref.ref[DataLoader[Any]]
    dataset: str
    is_stream: bool
    splits_rows: bool


@dataclass
class LoaderInputs:
    """Inputs of a model while a loader was iterated.

    Attributes:
        iterated: the loader.
        digests: of the inputs of its first forwards since, at most 4.
        since_ns: time after the first of them.
    """

    iterated: IteratedLoader
    digests: list[int] = field(default_factory=list)
    since_ns: int = field(default_factory=time.monotonic_ns)


def splits_rows(sampler: object) -> TypeGuard[DistributedSampler[Any]]:
    """Return whether a sampler gives each rank its own rows."""
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


class TrainingInputs:
    """Notes the inputs of each outermost module that trains while exactly one DataLoader is iterated.

    Those are positional: of a model that is called with keywords, the inputs of its first modules tell as much.

    Args:
        is_aside: whether the running code is the workbench's own.
    """

    def __init__(self, is_aside: Callable[[], bool]) -> None:
        self._is_aside = is_aside
        self._handle: RemovableHandle | None = None
        self.forget()

    def forget(self) -> None:
        """Forget what was noted so far, and the iterators."""
        self.remove()
        self._is_full = False
        self._iterators: weakref.WeakKeyDictionary[object, IteratedLoader] = weakref.WeakKeyDictionary()
        self._found: weakref.WeakKeyDictionary[nn.Module, LoaderInputs] = weakref.WeakKeyDictionary()

    def iterated(self, loader: DataLoader[Any], iterator: object) -> None:
        """Note an iterator of a loader; the inputs of forwards are noted from then on."""
        rows, sampler = loader.dataset, loader.sampler
        self._iterators[iterator] = IteratedLoader(
            number=id(loader),
            loader=weakref.ref(loader),
            dataset=type(rows).__name__,
            is_stream=isinstance(rows, IterableDataset),
            splits_rows=splits_rows(sampler),
        )
        self._watch()

    def watch_again(self) -> None:
        """Note the inputs of the next forwards instead of those so far."""
        self._found.clear()
        self._is_full = False
        if self._iterators:
            self._watch()

    def of(self, model: nn.Module) -> LoaderInputs | None:
        """Return the inputs of a model, or of what contains it; None if they are unknown, or all the same."""
        holders = (each for each in tuple(self._found) if any(module is model for module in each.modules()))
        holder = next(holders, None) or next((each for each in model.modules() if each in self._found), None)
        found = None if holder is None else self._found[holder]
        return found if found is not None and len(set(found.digests)) > 1 else None

    def remove(self) -> None:
        """Note no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _watch(self) -> None:
        if self._handle is None and not self._is_full:
            self._handle = register_module_forward_hook(self._after_forward)  # torch leaves a mark of one with kwargs

    def _after_forward(self, *call: Any) -> None:  # noqa: ANN401 - of a hook
        """Note a forward; a fault of this ends the notes, and not the program."""
        try:
            self._note(*call)
        except Exception:  # noqa: BLE001 - whatever it is, the program goes on
            self._found.clear()
            self._is_full = True
            self.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], _: object) -> None:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and module.training) or self._is_aside():
            return
        loaders = {each.number: each for each in self._iterators.values()}
        tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
        if any(each.requires_grad or isinstance(each, DTensor) or each.is_meta or is_fake(each) for each in tensors):
            return  # within a model, or without values
        if not tensors or len(loaders) != 1 or not any(p.requires_grad for p in module.parameters()):
            return
        for each in module.modules():  # their hooks came before
            if each is not module:
                self._found.pop(each, None)
        (iterated,) = loaders.values()
        found = self._found.setdefault(module, LoaderInputs(iterated))
        found.digests.append(hash(tuple((*each.shape, checksum(each)) for each in tensors)))
        if len(found.digests) == _MAX_FORWARDS:  # each hook costs a little time, in each module
            self._is_full = True
            self.remove()
