"""Which function of a rank does which command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from workbench.protocol.commands import Command
from workbench.runtime.distributed import ProcessGroups
from workbench.runtime.recorder import Recorder
from workbench.runtime.trainer import Trainer


class RankContext(Protocol):
    """What of a rank a command may need."""

    groups: ProcessGroups
    recorder: Recorder
    trainer: Trainer

    def account_optimizers(self) -> None:
        """Record what optimizer state has become."""


Doing = Callable[[Any, Any], object]
"""Does a command on a :class:`RankContext`, in its main thread and between steps; returns what its ``reply`` says."""

D = TypeVar("D", bound=Doing)

DOES: dict[type[Command], Doing] = {}


def does(command: type[Command]) -> Callable[[D], D]:
    """Have the function below do ``command`` on every rank."""

    def note(doing: D) -> D:
        DOES[command] = doing
        return doing

    return note
