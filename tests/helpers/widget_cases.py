"""What Python computes of given numbers, for the tests of the widgets' JavaScript, which computes the same.

``python -m tests.helpers.widget_cases`` writes ``extension/tests/widgets/python_cases.ts`` again.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.helpers.package_source import REPO
from workbench.base.text_formats import format_bytes, format_duration, format_share
from workbench.live.packing import COLUMNS, WIDTHS
from workbench.replay.grouping import label

FILE = REPO / "extension" / "tests" / "widgets" / "python_cases.ts"

_HEADING = "// Made of what Python computes by: python -m tests.helpers.widget_cases\n"

_SIZES = (0, 0.5, 1, 1.5, 2.5, 1023, 1023.5, 1024, 1025, 1029.12, 10234.88, 102348.8, 1048575, 1179648, 1185000)
BYTES = (*_SIZES, -2048, 10475274, 104_805_000, 2**30 - 1, 2**30, 5 * 2**29, 2**40, 1100 * 2**40)
US = (
    0,
    0.125,
    0.375,
    0.004,
    1,
    1.125,
    9.995,
    12.25,
    12.75,
    99.95,
    999.9996,
    1000,
    1125,
    62_500,
    999_999,
    1e6,
    3.6e9,
    -1500,
)
SHARES = (0, 0.004, 0.005, 0.015, 0.025, 0.125, 0.41, 0.415, 0.995, 1, 12.345)
RANKS = (
    [3],
    [0, 1],
    [0, 1, 2, 5],
    [*range(0, 16, 2)],
    [*range(0, 18, 2)],
    [0, 1, *range(15, 512, 15)],
    [*range(37), *range(38, 512)],
)


def _cases(values: Iterable[Any], compute: Callable[[Any], str]) -> list[list[Any]]:
    return [[value, compute(value)] for value in values]


def _tables() -> dict[str, Any]:
    """Return a buffer as :mod:`workbench.live.packing` lays it out, with the counts and columns that are in it."""
    counts, buffer = {"spans": 3, "memory": 2, "states": 1, "steps": 0}, b""
    columns: dict[str, dict[str, list[float]]] = {}
    for place, (table, wanted) in enumerate(COLUMNS.items()):
        columns[table] = {}
        for number, (name, code) in enumerate(wanted):
            length = counts[table] * WIDTHS.get((table, name), 1)
            values = np.arange(length).astype(f"<{code}") + 10 * place + number
            columns[table][name] = values.tolist()
            column = values.astype(f"<{code}").tobytes()
            buffer += column + bytes(-len(column) % 8)
    return {"counts": counts, "buffer": base64.b64encode(buffer).decode(), "columns": columns}


def program() -> str:
    """Return what the file has to hold."""
    cases = {
        "BYTES": _cases(BYTES, format_bytes),
        "DURATIONS": _cases(US, lambda us: format_duration(1000 * us)),
        "SHARES": _cases(SHARES, format_share),
        "RANKS": _cases(RANKS, label),
        "TABLES": _tables(),
    }
    types = dict.fromkeys(("BYTES", "DURATIONS", "SHARES"), ": readonly (readonly [number, string])[]")
    types |= {"RANKS": ": readonly (readonly [readonly number[], string])[]", "TABLES": ""}
    return _HEADING + "".join(
        f"\nexport const {name}{types[name]} = {json.dumps(case)};\n" for name, case in cases.items()
    )


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(program(), encoding="utf-8")
