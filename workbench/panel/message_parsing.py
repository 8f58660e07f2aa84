"""Parsing of the browser's questions and commands, and the line of a command."""

from __future__ import annotations

from typing import Any, get_args

from workbench.codec import decode_named
from workbench.errors import UsageError
from workbench.live.panel_messages import Question
from workbench.magics.command_lines import WORDS, parse_line
from workbench.protocol.commands import Command, to_text

QUESTIONS = {question.word: question for question in get_args(Question)}


def read_question(data: Any) -> Question:  # noqa: ANN401 - any JSON may come
    """Return ``data`` as a question.

    Raises:
        ValueError: ``data`` is no question, or a field is missing or of another type.
    """
    question: Question = decode_named(QUESTIONS, data, "question", fill=True)
    return question


def read_command(data: Any) -> Command:  # noqa: ANN401 - any JSON may come
    """Return ``data`` as a command, parsed from its line; missing arguments have their defaults.

    Raises:
        UsageError: there is no such command, its arguments are invalid, or they do not fit on one line.
    """
    try:
        command: Command = decode_named(WORDS, data, "command", fill=True)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    line = to_text(command)
    if len(line.splitlines()) > 1:  # any of Python's line breaks ends the magic's line
        raise UsageError("a command is one line, but an argument has a line break")
    return parse_line(line)


def line_of(command: Command) -> str:
    """Return the line to type for ``command``, without arguments at their defaults."""
    return f"%fsdp {to_text(command)}"
