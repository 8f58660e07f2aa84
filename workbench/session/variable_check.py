"""Checks of the names in a request before any rank starts: a name missing on one rank would block the others."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from workbench.errors import UsageError, did_you_mean
from workbench.events import Unit
from workbench.protocol.breakpoints import chosen_units, nearest
from workbench.protocol.commands import Command, InjectFault, Lint, Load, Reshard, Run, Save, Shard, Step, Verify
from workbench.protocol.rank_messages import ModelInfo, Names
from workbench.protocol.starting import ConnectReply
from workbench.replay.grouping import label
from workbench.reports.stop_positions import live_units
from workbench.trace.schema import Header

C = TypeVar("C", bound=Command)


def everywhere(names: Mapping[int, Names], kind: str) -> list[str]:
    """Return the names of one kind (a field of :class:`Names`) on any rank, sorted, without ``_private`` ones."""
    return sorted({name for own in names.values() for name in getattr(own, kind) if not name.startswith("_")})


def unit_paths(models: Mapping[int, Iterable[ModelInfo]], units: Iterable[Unit]) -> list[str]:
    """Return the path of each unit that can be resharded alone, such as ``model.blocks.2``, in their order.

    Args:
        models: models of each rank.
        units: all units in use; a unit of several modules is named after the first, and units of a classic model are
            left out, as they have no separate policies.
    """
    having = {model.name: set(model.units) for found in models.values() for model in found}
    alone = [unit for unit in units if unit.name and not unit.is_flat]
    return [
        f"{name}.{unit.name.partition(', ')[0]}"
        for name, indices in sorted(having.items())
        if not name.startswith("_")
        for unit in alone
        if unit.index in indices
    ]


def check_model(names: Mapping[int, Names], model: str, in_notebook: Callable[[str], bool]) -> None:
    """Check that every rank has the variable that ``model`` starts with.

    Raises:
        UsageError: the message names the ranks that have it, or the available models.
    """
    _check(names, model.partition(".")[0], what="model", instead=everywhere(names, "modules"), in_notebook=in_notebook)


def check_function(names: Mapping[int, Names], fn: str, in_notebook: Callable[[str], bool]) -> None:
    """Check that every rank has the variable ``fn``.

    Raises:
        UsageError: the message names the ranks that have it, or similar variables.
    """
    first = fn.partition(".")[0]
    steps = next((own.steps for own in names.values() if own.steps), ())
    if steps and not any(first in own.variables for own in names.values()):
        raise UsageError(
            f"the script has no function {fn!r}: name the one that trains one step with --fn (an optimizer was stepped "
            f"in {', '.join(steps[:4])}), or put one step of its loop into a function, def {fn}(batch)"
        )
    near = difflib.get_close_matches(first, everywhere(names, "variables"), n=3, cutoff=0.5)
    _check(names, first, what="function", instead=near, in_notebook=in_notebook)


def check_parameter(fqn: str, known: Sequence[str]) -> None:
    """Check that there is a parameter called ``fqn``, also with a variable before it, which a rank checks.

    Raises:
        UsageError: there is none; the message lists the nearest.
    """
    if fqn not in known and fqn.partition(".")[2] not in known:
        near = ", ".join(nearest(fqn, known)[:5]) or "none"
        raise UsageError(f"there is no parameter {fqn!r}; the parameters, nearest first: {near}")


def shard_first(names: Mapping[int, Names], word: str) -> UsageError:
    """Return the error of a command that needs a sharded model when there is none; it says what to run first."""
    models = everywhere(names, "modules")
    first = f"%fsdp shard {models[0]}" if models else "build a model in a %%fsdp cell, then %fsdp shard MODEL"
    return UsageError(f"nothing is sharded yet, so there is nothing to {word}: first {first}")


def _check(
    names: Mapping[int, Names], name: str, *, what: str, instead: Sequence[str], in_notebook: Callable[[str], bool]
) -> None:
    having = [rank for rank, own in names.items() if name in own.variables]
    lacking = [rank for rank in names if rank not in having]
    if not lacking:
        return
    if having:
        raise UsageError(
            f"{what} {name!r} is on {label(having)}, not on {label(lacking)}: define it in a %%fsdp cell without -t"
        )
    if in_notebook(name):
        raise UsageError(
            f"{name!r} is in this notebook, not on the ranks: put the code that defines it in a %%fsdp cell"
        )
    raise UsageError(f"no rank has a {what} named {name!r}: {_instead(name, instead)}")


def _instead(name: str, known: Sequence[str]) -> str:
    if not known:
        return "define it in a %%fsdp cell"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}the ranks have {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}"


def on_hosts(command: C, ranks: Sequence[ConnectReply]) -> C:
    """Return ``command`` with its host options resolved to numbers.

    Raises:
        UsageError: they do not fit these ranks.
    """
    if not isinstance(command, (Shard, Reshard)):
        return command
    try:
        return cast(C, command.on_hosts(list(Counter(rank.host for rank in ranks).values())))
    except ValueError as error:
        raise UsageError(f"%fsdp {command.word}: {error}") from error


def with_path(command: C, models: Callable[[], Mapping[int, Iterable[ModelInfo]]], header: Header) -> C:
    """Return a ``reshard`` of a unit name, as printed by ``shard``, with the full path from the variable.

    Example: ``reshard model.layers.1`` of a variable ``model`` that has a module ``model`` ->
    ``reshard model.model.layers.1``. Other commands are returned as they are.

    Raises:
        UsageError: several models have such a unit.
    """
    units = live_units(header)
    if not isinstance(command, Reshard) or command.model not in {unit.name for unit in units}:
        return command
    paths = unit_paths(models(), units)
    found = [path for path in paths if path.partition(".")[2] == command.model]
    if command.model in paths or not found:
        return command
    if len(found) > 1:
        raise UsageError(f"{command.model!r} is a unit of several models; write one of {', '.join(found)}")
    return cast(C, dataclasses.replace(command, model=found[0]))


def with_script(command: C) -> C:
    """Return a ``run`` of a file with its absolute path, as ranks may have another working directory.

    Other commands, also a ``run`` of a module, are returned as they are.

    Raises:
        UsageError: there is no such file here.
    """
    if not isinstance(command, Run) or command.module:
        return command
    path = Path(command.script).expanduser().absolute()
    if not path.is_file():
        near = did_you_mean(path.name, [each.name for each in path.parent.glob("*.py")], cutoff=0.6)
        raise UsageError(f"there is no script {command.script} in {Path.cwd()}{near}")
    return cast(C, dataclasses.replace(command, script=str(path)))


def with_folder(command: C) -> C:
    """Return a command with the absolute path of its folder of checkpoints: ranks may have another working directory.

    Other commands are returned as they are.
    """
    name = _FOLDERS.get(type(command), "")
    folder = getattr(command, name, "")
    if not folder:
        return command
    return dataclasses.replace(command, **{name: str(Path(folder).expanduser().absolute())})


_FOLDERS: Mapping[type[Command], str] = {Save: "folder", Load: "folder", Step: "save", Verify: "resume"}


def check(
    command: Command, names: Mapping[int, Names], header: Header, num_ranks: int, in_notebook: Callable[[str], bool]
) -> None:
    """Check that ``command`` can run on all ranks; else some would start and wait for the rest.

    Raises:
        UsageError: it cannot; the message says what to run first or write instead.
    """
    if isinstance(command, (Shard, Reshard)):
        try:
            command.check_fits(num_ranks, num_ranks if isinstance(command, Shard) else 0)
        except ValueError as error:
            raise UsageError(f"%fsdp {command.word}: {error}") from error
    units = [unit.name for unit in live_units(header)]
    if isinstance(command, (InjectFault, Lint, Reshard, Step, Verify)) and not units:
        raise shard_first(names, "inject a fault into" if isinstance(command, InjectFault) else command.word)
    if isinstance(command, Step) and command.stop is not None and command.stop.unit is not None:
        chosen_units(command.stop.unit, units)
    given = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    if given.get("fn"):
        check_function(names, given["fn"], in_notebook)
    if given.get("model"):
        check_model(names, given["model"], in_notebook)
