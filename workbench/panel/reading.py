"""What comes from the browser, read: questions and commands, and the line of a command."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_args

from workbench.codec import decode_named, encode
from workbench.errors import UsageError
from workbench.magics.words import WORDS, parse_line
from workbench.panel.messages import Question
from workbench.protocol.commands import Command, to_text

QUESTIONS = {question.word: question for question in get_args(Question)}


def read_question(data: Any) -> Question:  # noqa: ANN401 - anything may come
    """Return the question that came as ``data``.

    Raises:
        ValueError: it is none, or a field is missing or of another type.
    """
    question: Question = decode_named(QUESTIONS, _filled(QUESTIONS, data), "question")
    return question


def read_command(data: Any) -> Command:  # noqa: ANN401 - anything may come
    """Return the command that came as ``data``, as its line gives it; what it lacks has its default.

    Raises:
        UsageError: there is no such word, it takes no such arguments, or they do not fit on one line.
    """
    try:
        command: Command = decode_named(WORDS, _filled(WORDS, data), "command")
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    line = to_text(command)
    if len(line.splitlines()) > 1:  # what Python takes for the end of a line ends the magic's as well
        raise UsageError("a command is one line: an argument of it has a line break")
    return parse_line(line)


def line_of(command: Command) -> str:
    """Return the line that one could have typed for ``command``; what is at its default is left out."""
    return f"%fsdp {to_text(command)}"


def _filled(known: Mapping[str, type], data: Any) -> Any:  # noqa: ANN401
    """Return ``data`` with the defaults of what it lacks; data that is nothing of the sort as it is."""
    word = data.get("word") if isinstance(data, dict) else None
    if not isinstance(word, str) or word not in known:
        return data
    fields = dataclasses.fields(cast("Any", known[word]))
    defaults = {f.name: encode(f.default) for f in fields if f.default is not dataclasses.MISSING}
    return {**defaults, **data}
