"""Generator of the front end's copies of Python definitions: messages, commands, tables, names and colours of events.

Run ``python -m workbench.cli.generate_front_end`` after a change of :mod:`workbench.live.messages`, the commands of
``%fsdp``, :mod:`workbench.events`, :mod:`workbench.base.devices`, the colours of views or
:mod:`workbench.live.packing`.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from workbench.base.codec import hints_of
from workbench.base.devices import CHOICES
from workbench.base.glossary import MEANINGS
from workbench.cli.main import COURSE_FOLDER
from workbench.course.checks import CHECK_MIME
from workbench.events import RANK_TRACKS, Category, Kind, UnitState
from workbench.live import messages
from workbench.live.packing import COLUMNS, WIDTHS
from workbench.magics.command_lines import WORDS, DrawCommand
from workbench.protocol.commands import summary
from workbench.protocol.example import EXAMPLE
from workbench.protocol.fault_kinds import KINDS
from workbench.protocol.policy import HYBRID, STRATEGIES
from workbench.replay.grouping import MAX_RUNS, NAMED_RUNS
from workbench.views import theme

_REPO = Path(__file__).parents[2]
TYPES = _REPO / "extension" / "src" / "protocol.ts"
SETTINGS = _REPO / "extension" / "schema" / "plugin.json"
STATIC = Path(__file__).parents[1] / "widgets" / "static"
EVENTS, TABLES, WIDGET_TYPES = STATIC / "events.js", STATIC / "tables.js", STATIC / "messages.d.ts"

_HEADING = "Made of {} by: python -m workbench.cli.generate_front_end"
_PLAIN: dict[Any, str] = {
    **{bool: "boolean", int: "number", float: "number", str: "string", NoneType: "null"},
    **{memoryview: "number", Any: "unknown"},
}
_WIDTH = 100
_ARRAYS = {"f8": "Float64Array", "f4": "Float32Array", "i4": "Int32Array", "i2": "Int16Array", "u1": "Uint8Array"}


def programs() -> dict[Path, str]:
    """Return the text of each file that is generated in whole or in part."""
    return {
        TYPES: _types(),
        WIDGET_TYPES: _widget_types(),
        SETTINGS: _settings(),
        EVENTS: _events(),
        TABLES: _tables(),
    }


def _types() -> str:
    """Return the types of all messages and commands, and of the tables in the buffers of messages."""
    commands = list(WORDS.values())
    named = ("PanelQuestion", "PanelAnswer", "ViewQuestion", "ViewAnswer")
    unions = {name: get_args(getattr(messages, name)) for name in named} | {"Command": commands}
    questions = get_args(messages.Question)
    declared = module(
        _HEADING.format("workbench/live/messages.py, which describes them, and the words of %fsdp"),
        [*questions, *get_args(messages.Answer), *commands],
        unions=unions,
        constants={
            **{"TARGET": messages.TARGET, "VERSION": messages.VERSION},
            **{"DEVICES": CHOICES, "STRATEGIES": STRATEGIES, "HYBRID": HYBRID},
            "EXAMPLE": EXAMPLE,
            **{"CHECK_MIME": CHECK_MIME, "COURSE_FOLDER": COURSE_FOLDER},
            "FAULT_KINDS": {kind.name: kind.summary for kind in KINDS.values()},
            "VIEWS": {word: summary(cls) for word, cls in WORDS.items() if issubclass(cls, DrawCommand)},
        },
        sent=[*get_args(messages.PanelQuestion), *commands],
    )
    tables = (_table_interface(f"{name.title()}Table", dict(columns)) for name, columns in COLUMNS.items())
    together = _block("export interface Tables {", [f"readonly {name}: {name.title()}Table;" for name in COLUMNS])
    return "\n".join([declared, *tables, *together, ""])


def _table_interface(name: str, columns: dict[str, str]) -> str:
    members = [f"readonly {column}: {_ARRAYS[code]};" for column, code in columns.items()]
    return "\n".join([*_block(f"export interface {name} {{", members), ""])


def _widget_types() -> str:
    """Return the names under which the widgets' modules know the same types."""
    source = "../../../extension/src/protocol"
    return (
        f"// {_HEADING.format('extension/src/protocol.ts')}\n"
        f'export type {{ ViewAnswer as Answer, ViewQuestion as Question }} from "{source}";\n'
        f'export type * from "{source}";\n'
    )


def _settings() -> str:
    settings = json.loads(SETTINGS.read_text("utf-8"))
    settings["properties"]["device"]["enum"] = CHOICES
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _events() -> str:
    """Return tables indexed by the numbers that traces use, and these numbers by name."""
    kinds = ({**_entry(k, theme.KIND_COLOURS[k]), "isCollective": k.info.is_collective} for k in Kind)
    categories = (_entry(category, theme.CATEGORY_COLOURS[category]) for category in Category)
    states = (_entry(state, theme.UNIT_STATE_COLOURS[state]) for state in UnitState)
    words = dict.fromkeys([*(word.words for word in (*Kind, *Category, *UnitState)), "exposed"])
    shown = {word: MEANINGS[word] for word in words if word in MEANINGS}
    parts = (
        f"// {_HEADING.format('workbench/events.py and workbench/views/theme.py')}\n",
        _entries("KINDS", kinds) + _numbers("KIND", Kind),
        _entries("CATEGORIES", categories) + _numbers("CATEGORY", Category),
        _entries("UNIT_STATES", states) + _numbers("UNIT_STATE", UnitState),
        f"/** @type {{Readonly<Record<string, string>>}} */\nexport const MEANINGS = {json.dumps(shown, indent=2)};\n",
    )
    return "\n".join(parts)


