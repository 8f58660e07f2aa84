"""``input`` on a rank, which no front end can answer, says where to ask instead."""

from __future__ import annotations

import builtins
import getpass
from typing import NoReturn

CANNOT_ASK = "a rank cannot ask for input: ask in a cell without %%fsdp, and write the answer into the ranks' code"


def install() -> None:
    """Replace ``input`` and ``getpass`` from now on; IPython sets its own for each cell, before its events."""
    builtins.input = getpass.getpass = _refuse


def _refuse(*_: object, **__: object) -> NoReturn:
    raise EOFError(CANNOT_ASK)  # as of a program without standard input, which scripts expect
