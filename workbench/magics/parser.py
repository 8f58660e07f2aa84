"""The argparse parser of one word: it raises instead of leaving the process, and knows what completes its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from workbench.errors import UsageError

Expand = Callable[[str], str]
"""Replaces ``{name}`` in one argument by the notebook's variable of that name."""

Kind = Literal["", "modules", "variables", "classes", "events", "units", "fqns", "traces", "files"]
"""Which names an argument takes: a field of :class:`workbench.session.names.Names`; of parameters fqns; trace files, or
all that ``export`` writes."""


class HelpAsked(Exception):
    """``-h`` was given; the message is the text to show."""


class AskHelp(argparse.Action):
    """``-h``: raises before argparse misses the arguments that are required."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:  # noqa: ANN401 - argparse's signature
        """Raise HelpAsked with the help of ``parser``."""
        raise HelpAsked(parser.format_help())


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, and knows what may complete its arguments.

    Args:
        settings: as for ``ArgumentParser``.

    Attributes:
        flags: every flag that takes a word, in order, with what may follow it: words, or a :data:`Kind` of names.
        switches: flags that take none.
        positionals: the same for each argument without a flag.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**settings)
        self.flags: dict[str, Sequence[str] | Kind] = {}
        self.switches: set[str] = set()
        self.positionals: list[Sequence[str] | Kind] = []

    def flag(self, *names: str, complete: Sequence[str] | Kind = "", **settings: Any) -> None:  # noqa: ANN401
        """Add an argument that is given by name."""
        self.flags |= dict.fromkeys(names, settings.get("choices", complete))
        self.add_argument(*names, **settings)

    def switch(self, name: str, *, default: bool | str | None, about: str) -> None:
        """Add ``--name`` and ``--no-name``, which take no word after them."""
        self.switches |= {f"--{name}", f"--no-{name}"}
        self.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=about)

    def positional(self, name: str, *, complete: Sequence[str] | Kind = "", **settings: Any) -> None:  # noqa: ANN401
        """Add an argument that is given by its place."""
        self.positionals.append(complete)
        self.add_argument(name, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the usage line."""
        raise UsageError(f"{self.prog}: {message}\n{self.usage_line()}")

    def usage_line(self) -> str:
        """Return the usage on one line."""
        return " ".join(self.format_usage().split())


def number(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: ``text`` is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Return the parts of a list: ``"Block,Embedding"`` -> ``("Block", "Embedding")``."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return ``"1,3"`` or ``"0-2,5"`` as ranks, each once, ascending.

    Raises:
        argparse.ArgumentTypeError: written otherwise.
    """
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"expected ranks such as 1,3 or 0-2, got {text!r}")
        found.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(found))
