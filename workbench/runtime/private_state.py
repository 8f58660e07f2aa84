"""The part of a rank's training state that no replica has, in a file that outlives the rank's process.

With a replicate dimension another rank has the same parameters and optimizer state. Random numbers, buffers that steps
change, options of optimizers, schedulers and plain variables are this rank's own. They are written after each step,
cell and command, the last two states of which are kept, so that a heal finds those of a rank that was killed.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workbench.protocol.rank_messages import SnapshotMark
from workbench.runtime.training_state import (
    TrainingObjects,
    TrainingSnapshot,
    capture,
    local_part,
    model_buffers,
    params_of,
    state_tensors,
)

_KEPT = 2

Versions = frozenset[tuple[str, int, int]]
"""Name, id and version of tensors: another set shows that one was replaced or written to."""


@dataclass(frozen=True)
class PrivateState:
    """The state of one rank that no replica has.

    Attributes:
        mark: when: entries of the program that were done, and steps of the next one.
        state: its training, without what replicas have.
        plain: the variables that are numbers, texts, or lists and the like of these, pickled.
    """

    mark: SnapshotMark
    state: TrainingSnapshot
    plain: bytes

    def over(self, of_replica: TrainingSnapshot) -> TrainingSnapshot:
        """Return the state of a replica with this rank's own part: of an earlier step, what ranks may differ in."""
        tensors = of_replica.tensors | self.state.tensors
        if self.state.step != of_replica.step:
            return replace(of_replica, tensors=tensors, random=self.state.random)
        return replace(self.state, tensors=tensors, dtensors=of_replica.dtensors)


class PrivateStates:
    """Writes the private states of this rank, and notes whether the rest has changed since.

    Args:
        path: the file; another process may have written it before.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._kept: list[PrivateState] = []
        self._trained: tuple[int, Versions] = (0, frozenset())
        self._buffers: dict[str, torch.Tensor] = {}  # copies: batch norm writes to its own without a new version
        self._changing: set[str] = set()

    def write(
        self, mark: SnapshotMark, objects: TrainingObjects, step: int, plain: bytes, optimizer_steps: int = 0
    ) -> None:
        """Write this rank's part of the state now; the file has the one before or this one, whenever the rank dies.

        Args:
            mark: when.
            objects: the objects of the training.
            step: number of steps that led to it.
            plain: the plain variables.
            optimizer_steps: number of optimizer steps: fused ones leave no other trace on parameters.
        """
        buffers = {name: local_part(buffer) for name, buffer in model_buffers(objects)}
        for name, now in buffers.items():
            if name not in self._buffers:
                self._buffers[name] = now.clone()
            elif name not in self._changing and not torch.equal(now, self._buffers[name]):
                self._changing.add(name)
        self._trained = optimizer_steps, _versions(_trained(objects))
        own = [(name, tensor) for name, tensor in buffers.items() if name in self._changing]
        self._kept = [*self._kept, PrivateState(mark, capture(objects, step, tensors=own), plain)][-_KEPT:]
        part = self.path.with_suffix(".part")
        with suppress(OSError), open(part, "wb", opener=_only_for_me) as file:  # a full disk: a heal names it
            file.write(pickle.dumps(self._kept))
            file.flush()
            part.replace(self.path)

    def newest(self, objects: TrainingObjects, optimizer_steps: int = 0) -> PrivateState | None:
        """Return the newest state if nothing has changed since in what replicas have, else None."""
        is_same = self._kept and (optimizer_steps, _versions(_trained(objects))) == self._trained
        return self._kept[-1] if is_same else None

    def read(self) -> list[PrivateState]:
        """Return the states in the file, of whichever process of this rank wrote them, oldest first."""
        with suppress(OSError), self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                found: list[PrivateState] = pickle.load(file)
                return found
        return []

    def remove(self) -> None:
        """Remove the states, and the file."""
        self._kept.clear()
        self.path.unlink(missing_ok=True)


def _only_for_me(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _trained(objects: TrainingObjects) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what optimizers write to: replicas have the same."""
    for variable, optimizer in objects.optimizers.items():
        yield from ((f"{variable}.{place}", param) for place, param in enumerate(params_of(optimizer)))
    yield from state_tensors(objects)


def _versions(tensors: Iterable[tuple[str, torch.Tensor]]) -> Versions:
    return frozenset((name, id(tensor), local_part(tensor)._version) for name, tensor in tensors)
