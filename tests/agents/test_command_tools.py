"""The tools follow from the declared commands, and what is written about them follows from the tools."""

import json
import re

import jsonschema
import pytest

from tests.helpers import documents
from tests.helpers.package_source import PACKAGE, REPO
from workbench.agents.command_tools import CELL, ONLY_SHOWN, WAIT, command_tools
from workbench.agents.reply_limit import limited
from workbench.base.codec import encode
from workbench.cli.main import _COMMANDS
from workbench.magics.command_lines import WORDS, parse_line
from workbench.panel.client import read_command
from workbench.protocol.commands import COMMANDS, ON_RANKS
from workbench.reports import schema_path
from workbench.reports.json_document import document, to_line

TOOLS = command_tools()
ACTS = {
    "start",
    "attach",
    "stop",
    "heal",
    "snapshot",
    "shard",
    "reshard",
    "plan",
    "unshard",
    "lint",
    "step",
    "save",
    "load",
    "run",
    "pause",
    "next",
    "continue",
} | {*("abort", "break", "inspect", "eval", "verify", "fault", "export", CELL)}
"""What changes ranks or writes files: written down here once more, as an error in it would matter."""


def test_there_is_a_tool_for_each_command_that_is_more_than_a_widget():
    assert TOOLS.keys() == {*WORDS, CELL, WAIT} - ONLY_SHOWN
    assert {name for name, tool in TOOLS.items() if not tool.looks} == ACTS
    assert {word for word, command in COMMANDS.items() if command.looks} & ON_RANKS.keys() == set()


@pytest.mark.parametrize("name", sorted(WORDS.keys() - ONLY_SHOWN))
def test_a_tool_takes_what_its_command_takes(name):
    tool, command = TOOLS[name], parse_line(WORDS[name].example)
    jsonschema.Draft202012Validator.check_schema(tool.schema)
    given = {
        key: value for key, value in encode(command).items() if value is not None and key in tool.schema["properties"]
    }
    jsonschema.validate(given, tool.schema)
    tool.check(given)
    assert read_command({"word": name, **given}) == command


def long_document():
    ranks = [{"rank": rank, "state": "w" * 50} for rank in range(5000)]
    return document("where", notices=["n" * 90_000]) | {
        "report": {"ranks": ranks, "texts": {str(i): "" for i in range(99)}}
    }


def test_a_long_reply_says_what_was_left_out():
    found = limited(long_document(), 20_000)
    assert len(to_line(found)) <= 20_000
    assert [rank["rank"] for rank in found["report"]["ranks"]] == list(range(100))
    assert found["notices"][1:] == [
        "Too long for one reply; of these only a part is here: report.ranks: 100 of 5000 items"
    ]
    assert limited(found) == found
    found = limited(long_document(), 2_000)
    assert [len(found["report"][name]) for name in ("ranks", "texts")] == [10, 10]
    assert found["notices"][1].endswith("report.ranks: 10 of 5000 items; report.texts: 10 of 99 members")
    found = limited(document("eval") | {"report": [["a" * 90] * 9] * 9}, 600)
    assert (found["report"], found["notices"]) == (
        None,
        ["Too long for a reply, 7,721 characters: ask for one step, unit or rank"],
    )


# ---- what is written about the tools

SKILL = (PACKAGE / "agents" / "SKILL.md").read_text("utf-8")


def test_the_skill_has_a_short_head_and_body():
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", SKILL, re.DOTALL).groups()
    assert re.fullmatch(r"name: fsdp-workbench\ndescription: .{100,1000}", head)
    assert len(body.splitlines()) < 90


def test_the_skill_names_what_there_is():
    """Each name in it is a tool, an argument of one, a part of a report, or a variable of a cell."""
    arguments = {name for tool in TOOLS.values() for name in tool.schema["properties"]}
    parts = set(re.findall(r'"(\w+)": {', schema_path().read_text("utf-8")))
    known = {*TOOLS, *arguments, *parts, "train_step", "model", "rank", "world_size", "device", "mesh"}
    written = documents.inline_code(SKILL)
    plain = {name for each in written if re.fullmatch(r"[\w.()]+", each) for name in re.split(r"[.()]+", each) if name}
    given = {name for each in written for name in re.findall(r"(\w+)=", each)}
    assert plain - known == set()
    assert given - arguments == set()
    assert {"where", "wait", "abort", "lint", "verify", "shard"} <= plain
    commands = {word for each in written for word in re.findall(r"\bworkbench (\w+)", each)}
    assert {"mcp", "where", "lint"} <= commands <= _COMMANDS.keys()
    for line in (each for each in written if each.startswith("%fsdp ")):
        parse_line(line.removeprefix("%fsdp "))


def test_the_skill_and_the_page_say_which_tools_need_control():
    needs = documents.code(SKILL.partition("# What needs control")[2].partition("Ask the person")[0])
    assert {name for name in needs if name in ACTS} == ACTS & {*needs} >= {CELL, "step", "abort"}
    row = next(row for row in documents.table("started as") if row[0] == "`workbench mcp`")
    assert {*documents.code(row[1])} == {name for name, tool in TOOLS.items() if tool.is_offered_to_viewers}


def test_the_page_names_only_tools_and_arguments():
    rows = documents.table("tool or argument")
    arguments = {name for tool in TOOLS.values() for name in tool.schema["properties"]}
    assert {name for row in rows for name in documents.code(row[0])} <= {*TOOLS, *arguments}
    (shown,) = documents.blocks("json", documents.documents()[REPO / "docs" / "agents.md"])
    assert list(json.loads(shown)["mcpServers"]["fsdp-workbench"]) == ["command", "args"]
