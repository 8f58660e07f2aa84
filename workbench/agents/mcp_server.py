"""A server of the Model Context Protocol over standard input and output: ``workbench mcp``.

Each reply is the document that ``--json`` prints. Without ``--control``, tools that change ranks or write files are
not offered, and an attach only views the ranks. The server ends with its client: when standard input closes, or on
SIGTERM, it stops the ranks that it has started; if it is killed, the cluster's reaper does so.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from workbench import __version__
from workbench.agents.command_tools import CELL, MAX_WAIT_S, WAIT, WAIT_S, CommandTool, command_tools
from workbench.agents.reply_limit import limited
from workbench.agents.screenshot import screenshot
from workbench.agents.tool_calls import OpenCalls, ToolCall
from workbench.cluster.local_launch import connection_files
from workbench.errors import UsageError, did_you_mean
from workbench.panel.client import read_command
from workbench.protocol.commands import Attach, Command
from workbench.reports import run_where
from workbench.reports.json_document import document, to_line
from workbench.session.recorded_run import recorded_run
from workbench.workbench import DRAWN, Workbench

INSTRUCTIONS = """\
Sharded training (FSDP) on several ranks: start them, shard a model, stop inside a step, and ask why it hangs or is
wrong. `workbench skill` prints what to call first. Each tool is a line of %fsdp: a message with `%fsdp abort` means the
tool abort. Each reply is a JSON document: read headline, problem, and of a fault its verdict, evidence and fix."""
VIEWS_ONLY = """
This server only views: tools that change ranks or write files need `workbench mcp --control`."""
VIEW_RANKS = "Attach to ranks that a notebook controls, or to free ones, only to view them."
MAX_NAME = 80
"""Characters of the name of an unknown tool that its reply repeats."""

MAX_SESSIONS = 8
"""Most connection files that are named when an attach finds no cluster."""


class ToolServer:
    """Answers the calls of a client with one workbench.

    Args:
        control: whether its tools may change ranks and write files.
        make: makes the workbench.

    Attributes:
        workbench: its workbench.
        tools: the tools that it offers, by name.
    """

    def __init__(self, *, control: bool, make: Callable[[], Workbench] = Workbench) -> None:
        self.workbench = make()
        self._control, self._all, self._calls = control, command_tools(), OpenCalls()
        self.tools = {name: tool for name, tool in self._all.items() if control or tool.is_offered_to_viewers}
        if not control:
            self.tools[Attach.word] = replace(self.tools[Attach.word], about=VIEW_RANKS, looks=True)

    def server(self) -> Server[Any]:
        """Return the server of the SDK."""
        return Server(
            "fsdp-workbench",
            version=__version__,
            instructions=INSTRUCTIONS if self._control else INSTRUCTIONS + VIEWS_ONLY,
            on_list_tools=self._list,
            on_call_tool=self._call,
        )

    async def _list(self, _context: object, _params: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_declared(tool) for tool in self.tools.values()])

    async def _call(self, _context: object, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await self.call(params.name, params.arguments or {})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """Return the result of a tool, or after ``wait_s`` seconds that it has not ended yet."""
        try:
            tool = self._tool(name)
            tool.check(arguments)
            given = dict(arguments)
            wait_s = _seconds(given.pop("wait_s", WAIT_S))
            if name == WAIT:
                call = self._calls.oldest()
            else:
                call = ToolCall(name, partial(self._run, given))
                self._calls.begin(call)
        except UsageError as error:
            return _result(limited(document(name[:MAX_NAME], error=error)))
        await asyncio.wait([asyncio.wrap_future(call.ended)], timeout=wait_s)
        found = self._calls.close(call)
        has_texts = found["type"] == "CellReport"  # what the ranks printed, by rank
        return _result(found, "" if has_texts else call.take_output(), call.picture if call.ended.done() else None)

    def _tool(self, name: str) -> CommandTool:
        """Return an offered tool.

        Raises:
            UsageError: there is none of this name, or it needs ``--control``.
        """
        if name in self.tools:
            return self.tools[name]
        if name in self._all:
            raise UsageError(
                f"{name} changes ranks or writes files, and this server only views: workbench mcp --control"
            )
        raise UsageError(f"there is no tool {name[:MAX_NAME]!r}{did_you_mean(name, self.tools)}")

    def _run(self, given: dict[str, Any], call: ToolCall) -> object:
        """Do what a call asks for, in its thread."""
        picture, folder = bool(given.pop("picture", False)), given.pop("folder", "")
        call.notices += self.workbench.news()
        if call.name == CELL:
            return self._cell(call, **given)
        if call.name == Attach.word and not self._control:
            _check_private(given.get("file"))
            given["look"] = True
        command = read_command({"word": call.name, **given})
        if folder:
            return run_where.where(*recorded_run(Path(str(folder))))
        return self._do(call, command, picture=picture)

    def _cell(self, call: ToolCall, code: object, ranks: Any = None) -> object:  # noqa: ANN401 - any JSON may come
        if not isinstance(code, str) or not (ranks is None or _are_ranks(ranks)):
            raise UsageError("cell takes code, a text, and ranks, a list of numbers such as [0, 1]")
        return self.workbench.run_cell(code, ranks, call.on_output, call.on_standing)

    def _do(self, call: ToolCall, command: Command, *, picture: bool) -> object:
        self.workbench.note(command, "tool")
        more = {"on_notice": call.notices.append, "on_output": call.on_output}
        try:
            report = self.workbench.report(command, **more, on_standing=call.on_standing, on_wait=call.on_standing)
        except UsageError:
            if isinstance(command, Attach):
                call.notices += [
                    f"started here with %fsdp start: file {found}" for found in connection_files()[:MAX_SESSIONS]
                ]
            raise
        if picture:
            drawn = self.workbench.do(command) if command.word in DRAWN else self.workbench.picture(report)
            try:
                call.picture = None if drawn is None else screenshot(drawn)
            except UsageError as error:  # the numbers are there nevertheless
                call.notices.append(str(error))
        return report

    def close(self) -> None:
        """Stop the ranks that were started here, and detach from others. May be called again."""
        if self.workbench.exchange == "start":
            self.workbench.abort()
        self.workbench.close()


def _declared(tool: CommandTool) -> types.Tool:
    hints = types.ToolAnnotations(read_only_hint=tool.looks, open_world_hint=False)
    return types.Tool(name=tool.name, description=tool.about, input_schema=tool.schema, annotations=hints)


def _result(found: dict[str, Any], output: str = "", picture: bytes | None = None) -> types.CallToolResult:
    """Return a document as a result, with what the ranks have printed, and a picture."""
    content: list[types.ContentBlock] = [types.TextContent(text=to_line(found))]
    if output:
        content.append(types.TextContent(text=f"The ranks have printed:\n{output}"))
    if picture is not None:
        content.append(types.ImageContent(data=base64.b64encode(picture).decode(), mime_type="image/png"))
    return types.CallToolResult(content=content, structured_content=found, is_error=found["error"] is not None)


def _seconds(given: object) -> int:
    if type(given) is not int or not 0 <= given <= MAX_WAIT_S:
        raise UsageError(f"wait_s is a number of seconds from 0 to {MAX_WAIT_S}, not {given!r:.80}")
    return given


def _check_private(file: object) -> None:
    """Raise UsageError if others can read or own a connection file: what its cluster answers is unpickled here."""
    with suppress(OSError, TypeError, ValueError):  # without such a file, the attach says so
        found = Path(cast("str", file)).expanduser().stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(f"{file} is not readable by you alone, as ipyparallel writes it: only --control allows it")


def _are_ranks(given: object) -> bool:
    return isinstance(given, list) and all(type(rank) is int for rank in given)


def serve(*, control: bool) -> None:
    """Serve one client over standard input and output, until it closes its end or SIGTERM or SIGINT comes."""
    tools = ToolServer(control=control)

    def end() -> None:
        try:
            tools.close()
        finally:
            os._exit(0)  # a thread still reads standard input, and nothing can interrupt it

    def on_signal(_number: int, _frame: object) -> None:
        threading.Thread(target=end, name="end of the server", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        asyncio.run(_serve(tools.server()))
    finally:
        tools.close()


async def _serve(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())
