"""The tools of the server for the Model Context Protocol: one for each command of ``%fsdp``, made from its declaration.

A tool has the name and the arguments of its command. Besides these, ``cell`` runs code as a ``%%fsdp`` cell does, and
``wait`` waits for a call that has not ended yet.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, cast, get_args, get_origin

from workbench.base.codec import hints_of
from workbench.errors import UsageError, did_you_mean
from workbench.magics.command_lines import WORDS
from workbench.protocol.arguments import argument_of
from workbench.protocol.commands import Attach, Cell, Command, summary
from workbench.workbench import DRAWN

CELL, WAIT = "cell", "wait"
WAIT_S, MAX_WAIT_S = 30, 600
"""Time in seconds that a call waits for its end, by default and at most."""

ONLY_SHOWN = {"dashboard", "example", "help"}
"""Commands without a tool: a widget, a cell to insert, and the list of commands, as a client has that of tools."""

_ONLY_DRAWN = {"talk", "canvas"}
"""Arguments that only change a figure in a notebook."""

_TYPES = {bool: "boolean", int: "integer", str: "string"}
_CODE = {"type": "string", "description": "Python, as in a notebook cell"}
_PICTURE = {"type": "boolean", "description": "also return the picture, as PNG (default: no)"}
_FOLDER = {
    "type": "string",
    "description": "a recorded run: the folder of python -m workbench.record, or of dumps of the Flight Recorder "
    "(default: the ranks of this session)",
}
_WAIT = {
    "type": "integer",
    "minimum": 0,
    "maximum": MAX_WAIT_S,
    "description": f"seconds to wait for the end (default {WAIT_S}); a call that has not ended goes on: see {WAIT}",
}


@dataclass(frozen=True, kw_only=True)
class CommandTool:
    """A tool.

    Attributes:
        name: its name.
        about: what it does.
        schema: JSON Schema of its arguments.
        looks: whether it is read-only.
    """

    name: str
    about: str
    schema: dict[str, Any]
    looks: bool

    @property
    def is_offered_to_viewers(self) -> bool:
        """Whether a server without ``--control`` offers it: also an attach, which then only views the ranks."""
        return self.looks or self.name == Attach.word

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise UsageError unless the tool has all of these arguments, and they have those that it needs."""
        known = self.schema["properties"]
        for name in arguments.keys() - known.keys():
            near = did_you_mean(name, known) or ";"
            raise UsageError(f"{self.name} has no argument {name!r}{near} it takes {', '.join(known) or 'none'}")
        if missing := [name for name in self.schema["required"] if name not in arguments]:
            raise UsageError(f"{self.name} needs {' and '.join(missing)}: {known[missing[0]]['description']}")


def command_tools() -> dict[str, CommandTool]:
    """Return all tools by name, in the order of ``%fsdp help``."""
    found = [_tool_of(word, command) for word, command in WORDS.items() if word not in ONLY_SHOWN]
    about = "Wait for the call that has run longest without an end, and return its result."
    cell = _tool_of(CELL, Cell)
    schema = cell.schema | {"properties": {"code": _CODE, **cell.schema["properties"]}, "required": ["code"]}
    wait = CommandTool(name=WAIT, about=about, schema=_object({"wait_s": _WAIT}), looks=True)
    return {tool.name: tool for tool in (*found, dataclasses.replace(cell, schema=schema), wait)}


def _tool_of(name: str, command: type[Command]) -> CommandTool:
    """Return the tool of a command."""
    fields = [field for field in dataclasses.fields(command) if field.name not in _ONLY_DRAWN]
    hints = hints_of(cast("Any", command))
    properties = {field.name: _argument(field, hints[field.name]) for field in fields}
    if name in {*DRAWN, "explain"}:
        properties["picture"] = _PICTURE
    if name == "where":
        properties["folder"] = _FOLDER
    properties["wait_s"] = _WAIT
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    text = summary(command)
    more = (inspect.getdoc(command) or "").partition("\n\n")[2]
    more = more.partition("Args:\n")[0].partition("Raises:\n")[0].replace("``", "").strip()
    about = "\n".join(filter(None, [f"{text[:1].upper()}{text[1:]}.", more]))
    return CommandTool(name=name, about=about, schema=_object(properties, required), looks=command.looks)


def _object(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:  # noqa: ANN401 - a type
    """Return the schema of one argument."""
    known, kinds = argument_of(field), _kinds(hint)
    choices: dict[str, Any] = {"enum": list(known.choices)} if known.choices else {}
    if known.choices and field.default == "":
        choices["enum"].append("")  # as if it was not given
    return {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}), **choices, "description": known.about}


def _kinds(hint: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - a type
    """Return the schema of each alternative of a type, except None, which means that an argument is not given."""
    if hint in _TYPES:
        return [{"type": _TYPES[hint]}]
    if get_origin(hint) is Sequence:
        return [{"type": "array", "items": _kinds(get_args(hint)[0])[0]}]
    return [kind for part in get_args(hint) if part is not NoneType for kind in _kinds(part)]