def _entry(word: Kind | Category | UnitState, colour: str) -> dict[str, Any]:
    return {"words": word.words, "colour": colour}


def _entries(name: str, entries: Iterable[dict[str, Any]]) -> str:
    lines = "".join(f"  {json.dumps(entry)},\n" for entry in entries)
    return f"export const {name} = /** @type {{const}} */ ([\n{lines}]);\n"


def _numbers(name: str, words: type[IntEnum]) -> str:
    lines = "".join(f"  {word.name}: {int(word)},\n" for word in words)
    return f"export const {name} = /** @type {{const}} */ ({{\n{lines}}});\n"


def _tables() -> str:
    """Return each table's columns with type and width, the tracks of a rank, and the limits for labels of ranks."""
    found = {
        table: {column: [code, WIDTHS.get((table, column), 1)] for column, code in columns}
        for table, columns in COLUMNS.items()
    }
    lines = "".join(f"  {table}: {json.dumps(columns)},\n" for table, columns in found.items())
    tracks = json.dumps([track.value for track in RANK_TRACKS])
    sources = "workbench/live/packing.py, workbench/events.py and workbench/replay/grouping.py"
    return (
        f"// {_HEADING.format(sources)}\n"
        f"\nexport const TABLES = {{\n{lines}}};\n\nexport const TRACKS = {tracks};\n"
        f"\nexport const MAX_RUNS = {MAX_RUNS};\nexport const NAMED_RUNS = {NAMED_RUNS};\n"
    )


def module(
    heading: str,
    dataclasses: Iterable[type],
    *,
    unions: Mapping[str, Iterable[type]],
    constants: Mapping[str, object],
    sent: Iterable[type],
) -> str:
    """Return a TypeScript module with an ``interface`` for each dataclass.

    The types describe what :mod:`workbench.base.codec` encodes. A tuple becomes a ``readonly`` array, a ``dict`` a
    ``Record``, a union a union, ``Any`` becomes ``unknown``, an enum the union of its numbers, and a ``memoryview`` the
    index of a buffer sent with the message. ``Literal``, and the choices of an argument of ``%fsdp``, become unions of
    texts. A field with ``typescript`` in its metadata has the type given there.

    Args:
        heading: the comment at the top.
        dataclasses: dataclasses to declare, with all that they contain.
        unions: the members of each union, by its name.
        constants: values to export, by name.
        sent: dataclasses that the front end sends: fields with a default become optional.
    """
    may_lack = {kind for root in sent for kind in (root, *_bases(root))}
    parts = [f"// {heading}\n"]
    parts.append("".join(f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items()))
    parts += [_interface(kind, may_lack=kind in may_lack) for kind in _reached(dataclasses)]
    for name, kinds in unions.items():
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
                for hint in hints_of(kind).values():
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
    extends = f" extends {', '.join(map(_base, bases))}" if bases else ""
    word = getattr(kind, "word", "")
    members = [f"readonly word: {json.dumps(word)};"] if word else []
    hints = hints_of(kind)
    members += [
        _member(field, hints, may_lack=may_lack) for field in dataclasses.fields(kind) if field.name not in inherited
    ]
    head = f"export interface {_name(kind)}{extends} {{"
    return "\n".join([*_block(head, members), ""])


def _block(head: str, members: Sequence[str]) -> list[str]:
    """Return the lines of an interface: one if it is short."""
    line = f"{head} {' '.join(members)} }}"
    return [line] if len(line) <= _WIDTH else [head, *(f"  {member}" for member in members), "}"]


def _bases(kind: Any) -> list[Any]:  # noqa: ANN401 - dataclasses
    """Return the dataclasses whose fields a dataclass inherits directly."""
    return [base for base in kind.__bases__ if dataclasses.is_dataclass(base) and dataclasses.fields(base)]


def _base(kind: Any) -> str:  # noqa: ANN401 - a dataclass
    """Return what inherits a dataclass's fields, but not its word."""
    return f'Omit<{_name(kind)}, "word">' if getattr(kind, "word", "") else _name(kind)


def _name(kind: Any) -> str:  # noqa: ANN401 - a dataclass
    return str(kind.__name__).lstrip("_")


def _member(field: dataclasses.Field[Any], hints: Mapping[str, Any], *, may_lack: bool) -> str:
    known = field.metadata.get("argument")
    is_optional = may_lack and field.default is not dataclasses.MISSING
    choices = known.choices if known is not None else None
    type_ = field.metadata.get("typescript") or (_of_texts(choices) if choices else type_of(hints[field.name]))
    return f"readonly {field.name}{'?' if is_optional else ''}: {type_};"


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


if __name__ == "__main__":
    for path, text in programs().items():
        path.write_text(text, encoding="utf-8")
