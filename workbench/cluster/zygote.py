"""One process that imports what all ranks need, and becomes them: importing torch once instead of once per rank.

The zygote imports, then forks one child per rank while it is still a single thread with no socket; each child becomes
an engine with a session, a log file and a process id of its own. Then the zygote only waits for its children and tells
the kernel, one JSON line each, who was born (``{"rank": 0, "pid": 12}``) and who ended (``{"rank": 0, "code": -9}``).
A child dies with it (Linux's parent death signal), so that no rank is ever left that nobody waits for.

Only on Linux, and only for ranks that compute on the CPU: a CUDA library does not survive a fork.

Run as ``python -m workbench.cluster.zygote`` with the request, a JSON object, on its stdin.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from workbench.cluster import processes
from workbench.errors import ClusterError

_DIE_S = 5.0  # a process needs a moment to die of a signal
_PR_SET_PDEATHSIG = 1
_NVIDIA = Path("/dev/nvidiactl")
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # it starts its threads when it is imported


def can_fork(device: str) -> bool:
    """Whether ranks on ``device`` (``cpu``, ``cuda``, ``auto``) can be forked here."""
    return sys.platform == "linux" and (device == "cpu" or (device == "auto" and not _NVIDIA.exists()))


# --------------------------------------------------------------------- on the kernel


@dataclass
class Forked:
    """A rank's process, which is a child of the zygote.

    Attributes:
        process: None before it was born.
        returncode: exit code (negative: the signal that ended it), None while it runs or was not born yet; of a rank
            that died with the zygote the zygote's.
        died_with_zygote: whether it was the zygote's end that ended it.
    """

    process: psutil.Process | None = None
    returncode: int | None = None
    died_with_zygote: bool = False


class Zygote:
    """The kernel's handle on a zygote; the constructor starts it and waits for nothing.

    Args:
        arguments: command line of each rank's engine, without the interpreter and the module.
        logs: file for stdout and stderr of each rank; the first one's takes the zygote's own, too.
        preload: modules to import before the ranks are made.
        environment: of the zygote and the ranks.
        on_born: called in a thread of its own with a process that a rank now has.
        on_exit: called in that thread with a rank that has ended and its exit code.

    Attributes:
        ranks: the process of each rank.
        process: the zygote itself.
    """

    def __init__(
        self,
        arguments: Sequence[Sequence[str]],
        logs: Sequence[Path],
        preload: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_born: Callable[[psutil.Process], None],
        on_exit: Callable[[int, int], None],
    ) -> None:
        self.ranks = [Forked() for _ in arguments]
        self._on_born, self._on_exit = on_born, on_exit
        with logs[0].open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environment, **_ONE_THREAD},
                start_new_session=True,  # a Ctrl-C in the terminal is for the kernel alone
            )
        self.process = psutil.Process(self._popen.pid)
        engines = [{"arguments": list(a), "log": str(log)} for a, log in zip(arguments, logs, strict=True)]
        kept = {name: environment.get(name) for name in _ONE_THREAD}
        request = {"preload": list(preload), "engines": engines, "environment": kept}
        self._ask(json.dumps(request).encode())
        self._thread = threading.Thread(target=self._listen, name=f"zygote(pid={self._popen.pid})", daemon=True)
        self._thread.start()

    def _ask(self, request: bytes) -> None:
        pipe = self._popen.stdin
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError), pipe:  # it ended at once; its exit code will tell
                pipe.write(request)

    def _listen(self) -> None:
        if self._popen.stdout is not None:
            with self._popen.stdout as lines:
                self._read(lines)
        code = self._popen.wait()
        processes.wait_for_end([f.process for f in self.ranks if f.returncode is None and f.process], _DIE_S)
        for rank, forked in enumerate(self.ranks):  # those that lived died with it
            if forked.returncode is None:
                forked.died_with_zygote = True
                self._ended(rank, code)

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            told = json.loads(line)
            if "pid" in told:
                # it has ended already: that is told next; or the reaper is gone: it stays a child of the zygote
                with contextlib.suppress(psutil.NoSuchProcess, ClusterError):
                    self.ranks[told["rank"]].process = process = psutil.Process(told["pid"])
                    self._on_born(process)
            else:
                self._ended(told["rank"], told["code"])

    def _ended(self, rank: int, code: int) -> None:
        self.ranks[rank].returncode = code
        self._on_exit(rank, code)

    def join(self, timeout_s: float) -> None:
        """Wait for the zygote, and so for all ranks, to end."""
        self._thread.join(timeout_s)


# --------------------------------------------------------------------- in the zygote


def main() -> None:
    """Be a zygote; in each child, be an engine (see the module's text)."""
    request = json.loads(sys.stdin.buffer.read())
    tell = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what an import prints is not for the kernel
    for module in ("ipyparallel.engine.app", *request["preload"]):
        with contextlib.suppress(ImportError):  # the rank says so when it is asked for it
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is there now is never looked at again: the ranks share its pages
    zygote, ranks = os.getpid(), {}
    for rank, engine in enumerate(request["engines"]):
        pid = os.fork()
        if pid == 0:
            tell.close()
            _become(engine, zygote, request["environment"])
            return
        ranks[pid] = rank
        _say(tell, {"rank": rank, "pid": pid})
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when its ranks have: they are asked to, and may take time
        signal.signal(number, signal.SIG_IGN)
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            _say(tell, {"rank": ranks.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _say(tell: IO[bytes], what: Mapping[str, int]) -> None:
    tell.write(json.dumps(what).encode() + b"\n")


def _become(engine: Mapping[str, object], zygote: int, environment: Mapping[str, str | None]) -> None:
    """Turn this child into an engine that dies with the zygote, and run it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:  # it died before that took hold
        os.kill(os.getpid(), signal.SIGKILL)
    os.setsid()
    _redirect(str(engine["log"]))
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else all ranks draw the same numbers; Python's own generator sees to it itself
    sys.argv[1:] = [str(part) for part in engine["arguments"]]  # type: ignore[attr-defined]
    runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)


def _redirect(log: str) -> None:
    """Read from nothing, and write to the file ``log``."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)


if __name__ == "__main__":
    main()
