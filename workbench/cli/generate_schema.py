"""Generator of the JSON Schema of the documents that ``--json`` prints, from the type hints and docstrings of reports.

Run ``python -m workbench.cli.generate_schema`` after a change of a report or of a dataclass that reports contain.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from workbench import reports
from workbench.base.codec import NotFinite, hints_of
from workbench.cli.demo import DemoReport
from workbench.cli.doctor import Diagnosis
from workbench.cli.grade import GradeReport
from workbench.reports.fault_report import FaultReport
from workbench.reports.json_document import VERSION, ErrorFacts, members, schema_path
from workbench.reports.report import Report
from workbench.reports.step_reports import UntilReport
from workbench.reports.view_numbers import ViewReport, WindowReport

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"anyOf": [{"type": "number"}, {"enum": list(get_args(NotFinite))}]},
    str: {"type": "string"},
    Path: {"type": "string"},
    types.NoneType: {"type": "null"},
}
_WHOLE = {"pattern": r"^-?\d+$"}
_ATTRIBUTE = re.compile(r"^    (?P<names>\w+(?:, \w+)*): (?P<text>.+(?:\n {8}.+)*)", re.MULTILINE)


def report_types() -> list[type]:
    """Return the types of all reports, by name."""
    for module in pkgutil.iter_modules(reports.__path__, f"{reports.__name__}."):
        importlib.import_module(module.name)
    found = {kind for kind in _subclasses(Report) if kind.__module__.startswith(f"{reports.__name__}.")} - {
        ViewReport,
        WindowReport,
        UntilReport,
        FaultReport,
    }
    return sorted({*found, Diagnosis, DemoReport, GradeReport}, key=lambda kind: kind.__name__)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def schema() -> Schema:
    """Return the schema of all documents. It allows members that it does not name: later versions of it may."""
    kinds = report_types()
    definitions: dict[str, Schema] = {}
    error = _schema_of(ErrorFacts, definitions)
    outcomes = [_outcome(kind.__name__, _schema_of(kind, definitions)) for kind in kinds]
    null = _PLAIN[types.NoneType]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "FSDP workbench: documents of --json",
        "type": "object",
        "properties": {
            "version": {"const": VERSION},
            "command": {"type": "string", "description": "First word of the line, or workbench and its subcommand."},
            "type": {"description": "Name of the type of the report; null: there is none."},
            "report": {"description": "The report; null: the command has none, or failed."},
            "error": {"anyOf": [error, null], "description": "Why the command failed; null: it succeeded."},
            "notices": {"type": "array", "items": {"type": "string"}, "description": "What else the command says."},
        },
        "required": ["version", "command", "type", "report", "error", "notices"],
        "oneOf": [
            *outcomes,
            {"title": "no report", "properties": {"type": null, "report": null}},
        ],
        "$defs": dict(sorted(definitions.items())),
    }


def _outcome(name: str, report: Schema) -> Schema:
    return {"title": name, "properties": {"type": {"const": name}, "report": report, "error": _PLAIN[types.NoneType]}}


def _schema_of(kind: Any, definitions: dict[str, Schema]) -> Schema:  # noqa: ANN401 - a type
    """Return the schema of a type; dataclasses and enums are added to ``definitions``.

    Raises:
        TypeError: no report may have such a value.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum)):
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # in case it contains itself
            definitions[kind.__name__] = _of_class(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    return _of_generic(get_origin(kind), get_args(kind), definitions)


def _of_class(kind: Any, definitions: dict[str, Schema]) -> Schema:  # noqa: ANN401 - a dataclass or an enum
    about = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    if issubclass(kind, Enum):
        return {"description": about, "enum": [member.name.lower() for member in kind]}
    texts, hints, found = _texts(kind), hints_of(kind), {}
    for name in members(kind):
        member = inspect.getattr_static(kind, name, None)
        if isinstance(member, property) and name not in hints:
            found[name] = _schema_of(get_type_hints(member.fget)["return"], definitions)
            texts[name] = (inspect.getdoc(member) or "").partition("\n\n")[0]
        else:
            found[name] = _schema_of(hints[name], definitions)
        if name in texts:
            found[name] = {**found[name], "description": texts[name]}
    return {"description": about, "type": "object", "properties": found, "required": list(found)}


def _of_generic(origin: Any, args: tuple[Any, ...], definitions: dict[str, Schema]) -> Schema:  # noqa: ANN401 - types
    if origin is Literal:
        return {"enum": list(args)}
    if origin in {types.UnionType, Union}:
        return {"anyOf": [_schema_of(arg, definitions) for arg in args]}
    if origin is tuple and args[-1] is not Ellipsis:
        items = [_schema_of(arg, definitions) for arg in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in {tuple, Sequence}:
        return {"type": "array", "items": _schema_of(args[0], definitions)}
    if origin is np.ndarray:
        (scalar,) = get_args(args[1])
        return {"type": "array", "items": _PLAIN[int if issubclass(scalar, np.integer) else float]}
    if origin in {dict, Mapping}:
        keys = (
            {} if args[0] is str else {"propertyNames": _WHOLE if args[0] is int else _schema_of(args[0], definitions)}
        )
        return {"type": "object", **keys, "additionalProperties": _schema_of(args[1], definitions)}
    raise TypeError(f"no report has a {origin} of {args}")


def _texts(kind: type) -> dict[str, str]:
    """Return the texts on a dataclass's attributes, those of its bases included, in its docstrings."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for entry in _ATTRIBUTE.finditer(attributes):
            text = " ".join(entry["text"].split()).replace("``", "")
            found |= dict.fromkeys(entry["names"].split(", "), re.sub(r":\w+:`~?([^`]+)`", r"\1", text))
    return found


def text() -> str:
    """Return the content of the schema's file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    schema_path().write_text(text(), encoding="utf-8")
