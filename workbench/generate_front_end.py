"""Generator of the front end's copies of Python definitions: messages, commands, tables, names and colours of events.

Run ``python -m workbench.generate_front_end`` after a change of :mod:`workbench.live.messages`, the commands of
``%fsdp``, :mod:`workbench.events`, :mod:`workbench.devices`, the colours of views or :mod:`workbench.live.packing`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Any, get_args

from workbench.devices import CHOICES
from workbench.events import RANK_TRACKS, Category, Kind, UnitState
from workbench.live import messages
from workbench.live.packing import COLUMNS, WIDTHS
from workbench.live.typescript import block, module
from workbench.magics.command_lines import WORDS, DrawCommand
from workbench.protocol.commands import summary
from workbench.protocol.policy import HYBRID, STRATEGIES
from workbench.replay.grouping import MAX_RUNS, NAMED_RUNS
from workbench.views import theme

_REPO = Path(__file__).parents[1]
TYPES = _REPO / "extension" / "src" / "protocol.ts"
SETTINGS = _REPO / "extension" / "schema" / "plugin.json"
STATIC = Path(__file__).parent / "widgets" / "static"
EVENTS, TABLES, WIDGET_TYPES = STATIC / "events.js", STATIC / "tables.js", STATIC / "messages.d.ts"

_HEADING = "Made of {} by: python -m workbench.generate_front_end"
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
            "VIEWS": {word: summary(cls) for word, cls in WORDS.items() if issubclass(cls, DrawCommand)},
        },
        sent=[*get_args(messages.PanelQuestion), *commands],
    )
    tables = (_interface(f"{name.title()}Table", dict(columns)) for name, columns in COLUMNS.items())
    together = block("export interface Tables {", [f"readonly {name}: {name.title()}Table;" for name in COLUMNS])
    return "\n".join([declared, *tables, *together, ""])


def _interface(name: str, columns: dict[str, str]) -> str:
    members = [f"readonly {column}: {_ARRAYS[code]};" for column, code in columns.items()]
    return "\n".join([*block(f"export interface {name} {{", members), ""])


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
    kinds = ({**_look(k, theme.KIND_COLOURS[k]), "isCollective": k.info.is_collective} for k in Kind)
    categories = (_look(category, theme.CATEGORY_COLOURS[category]) for category in Category)
    states = (_look(state, theme.UNIT_STATE_COLOURS[state]) for state in UnitState)
    parts = (
        f"// {_HEADING.format('workbench/events.py and workbench/views/theme.py')}\n",
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
    sources = "workbench/live/packing.py, workbench/events.py and workbench/replay/grouping.py"
    return (
        f"// {_HEADING.format(sources)}\n"
        f"\nexport const TABLES = {{\n{lines}}};\n\nexport const TRACKS = {tracks};\n"
        f"\nexport const MAX_RUNS = {MAX_RUNS};\nexport const NAMED_RUNS = {NAMED_RUNS};\n"
    )


if __name__ == "__main__":
    for path, text in programs().items():
        path.write_text(text, encoding="utf-8")
