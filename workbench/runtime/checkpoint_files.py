"""The folders of checkpoints: their names, what makes one whole, and reading them without running any code of theirs.

``%fsdp save runs/a`` at step 40 makes ``runs/a/step-40``, a checkpoint of ``torch.distributed.checkpoint`` with one
more file, :data:`RECORD`. While it is written it has another name (:data:`PARTIAL`). The rename is the last thing that
happens, so a folder with the name of a checkpoint is whole.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from workbench.base.text_formats import plural
from workbench.errors import UsageError

RECORD = "workbench.json"
"""The file of a checkpoint that says what is in it."""

METADATA = ".metadata"
"""The file that makes a folder a checkpoint of ``torch.distributed.checkpoint``."""

PARTIAL = ".saving-"
"""Begins the name of the folder of a checkpoint that is being written, or whose writing was interrupted."""

_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """The content of a checkpoint, as JSON in :data:`RECORD`.

    Attributes:
        step: number of steps that led to it.
        world_size: number of ranks that saved it.
        saved_ns: when, in nanoseconds since 1970.
        models: the variables of models.
        optimizers: those of optimizers.
        others: those of everything else with a state dict.
        files: bytes of each file.
    """

    step: int
    world_size: int
    saved_ns: int
    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    others: tuple[str, ...]
    files: Mapping[str, int]

    @classmethod
    def read(cls, folder: Path) -> CheckpointRecord | None:
        """Return that of a folder; None if it has none, as a checkpoint that the workbench did not save.

        Raises:
            UsageError: it is damaged, or files are missing or have other sizes.
        """
        try:
            data = json.loads((folder / RECORD).read_text())
            lists = {name: tuple(map(str, data[name])) for name in ("models", "optimizers", "others")}
            numbers = {name: int(data[name]) for name in ("step", "world_size", "saved_ns")}
            found = cls(**lists, **numbers, files={str(name): int(size) for name, size in data["files"].items()})  # type: ignore[arg-type]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise UsageError(f"{folder / RECORD} is damaged ({type(error).__name__}: {error})") from None
        for name, size in found.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != size:
                here = plural(path.stat().st_size, "byte") if path.is_file() else "no file"
                verb = "is" if here in {"no file", "1 byte"} else "are"
                raise UsageError(
                    f"{path} was saved with {size:,} bytes, and there {verb} {here}: the checkpoint is damaged"
                )
        return found

    def write(self, folder: Path) -> None:
        """Write it into a folder, down to the disk."""
        with (folder / RECORD).open("x") as file:
            json.dump(asdict(self), file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- names


def free_name(folder: Path, step: int) -> str:
    """Return the name of a new checkpoint in a folder: ``step-40``; ``step-40-2`` if that is taken."""
    taken = {path.name for path in folder.iterdir()}
    names = (f"step-{step}{f'-{number}' if number > 1 else ''}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / METADATA).is_file()]
    return sorted(found, key=_age)


def _age(path: Path) -> tuple[int, ...]:
    try:
        record = CheckpointRecord.read(path)
    except UsageError:
        return (-1,)
    numbers = _NAME.fullmatch(path.name)
    assert numbers is not None  # the caller has chosen it by its name
    return (0 if record is None else record.saved_ns, *(int(each or 1) for each in numbers.groups()))


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path means: it, or the newest whole one in it.

    Raises:
        UsageError: there is none; the message names the newest whole one nearby, if there is one.
    """
    try:
        if (path / METADATA).is_file() and not path.name.startswith(PARTIAL):
            return path
        nearby = path if path.is_dir() else path.parent
        whole = whole_checkpoints(nearby) or (whole_checkpoints(path.parent) if path.name.startswith(PARTIAL) else [])
        partial = sorted(each.name for each in nearby.iterdir() if each.name.startswith(PARTIAL))
    except OSError:
        whole, partial = [], []
    if whole and path.is_dir() and not path.name.startswith(PARTIAL):
        return whole[-1]
    instead = f"; the newest whole one is {whole[-1]}" if whole else ""
    if path.name.startswith(PARTIAL):
        raise UsageError(f"{path} was interrupted while it was saved, so it is not whole{instead}")
    if not path.exists():
        raise UsageError(f"there is no folder {path}{instead}")
    if partial:
        raise UsageError(f"{path} has no whole checkpoint: saving {partial[-1]} was interrupted")
    raise UsageError(f"{path} is no checkpoint: it has no file {METADATA}, and no folder like step-40 with one")


def words_of(error: OSError, folder: Path) -> str:
    """Return why files cannot be written into a folder, and what to do, as text."""
    what = f"cannot write into {folder}"
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return f"{what}: the disk is full; free some space or save into another folder"
        case errno.EROFS | errno.EACCES | errno.EPERM:
            return f"{what}: it is read-only; save into another folder"
        case errno.ENOENT:
            return f"{what}: there is no folder {folder.parent}; make it first, on the host of the ranks"
        case errno.ENOTDIR | errno.EEXIST:
            return f"{what}: it is a file"
        case _:
            return f"{what}: {error.strerror or error}"


# ---- reading


_FORMAT = "torch.distributed.checkpoint."
_CLASSES = {
    f"{_FORMAT}metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_FORMAT}filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}
"""The classes in the metadata of a checkpoint: none of them runs code of the file."""


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the objects of a checkpoint's metadata, and no others."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - a class or function
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """Reads a checkpoint; its metadata, which is a pickle, may hold only what the format needs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.metadata = _read_metadata(folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # noqa: ANN401 - as of the base
        """Return the metadata, read once."""
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read tensors and values; errors as of the base."""
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            if Path(name).name != name:
                raise UsageError(f"{self._folder} refers to {name}, a file outside of it")
        return super().read_data(plan, planner)


def _read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint.

    Raises:
        UsageError: it cannot be read, or is something else.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file).load()
    except Exception as error:  # noqa: BLE001 - damaged bytes may raise anything
        raise UsageError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(found, Metadata):
        raise UsageError(f"{path} is no metadata of a checkpoint, but a {type(found).__name__}")
    return found


class SafePlanner(DefaultLoadPlanner):
    """Fills a state dict; values that are not tensors may hold only what ``torch.load(weights_only=True)`` allows."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value.

        Raises:
            UsageError: it holds something else.
        """
        key = read_item.dest_index.fqn
        into: Any = self.original_state_dict
        *above, last = self.mappings[key]
        for part in above:
            into = into[part]
        into[last] = loaded(value, key)


def loaded(file: io.BytesIO, name: str) -> Any:  # noqa: ANN401 - plain data
    """Return the plain data in a file of ``torch.save``.

    Raises:
        UsageError: it holds something that could run code.
    """
    try:
        return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{name} of the checkpoint holds more than tensors and plain data ({reason})") from None


def dumped(data: object, what: str) -> bytes:
    """Return plain data as bytes of ``torch.save``.

    Raises:
        UsageError: :func:`loaded` could not read it again.
    """
    file = io.BytesIO()
    try:
        torch.save(data, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, AttributeError, TypeError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{what} holds more than tensors and plain data, which a checkpoint cannot hold safely ({reason}); "
            "let its state_dict() return numbers, text, lists, dicts and tensors"
        ) from None
    return file.getvalue()


def partial_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of interrupted checkpoints in a folder."""
    yield from (path for path in folder.iterdir() if path.name.startswith(PARTIAL) and path.is_dir())


def now_ns() -> int:
    """Return the time of day, in nanoseconds since 1970."""
    return time.time_ns()
