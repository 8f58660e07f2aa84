"""How the program of a rank ended: by an error of its own, or because of other ranks. Read from the error's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from workbench.trace.recording import AFTER

_OF_COLLECTIVES = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
"""Names of the errors that a collective raises."""

_ABORTED = ("StepAborted", "CollectiveFailed")
"""Names of errors that the workbench's engine raises because another rank failed."""

_PEER_GONE = re.compile(
    r"gloo/transport|Connection (closed|reset) by peer|Broken pipe|Socket closed|remote process exited|RemoteError",
    re.IGNORECASE,
)
_TOO_LONG = re.compile(
    r"Timed out waiting|Application timeout|wait timeout|collective operation timeout|watchdog"
    r"|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
_PLACE_IN_C = re.compile(r"\[(?:enforce fail at )?[^\]\s]*\.(cc|cpp|h|hpp):\d+\]\s*")
_ADVICE_OF_C = re.compile(r"\.? This is typically caused.*?(?=, at line |; after |$)")
_AFTER_FAILURE = " in check_after_failure"
_AT_LINE = re.compile(r", at line \d+ of [^;]*$")


class Ending(Enum):
    """Why a program ended; the value is its display text."""

    SUCCESS = "has ended"
    # an exception of its own, or an exit status
    ERROR = "failed"
    # a collective failed as another rank's process was gone, or had failed
    PEER = "failed because its peer was gone"
    # a collective failed as another rank did not come
    TIMEOUT = "had waited too long"
    # C or C++ code gave up, perhaps as a collective could not end
    ABORTED = "was aborted"
    # interrupted or terminated
    OUTSIDE = "was interrupted"


def ending_of(reason: str, frames: Sequence[str] = ()) -> Ending:
    """Return why a program ended.

    Args:
        reason: its last error as ``Name: text``; empty for success.
        frames: its calls at the end. A rank of the workbench's engine waits for a moment before it raises the failure
            of a collective, and its launcher may terminate it meanwhile.
    """
    if not reason:
        return Ending.SUCCESS
    if reason.startswith(("KeyboardInterrupt", "SIGTERM")):
        return Ending.PEER if any(_AFTER_FAILURE in frame for frame in frames) else Ending.OUTSIDE
    if reason.startswith("SIGABRT"):
        return Ending.ABORTED
    for error in reason.split(AFTER):
        name = error.partition(":")[0]
        if name in _OF_COLLECTIVES and _TOO_LONG.search(error):
            return Ending.TIMEOUT
        if name in _ABORTED or (name in _OF_COLLECTIVES and _PEER_GONE.search(error)):
            return Ending.PEER
    return Ending.ERROR


def short_reason(reason: str) -> str:
    """Return an error's text without places in C++ sources, advice of C++ libraries, and the line that raised it.

    Example: ``RuntimeError: [/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer [::1]:1. This is typically``
    -> ``RuntimeError: Connection closed by peer [::1]:1``.
    """
    return _AT_LINE.sub("", _ADVICE_OF_C.sub("", _PLACE_IN_C.sub("", reason)))
