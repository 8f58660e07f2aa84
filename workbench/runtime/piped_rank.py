"""A rank that serves one command line: a plain process, which reads requests from a pipe and answers through another.

A request is a line of JSON: the name of a function of :mod:`workbench.runtime.rank`, or one of those below, and what it
is given. The answer is a line too: what the function returned, or what it raised.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from workbench.models.engines import use_ours_as_torchs
from workbench.runtime import rank, tracebacks


def main(
    requests: int, answers: int, functions: Mapping[str, Callable[[Any], Any]] | None = None, *, forks: bool = False
) -> None:
    """Serve requests until the other end of the pipe is closed; in the middle of one, the process then ends at once.

    Args:
        requests: file descriptor to read from.
        answers: file descriptor to write to.
        functions: the functions that requests may name; None: :data:`_FUNCTIONS`.
        forks: answer each request in a child of this process, whose modules are loaded and whose state is as new.
    """
    answer_one = _answer_in_child if forks else _answer
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    busy = threading.Event()
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)

    def read() -> None:
        with os.fdopen(requests) as lines:
            for line in lines:
                busy.set()
                waiting.put(line)
        waiting.put("")
        if busy.is_set():
            os.killpg(0, signal.SIGKILL)  # with the processes that the script has started

    threading.Thread(target=read, daemon=True).start()
    with os.fdopen(answers, "w") as out:
        while line := waiting.get():
            answer = json.dumps(answer_one(functions or _FUNCTIONS, **json.loads(line)))
            sys.stdout.flush()
            sys.stderr.flush()
            busy.clear()
            out.write(f"{answer}\n")
            out.flush()
    rank.shutdown()


def _answer(
    functions: Mapping[str, Callable[[Any], Any]],
    function: str,
    given: Any,  # noqa: ANN401 - JSON data
) -> dict[str, Any]:
    try:
        return {"value": functions[function](given)}
    except BaseException as error:  # noqa: BLE001 - a script may raise anything
        return {"error": _report(error)}


def _answer_in_child(
    functions: Mapping[str, Callable[[Any], Any]],
    function: str,
    given: Any,  # noqa: ANN401 - JSON data
) -> Any:  # noqa: ANN401 - JSON data
    """Answer in a child; if that dies, this process dies of the same."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(write, "w") as out:
            json.dump(_answer(functions, function, given), out)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    if not text:
        os._exit(code)  # as the script did
    return json.loads(text)


def _ask(request: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON data
    """Answer a request of the control thread, without buffers."""
    return rank.handle_request(request)[0]


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "boot": rank.boot,
    "connect": rank.connect,
    "execute": rank.execute,
    "ask": _ask,
    "take_our_engine": lambda _: use_ours_as_torchs(),
}


def _report(error: BaseException) -> dict[str, Any]:
    """Return an exception as plain data, with the innermost line of the script."""
    file, line = getattr(sys.modules["__main__"], "__file__", None), None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file:
            line = number
    return {
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": "\n".join(tracebacks.fold(_render)(type(error), error, error.__traceback__)),
        "line": line,
        "script": "" if line is None else os.path.basename(str(file)),
    }


def _render(kind: type[BaseException], error: BaseException, frames: TracebackType | None, *_: object) -> list[str]:
    return "".join(traceback.format_exception(kind, error, frames)).splitlines()
