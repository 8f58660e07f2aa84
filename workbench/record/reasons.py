"""Why a script ended, as its recording has it."""

from __future__ import annotations

import re

from workbench.runtime.handled_errors import error_of_worker
from workbench.trace.recording import AFTER

_MAX_REASON = 500
"""Characters of an error's text that are recorded."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_CHAIN = 3
"""Errors of a chain that are recorded, the last one first."""


def reason_of(error: BaseException) -> str:
    """Return why a script ended that raised ``error``; empty if it ended well.

    The errors follow that were being handled when it was raised.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return ""
    found: list[str] = []
    current: BaseException | None = error
    while current is not None and len(found) < _MAX_CHAIN:
        found.append(_words(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return AFTER.join(found)


def _words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exit status {error.code}" if isinstance(error.code, int) else f"exit: {error.code}"
    told = _COLOURS.sub("", " ".join(error_of_worker(str(error))))  # without the worker's traceback
    text = " ".join(told.split())[:_MAX_REASON]
    kind = type(error)
    name = f"{kind.__module__}.{kind.__name__}" if kind.__name__.islower() else kind.__name__  # such as struct.error
    return f"{name}: {text}".removesuffix(": ")
