"""What a rank may be asked to do: small frozen commands that go down to every rank.

A magic, a button and the Python API build the same command. A command is plain data: :func:`to_dict` and
:func:`from_dict` carry it to the ranks, :func:`to_text` writes it as the words of ``%fsdp`` (``magics`` parses them).
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.policy import MixedPrecision, check_mesh, check_prefetch, check_reshard_after_forward


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
        mesh: ``(F,)``: all F ranks share one copy; ``(R, F)``: R copies, each shared by F ranks. Empty: all ranks.
        reshard_after_forward: ``auto`` (True, root kept unsharded), ``true``, ``false``, or a number of ranks that
            share the parameters between forward and backward.
        mp: mixed precision as :class:`~workbench.policy.MixedPrecision` reads it, or ``off``.
        offload: whether shards, gradients and optimizer state stay in host memory between uses.
        prefetch: how many units ahead are asked for by explicit lists; 0: the engine's own one.
        ignore: glob patterns of parameter names that stay unsharded.

    Raises:
        ValueError: a field holds something else.
    """

    word: ClassVar[str] = "shard"
    model: str
    wrap: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    reshard_after_forward: str | int = "auto"
    mp: str = "off"
    offload: bool = False
    prefetch: int = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_policy(self)
        if not all(_is_pattern(glob) for glob in self.ignore):
            raise ValueError(
                f"ignore takes patterns of names without commas or outer spaces, such as *.bias, not {self.ignore}"
            )


@dataclass(frozen=True, kw_only=True)
class Reshard(Command):
    """Change how a sharded model is sharded, in place; training goes on, optimizer state is carried along.

    Every attribute but ``model`` is as in :class:`Shard`, and at its default keeps what there is. Parameters that
    ``shard`` left out stay out.

    Raises:
        ValueError: a field holds something else.
    """

    word: ClassVar[str] = "reshard"
    model: str
    wrap: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    reshard_after_forward: str | int = ""
    mp: str = ""
    offload: bool | None = None
    prefetch: int | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_policy(self)


@dataclass(frozen=True, kw_only=True)
class Unshard(Command):
    """Undo :class:`Shard`: the plain module comes back with the same values, on every rank.

    Attributes:
        model: as in :class:`Shard`.

    Raises:
        ValueError: ``model`` is not such a name.
    """

    word: ClassVar[str] = "unshard"
    model: str

    def __post_init__(self) -> None:
        _check_model(self.model)


@dataclass(frozen=True, kw_only=True)
class Step(Command):
    """Call the user's step function ``count`` times.

    Attributes:
        count: number of training steps, at least 1.
        fn: name of a function without arguments on the ranks; a number it returns is logged as the loss.
        until: event before which all ranks stop once, as :class:`Break` has it; empty: none.
        background: whether the notebook goes on at once.

    Raises:
        ValueError: ``count`` < 1, or ``fn`` is not a name.
    """

    word: ClassVar[str] = "step"
    count: int = 1
    fn: str = "train_step"
    until: str = ""
    background: bool = False

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"the number of steps is a whole number of at least 1, not {self.count!r}")
        _check_function(self.fn)


@dataclass(frozen=True, kw_only=True)
class Verify(Command):
    """Compare one sharded step with the same step of an unsharded copy; training state is left as it was.

    Attributes:
        model: as in :class:`Shard`; empty: the only sharded model there is.
        fn: as in :class:`Step`.

    Raises:
        ValueError: ``model`` or ``fn`` is not such a name.
    """

    word: ClassVar[str] = "verify"
    model: str = ""
    fn: str = "train_step"

    def __post_init__(self) -> None:
        if self.model:
            _check_model(self.model)
        _check_function(self.fn)


@dataclass(frozen=True, kw_only=True)
class Pause(Command):
    """Stop all ranks at the same event of the step under way."""

    word: ClassVar[str] = "pause"


@dataclass(frozen=True, kw_only=True)
class Continue(Command):
    """Let stopped ranks go on; a step that was begun in the background goes on there.

    Attributes:
        foreground: wait for it all the same.
    """

    word: ClassVar[str] = "continue"
    foreground: bool = False


NEXT = ("event", "collective", "unit", "phase")


@dataclass(frozen=True, kw_only=True)
class Next(Command):
    """Let stopped ranks go on to the next event, or to the next collective, unit or phase.

    Attributes:
        what: one of :data:`NEXT`.

    Raises:
        ValueError: ``what`` is something else.
    """

    word: ClassVar[str] = "next"
    what: str = "event"

    def __post_init__(self) -> None:
        if self.what not in NEXT:
            raise ValueError(f"next goes to the next one of {', '.join(NEXT)}, not {self.what!r}")


@dataclass(frozen=True, kw_only=True)
class Abort(Command):
    """Give up what the ranks do; they are ready again afterwards."""

    word: ClassVar[str] = "abort"


