"""Exceptions of the workbench, with one common base, and a hint that several messages give.

::

    WorkbenchError
    |-- UsageError          the request itself is wrong: flag, name, order of commands
    |-- ClusterError        ranks could not be started, reached or stopped
    |   `-- RankDied        a rank's process is gone, or cannot be reached any more
    |-- RankError           code on a rank raised
    |-- Interrupted         Ctrl-C; also a KeyboardInterrupt
    `-- TraceError          a trace file is not one, is newer, or breaks a rule
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LONG = re.compile(r"(\S{300})\S+")

MAX_MESSAGE = 20_000
"""Most characters of an exception's message that leave a rank."""


def without_colours(text: str) -> str:
    """Return a traceback as plain text, without the colours of a terminal."""
    return _COLOUR.sub("", text)


def _shell_has_colours() -> bool:
    """Return whether IPython, if it runs here, shows colours."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return str(getattr(shell, "colors", "")).lower() != "nocolor"


def shortened(text: str) -> str:
    """Return ``text`` without its middle if it has more than :data:`MAX_MESSAGE` characters."""
    left_out = len(text) - MAX_MESSAGE
    half = MAX_MESSAGE // 2
    return text if left_out <= 0 else f"{text[:half]}\n... {left_out:,} characters left out ...\n{text[-half:]}"


def printable(text: str) -> str:
    """Return ``text`` with lone surrogates, which UTF-8 cannot encode, written as their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


class WorkbenchError(Exception):
    """Base of all exceptions raised by the workbench.

    Attributes:
        advice: the end of the message if it says what to do next with the ranks, which a shell has none of; else empty.
    """

    advice = ""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows: the message alone, as the notebook's own stack adds nothing."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(WorkbenchError):
    """The request cannot be carried out as written; the message says what to write instead.

    The message cuts every text without spaces to 300 characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_LONG.sub(r"\1...", message))


class ClusterError(WorkbenchError):
    """Ranks could not be started, reached or stopped."""


class RankDied(ClusterError):
    """The process of a rank is gone, or cannot be reached any more.

    Attributes:
        ranks: the dead ranks.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankError(WorkbenchError):
    """Code on one or more ranks raised.

    Attributes:
        rank: the rank whose exception came first.
        ename: its exception's class name.
        evalue: its exception's message.
        traceback: its traceback, ready to print.
        also: other ranks that raised the same exception.
        line: line number of the innermost call in the cell or script that raised; None if none was involved.
        script: name of the script's file; empty: the line is that of a cell.
    """

    def __init__(  # noqa: PLR0913 - keywords: one for each attribute
        self,
        message: str,
        *,
        rank: int,
        ename: str,
        evalue: str,
        traceback: str = "",
        also: tuple[int, ...] = (),
        line: int | None = None,
        script: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ename = ename
        self.evalue = evalue
        self.traceback = traceback
        self.also = also
        self.line = line
        self.script = script

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows: the rank's own traceback, then the message."""
        text = self.traceback if _shell_has_colours() else without_colours(self.traceback)
        return [*([text, ""] if text else []), *super()._render_traceback_()]


class Interrupted(WorkbenchError, KeyboardInterrupt):
    """The user interrupted the running request; the message says in which state the ranks are."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that IPython shows: the message alone, without the class name."""
        return [str(self)]


class TraceError(WorkbenchError):
    """A trace could not be read or breaks a rule of the schema."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``", did you mean 'shard'?"`` for the nearest of ``known``, all that are equally near, or an empty text.

    Args:
        word: the word that was given.
        known: the valid words.
        cutoff: similarity from which a word is near, as in :func:`difflib.get_close_matches`.
    """
    near = difflib.get_close_matches(word, tuple(known), n=3, cutoff=cutoff)
    alike = [each for each in near if _similarity(word, each) == _similarity(word, near[0])]
    return f", did you mean {' or '.join(map(repr, sorted(alike)))}?" if near else ""


def _similarity(word: str, known: str) -> float:
    return difflib.SequenceMatcher(None, known, word).ratio()
