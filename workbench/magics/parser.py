"""The argparse parser of one word: it raises instead of leaving the process, and knows what completes its arguments."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from workbench.errors import UsageError


class PositionalText(str):
    """A word after ``--`` or ``--flag=``: no flag, whatever it is.

    argparse is shown a space before it: it would take some for flags, and before Python 3.12.5 lose ``--`` itself.

    Args:
        word: as it was written.

    Attributes:
        word: likewise.
    """

    word: str

    def __new__(cls, word: str) -> Self:
        """Return what argparse is shown."""
        made = super().__new__(cls, f" {word}")
        made.word = word
        return made


def as_written(word: str) -> str:
    """Return a word that argparse was shown as it was written."""
    return word.word if isinstance(word, PositionalText) else word


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
        flags: every flag that takes a word, in order, with what may follow it: words, or a kind of
            :data:`~workbench.protocol.arguments.Names`.
        switches: flags that take none.
        positionals: the same for each argument without a flag.
        rest: the same for the raw rest of the line; empty: there is none.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - handed on
        super().__init__(**settings)
        self.flags: dict[str, Sequence[str]] = {}
        self.switches: set[str] = set()
        self.positionals: list[Sequence[str]] = []
        self.rest: Sequence[str] = ""
        self._hint = ""

    def flag(self, *names: str, complete: Sequence[str] = "", **settings: Any) -> None:  # noqa: ANN401
        """Add an argument that is given by name."""
        self.flags |= dict.fromkeys(names, complete)
        self.add_argument(*names, **settings)

    def switch(self, flag: str, *, about: str) -> None:
        """Add ``--name`` and ``--no-name``, which take no word after them."""
        self.switches |= {flag, flag.replace("--", "--no-")}
        self.add_argument(flag, action=argparse.BooleanOptionalAction, help=about)

    def positional(self, name: str, *, complete: Sequence[str] = "", **settings: Any) -> None:  # noqa: ANN401
        """Add an argument that is given by its place."""
        self.positionals.append(complete)
        self.add_argument(name, **settings)

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return what the words mean, and those that have no place.

        Raises:
            UsageError: an argument is missing or wrong; if a word may have been meant for it, this is said.
        """
        self._hint = self.behind_hint(words)
        found = self.parse_known_args(words)
        self._hint = ""
        return found

    def behind_hint(self, words: Sequence[str]) -> str:
        """Return how to give by place the first word that argparse takes for a flag; empty: there is none."""
        flags = {*self.flags, *self.switches}
        for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
            is_flag = word.startswith("-") and " " not in word and not _is_number(word)
            if self.positionals and is_flag and before not in self.flags and word.partition("=")[0] not in flags:
                line = shlex.join([*map(as_written, words[:place]), "--", word])
                return f"; {word!r} reads as a flag, write -- before it: {self.prog} {line}"
        return ""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the usage line."""
        raise UsageError(f"{self.prog}: {message}{self._hint}\n{self.usage_line()}")

    def usage_line(self) -> str:
        """Return the usage on one line."""
        return " ".join(self.format_usage().split())


def _is_number(word: str) -> bool:
    """Whether argparse takes a word that begins with ``-`` for a number."""
    return word[1:].replace(".", "", 1).isdecimal()
