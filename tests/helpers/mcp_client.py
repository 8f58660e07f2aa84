"""A client of ``workbench mcp``, over the standard input and output of a server that it starts."""

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client

from tests.helpers import json_schema


@dataclass
class Connection:
    """A client and its server.

    Attributes:
        pid: of the server.
        tools: the names of the tools that the server offers.
    """

    portal: object = field(repr=False)
    client: Client = field(repr=False)
    pid: int
    tools: tuple[str, ...] = ()

    def result(self, tool, **arguments):
        """Return the whole result of a tool."""
        return self.portal.call(self.client.call_tool, tool, arguments)

    def call(self, tool, **arguments):
        """Return the document of a tool."""
        return json_schema.check(self.result(tool, **arguments).structured_content)

    def ok(self, tool, **arguments):
        """Return the report of a tool that succeeds."""
        found = self.call(tool, **arguments)
        assert found["error"] is None, found["error"]["message"]
        return found["report"]

    def refused(self, tool, **arguments):
        """Return why a tool refuses what it was asked for."""
        error = self.call(tool, **arguments)["error"]
        assert error["type"] == "UsageError", error
        return error["message"]


@contextmanager
def connected(*flags):
    """Start a server and yield the connection to it; the server ends with the client."""
    given = StdioServerParameters(
        command=sys.executable, args=["-m", "workbench.cli.main", "mcp", *flags], env=dict(os.environ)
    )
    with open(os.devnull, "w") as nowhere, start_blocking_portal() as portal:
        before = set(psutil.Process().children())
        client = Client(stdio_client(given, errlog=nowhere))
        with portal.wrap_async_context_manager(client):
            (server,) = [each for each in set(psutil.Process().children()) - before if flags_of(each) == flags]
            found = Connection(portal, client, server.pid)
            found.tools = tuple(tool.name for tool in portal.call(client.list_tools).tools)
            yield found


def flags_of(process):
    """Return the flags of a server; None for another process."""
    words = process.cmdline()
    return tuple(words[words.index("mcp") + 1 :]) if "mcp" in words else None
