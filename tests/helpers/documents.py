"""The documents as data: tables, code blocks and links of README.md, CONTRIBUTING.md, CHANGELOG.md and docs/.

``python -m tests.helpers.documents`` writes the tables of commands that :data:`COMMAND_TABLES` lists, those of the
rules of ``lint`` and of faults, that of engines, and the glossary.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.helpers.engine_contract import ENGINES, INSTRUMENTS, LIMITS
from tests.helpers.package_source import REPO
from workbench.base.glossary import SECTIONS
from workbench.magics import command_lines
from workbench.protocol.commands import Command, summary
from workbench.protocol.fault_kinds import KINDS
from workbench.runtime.lint_rules import rules
from workbench.runtime.lint_target import Damage

README = REPO / "README.md"


@cache
def documents() -> dict[Path, str]:
    """Return the text of each document, by path."""
    paths = [README, REPO / "CONTRIBUTING.md", REPO / "CHANGELOG.md", *sorted((REPO / "docs").glob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def text() -> str:
    """Return the text of all documents."""
    return "\n\n".join(documents().values())


def table(first_column: str) -> list[list[str]]:
    """Return the rows of the only table with this title of its first column, each a list of cell texts."""
    found = [rows for each in documents().values() for rows in _tables(each, first_column)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} tables in README.md and docs/ have the first column {first_column!r}, not 1")
    return found[0]


def _tables(document: str, first_column: str) -> list[list[list[str]]]:
    """Return every table of a document with this first column."""
    lines = document.splitlines()
    starts = [i for i, line in enumerate(lines) if _cells(line)[:1] == [first_column]]
    found = []
    for start in starts:
        end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
        found.append([_cells(line) for line in lines[start + 2 : end]])  # without titles and the rule below them
    return found


def code(text_of_cell: str) -> list[str]:
    """Return everything between backticks."""
    return re.findall(r"`([^`]+)`", text_of_cell)


def inline_code(document: str | None = None) -> list[str]:
    """Return everything between backticks outside fenced blocks, of all documents or of one."""
    return code(
        re.sub(r"^ *```.*?^ *```$", "", text() if document is None else document, flags=re.MULTILINE | re.DOTALL)
    )


def blocks(language: str, document: str | None = None) -> list[str]:
    """Return the fenced code blocks in a language, of all documents or of one."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, text() if document is None else document, re.MULTILINE | re.DOTALL)


def links(document: str) -> list[tuple[str, str]]:
    """Return a document's links to other documents and files, each as (path, heading); both may be empty."""
    targets = re.findall(r"\]\(([^)\s]+)\)", document)
    return [(path, heading) for path, _, heading in (t.partition("#") for t in targets if "://" not in t)]


def headings(document: str) -> set[str]:
    """Return the anchors of a document's headings: ``## A kind of event`` -> ``a-kind-of-event``."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```$", "", document, flags=re.MULTILINE | re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


# ---- the tables of commands


def _in_full(command: type[Command]) -> str:
    return "; ".join(filter(None, [summary(command), command.more]))


COMMAND_TABLES: dict[str, tuple[Path, Callable[[type[Command]], str]]] = {
    "line": (README, summary),
    "command": (REPO / "docs" / "commands.md", _in_full),
}
"""First column of each table of commands: its document, and the function that describes a command."""

FIRST = ("start", "shard", "step", "explain", "dashboard", "break", "inspect", "where", "lint", "verify")
"""Commands in the table of README.md, in the order of a first hour."""


def command_rows(first_column: str) -> list[list[str]]:
    """Return the rows that a table of commands must have."""
    _, description = COMMAND_TABLES[first_column]
    words = [command_lines.WORDS[name] for name in FIRST] if first_column == "line" else command_lines.WORDS.values()
    return [[f"`%fsdp {word.example}`", description(word)] for word in words]


RULE_TABLE = "`lint` rule", REPO / "docs" / "commands.md"
"""First column and document of the table of the rules of ``lint``."""


def rule_rows() -> list[list[str]]:
    """Return the rows of that table: each rule, what its faults cost, and what it finds."""
    return [[f"`{rule.name}`", _COSTS[rule.damage], rule.about.replace("``", "`")] for rule in rules()]


_COSTS = {
    Damage.NUMBERS: "wrong results",
    Damage.STOPS: "an error or a hang",
    Damage.MEMORY: "memory",
    Damage.SPEED: "time",
}


FAULT_TABLE = "fault", REPO / "docs" / "commands.md"
"""First column and document of the table of the faults that ``fault`` injects."""


def fault_rows() -> list[list[str]]:
    """Return the rows of that table: each fault, what it does, and what names it."""
    return [
        [f"`{kind.name}`", kind.summary, f"`{kind.shown_by}`".replace("`the error`", "the error")]
        for kind in KINDS.values()
    ]


ENGINE_TABLE = "instrument", REPO / "docs" / "engine.md"
"""First column and document of the table of what works with which engine."""


def engine_rows() -> list[list[str]]:
    """Return the rows of that table: each instrument, and whether it works with each engine, or what it says."""
    return [
        [", ".join(f"`{word}`" for word in name.split(", ")), *(LIMITS.get((name, each), "yes") for each in ENGINES)]
        for name in INSTRUMENTS
    ]


GLOSSARY = REPO / "docs" / "glossary.md"


def glossary_tables() -> str:
    """Return the sections that the glossary must have."""
    head = "| term | meaning |\n|---|---|\n"
    rows = {
        title: "".join(f"| {term} | {meaning} |\n" for term, meaning in terms.items())
        for title, terms in SECTIONS.items()
    }
    return "\n".join(f"## {title}\n\n{head}{each}" for title, each in rows.items())


def _write_tables() -> None:
    GLOSSARY.write_text(f"{GLOSSARY.read_text('utf-8').partition('## ')[0]}{glossary_tables()}", encoding="utf-8")
    tables = [(first, path, command_rows(first)) for first, (path, _) in COMMAND_TABLES.items()]
    for first_column, path, found in (
        *tables,
        (*RULE_TABLE, rule_rows()),
        (*FAULT_TABLE, fault_rows()),
        (*ENGINE_TABLE, engine_rows()),
    ):
        rows = "".join(f"| {' | '.join(row)} |\n" for row in found)
        before, title, rest = re.split(rf"(^\| {first_column} \|.*\n\|---.*\n)", path.read_text("utf-8"), flags=re.M)
        after = re.sub(r"\A(\|.*\n)*", "", rest)
        path.write_text(before + title + rows + after, encoding="utf-8")


if __name__ == "__main__":
    _write_tables()