@dataclass(frozen=True, kw_only=True)
class Break(Command):
    """Stop before every such event.

    Attributes:
        event: such as ``all_gather``, ``all_gather:blocks.2``, ``backward.end:*``.
        rank: the only rank that stops; None: all of them.
        when: a condition over the event's fields, such as ``num_bytes > 1e6``; None: always.
    """

    word: ClassVar[str] = "break"
    event: str
    rank: int | None = None
    when: str | None = None


@dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Look at a parameter on every stopped rank.

    Attributes:
        fqn: its name relative to the root module.
    """

    word: ClassVar[str] = "inspect"
    fqn: str


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Evaluate a Python expression on stopped ranks, in the step's own thread.

    Attributes:
        expr: the expression.
        ranks: which ranks; empty: all.
        frame: number of the user's function in which names are looked up first, 0 the innermost that is under way.

    Raises:
        ValueError: ``frame`` is no such number.
    """

    word: ClassVar[str] = "eval"
    expr: str
    ranks: tuple[int, ...] = ()
    frame: int = 0

    def __post_init__(self) -> None:
        if type(self.frame) is not int or self.frame < 0:
            raise ValueError(f"a frame is a number, 0 for the innermost, not {self.frame!r}")


COMMANDS: dict[str, type[Command]] = {
    cls.word: cls
    for cls in (Shard, Reshard, Unshard, Step, Verify, Pause, Continue, Next, Abort, Break, Inspect, Evaluate)
}

# the field each word takes without a flag
_POSITIONAL = {
    "shard": "model",
    "reshard": "model",
    "unshard": "model",
    "step": "count",
    "verify": "model",
    "next": "what",
    "break": "event",
    "inspect": "fqn",
}


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
    missing = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING} - fields.keys()
    if missing:
        raise ValueError(f"command {word!r} lacks {', '.join(sorted(missing))}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def to_text(command: Command) -> str:
    """Return the ``%fsdp`` words for ``command``; fields at their default are left out.

    Example: ``Shard(model="model", wrap=("Block",))`` -> ``shard model --wrap Block``.
    """
    if isinstance(command, Evaluate):  # its expression is the raw rest of the line
        frame = f"--frame {command.frame} " if command.frame else ""
        return f"eval {frame}{command.expr}" + (f" -t {','.join(map(str, command.ranks))}" if command.ranks else "")
    words = ["break add" if isinstance(command, Break) else command.word]
    for f in dataclasses.fields(command):
        value = getattr(command, f.name)
        if value == f.default and type(value) is type(f.default):  # False and 0 are equal
            continue
        if f.name == _POSITIONAL.get(command.word):
            words.insert(1, shlex.quote(str(value)))
        else:
            words += _flag(f.name, value)
    return " ".join(words)


def _flag(name: str, value: object) -> list[str]:
    """Return the words for one field: ``mesh, (2, 4)`` -> ``--mesh 2x4``; ``offload, False`` -> ``--no-offload``."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-")]
    text = ("x" if name == "mesh" else ",").join(map(str, value)) if isinstance(value, tuple) else str(value)
    # argparse takes a separate word that starts with a dash for a flag
    return [f"{flag}={shlex.quote(text)}"] if text.startswith("-") else [flag, shlex.quote(text)]


def _check_policy(command: Shard | Reshard) -> None:
    """Raise unless the fields that both have hold what they may, or their default."""
    for cls in command.wrap:
        if not _is_name(cls):
            raise ValueError(f"wrap takes names of module classes such as Block, not {cls!r}")
    if command.mesh:
        check_mesh(command.mesh)
    if command.reshard_after_forward != type(command).reshard_after_forward:
        check_reshard_after_forward(command.reshard_after_forward)
    if command.mp != type(command).mp:
        MixedPrecision.parse(command.mp)
    if not isinstance(command.offload, bool) and command.offload is not type(command).offload:
        raise ValueError(f"offload is true or false, not {command.offload!r}")
    if command.prefetch is not type(command).prefetch:
        check_prefetch(command.prefetch)


def _check_model(model: object) -> None:
    """Raise unless ``model`` is a Python name, or a dotted path of names and list places after one."""
    first, *rest = model.split(".") if isinstance(model, str) else [""]
    if not _is_name(first) or not all(_is_name(part) or part.isdecimal() for part in rest):
        raise ValueError(f"a model is named by its variable on the ranks, such as model or model.blocks, not {model!r}")


def _check_function(fn: object) -> None:
    if not _is_name(fn):
        raise ValueError(f"fn is the name of a function on the ranks, such as train_step, not {fn!r}")


def _is_name(text: object) -> bool:
    return isinstance(text, str) and text.isidentifier()


def _is_pattern(text: object) -> bool:
    return isinstance(text, str) and bool(text) and "," not in text and text == text.strip()
