"""Checkpoints that this process reads or maps, and the models that take them from its memory."""

from __future__ import annotations

import bisect
import inspect
import json
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
from workbench.engine.backends.memory_aliasing import address_of
from workbench.models.patches import RESULT, Patches, Watching

_SAFETENSORS = ".safetensors"
_MAPS = "/proc/self/maps"
BUILDING, SHARDING = "building", "sharding"
"""Parts of loading; others name a file or a model."""

_MAKES_MODELS = "from_pretrained"
_TRAIN = nn.Module.train.__code__  # calls itself for the parts of a module
_MAX_FRAMES = 8  # from the watcher to the function that made the model, with the methods that transformers overrides

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
        is_pretrained: whether ``from_pretrained`` has made the model.
    """

    paths: tuple[str, ...]
    num_elements: int
    num_bytes: int
    is_pretrained: bool = False

    @property
    def words(self) -> str:
        """Bytes and files, for a sentence."""
        return f"{self.num_bytes:,} B of {', '.join(map(os.path.basename, self.paths))}"


class CheckpointReads:
    """Notes, while it is installed, which models take whole tensors of a checkpoint that are in memory.

    These are tensors that ``torch.load`` has allocated, and copies of those in a file, such as in another dtype: by
    their shapes, as a copy does not know its origin. Tensors that are mapped from the file, as those of safetensors
    are, on the meta device, or shards do not count. Of a model that ``from_pretrained`` makes, as in transformers and
    diffusers, all parameters count that are not mapped, at once or after a later cast of the model. Storages are
    remembered by weak references: nothing lives longer, and nothing is added to the tensors, which the user may save
    again.

    Attributes:
        taken: by module: what it has taken last.
        on_read: called with what has just been done: the program has built what it builds before it reads, a
            checkpoint was read, or a model has taken or broadcast one.
    """

    def __init__(self) -> None:
        self.taken: weakref.WeakKeyDictionary[nn.Module, TakenTensors] = weakref.WeakKeyDictionary()
        self.on_read: Callable[[str], object] = lambda _: None
        self._files: dict[StorageWeakRef, ReadFile] = {}
        self._pretrained: weakref.WeakKeyDictionary[nn.Module, tuple[str, ...]] = weakref.WeakKeyDictionary()  # mapped
        self._paths: dict[torch.Size, str] = {}  # of the newest file, not taken yet, that has a tensor of a shape
        self._has_read = False
        self._patches = Patches("checkpoints that are read are")

    def install(self) -> CheckpointReads:
        """Note from now on."""
        self._patches.wrap(torch, "load", self._reading)
        self._patches.wrap(torch.UntypedStorage, "from_file", self._mapping)
        self._patches.wrap(nn.Module, "load_state_dict", self._taking)
        self._patches.wrap(of_models, "set_model_state_dict", self._taking)
        self._patches.wrap(nn.Module, "train", self._evaluating)
        for cast in ("to", "float", "half", "bfloat16", "double"):
            self._patches.wrap(nn.Module, cast, self._casting)
        return self

    def remove(self) -> None:
        """Note no more."""
        self._patches.undo()

    def unclaimed(self) -> list[ReadFile]:
        """Return the checkpoints that are in memory and of which no model has taken a tensor."""
        self._forget_freed()
        return [file for file in dict.fromkeys(self._files.values()) if not file.is_taken]

    def _reading(self, f: object = None, *_: object, mmap: bool | None = None, **__: object) -> Watching:
        self._note_built()
        result = yield RESULT
        if isinstance(result, torch.Tensor):  # it may be a part of a sharded checkpoint
            return
        path = os.path.abspath(f) if isinstance(f, (str, os.PathLike)) else getattr(f, "name", _BYTES)
        leaves = tree_leaves(result)
        self._paths.update({tensor.shape: path for tensor in _allocated(leaves)})
        if not (config.load.mmap if mmap is None else mmap):
            self._note_read(leaves, ReadFile(path))

    def _mapping(self, filename: str | os.PathLike[str], *_: object, **__: object) -> Watching:
        self._note_built()
        yield
        path = os.path.abspath(filename)
        if path.endswith(_SAFETENSORS):
            self._paths.update(dict.fromkeys(_shapes_in(path), path))

    def _note_built(self) -> None:
        if not self._has_read:
            self._has_read = True
            self.on_read(BUILDING)

    def _note_read(self, leaves: Iterable[object], file: ReadFile) -> None:
        self._forget_freed()
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
            if any(isinstance(each, of_models.StateDictOptions) and each.broadcast_from_rank0 for each in given):
                self.on_read(f"broadcasting {type(model).__name__}")
            elif taken is not None:
                self.on_read(f"loading {type(model).__name__}")

    def _evaluating(self, model: nn.Module, mode: bool = True) -> Watching:
        """Note the model that ``from_pretrained`` has made: as documented, it sets it to evaluation at its end."""
        yield
        if not mode and _is_called_by(_MAKES_MODELS):
            paths, self._paths = tuple(sorted({*self._paths.values()})), {}
            self._note_pretrained(model, paths or (_BYTES,))

    def _casting(self, model: nn.Module, *_: object, **__: object) -> Watching:
        """Note the mapped models in one whose tensors are copied by a cast."""
        yield
        for module in [*model.modules()] if self._pretrained else ():
            if module in self._pretrained:
                self._note_pretrained(module, self._pretrained[module])

    def _note_pretrained(self, model: nn.Module, paths: tuple[str, ...]) -> None:
        params = [param for param in _allocated(model.parameters()) if param.is_cpu]
        if not params:
            return
        copied = list(_not_mapped(params))
        num_elements = sum(param.numel() for param in copied)
        file = ReadFile(", ".join(paths), num_elements, is_taken=True)
        self._files.update(dict.fromkeys((StorageWeakRef(param.untyped_storage()) for param in copied), file))
        taken = TakenTensors(paths, num_elements, sum(param.nbytes for param in copied), is_pretrained=True)
        self._note_taken(model, taken if copied else None)
        if len(copied) < len(params):
            self._pretrained[model] = paths
        else:
            self._pretrained.pop(model, None)
        self.on_read(f"loading {type(model).__name__}")

    def _of_files(self, values: Iterable[object]) -> TakenTensors | None:
        """Return the tensors among these that are those of a checkpoint, or copies of them; None if there are none."""
        found: list[tuple[torch.Tensor, str]] = []
        others: list[torch.Tensor] = []
        for tensor in _allocated(values):
            file = self._file_of(tensor)
            if file is not None:
                file.is_taken = True
                found.append((tensor, file.path))
            elif tensor.shape in self._paths and tensor.is_cpu:
                others.append(tensor)
        found += [(tensor, self._paths[tensor.shape]) for tensor in _not_mapped(others)]
        taken = {*(path for _, path in found), *(self._paths[tensor.shape] for tensor in others)}
        self._paths = {shape: path for shape, path in self._paths.items() if path not in taken}
        return (
            TakenTensors(
                tuple(sorted({path for _, path in found})),
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


def _is_called_by(name: str) -> bool:
    """Return whether a function of that name sets the mode of a whole module, not of one that is part of it."""
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        frame = frame and frame.f_back
        if frame is None or frame.f_code is _TRAIN:
            return False
        if frame.f_code.co_name == name:
            return True
    return False


def _shapes_in(path: str) -> list[torch.Size]:
    """Return the shapes of the tensors in a file of safetensors: 8 bytes of size, then a header in JSON."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [torch.Size(row["shape"]) for name, row in header.items() if name != "__metadata__"]


def _not_mapped(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors whose memory is not mapped from a file; none where the system does not tell."""
    if not tensors or not os.path.exists(_MAPS):
        return
    with open(_MAPS) as maps:
        rows = [line.split(maxsplit=5) for line in maps]
    begins = [int(row[0].partition("-")[0], 16) for row in rows]  # ascending
    for tensor in tensors:
        row = rows[bisect.bisect(begins, address_of(tensor)) - 1]
        if not (row[5:] and row[5].startswith("/")):
            yield tensor


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
