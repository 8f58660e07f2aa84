"""Declaration of a command's arguments: what each means, how its text is parsed, and which names complete it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Literal

Names = Literal[
    "",
    "modules",
    "parts",
    "variables",
    "classes",
    "events",
    "units",
    "fqns",
    "traces",
    "records",
    "files",
    "scripts",
    "words",
    "launchers",
    "explained",
]
"""Names that complete an argument: names in the ranks' namespaces, models with the paths of their units, stop events,
units, parameters, traces for ``compare``, trace files, all files that ``export`` writes, the words of ``%fsdp``,
launchers of ipyparallel, Python scripts, what ``explain`` takes."""


Variable = Callable[[str], str]
"""Returns a notebook variable as text, by name."""

_BRACES = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def with_variables(text: str, variable: Variable) -> str:
    """Return ``text`` with variables inserted: ``"{n}.trace"`` -> ``"3.trace"``; as in format strings ``{{`` is ``{``.

    A single brace is left unchanged.
    """
    return _BRACES.sub(lambda found: variable(found[1]) if found[1] else found[0][0], text)


def without_variables(text: str) -> str:
    """Return the text from which :func:`with_variables` makes ``text``: ``"{n}"`` -> ``"{{n}}"``."""
    return text.replace("{", "{{").replace("}", "}}")


def _same(text: str) -> str:
    return text


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a command on a ``%fsdp`` line; its name, type and default are those of the declaring field.

    A field that is positional in Python is positional on the line. A bool without ``flags`` is written ``--name`` or
    ``--no-name``, one with ``flags`` but no ``metavar`` only as its flag; all others ``--name TEXT``. After ``--``
    everything is positional.

    Attributes:
        about: its meaning, for help.
        metavar: placeholder of its text in help.
        read: parses its text; raises ValueError with a sentence.
        completes: kind of names, or texts, that complete it.
        choices: the only allowed texts; none: any.
        flags: flags instead of ``--name``, the shortest first.
        joint: separator of the parts of a list.
        is_code: whether its text is code, in which ``{name}`` stays unchanged; if positional, it is the raw rest of the
            line.
        needs_no_ranks: whether its command, which needs ranks, does not need them with this argument.
        takes_rest: whether it takes all words behind the positional argument before it, flags included.
    """

    about: str
    metavar: str | None = None
    read: Callable[[str], Any] = _same
    completes: Names | Sequence[str] = ""
    choices: tuple[str, ...] | None = None
    flags: tuple[str, ...] = ()
    joint: str = ","
    is_code: bool = False
    needs_no_ranks: bool = False
    takes_rest: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether a bool's flag takes no value: it has no flags of its own, or no placeholder for a value."""
        return not self.flags or self.metavar is None


def argument(about: str | Argument, *, default: Any = MISSING, kw_only: bool = True, **more: Any) -> Any:  # noqa: ANN401
    """Return the field of a command that declares an :class:`Argument`.

    Args:
        about: the argument, or its meaning.
        default: of the field.
        kw_only: whether it is given by name; else by its place.
        more: the other fields of the argument, if ``about`` is its meaning.
    """
    declared = about if isinstance(about, Argument) else Argument(about=about, **more)
    return field(default=default, kw_only=kw_only, metadata={"argument": declared})


def argument_of(declared: Field[Any]) -> Argument:
    """Return the :class:`Argument` that a field declares."""
    found: Argument = declared.metadata["argument"]
    return found


# ---- parsing


def number(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        ValueError: ``text`` is not such a number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def count(zero: str) -> Callable[[str], int]:
    """Return a parser of a whole number of at least 0; ``zero`` says what 0 means.

    Raises:
        ValueError: by the parser, if its text is not such a number.
    """

    def read(text: str) -> int:
        if not text.isdecimal():
            raise ValueError(f"expected a whole number, {zero}, got {text!r}")
        return int(text)

    return read


def rank(text: str) -> int:
    """Return a rank.

    Raises:
        ValueError: ``text`` is not a rank.
    """
    if not text.isdecimal():
        raise ValueError(f"expected a rank such as 1, got {text!r}")
    return int(text)


def ranks(text: str) -> tuple[int, ...]:
    """Return ``"1,3"`` or ``"0-2,5"`` as ranks, each once, ascending.

    Raises:
        ValueError: ``text`` has another form.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"expected ranks such as 1,3 or 0-2, got {text!r}")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))


def several(text: str) -> tuple[str, ...]:
    """Return the parts of a list: ``"Block,Embedding"`` -> ``("Block", "Embedding")``."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def truth(text: str) -> bool:
    """Return ``"true"`` or ``"false"`` as a bool.

    Raises:
        ValueError: it is neither.
    """
    if text not in {"true", "false"}:
        raise ValueError(f"expected true or false, got {text!r}")
    return text == "true"
