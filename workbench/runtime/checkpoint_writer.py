"""Writing a checkpoint: staged in memory while training waits, written by a thread while it goes on.

All ranks stage together: ``torch.distributed.checkpoint`` plans who writes what, into files in memory. Then a thread of
each rank writes its files without any collective, so training may issue its own. The threads meet in the file system:
each leaves a mark when its files are on the disk, and rank 0 renames the folder when all marks are there. So the
checkpoint is whole once it has its name, whatever is killed when. If a thread fails, rank 0 removes the folder.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.filesystem import FileSystemWriter as TorchWriter
from torch.distributed.checkpoint.state_dict_saver import save

from workbench.base.text_formats import format_bytes
from workbench.engine.cancellable_waits import cancellation
from workbench.errors import UsageError
from workbench.runtime.checkpoint_files import (
    PARTIAL,
    CheckpointRecord,
    free_name,
    now_ns,
    partial_folders,
    sync_folder,
    words_of,
)

CHUNK = 8 << 20
"""Bytes that are written between two looks at whether to go on."""

LOOK_S = 0.02
"""Time between two looks for the marks of other ranks, in seconds."""

STALL_S = 60.0
"""Time in seconds without a new byte or mark of any rank after which rank 0 gives a checkpoint up."""

_DONE, _FAILED = ".done-", ".failed-"

T = TypeVar("T")


def agree(make: Callable[[], T]) -> list[T]:
    """Return what ``make`` returns on each rank; collective.

    Raises:
        UsageError: on all ranks, if it raised UsageError on one; the message names the first such rank.
    """
    mine: tuple[str, Any]
    try:
        mine = "", make()
    except UsageError as error:
        mine = str(error), None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    failed = {rank: why for rank, (why, _) in enumerate(found) if why}
    if failed:
        first, why = next(iter(failed.items()))
        everywhere = len(failed) == len(found) and len(set(failed.values())) == 1
        raise UsageError(why if everywhere else f"rank {first}: {why}")
    return [value for _, value in found]


class MemoryFile(io.BytesIO):
    """A file in memory whose content outlives its closing."""

    def close(self) -> None:
        """Do nothing."""


class MemoryFiles(FileSystemBase):
    """Files in memory, by name: a file system for torch's writer."""

    def __init__(self) -> None:
        self.files: dict[str, MemoryFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a new file for writing."""
        del mode
        yield self.files.setdefault(os.fspath(path), MemoryFile())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return the name of a file: there are no folders."""
        del path
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        self.files[os.fspath(new_path)] = self.files.pop(os.fspath(path))

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path of a checkpoint."""
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: there are no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a name."""
        return bool(checkpoint_id)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether there is such a file."""
        return os.fspath(path) in self.files

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        del self.files[os.fspath(path)]


def write_chunk(file: io.FileIO, chunk: memoryview) -> None:
    """Write a part of a file; a fault may replace it."""
    while chunk:
        chunk = chunk[file.write(chunk) :]


@dataclass
class CheckpointWriter:
    """A checkpoint that this rank writes, together with the others.

    Attributes:
        target: its folder, once it is whole.
        partial: its folder until then.
        record: what is in it.
        rank: this rank.
        files: the contents of this rank's files.
        written: bytes that are written.
        blocked_s: time in seconds that training waited for it.
        error: why it failed; empty: it did not.
        is_cause: whether that happened on this rank.
    """

    target: Path
    partial: Path
    record: CheckpointRecord
    rank: int
    files: dict[str, MemoryFile]
    written: int = 0
    blocked_s: float = 0.0
    error: str = ""
    is_cause: bool = False
    _abandoned: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's files."""
        return sum(file.getbuffer().nbytes for file in self.files.values()) if self.files else self.written

    @property
    def is_running(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_abandoned(self) -> bool:
        """Whether it was given up on this rank, as by Ctrl-C."""
        return self._abandoned.is_set()

    @property
    def words(self) -> str:
        """How far it is, as text; empty if it is over."""
        if not self.is_running:
            return ""
        share = 100 * self.written // max(1, self.num_bytes)
        return f"saves {self.target}, {share} % written" if share < 100 else f"saves {self.target}, waits for all ranks"

    def start(self) -> CheckpointWriter:
        """Write in a thread."""
        name = f"workbench: save {self.target.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        return self

    @property
    def _failed_elsewhere(self) -> str:
        return f"saving {self.target} failed on another rank"

    def wait(self) -> None:
        """Wait until the checkpoint is whole; collective.

        Raises:
            UsageError: it failed, on all ranks; the message says why, and on which rank.
            StepAborted: this rank was aborted meanwhile; the checkpoint is given up.
        """
        self.wait_alone()
        errors = agree(lambda: (self.error, self.is_cause))
        causes = [f"rank {rank}: {why}" for rank, (why, is_cause) in enumerate(errors) if is_cause]
        for why in (*causes, *(why for why, _ in errors if why)):
            raise UsageError(f"{why}. Nothing was saved; older checkpoints are as they were")

    def wait_alone(self) -> None:
        """Wait until its thread has ended; errors as :meth:`wait`, but for that of the checkpoint."""
        since = time.monotonic()
        try:
            while self.is_running:
                cancellation.sleep(LOOK_S)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.blocked_s += time.monotonic() - since

    def abandon(self) -> None:
        """End the thread soon; rank 0 removes what was written."""
        self._abandoned.set()

    def _run(self) -> None:
        try:
            self._write()
            self._commit() if self.rank == 0 else self._follow()
        except OSError as error:
            self.is_cause = self.partial.exists()  # else rank 0 has removed it, as another rank has failed
            self.error = words_of(error, self.target.parent) if self.is_cause else self._failed_elsewhere
            with suppress(OSError):
                (self.partial / f"{_FAILED}{self.rank}").touch()
        except UsageError as error:
            self.error = str(error)
        finally:
            self.written, self.files = self.num_bytes, {}
            if self.rank == 0 and not self.target.exists():
                self._remove()

    def _write(self) -> None:
        for name, content in self.files.items():
            with (self.partial / name).open("xb", buffering=0) as file:
                view = content.getbuffer()
                for begin in range(0, len(view), CHUNK):
                    self._check()
                    chunk = view[begin : begin + CHUNK]
                    write_chunk(file, chunk)
                    self.written += len(chunk)
                os.fsync(file.fileno())
        (self.partial / f"{_DONE}{self.rank}").touch(exist_ok=False)

    def _check(self) -> None:
        if self._abandoned.is_set():
            raise UsageError(f"saving {self.target} was interrupted")

    def _commit(self) -> None:
        """Wait until the files of all ranks are on the disk; then give the checkpoint its name."""
        ranks, seen, since = set(range(self.record.world_size)), -1, time.monotonic()
        while True:
            self._check()
            found = {path.name: path for path in self.partial.iterdir()}
            missing = [rank for rank in ranks if f"{_DONE}{rank}" not in found]
            for rank in missing:
                if f"{_FAILED}{rank}" in found:
                    raise UsageError(self._failed_elsewhere)
            if not missing:
                break
            size = sum(path.stat().st_size for path in found.values()) + len(found)
            if size != seen:
                seen, since = size, time.monotonic()
            if time.monotonic() - since > STALL_S:
                raise UsageError(f"rank {missing[0]} wrote nothing of {self.target} for {STALL_S:.0f} s")
            self._abandoned.wait(LOOK_S)
        for rank in ranks:
            (self.partial / f"{_DONE}{rank}").unlink()
        sizes = {path.name: path.stat().st_size for path in self.partial.iterdir()}
        replace(self.record, files=sizes, saved_ns=now_ns()).write(self.partial)
        sync_folder(self.partial)
        self._check()
        self.partial.rename(self.target)
        sync_folder(self.target.parent)

    def _remove(self) -> None:
        """Remove the folder under another name, so that threads of other ranks that still write make no file in it."""
        gone = self.partial.with_name(f"{self.partial.name}.gone")
        with suppress(OSError):
            self.partial.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _follow(self) -> None:
        """Wait until rank 0 has renamed the folder, or given up."""
        while not self.target.exists():
            self._check()
            if not self.partial.exists() and not self.target.exists():
                raise UsageError(self._failed_elsewhere)
            self._abandoned.wait(LOOK_S)


def begin_checkpoint(folder: Path, record: CheckpointRecord, state: dict[str, Any]) -> CheckpointWriter:
    """Stage a checkpoint and return its writer, not started; collective.

    Args:
        folder: where it becomes a folder.
        record: what is in it.
        state: this rank's state dict.

    Raises:
        UsageError: it cannot be written there; nothing is left behind.
    """
    rank = dist.get_rank()
    since = time.monotonic()
    name, token = agree(lambda: _make_folder(folder, record.step) if rank == 0 else ("", ""))[0]
    partial = folder / f"{PARTIAL}{name}-{token}"
    try:
        agree(lambda: _check_seen(partial))
        memory = MemoryFiles()
        writer = TorchWriter(folder / name, sync_files=False)
        writer.fs = memory  # type: ignore[assignment]
        save(state, storage_writer=writer)
        num_bytes = sum(agree(lambda: sum(file.getbuffer().nbytes for file in memory.files.values())))
        agree(lambda: _check_space(folder, num_bytes))
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return CheckpointWriter(
        target=folder / name,
        partial=partial,
        record=record,
        rank=rank,
        files=memory.files,
        blocked_s=time.monotonic() - since,
    )


def _make_folder(folder: Path, step: int) -> tuple[str, str]:
    """Make the folder of a new checkpoint on rank 0; return its name, and the token in its name until it is whole."""
    token = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir(exist_ok=True)
        for path in partial_folders(folder):
            if _is_abandoned(path.name):
                shutil.rmtree(path, ignore_errors=True)
        name = free_name(folder, step)
        (folder / f"{PARTIAL}{name}-{token}").mkdir()
    except OSError as error:
        raise UsageError(words_of(error, folder)) from None
    return name, token


def _is_abandoned(name: str) -> bool:
    """Return whether the process that wrote a checkpoint, of which only a part is there, ran here and is gone."""
    begin, pid, _ = f"--{name}".rsplit("-", 2)
    if not begin.endswith(f"-{socket.gethostname()}"):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, ValueError):
        pass
    return False


def _check_seen(partial: Path) -> None:
    if not partial.is_dir():
        raise UsageError(
            f"{partial.parent} on {socket.gethostname()} is not the folder that rank 0 sees: the ranks do not share "
            "this file system; save into a folder that all hosts share"
        )


def _check_space(folder: Path, num_bytes: int) -> None:
    """Raise UsageError if a checkpoint certainly does not fit on the disk."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if found.f_blocks and free < num_bytes:
        raise UsageError(
            f"the checkpoint has {format_bytes(num_bytes)}, and the disk of {folder} has {format_bytes(free)} left; "
            "free some space or save into another folder"
        )
