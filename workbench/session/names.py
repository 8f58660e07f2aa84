"""What a request may name on the ranks, checked before any rank starts: a name one rank lacks would block the rest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from workbench.errors import UsageError
from workbench.replay.alike import label


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the namespace of one rank holds.

    Attributes:
        modules: variables that are a ``torch.nn.Module``.
        variables: all variables.
        classes: of modules with parameters inside of those modules.
    """

    modules: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def everywhere(names: Mapping[int, Names], kind: str) -> list[str]:
    """Return the names of one kind (a field of :class:`Names`) that any rank has, sorted, without ``_private`` ones."""
    return sorted({name for own in names.values() for name in getattr(own, kind) if not name.startswith("_")})


def check_model(names: Mapping[int, Names], model: str, in_notebook: Callable[[str], bool]) -> None:
    """Raise unless every rank has the variable that ``model`` starts with.

    Raises:
        UsageError: the message says which ranks have it, or what there is instead.
    """
    _check(names, model.partition(".")[0], what="model", instead=everywhere(names, "modules"), in_notebook=in_notebook)


def check_function(names: Mapping[int, Names], fn: str, in_notebook: Callable[[str], bool]) -> None:
    """Raise unless every rank has the variable ``fn``.

    Raises:
        UsageError: the message says which ranks have it, or what there is instead.
    """
    near = difflib.get_close_matches(fn, everywhere(names, "variables"), n=3, cutoff=0.5)
    _check(names, fn, what="function", instead=near, in_notebook=in_notebook)


def shard_first(names: Mapping[int, Names], word: str) -> UsageError:
    """Return the error for a word that needs a sharded model when there is none: it says what to run first."""
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
