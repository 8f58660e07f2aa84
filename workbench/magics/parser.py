"""The argparse parser of one command: it raises instead of exiting, and knows the completions of its arguments."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Any, NoReturn, Self

from workbench.errors import UsageError, did_you_mean

JSON = "--json"


class PositionalText(str):
    """A word after ``--`` or ``--flag=``, which is never a flag.

    argparse gets it with a leading space: it would take some words for flags, and before Python 3.12.5 drop ``--``.

    Args:
        word: the word as written.

    Attributes:
        word: likewise.
    """

    word: str

    def __new__(cls, word: str) -> Self:
        """Return the text for argparse."""
        made = super().__new__(cls, f" {word}")
        made.word = word
        return made


def as_written(word: str) -> str:
    """Return a word as it was written, without the space added for argparse."""
    return word.word if isinstance(word, PositionalText) else word


class HelpAsked(Exception):
    """``-h`` was given; the message is the text to show."""


class AskHelp(argparse.Action):
    """``-h``: raises before argparse complains about missing arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:  # noqa: ANN401 - argparse's signature
        """Raise HelpAsked with the help of ``parser``."""
        raise HelpAsked(parser.format_help())


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, and knows the completions of its arguments.

    Args:
        settings: as for ``ArgumentParser``.

    Attributes:
        flags: every flag that takes a value, in order, with its completions: texts, or a kind of
            :data:`~workbench.protocol.arguments.Names`.
        switches: flags without a value.
        positionals: completions of each positional argument.
        rest: completions of the raw rest of the line; empty: there is none.
        takes_rest: whether all words behind the first positional one belong to its last argument.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(**settings)
        self.flags: dict[str, Sequence[str]] = {}
        self.switches: set[str] = set()
        self.positionals: list[Sequence[str]] = []
        self.rest: Sequence[str] = ""
        self.takes_rest = False
        self._hint = ""

    def flag(self, *names: str, complete: Sequence[str] = "", **settings: Any) -> None:  # noqa: ANN401
        """Add an argument given by name."""
        self.flags |= dict.fromkeys(names, complete)
        self.add_argument(*names, **settings)

    def switch(self, flag: str, *, about: str, dest: str) -> None:
        """Add ``--name`` and ``--no-name``, or ``-n`` alone, which take no value."""
        self.switches |= {flag, flag.replace("--", "--no-")}
        self.add_argument(flag, action=argparse.BooleanOptionalAction, help=about, dest=dest)

    def json(self) -> None:
        """Add ``--json``, which every command has."""
        self.switches.add(JSON)
        self.add_argument(JSON, action="store_true", help="print the result as one line of JSON")

    def positional(self, name: str, *, complete: Sequence[str] = "", **settings: Any) -> None:  # noqa: ANN401
        """Add a positional argument."""
        self.positionals.append(complete)
        self.add_argument(name, **settings)

    def read(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the parsed arguments, and the words left over.

        Raises:
            UsageError: an argument is missing or wrong; the message says so if a word may have been meant for it.
        """
        self._hint = self.behind_hint(words)
        found = self.parse_known_args(words)
        self._hint = ""
        return found

    def behind_hint(self, words: Sequence[str]) -> str:
        """Return how to write the first positional word that argparse takes for a flag; empty: there is none."""
        flags = {*self.flags, *self.switches}
        for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
            is_flag = word.startswith("-") and " " not in word and not _is_number(word)
            if self.positionals and is_flag and before not in self.flags and word.partition("=")[0] not in flags:
                line = shlex.join([*map(as_written, words[:place]), "--", word])
                return f"; {word!r} is read as a flag; write -- before it: {self.prog} {line}"
        return ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 - argparse's signature
        """Refuse what is none of an argument's words, and name the nearest."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known) or ";"
            raise argparse.ArgumentError(
                action, f"there is no {as_written(value)!r}{near} choose from: {', '.join(known)}"
            )

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the usage line."""
        raise UsageError(f"{self.prog}: {message}{self._hint}\n{self.usage_line()}")

    def usage_line(self) -> str:
        """Return the usage on one line."""
        return " ".join(self.format_usage().split())


def _is_number(word: str) -> bool:
    """Whether argparse reads a word that begins with ``-`` as a number."""
    return word[1:].replace(".", "", 1).isdecimal()
