"""Checkpoints that ``torch.load`` reads into the memory of this process, and the models that take them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as of_models
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.serialization import config

from workbench.engine._torch import is_fake
from workbench.models.patches import RESULT, Patches, Watching

_BYTES = "a buffer"
"""The name of a checkpoint that was read from no file."""


@dataclass(eq=False)
class ReadFile:
    """A checkpoint in memory.

    Attributes:
        path: of its file; without one, :data:`_BYTES`.
        num_elements: elements of its whole tensors that ``torch.load`` has allocated.
        is_taken: whether a model has taken tensors of it.
    """

    path: str
    num_elements: int = 0
    is_taken: bool = False


@dataclass(frozen=True)
class TakenTensors:
    """The tensors that a model has taken from checkpoints in memory.

    Attributes:
        paths: of their files.
        num_elements, num_bytes: of the tensors.
    """

    paths: tuple[str, ...]
    num_elements: int
    num_bytes: int

    @property
    def words(self) -> str:
        """Bytes and files, for a sentence."""
        return f"{self.num_bytes:,} B of {', '.join(map(os.path.basename, self.paths))}"


class CheckpointReads:
    """Notes, while it is installed, which models take whole tensors that ``torch.load`` has allocated.

    Tensors that are mapped from the file, on the meta device, or shards do not count. Storages are remembered by weak
    references: nothing lives longer, and nothing is added to the tensors, which the user may save again.

    Attributes:
        taken: by module: what it has taken last.
        on_read: called with what has just been done: a checkpoint was read, or a model has taken one.
    """

    def __init__(self) -> None:
        self.taken: weakref.WeakKeyDictionary[nn.Module, TakenTensors] = weakref.WeakKeyDictionary()
        self.on_read: Callable[[str], object] = lambda _: None
        self._files: dict[StorageWeakRef, ReadFile] = {}
        self._patches = Patches("checkpoints that are read are")

    def install(self) -> CheckpointReads:
        """Note from now on."""
        self._patches.wrap(torch, "load", self._reading)
        self._patches.wrap(nn.Module, "load_state_dict", self._taking)
        self._patches.wrap(of_models, "set_model_state_dict", self._taking)
        return self

    def remove(self) -> None:
        """Note no more."""
        self._patches.undo()

    def unclaimed(self) -> list[ReadFile]:
        """Return the checkpoints that are in memory and of which no model has taken a tensor."""
        self._forget_freed()
        return [file for file in dict.fromkeys(self._files.values()) if not file.is_taken]

    def _reading(self, f: object = None, *_: object, mmap: bool | None = None, **__: object) -> Watching:
        result = yield RESULT
        is_mapped = config.load.mmap if mmap is None else mmap
        if not (is_mapped or isinstance(result, torch.Tensor)):  # one tensor may be a part of a sharded checkpoint
            self._note_read(result, f)

    def _note_read(self, result: object, f: object) -> None:
        self._forget_freed()
        file = ReadFile(os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else getattr(f, "name", _BYTES))
        leaves = tree_leaves(result)
        modules = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
        for tensor in _allocated([*leaves, *(param for module in modules for param in module.parameters())]):
            file.num_elements += tensor.numel()
            self._files[StorageWeakRef(tensor.untyped_storage())] = file
        for module in modules:
            self._note_taken(module, self._of_files(module.parameters()))
        if file.num_elements:
            self.on_read(f"reading {os.path.basename(file.path)}")

    def _taking(self, *args: object, **kwargs: object) -> Watching:
        given = [*args, *kwargs.values()]
        model = next((each for each in given if isinstance(each, nn.Module)), None)
        state = next((each for each in given if isinstance(each, Mapping)), {})
        taken = self._of_files(state.values())  # the call may change the state, and free its tensors
        yield
        if model is not None:
            self._note_taken(model, taken)
            if taken is not None:
                self.on_read(f"loading {type(model).__name__}")

    def _of_files(self, values: Iterable[object]) -> TakenTensors | None:
        """Return the tensors among these that ``torch.load`` has allocated; None if there are none."""
        found = [(tensor, file) for tensor in _allocated(values) if (file := self._file_of(tensor)) is not None]
        for _, file in found:
            file.is_taken = True
        return (
            TakenTensors(
                tuple(sorted({file.path for _, file in found})),
                sum(tensor.numel() for tensor, _ in found),
                sum(tensor.nbytes for tensor, _ in found),
            )
            if found
            else None
        )

    def _note_taken(self, model: nn.Module, taken: TakenTensors | None) -> None:
        if taken is None:
            self.taken.pop(model, None)
        else:
            self.taken[model] = taken

    def _file_of(self, tensor: torch.Tensor) -> ReadFile | None:
        return self._files.get(StorageWeakRef(tensor.untyped_storage()))

    def _forget_freed(self) -> None:
        self._files = {ref: file for ref, file in self._files.items() if not ref.expired()}


def _allocated(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the whole tensors among values that have memory."""
    for value in values:
        if (
            isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.layout is torch.strided
            and not (value.is_meta or is_fake(value))
        ):
            yield value
