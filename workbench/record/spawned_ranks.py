"""Ranks that a script starts itself: the processes of ``torch.multiprocessing.spawn``, each in its own recording."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from workbench.engine.explain import explain
from workbench.models._torch_private import at_first_group
from workbench.models.patches import Patches, Watching
from workbench.record.launch import Place
from workbench.record.rank_recording import RankRecording
from workbench.record.reasons import reason_of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Arguments of :class:`RankRecording` that all ranks share."""

    program: tuple[str, ...]
    max_bytes: int
    keep: int
    every: int


def record_spawned(recording: RankRecording, folder: Path, options: Options, say: Callable[[str], object]) -> Patches:
    """Let the processes that this one starts be the ranks that are recorded into ``folder``, in place of itself.

    A process that has a process group is a rank, and those that it starts are not. The patches are returned.
    """

    def start(run: Callable[..., object], *args: Any, **_: Any) -> Watching:  # noqa: ANN401
        if not dist.is_initialized():
            recording.discard()
            yield SpawnedRank(run, folder, options), *args

    patches = Patches("ranks that this process starts are", say)
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        patches.wrap(module, "start_processes", start)
    return patches


class SpawnedRank:
    """Runs a function in a process of its own, which is recorded from its first process group on.

    Args:
        run: the function, which gets the number of the process.
        folder: of the recording.
        options: of the recording.
    """

    def __init__(self, run: Callable[..., object], folder: Path, options: Options) -> None:
        self._run, self._folder, self._options = run, folder, options
        self._recording: RankRecording | None = None

    def __call__(self, index: int, *args: object) -> object:
        """Call the function, and record it."""
        patches = Patches("this process is", say_as(f"process {index}"))
        at_first_group(patches, lambda rank, size: self._begin(index, rank, size))
        reason, cause = "", None
        try:
            return self._run(index, *args)
        except BaseException as error:
            explain(error)
            reason, cause = reason_of(error), error
            raise
        finally:
            patches.undo()
            if self._recording is not None:
                self._recording.end(reason, cause)

    def _begin(self, index: int, rank: int, size: int) -> None:
        say, options = say_as(f"rank {rank}"), self._options
        here = Place(rank=rank, world_size=size, local_rank=index, launcher="torch.multiprocessing")
        try:
            recording = RankRecording(self._folder, here, complain=say, **vars(options))
            recording.begin()
        except FileExistsError:
            say(f"it is not recorded: {self._folder} has a recording of rank {rank} already")
        except Exception as error:  # noqa: BLE001 - the script goes on
            say(f"it is not recorded: {type(error).__name__}: {error}")
        else:
            self._recording = recording


def say_as(who: str) -> Callable[[str], None]:
    """Return what writes a sentence about a process to stderr."""

    def say(sentence: str) -> None:
        sys.stderr.write(f"workbench.record, {who}: {sentence}\n")
        sys.stderr.flush()

    return say
