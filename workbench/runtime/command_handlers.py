"""Registry of the functions that run commands on a rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from workbench.events import Unit
from workbench.models.engines import Watch
from workbench.protocol.commands import Command, Shard
from workbench.protocol.fault_kinds import FaultReply
from workbench.runtime.checkpoint_reads import CheckpointReads
from workbench.runtime.checkpoint_writer import CheckpointWriter
from workbench.runtime.distributed import ProcessGroups
from workbench.runtime.emptied_tensors import EmptiedTensors
from workbench.runtime.recorder import Recorder
from workbench.runtime.script_runner import ScriptRunner
from workbench.runtime.trainer import Trainer
from workbench.runtime.training_history import TrainingHistory


@dataclass(frozen=True)
class ActiveFault:
    """A fault that is on.

    Attributes:
        reply: what it is.
        held: what removes it when it closes.
        first_step: the first step that has it.
    """

    reply: FaultReply
    held: ExitStack
    first_step: int


class RankContext(Protocol):
    """The parts of a rank that a command may need.

    Attributes:
        fault: the fault that is on.
        faulty_steps: the steps taken while faults were on that have been removed.
        writer: the newest checkpoint that it saves or saved; None: it saved none.
    """

    groups: ProcessGroups
    recorder: Recorder
    trainer: Trainer
    scripts: ScriptRunner
    watch: Watch
    emptied: EmptiedTensors
    reads: CheckpointReads
    history: TrainingHistory
    fault: ActiveFault | None
    faulty_steps: set[int]
    writer: CheckpointWriter | None

    def account_optimizers(self) -> None:
        """Record the current bytes of optimizer state."""

    def plan(self, command: Shard) -> tuple[Unit, ...]:
        """Return the units that ``command`` would make, without any change; raises if it is not possible."""


Doing = Callable[[Any, Any], object]
"""Runs a command on a :class:`RankContext`, in the main thread between steps; returns the type in its ``reply``."""

D = TypeVar("D", bound=Doing)

DOES: dict[type[Command], Doing] = {}


def does(command: type[Command]) -> Callable[[D], D]:
    """Register the decorated function as the one that runs ``command`` on every rank."""

    def register(function: D) -> D:
        DOES[command] = function
        return function

    return register
