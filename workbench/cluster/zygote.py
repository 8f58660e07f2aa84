"""The zygote: a process that imports ipyparallel and torch once and forks all others, which saves their imports.

It forks the controller, and one child per rank, while it is still single-threaded and has no socket. The first
controller is forked before torch is imported, and starts meanwhile. A child becomes a controller or an engine with its
own session, log file and process id. The zygote waits for its children and for requests, and reports each start
(``{"rank": 0, "pid": 12}``; the controller has the rank None) and end (``{"rank": 0, "code": -9}``) to the kernel, as
one JSON line. A child dies with the zygote (Linux's parent death signal), so every running rank has a parent that waits
for it. Once all children have ended the zygote is idle again and can fork those of another cluster (zygote_cache.py).

It belongs to no cluster; it has its own marker and reaper, so it ends when the kernel does.

Only on Linux, and only for ranks that compute on the CPU: a CUDA library does not survive a fork.

Run as ``python -m workbench.cluster.zygote``; each line of its stdin is a request, a JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import secrets
import select
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from workbench.base.devices import AUTO, DEVICES
from workbench.base.process_end import end_process
from workbench.cluster import processes
from workbench.cluster.reaper import Reaper
from workbench.errors import ClusterError

_DIE_S = 5.0  # limit for a process to die of a signal
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MANY = 2**16  # bytes read at once
_ENV_START = 47  # index of the environment's address among the fields of /proc/PID/stat after the name
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # OpenBLAS starts its threads at import
# no import reads these: the workbench's own, and the others, of which the last has the name of pytest's current test
_OF_ONE_START = re.compile(r"WORKBENCH_\w+|IPP_SESSION_KEY|PYTEST_CURRENT_TEST")

CONTROLLER = b"fsdp-controller"
"""Name of the controller's process, as ``top`` shows it; a rank's is ``fsdp-rank-0``."""


def can_fork(device: str) -> bool:
    """Return whether ranks on ``device``, one of :data:`.CHOICES`, can be forked on this machine."""
    drivers = [kind.driver for kind in DEVICES.values() if kind.driver]
    is_free = not any(Path(driver).exists() for driver in drivers) if device == AUTO else not DEVICES[device].driver
    return sys.platform == "linux" and is_free


# --------------------------------------------------------------------- on the kernel


@dataclass(frozen=True)
class ClusterProgram:
    """What a process of a cluster runs.

    Attributes:
        module: as for ``python -m``.
        arguments: its arguments.
        log: file for its stdout and stderr.
        preload: modules that the zygote imports before it forks the process; what it writes then is in ``log`` too.
    """

    module: str
    arguments: Sequence[str]
    log: Path
    preload: Sequence[str]


@dataclass(eq=False)
class ForkedProcess:
    """The process of a rank, or of the controller, which is a child of the zygote.

    Attributes:
        process: the process; None before the fork.
        returncode: exit code (negative: the signal that ended it); None before the fork and while it runs; the
            zygote's exit code if it died with the zygote.
        died_with_zygote: whether it ended because the zygote did.
    """

    process: psutil.Process | None = None
    returncode: int | None = None
    died_with_zygote: bool = False


class Zygote:
    """The kernel's handle on a zygote; the constructor starts it without waiting.

    Args:
        environment: environment during its imports; ranks get their own.
        preload: modules that its ranks need.
        log: file for its output until the first request.

    Attributes:
        process: the zygote itself.
        inherited: state that its ranks inherit; it serves another start only if that matches.

    Raises:
        ClusterError: its reaper did not start.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str], log: Path) -> None:
        marker = secrets.token_hex(8)
        self.inherited = inherited(environment, preload)
        self._reaper = Reaper(marker)
        self._children: dict[int | None, ForkedProcess] = {}
        self._thread: threading.Thread | None = None
        self._listening = threading.Lock()  # held while the thread that listens begins or ends
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "workbench.cluster.zygote"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**environment, **_ONE_THREAD, processes.MARKER: marker},
                start_new_session=True,  # a Ctrl-C in the terminal is for the kernel alone
            )
        self.process = psutil.Process(self._popen.pid)
        try:
            self._reaper.adopt(self.process)
        except BaseException:
            self.end(_DIE_S)
            raise

    @property
    def processes(self) -> tuple[psutil.Process, ...]:
        """The zygote and its reaper."""
        return self.process, psutil.Process(self._reaper.pid)

    @property
    def has_made_all(self) -> bool:
        """Whether all that was requested was forked."""
        return all(forked.process is not None or forked.returncode is not None for forked in self._children.values())

    @property
    def is_idle(self) -> bool:
        """Whether it runs, and all that was requested, if anything, was forked and has ended."""
        children = self._children.values()
        all_ended = all(forked.returncode is not None and not forked.died_with_zygote for forked in children)
        return all_ended and self._popen.poll() is None

    def fork(
        self,
        programs: Mapping[int | None, ClusterProgram],
        *,
        environment: Mapping[str, str],
        on_born: Callable[[psutil.Process], None],
        on_exit: Callable[[int | None, int], None],
    ) -> dict[int | None, ForkedProcess]:
        """Have an idle zygote fork the processes of a cluster, in their order, without waiting for them.

        Args:
            programs: what each process runs, by rank; the controller has the rank None.
            environment: environment of all.
            on_born: called in a separate thread with each process that was forked.
            on_exit: called in that thread with the rank of each that has ended, and its exit code.

        Returns:
            The handle of each, filled in as the zygote reports.
        """
        self._children = {rank: ForkedProcess() for rank in programs}
        self._environment, self._on_born, self._on_exit = dict(environment), on_born, on_exit
        return {rank: self._fork(rank, program) for rank, program in programs.items()}

    def replace(self, rank: int, program: ClusterProgram) -> ForkedProcess:
        """Have the zygote fork a rank that has ended once more, without waiting for it; return its new handle.

        Raises:
            ClusterError: the zygote has ended.
        """
        if self._popen.poll() is not None:
            raise ClusterError(f"the process that ranks are forked from has ended: no process for rank {rank}")
        self._children[rank] = ForkedProcess()
        return self._fork(rank, program)

    def _fork(self, rank: int | None, program: ClusterProgram) -> ForkedProcess:
        self._ask({"rank": rank, "environment": self._environment, **vars(program), "log": str(program.log)})
        with self._listening:
            if self._thread is None:
                name = f"zygote(pid={self._popen.pid})"
                self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
                self._thread.start()
        return self._children[rank]

    def _ask(self, request: Mapping[str, object]) -> None:
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended; _listen reports that
                self._popen.stdin.write(json.dumps(request).encode() + b"\n")
                self._popen.stdin.flush()

    def _listen(self) -> None:
        """Process the zygote's reports until all its children have ended, or the zygote has."""
        while not self._has_ended() and (line := self._read()):
            report = json.loads(line)
            forked = self._children[report["rank"]]
            if "pid" in report:
                # the child has ended already, which is reported next, or the reaper is gone, but the zygote remains
                with contextlib.suppress(psutil.NoSuchProcess, ClusterError):
                    forked.process = process = psutil.Process(report["pid"])
                    self._on_born(process)
            else:
                forked.returncode = report["code"]
                self._on_exit(report["rank"], report["code"])
        lost = {rank: forked for rank, forked in self._children.items() if forked.returncode is None}
        if self._thread is not threading.current_thread() or not lost:
            return
        code = self._popen.wait()
        processes.wait_for_end([forked.process for forked in lost.values() if forked.process], _DIE_S)
        for rank, forked in sorted(lost.items(), key=lambda each: (each[0] is None, each)):
            forked.died_with_zygote, forked.returncode = True, code  # ranks first: the log of the first one says why
            self._on_exit(rank, code)

    def _has_ended(self) -> bool:
        """Return whether all children have ended, so that the thread ends."""
        with self._listening:
            if any(forked.returncode is None for forked in self._children.values()):
                return False
            self._thread = None
            return True

    def _read(self) -> bytes:
        return self._popen.stdout.readline() if self._popen.stdout is not None else b""

    def join(self, timeout_s: float) -> None:
        """Wait for all its children to end."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def end(self, timeout_s: float) -> None:
        """End the zygote and its children; kill what takes longer than ``timeout_s`` seconds."""
        with ExitStack() as last:  # runs from the last line up; a callback that raises does not stop the others
            last.callback(self._reaper.close, timeout_s)
            if self._popen.stdout is not None:
                last.callback(self._popen.stdout.close)
            last.callback(self.join, timeout_s)
            last.callback(self._die, timeout_s)
            if self._popen.stdin is not None:
                last.enter_context(contextlib.suppress(BrokenPipeError))  # a request that it did not read
                last.callback(self._popen.stdin.close)

    def _die(self, timeout_s: float) -> None:
        self._popen.terminate()  # ignored while it has ranks
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


def inherited(environment: Mapping[str, str], preload: Sequence[str]) -> tuple[object, ...]:
    """Return all state that ranks would inherit from a zygote started now with ``environment`` and ``preload``.

    A zygote with other state must not fork these ranks: libraries read their variables at import, and a process
    inherits its permissions and limits from its parent.
    """
    status = Path("/proc/self/status").read_text()
    installed = (*site.getsitepackages(), site.getusersitepackages())
    return (
        tuple(preload),
        {name: value for name, value in environment.items() if not _OF_ONE_START.fullmatch(name)},
        os.readlink("/proc/self/cwd"),  # os.getcwd() raises if the directory was removed
        re.findall(r"^(?:Umask|[UG]id|Groups|Cpus_allowed|Mems_allowed):.*$", status, re.MULTILINE),
        os.getpriority(os.PRIO_PROCESS, 0),
        Path("/proc/self/limits").read_text(),
        [os.stat(folder).st_mtime_ns for folder in installed if os.path.isdir(folder)],
    )


# --------------------------------------------------------------------- in the zygote


def main() -> None:
    """Run the zygote; in each child, run its program."""
    zygote = os.getpid()
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep output of imports out of the kernel's pipe
    requests = _requests(pipe)
    for request in requests:
        _write_to(request["log"])
        _import(request["preload"])
        pid = os.fork()
        if pid == 0:
            requests.close()  # signals have their usual handlers again
            pipe.close()
            _become(request, zygote)
        _children[pid] = request["rank"]
        _report(pipe, {"rank": request["rank"], "pid": pid})
        _write_to(os.devnull)


_children: dict[int, int | None] = {}
"""The rank of each running child of the zygote, by process id; the controller has the rank None."""


def _requests(pipe: IO[bytes]) -> Generator[dict[str, Any]]:
    """Yield the requests of the kernel, and report children that have ended, until there are neither.

    The end of a child wakes the wait for the next request. The zygote must outlive its ranks, which may take time to
    end, so it ignores the signals that would end it while it has some.
    """
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that it is written to the pipe
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    asked, awaited = b"", {0, woken}
    try:
        while 0 in awaited or _children:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN if _children else handlers[number])
            ready, _, _ = select.select(awaited, (), ())
            if woken in ready:
                os.read(woken, _MANY)
                _reap(pipe)
            if 0 in ready:
                read = os.read(0, _MANY)
                awaited -= set() if read else {0}
                *lines, asked = (asked + read).split(b"\n")
                yield from map(json.loads, lines)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(woken)
        os.close(wakes)


def _reap(pipe: IO[bytes]) -> None:
    """Report the children that have ended."""
    while _children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid in _children:
            _report(pipe, {"rank": _children.pop(pid), "code": os.waitstatus_to_exitcode(status)})


def _import(preload: Sequence[str]) -> None:
    importlib.invalidate_caches()
    gc.disable()  # it would traverse all imported objects repeatedly, a quarter of the time
    for module in preload:
        with contextlib.suppress(ImportError):  # the rank raises it when it needs the module
            importlib.import_module(module)
    gc.freeze()  # never traversed again, so the ranks keep sharing its pages
    gc.enable()


def _report(pipe: IO[bytes], what: Mapping[str, int | None]) -> None:
    pipe.write(json.dumps(what).encode() + b"\n")


def _become(request: Mapping[str, Any], zygote: int) -> NoReturn:
    """Turn this child into a process of its own that dies with the zygote, run its program, and end it."""
    rank = request["rank"]
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_NAME, CONTROLLER if rank is None else b"fsdp-rank-%d" % rank)
    if os.getppid() != zygote:  # the zygote died before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)
    os.setsid()
    _read_nothing()
    _write_to(request["log"])
    _mark(request["environment"][processes.MARKER])
    os.environ.clear()
    os.environ.update(request["environment"])
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else all ranks draw the same numbers; Python reseeds its own generator
    sys.argv[1:] = request["arguments"]
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        end_process(error)
    end_process()


def _mark(cluster_id: str) -> None:
    """Make the cluster's marker visible in ``/proc/PID/environ`` of this process and its forks.

    That file shows the memory of the environment with which the zygote was started, so the marker is overwritten in
    place. Both markers have the same length.
    """
    was = b"\0" + Path("/proc/self/environ").read_bytes()
    name = f"\0{processes.MARKER}=".encode()
    begin = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ENV_START])
    ctypes.memmove(begin + was.index(name) + len(name) - 1, cluster_id.encode(), len(cluster_id))


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _write_to(log: str) -> None:
    """Redirect stdout and stderr to the file ``log``."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


if __name__ == "__main__":
    main()
