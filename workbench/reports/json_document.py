"""Reports as JSON: one object per dataclass, and the document that ``--json`` prints around it.

The members of an object are the fields of the dataclass. A class can add properties (``computed``) and leave out fields
(``internal``). Enums are written by their name in lower case, paths as text, arrays as lists, and numbers that are not
finite as the texts ``nan``, ``inf`` and ``-inf``. ``schema.json`` in this folder describes every document;
``python -m workbench.cli.generate_schema`` makes it from the same dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from workbench.base.codec import sent_number
from workbench.errors import RankDied, RankError, without_colours

VERSION = 1
"""Version of the documents. Within a version, members are added, but never renamed or removed."""

_SCHEMA = Path(__file__).parent / "schema.json"


def schema_path() -> Path:
    """Return the path of the JSON Schema (draft 2020-12) of the documents."""
    return _SCHEMA


def as_json(value: object) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return a report, or any value that reports contain, as data that JSON can hold.

    Raises:
        TypeError: ``value`` contains something that no report has, such as a tensor.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return sent_number(float(value))
    if isinstance(value, Path):
        return str(value)
    return _of_parts(value)


def _of_parts(value: object) -> Any:  # noqa: ANN401 - as above
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: as_json(getattr(value, name)) for name in members(type(value))}
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [as_json(item) for item in value]
    if type(value).__module__ == "numpy":  # not imported: a command that checks the installation loads this module
        return as_json(value.tolist())  # type: ignore[attr-defined]
    raise TypeError(f"a {type(value).__name__} has no place in a JSON document")


@cache
def members(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - a dataclass
    """Return the names of the members of a dataclass's JSON object."""
    internal = getattr(kind, "internal", ())
    fields = (field.name for field in dataclasses.fields(kind))
    return (*getattr(kind, "computed", ()), *(name for name in fields if name not in internal))


@dataclass(frozen=True, kw_only=True)
class ErrorFacts:
    """A command that failed.

    Attributes:
        type: class name of the exception, such as ``UsageError`` or ``RankDied``.
        message: what happened and what to do, as text.
        ranks: ranks that raised or died; empty if the error is not about particular ranks.
        ename: class name of the exception that code on a rank raised; empty if none did.
        evalue: message of that exception.
        traceback: its traceback, without colours.
        line: its line in the cell or script; null if unknown.
        script: name of the script's file; empty: the line is that of a cell.
    """

    type: str
    message: str
    ranks: tuple[int, ...] = ()
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    line: int | None = None
    script: str = ""


def error_facts(error: BaseException) -> ErrorFacts:
    """Return what the document says about an exception."""
    name, message = type(error).__name__, str(error)
    if isinstance(error, RankDied):
        return ErrorFacts(type=name, message=message, ranks=error.ranks)
    if isinstance(error, RankError):
        return ErrorFacts(
            type=name,
            message=message,
            ranks=(error.rank, *error.also),
            ename=error.ename,
            evalue=error.evalue,
            traceback=without_colours(error.traceback),
            line=error.line,
            script=error.script,
        )
    return ErrorFacts(type=name, message=message)


def document(
    command: str, report: object = None, *, error: BaseException | None = None, notices: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the document of a command; it always has the same members.

    Args:
        command: its first word, such as ``status``.
        report: its report; None: it has none, or failed.
        error: the exception that ended it; None: it succeeded.
        notices: what else it says, a sentence each.
    """
    return {
        "version": VERSION,
        "command": command,
        "type": None if report is None else type(report).__name__,
        "report": as_json(report),
        "error": None if error is None else as_json(error_facts(error)),
        "notices": list(notices),
    }


def to_line(found: Mapping[str, Any]) -> str:
    """Return a document as one line of ASCII: it can command no terminal, and each line of an output is a document."""
    return json.dumps(found, allow_nan=False)
