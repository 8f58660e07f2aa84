"""What the front end knows of events: ``static/events.js``, made of :mod:`workbench.events` and the colours of views.

``python -m workbench.widgets.words`` writes it again after either has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from workbench.events import Category, Kind, UnitState
from workbench.views import theme
from workbench.widgets.modules import STATIC

FILE = STATIC / "events.js"


def program() -> str:
    """Return what the file has to hold: tables indexed by the numbers of traces, and these numbers by name."""
    kinds = ({**_look(k, theme.KIND_COLOURS[k]), "isCollective": k.info.is_collective} for k in Kind)
    categories = (_look(category, theme.CATEGORY_COLOURS[category]) for category in Category)
    states = (_look(state, theme.UNIT_STATE_COLOURS[state]) for state in UnitState)
    parts = (
        _table("KINDS", kinds) + _numbers("KIND", Kind),
        _table("CATEGORIES", categories) + _numbers("CATEGORY", Category),
        _table("UNIT_STATES", states) + _numbers("UNIT_STATE", UnitState),
    )
    heading = "// Made of workbench/events.py and workbench/views/theme.py by: python -m workbench.widgets.words\n"
    return heading + "".join(f"\n{part}" for part in parts)


def _look(word: Kind | Category | UnitState, colour: str) -> dict[str, Any]:
    return {"words": word.words, "colour": colour}


def _table(name: str, entries: Iterable[dict[str, Any]]) -> str:
    lines = "".join(f"  {json.dumps(entry)},\n" for entry in entries)
    return f"export const {name} = [\n{lines}];\n"


def _numbers(name: str, words: type[IntEnum]) -> str:
    lines = "".join(f"  {word.name}: {int(word)},\n" for word in words)
    return f"export const {name} = {{\n{lines}}};\n"


if __name__ == "__main__":
    FILE.write_text(program(), encoding="utf-8")
