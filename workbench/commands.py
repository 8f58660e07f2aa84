"""What a rank may be asked to do: small frozen commands that go down to every rank.

A magic, a button and the Python API build the same command. A command is plain data: :func:`to_dict` and
:func:`from_dict` carry it to the ranks, :func:`to_text` writes it as the words of ``%fsdp`` (``magics`` parses them).
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

ReshardAfterForward = Literal["auto", "true", "false"]


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of all commands. ``word`` is the ``%fsdp`` word of the same meaning."""

    word: ClassVar[str] = ""


@dataclass(frozen=True, kw_only=True)
class Shard(Command):
    """Apply ``fully_shard`` to the module a rank's namespace calls ``model``.

    Attributes:
        model: a variable name on the ranks, or a dotted path that starts with one.
        wrap: names of module classes of which each instance becomes a unit of its own; empty: chosen from the
            module (the class of the largest ``ModuleList`` / ``Sequential`` of equal children).
        reshard_after_forward: ``auto`` (True, root kept unsharded), ``true`` or ``false``.
        ignore: glob patterns of parameter names that stay unsharded.
    """

    word: ClassVar[str] = "shard"
    model: str
    wrap: tuple[str, ...] = ()
    reshard_after_forward: ReshardAfterForward = "auto"
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unshard(Command):
    """Undo :class:`Shard`: the plain module comes back with the same values, on every rank.

    Attributes:
        model: as in :class:`Shard`.
    """

    word: ClassVar[str] = "unshard"
    model: str


@dataclass(frozen=True, kw_only=True)
class Step(Command):
    """Call the user's step function ``count`` times.

    Attributes:
        count: number of training steps, at least 1.
        fn: name of a function without arguments on the ranks; a number it returns is logged as the loss.
    """

    word: ClassVar[str] = "step"
    count: int = 1
    fn: str = "train_step"


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Compare one sharded step with the same step of an unsharded copy; training state is left as it was.

    Attributes:
        model: as in :class:`Shard`; empty: the only sharded model there is.
        fn: as in :class:`Step`.
    """

    word: ClassVar[str] = "verify"
    model: str = ""
    fn: str = "train_step"


COMMANDS: dict[str, type[Command]] = {cls.word: cls for cls in (Shard, Unshard, Step, Verify)}

# the field each word takes without a flag
_POSITIONAL = {"shard": "model", "unshard": "model", "step": "count", "verify": "model"}


def to_dict(command: Command) -> dict[str, Any]:
    """Return ``command`` as plain data that JSON can hold."""
    return {"word": command.word, **dataclasses.asdict(command)}


def from_dict(data: dict[str, Any]) -> Command:
    """Inverse of :func:`to_dict`.

    Raises:
        ValueError: unknown word or field.
    """
    fields = dict(data)
    word = fields.pop("word", None)
    if word not in COMMANDS:
        raise ValueError(f"unknown command {word!r}; known: {', '.join(COMMANDS)}")
    cls = COMMANDS[word]
    unknown = fields.keys() - {f.name for f in dataclasses.fields(cls)}
    if unknown:
        raise ValueError(f"command {word!r} has no field {', '.join(sorted(unknown))}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def to_text(command: Command) -> str:
    """Return the ``%fsdp`` words for ``command``; fields at their default are left out.

    Example: ``Shard(model="model", wrap=("Block",))`` -> ``shard model --wrap Block``.
    """
    words = [command.word]
    for f in dataclasses.fields(command):
        value = getattr(command, f.name)
        if f.name == _POSITIONAL[command.word]:
            if value != f.default:
                words.insert(1, shlex.quote(str(value)))
        elif value != f.default:
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words += ["--" + f.name.replace("_", "-"), shlex.quote(text)]
    return " ".join(words)
