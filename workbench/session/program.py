"""The program of a notebook: the cells and commands that all ranks completed, in order.

A cell that raised, an aborted step and a cell on some ranks are no part of it. Each leaves an :class:`Omission`, since
it may have changed variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.base.devices import HOST
from workbench.errors import Interrupted, RankDied, RankError, UsageError
from workbench.protocol.commands import Command, Step
from workbench.protocol.policy import ModelPolicy
from workbench.replay.grouping import label

NEVER_RAN = {"SyntaxError", "IndentationError", "TabError"}
"""Exceptions of a cell that did not begin."""


@dataclass(frozen=True, kw_only=True)
class CompletedCell:
    """A cell that all ranks completed.

    Attributes:
        code: its code, as the notebook has it.
    """

    code: str


@dataclass(frozen=True, kw_only=True)
class CompletedCommand:
    """A command that all ranks completed.

    Attributes:
        command: the command, as it was sent: hosts in numbers, a unit by its full path.
        reply: the reply of rank 0; None: steps of a command that did not complete.
        policy: of a ``reshard``: how its model is sharded since; None: it is not known.
        left: number of steps of the command that were not done, because a rank was lost.
    """

    command: Command
    reply: Any = None
    policy: ModelPolicy | None = None
    left: int = 0


@dataclass(frozen=True, kw_only=True)
class Omission:
    """Work that is no part of the program.

    Attributes:
        what: the work and why, as a noun phrase: ``a cell that raised NameError``.
        is_loss: whether it ended with the loss of a rank.
        left: steps that the loss of a rank left, if not one of them was done.
        code: of a cell that every rank ran until it raised there by itself: a heal runs it again, for what it changed.
    """

    what: str
    is_loss: bool = False
    left: Step | None = None
    code: str = ""


Entry = CompletedCell | CompletedCommand | Omission


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the ranks have done since their start.

    Attributes:
        device: kind of their device.
        ranks_per_host: number of ranks on each host; empty: no ranks were started.
        is_attached: whether they were attached, so that they may have done more before.
        entries: what they did, oldest first.
        under_way: name of the request under way; empty: none.
    """

    device: str = HOST
    ranks_per_host: tuple[int, ...] = ()
    is_attached: bool = False
    entries: tuple[Entry, ...] = ()
    under_way: str = ""


def cell_on(code: str, ranks: Sequence[int], num_ranks: int) -> Entry:
    """Return the entry of a cell that ``ranks`` completed: an omission unless these are all ranks."""
    if len(ranks) == num_ranks:
        return CompletedCell(code=code)
    return Omission(what=f"a cell that ran on {label(ranks)} only")


def failed(words: str, command: Command | None, error: BaseException, steps_done: int, code: str = "") -> list[Entry]:
    """Return the entries of a request that did not complete.

    Args:
        words: its name: ``%fsdp step 40``, ``a cell``.
        command: the command; None: a cell.
        error: how it ended.
        steps_done: steps that all ranks finished.
        code: of a cell that raised on every rank by itself; else empty.

    Returns:
        the steps that were finished, and an omission; nothing for a request that was refused, or never ran.
    """
    if isinstance(error, UsageError) or (isinstance(error, RankError) and error.ename in NEVER_RAN):
        return []
    why = {Interrupted: "was aborted", RankDied: "lost a rank"}.get(type(error), "failed")
    why = f"raised {error.ename}" if isinstance(error, RankError) else why
    if isinstance(command, Step) and steps_done:
        finished = replace(command, count=steps_done, until="", background=False)
        left = command.count - steps_done if isinstance(error, RankDied) else 0
        after = f"{steps_done} of its {command.count} steps"
        return [
            CompletedCommand(command=finished, left=left),
            Omission(what=f"the rest of {words}, which {why} after {after}", is_loss=isinstance(error, RankDied)),
        ]
    undone = command if isinstance(command, Step) and isinstance(error, RankDied) else None
    return [Omission(what=f"{words} that {why}", is_loss=undone is not None, left=undone, code=code)]
