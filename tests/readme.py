"""The README as data: its tables and its blocks of code."""

import re
from functools import cache

from tests.source import REPO


@cache
def text() -> str:
    return (REPO / "README.md").read_text(encoding="utf-8")


def table(first_column: str) -> list[list[str]]:
    """Rows of the table whose first column has this title, each a list of its cells' text."""
    lines = iter(text().splitlines())
    if not any(_cells(line)[:1] == [first_column] for line in lines):
        raise LookupError(f"README.md has no table whose first column is {first_column!r}")
    next(lines)  # the rule below the titles
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(_cells(line))
    return rows


def code(text_of_cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", text_of_cell)


def inline_code() -> list[str]:
    """Everything between backticks outside of fenced blocks."""
    return code(re.sub(r"^```.*?^```$", "", text(), flags=re.MULTILINE | re.DOTALL))


def blocks(language: str) -> list[str]:
    """Fenced blocks of code in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]
