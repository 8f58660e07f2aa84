"""Calls of functions in new Python processes, as in a notebook's: with a time limit, and without leftovers.

The calling process has loaded torch; the new one loads what its function needs. It ends after the call, at the time
limit, or with the caller; ranks that it started end with it.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 300.0
GRACE_S = 15.0
"""How long a terminated process may take to end, in seconds."""


class ApartFailure(Exception):
    """The function raised or exceeded the time limit; the message is the end of its process's output."""


def call_apart(function: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
    """Call ``"module:function"`` with ``arguments`` in a new process and return its value; both are JSON data.

    Raises:
        ApartFailure: it did not return.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "log"
        command = [sys.executable, "-m", __name__, function, json.dumps(arguments), str(answer)]
        with log.open("wb") as written:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ApartFailure(f"{_tail(log)}\n{function} did not return within {timeout_s:.0f} s") from None
        finally:
            _end(process)
        if code:
            raise ApartFailure(_tail(log) or f"{function} ended with exit code {code}")
        return json.loads(answer.read_text("utf-8"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started in its session."""
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)


def _tail(log: Path, num_lines: int = 40) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").strip().splitlines()[-num_lines:])


def main(argv: Sequence[str]) -> None:
    """Call the function that ``argv`` names, with its arguments as JSON, and write its value to a file."""
    function, arguments, answer = argv
    module, _, name = function.partition(":")
    value = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
