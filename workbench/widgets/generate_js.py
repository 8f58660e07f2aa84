"""Generator of the front end's copies of Python definitions: names and colours of events, tables, messages.

Run ``python -m workbench.widgets.generate_js`` after a change of :mod:`workbench.events`, the colours of views,
:mod:`workbench.live.packing` or :mod:`workbench.live.dashboard_messages`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, get_args

from workbench.events import RANK_TRACKS, Category, Kind, UnitState
from workbench.live.dashboard_messages import Answer, InitialState, Question
from workbench.live.packing import COLUMNS, WIDTHS
from workbench.replay.grouping import MAX_RUNS, NAMED_RUNS
from workbench.views import theme
from workbench.widgets.js_bundle import STATIC
from workbench.widgets.typescript import module

_HEADING = "Made of workbench/{}.py by: python -m workbench.widgets.generate_js"
_ARRAYS = {"f8": "Float64Array", "f4": "Float32Array", "i4": "Int32Array", "i2": "Int16Array", "u1": "Uint8Array"}


def programs() -> dict[str, str]:
    """Return the text of each generated file, by its name in ``static``."""
    return {"events.js": _events(), "tables.js": _tables(), "messages.d.ts": _messages()}


def _events() -> str:
    """Return tables indexed by the numbers that traces use, and these numbers by name."""
    kinds = ({**_look(k, theme.KIND_COLOURS[k]), "isCollective": k.info.is_collective} for k in Kind)
    categories = (_look(category, theme.CATEGORY_COLOURS[category]) for category in Category)
    states = (_look(state, theme.UNIT_STATE_COLOURS[state]) for state in UnitState)
    parts = (
        f"// {_HEADING.format('events.py and workbench/views/theme')}\n",
        _entries("KINDS", kinds) + _numbers("KIND", Kind),
        _entries("CATEGORIES", categories) + _numbers("CATEGORY", Category),
        _entries("UNIT_STATES", states) + _numbers("UNIT_STATE", UnitState),
    )
    return "\n".join(parts)


def _look(word: Kind | Category | UnitState, colour: str) -> dict[str, Any]:
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
    return (
        f"// {_HEADING.format('events.py, workbench/live/packing.py and workbench/replay/grouping')}\n"
        f"\nexport const TABLES = {{\n{lines}}};\n\nexport const TRACKS = {tracks};\n"
        f"\nexport const MAX_RUNS = {MAX_RUNS};\nexport const NAMED_RUNS = {NAMED_RUNS};\n"
    )


def _messages() -> str:
    """Return the types of the messages and of the tables in their buffers."""
    questions, answers = get_args(Question), get_args(Answer)
    heading = _HEADING.format("widgets/dashboard_messages.py and workbench/live/packing")
    messages = module(
        heading,
        [*questions, *answers, InitialState],
        unions={"Question": questions, "Answer": answers},
    )
    return "\n".join([messages, *(_table(name, columns) for name, columns in COLUMNS.items()), _all_tables()])


def _table(name: str, columns: Iterable[tuple[str, str]]) -> str:
    lines = "".join(f"  readonly {column}: {_ARRAYS[code]};\n" for column, code in columns)
    return f"export interface {name.title()}Table {{\n{lines}}}\n"


def _all_tables() -> str:
    lines = "".join(f"  readonly {name}: {name.title()}Table;\n" for name in COLUMNS)
    return f"export interface Tables {{\n{lines}}}\n"


if __name__ == "__main__":
    for name, text in programs().items():
        (STATIC / name).write_text(text, encoding="utf-8")
