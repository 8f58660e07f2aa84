"""How a model is to be sharded, as a person writes it in Python, and as a command's fields take it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

from workbench.commands import Command, Reshard, Shard
from workbench.errors import UsageError
from workbench.policy import as_mesh, check_mesh_fits, check_reshard_fits


class ReshardOptions(TypedDict, total=False):
    """What ``Workbench.reshard`` takes; :class:`workbench.commands.Reshard` says what each means."""

    wrap: str | Iterable[str]
    mesh: int | str | Sequence[int]
    reshard_after_forward: str | int
    mp: str
    offload: bool
    prefetch: int


class ShardOptions(ReshardOptions, total=False):
    """What ``Workbench.shard`` takes; :class:`workbench.commands.Shard` says what each means."""

    ignore: str | Iterable[str]


def plain(policy: ShardOptions | ReshardOptions) -> dict[str, Any]:
    """Return options as a command's fields take them."""
    fields: dict[str, Any] = dict(policy)
    fields |= {name: _several(fields[name]) for name in ("wrap", "ignore") if name in fields}
    if "mesh" in fields:
        fields["mesh"] = as_mesh(fields["mesh"])
    return fields


def _several(names: str | Iterable[str]) -> tuple[str, ...]:
    """One name is no sequence of letters."""
    return (names,) if isinstance(names, str) else tuple(names)


def check_fits(command: Shard | Reshard, num_ranks: int) -> None:
    """Check that a mesh holds all ranks and a number of ranks splits a copy.

    Raises:
        UsageError: it does not.
    """
    try:
        check_mesh_fits(command.mesh, num_ranks)
        if command.mesh or isinstance(command, Shard):
            check_reshard_fits(command.reshard_after_forward, [num_ranks, *command.mesh][-1])
    except ValueError as error:
        raise UsageError(f"%fsdp {command.word}: {error}") from error


def made(make: Callable[[], Command]) -> Command:
    """Return the command that ``make`` makes.

    Raises:
        UsageError: what it takes amiss.
    """
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
