"""TypeScript types from Python dataclasses: an ``interface`` for each. What they mean is described in Python alone.

The types describe what :mod:`workbench.codec` encodes. A tuple becomes a ``readonly`` array, a ``dict`` a ``Record``, a
union a union, ``Any`` becomes ``unknown``, an enum the union of its numbers, and a ``memoryview`` the index of a buffer
sent with the message. ``Literal``, and the choices of an argument of ``%fsdp``, become unions of texts. A field with
``typescript`` in its metadata has the type given there.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, str] = {
    **{bool: "boolean", int: "number", float: "number", str: "string", NoneType: "null"},
    **{memoryview: "number", Any: "unknown"},
}
_WIDTH = 100


def module(
    heading: str,
    dataclasses: Iterable[type],
    *,
    unions: Mapping[str, Iterable[type]] | None = None,
    constants: Mapping[str, object] | None = None,
    sent: Iterable[type] = (),
) -> str:
    """Return a TypeScript module.

    Args:
        heading: lines of the comment at the top.
        dataclasses: dataclasses to declare, with all that they contain.
        unions: the members of each union, by its name.
        constants: values to export, by name.
        sent: dataclasses that the front end sends: fields with a default become optional.
    """
    may_lack = {kind for root in sent for kind in (root, *_bases(root))}
    parts = ["".join(f"// {line}\n" for line in heading.splitlines())]
    parts.append("".join(f"export const {name} = {json.dumps(value)};\n" for name, value in (constants or {}).items()))
    parts += [_interface(kind, may_lack=kind in may_lack) for kind in _reached(dataclasses)]
    for name, kinds in (unions or {}).items():
        members = textwrap.wrap(" ".join(f"|\u00a0{kind.__name__}" for kind in kinds), _WIDTH - 2)
        parts.append(f"export type {name} =\n  " + "\n  ".join(members).replace("\u00a0", " ") + ";\n")
    return "\n".join(parts)


def _reached(roots: Iterable[type]) -> list[type]:
    """Return dataclasses and those they contain, each once, before the first that contains it."""
    found: dict[type, None] = {}

    def visit(kind: Any) -> None:  # noqa: ANN401 - a type
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if kind not in found:
                for base in _bases(kind):
                    visit(base)
                for hint in _hints(kind).values():
                    visit(hint)
                found[kind] = None
        else:
            for part in get_args(kind):
                visit(part)

    for root in roots:
        visit(root)
    return list(found)


def _interface(kind: Any, *, may_lack: bool) -> str:  # noqa: ANN401 - a dataclass
    bases = _bases(kind)
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    extends = f" extends {', '.join(map(_name, bases))}" if bases else ""
    word = getattr(kind, "word", "")
    members = [f"readonly word: {json.dumps(word)};"] if word else []
    hints = _hints(kind)
    members += [
        _member(field, hints, may_lack=may_lack) for field in dataclasses.fields(kind) if field.name not in inherited
    ]
    head = f"export interface {_name(kind)}{extends} {{"
    return "\n".join([*block(head, members), ""])


def block(head: str, members: Sequence[str]) -> list[str]:
    """Return the lines of an interface: one if it is short."""
    line = f"{head} {' '.join(members)} }}"
    return [line] if len(line) <= _WIDTH else [head, *(f"  {member}" for member in members), "}"]


def _bases(kind: Any) -> list[Any]:  # noqa: ANN401 - dataclasses
    """Return the dataclasses whose fields a dataclass inherits directly."""
    return [base for base in kind.__bases__ if dataclasses.is_dataclass(base) and dataclasses.fields(base)]


def _name(kind: Any) -> str:  # noqa: ANN401 - a dataclass
    return str(kind.__name__).lstrip("_")


def _member(field: dataclasses.Field[Any], hints: Mapping[str, Any], *, may_lack: bool) -> str:
    known = field.metadata.get("argument")
    is_optional = may_lack and field.default is not dataclasses.MISSING
    choices = known.choices if known is not None else None
    type_ = field.metadata.get("typescript") or (_of_texts(choices) if choices else type_of(hints[field.name]))
    return f"readonly {field.name}{'?' if is_optional else ''}: {type_};"


def _hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def type_of(kind: Any) -> str:  # noqa: ANN401 - a type
    """Return a type in TypeScript's notation.

    Raises:
        TypeError: messages do not support this type.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is not None:
        return _generic(origin, args)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return " | ".join(str(int(member)) for member in kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _name(kind)
    raise TypeError(f"no message holds a {kind}")


def _generic(origin: Any, args: tuple[Any, ...]) -> str:  # noqa: ANN401 - types
    if origin is Literal:
        return _of_texts(args)
    if origin in {tuple, Sequence}:
        item = type_of(args[0])
        return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
    if origin is dict:
        return f"Readonly<Record<string, {type_of(args[1])}>>"
    if origin in {UnionType, Union}:
        return " | ".join(dict.fromkeys(type_of(arg) for arg in args))
    raise TypeError(f"no message holds a {origin}")


def _of_texts(texts: Iterable[str]) -> str:
    return " | ".join(json.dumps(text) for text in texts)
