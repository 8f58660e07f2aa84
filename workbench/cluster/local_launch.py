"""The fast start on this machine: the processes of one cluster, from reaper to last engine, and its private files.

One process routes messages: ipyparallel's controller, with its queues in threads and a heartbeat process below it. Each
rank is one more process, an ipyparallel engine. Their sockets are on the loopback interface, encrypted and
authenticated by keys in files that only this user can read. The connections among ranks, c10d's store and gloo's
(runtime/distributed.py), are on the loopback interface too, but neither encrypted nor authenticated. Engines start in
parallel with the controller: each waits for a connection file, which appears, complete, once the controller has written
its own.

All processes are our children, so we wait for their ends ourselves and learn of each at once, with its exit code.
ipyparallel's own means are therefore off: the nanny process of each engine, and the limit of missed heartbeats, which a
busy engine may exceed.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from workbench.base.crash import Crash, read_crash
from workbench.base.devices import AUTO, DEVICES
from workbench.base.open_files import check_open_files
from workbench.base.ports import LOOPBACK, reserved_port
from workbench.base.text_formats import plural
from workbench.cluster import processes
from workbench.cluster.engine_provider import EngineProvider, Registered, WaitNotices, no_wait
from workbench.cluster.pending_replies import ranks_in_words
from workbench.cluster.processes import ChildProcess
from workbench.cluster.rank_assignment import few_devices
from workbench.cluster.reaper import Reaper
from workbench.cluster.zygote import ClusterProgram, ForkedProcess, Zygote, can_fork
from workbench.cluster.zygote_cache import KEEPER
from workbench.errors import ClusterError, UsageError

_CONTROLLER, _ENGINE = "ipyparallel.controller", "ipyparallel.engine"
HEARTBEAT_MS = 200  # an engine has registered after its second heartbeat
STOP_GRACE_S = 2.0
_NEVER = 10**6
_PATIENCE = 10  # times the timeout that engines wait for the controller: the deadline may be put off
_PORTS = 15  # that the controller listens on
_POLL_S = 0.01
_LOG_LINES = 12

PROGRESS_S = 0.5
"""CPU time in seconds, of one process before one deadline, that counts as progress; heartbeats take less."""

OPEN_FILES, OPEN_FILES_PER_RANK = 200, 12
"""Files that the processes of a start have open, at most: about twice as many as were counted."""


def profile_directory(name: str) -> Path:
    """Return the directory of the IPython profile ``name``.

    Raises:
        UsageError: it does not exist; the message lists the existing profiles.
    """
    home = Path(os.environ.get("IPYTHONDIR") or "~/.ipython").expanduser()
    names = sorted(path.name.removeprefix("profile_") for path in home.glob("profile_*"))
    if name not in names:
        known = f"profiles: {', '.join(names)}" if names else "there are no profiles"
        raise UsageError(
            f"IPython profile {name!r} does not exist in {home}; {known}. Create it: ipython profile create {name}"
        )
    return home / f"profile_{name}"


_PREFIX = "fsdp-workbench-"


def connection_files() -> list[Path]:
    """Return the connection files of the clusters that this user has started on this machine, newest first."""
    files = Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/profile/security/ipcontroller-client.json")
    mine = [file for file in files if file.stat().st_uid == os.getuid()]
    return sorted(mine, key=lambda file: file.stat().st_mtime, reverse=True)


def private_directory(profile: str | None) -> Path:
    """Create the directory of a cluster's files, readable by this user only.

    It holds an IPython profile of its own, with links to the configuration and startup files of the user's profile.
    Keys, sockets and logs thus stay in one place that can be removed.
    """
    lent = profile_directory(profile) if profile is not None else None
    root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    own = root / "profile"
    own.mkdir(mode=0o700)
    for path in lent.iterdir() if lent is not None else ():
        if path.name == "startup" or path.stem.endswith("_config"):
            (own / path.name).symlink_to(path)
    return root


def controller_arguments(root: Path) -> list[str]:
    """Return the arguments of the controller."""
    flags = {
        "IPController.ports": ",".join(str(reserved_port()) for _ in range(_PORTS)),
        "ProfileDir.location": root / "profile",
        "IPController.engine_ip": LOOPBACK,
        "IPController.client_ip": LOOPBACK,
        "IPController.monitor_ip": LOOPBACK,
        "IPController.location": LOOPBACK,
        "IPController.enable_curve": True,
        "IPController.use_threads": True,
        "IPController.db_class": "NoDB",
        "IPController.broadcast_scheduler_depth": 0,
        "IPController.log_level": "CRITICAL",
        "HeartMonitor.period": HEARTBEAT_MS,
        "HeartMonitor.max_heartmonitor_misses": _NEVER,
    }
    return _arguments(flags)


def engine_arguments(root: Path, engine: str, timeout_s: float) -> list[str]:
    """Return the arguments of the engine with the session id ``engine``."""
    flags = {
        "ProfileDir.location": root / "profile",
        "Session.session": engine,
        "IPEngine.url_file": root / "engine.json",
        "IPEngine.wait_for_url_file": timeout_s,
        "IPEngine.timeout": timeout_s,
        "IPEngine.max_heartbeat_misses": 0,
        "IPEngine.enable_nanny": False,
        "IPEngine.log_level": "ERROR",
    }
    return _arguments(flags)


def _arguments(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def command(program: ClusterProgram) -> list[str]:
    """Return the command line of a process that is not forked."""
    return [sys.executable, "-m", program.module, *program.arguments]


class LocalLaunch(EngineProvider):
    """The processes of a cluster of ``num_ranks`` ranks; the constructor starts them all and waits for none.

    Args:
        num_ranks: number of engines.
        profile: name of the IPython profile whose configuration applies; None: none.
        timeout_s: time in seconds the start may take.
        device: one of :data:`workbench.base.devices.CHOICES`; ranks are forked where the device allows it (zygote.py).
        preload: module that every rank will need.
        on_exit: called in a separate thread when a process has ended, with the rank (None: the controller).
        notices: receives notices of what the start waits for.

    Attributes:
        engines: session id of the engine of each rank.
        deadline: time (monotonic clock, s) at which the start times out if no process makes progress.

    Raises:
        UsageError: the profile does not exist, or this machine has no such device.
        ClusterError: the reaper did not start.
    """

    tells_ends = True

    def __init__(
        self,
        num_ranks: int,
        profile: str | None,
        timeout_s: float,
        on_exit: Callable[[int | None], None],
        *,
        device: str = AUTO,
        preload: str = "",
        notices: WaitNotices | None = None,
    ) -> None:
        if device in DEVICES and not DEVICES[device].may_be_here():
            raise UsageError(few_devices(socket.gethostname(), num_ranks, 0, device))
        needed = OPEN_FILES + OPEN_FILES_PER_RANK * num_ranks
        check_open_files(needed, plural(num_ranks, "rank"), "the terminal that starts Jupyter")
        self._notices = notices or WaitNotices(no_wait)
        self._timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._used_s: dict[psutil.Process, float] = {}  # CPU time of each process at the last deadline
        self._id = secrets.token_hex(8)
        self._on_exit = on_exit
        self._watched: dict[int | None, ChildProcess | ForkedProcess] = {}
        self._zygote: Zygote | None = None
        self._num_replaced = 0
        self._oom_kills = processes.num_oom_kills()
        self._lacked_memory: dict[ChildProcess | ForkedProcess, bool] = {}
        self._root = private_directory(profile)
        self._environment = processes.environment(self._id, num_ranks) | {"IPP_SESSION_KEY": secrets.token_hex(32)}
        self.engines = tuple(f"{self._id}-rank-{rank}" for rank in range(num_ranks))
        self._reaper = Reaper(self._id, glob.escape(str(self._root)))
        try:
            patience_s = _PATIENCE * timeout_s
            self._preload = [preload] if preload else []
            programs: dict[int | None, ClusterProgram] = {None: self._controller()}
            programs |= {rank: self._engine(rank, patience_s) for rank in range(num_ranks)}
            if can_fork(device):
                self._fork(programs)
            else:
                for rank, program in programs.items():
                    self._spawn(rank, program)
        except BaseException:  # processes that have started must not survive
            self.end()
            raise

    def _controller(self) -> ClusterProgram:
        arguments = controller_arguments(self._root)
        return ClusterProgram(_CONTROLLER, arguments, self._log_file(None), [f"{_CONTROLLER}.app"])

    def _engine(self, rank: int, timeout_s: float) -> ClusterProgram:
        arguments = engine_arguments(self._root, self.engines[rank], timeout_s)
        return ClusterProgram(_ENGINE, arguments, self._log_file(rank), [f"{_ENGINE}.app", *self._preload])

    def _spawn(self, rank: int | None, program: ClusterProgram) -> None:
        with program.log.open("wb") as log:
            popen = subprocess.Popen(
                command(program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the kernel alone
            )
        self._watched[rank] = watched = ChildProcess(popen, lambda _code: self._on_exit(rank))
        self._reaper.adopt(watched.process)

    def _fork(self, programs: Mapping[int | None, ClusterProgram]) -> None:
        self._zygote = KEEPER.take(self._environment, self._preload, self._log_file(None))
        self._watched |= self._zygote.fork(
            programs,
            environment=self._environment,
            on_born=self._reaper.adopt,
            on_exit=lambda rank, _code: self._on_exit(rank),
        )

    def replace(self, ranks: Sequence[int], registered: Registered, _used: Sequence[str]) -> dict[int, str]:
        """Start another process for each of ``ranks``, which have ended, and wait until its engine has registered.

        Returns:
            the session id of the new engine of each rank.

        Raises:
            ClusterError: one did not start.
        """
        self._num_replaced += 1
        new = {rank: f"{self._id}-rank-{rank}-{self._num_replaced}" for rank in ranks}
        self.engines = tuple(new.get(rank, engine) for rank, engine in enumerate(self.engines))
        self.deadline = time.monotonic() + self._timeout_s
        for rank in new:
            program = self._engine(rank, self._timeout_s)
            if self._zygote is None:
                self._spawn(rank, program)
            else:
                self._watched[rank] = self._zygote.replace(rank, program)
        while missing := [rank for rank, engine in new.items() if engine not in registered()]:
            self._wait_a_moment(f"{ranks_in_words(missing)} did not start", [*missing], "a process takes its place")
        return new

    def wait_for_controller(self) -> Path:
        """Wait until the controller listens, let the engines connect, and return its connection file for clients.

        Raises:
            ClusterError: it did not start.
        """
        security = self._root / "profile" / "security"
        for_client, for_engine = (security / f"ipcontroller-{whom}.json" for whom in ("client", "engine"))
        while not (is_complete(for_client) and is_complete(for_engine)):
            late = [None, *range(len(self.engines))]
            self._wait_a_moment("the controller did not start", late, "waiting for the controller")
        # engines read the file as soon as it exists, so it must appear complete: renamed, and a copy, since the
        # controller still writes to its own
        copy = self._root / "engine.json.copy"
        copy.touch(mode=0o600)
        shutil.copyfile(for_engine, copy)
        copy.rename(self._root / "engine.json")
        return for_client

    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Wait until ``registered()`` has all engines; return the session id of each rank's.

        Raises:
            ClusterError: some did not register; the message names the ranks and shows the log of one.
        """
        while missing := [rank for rank, engine in enumerate(self.engines) if engine not in registered()]:
            here = f"{len(self.engines) - len(missing)} of {len(self.engines)} processes have connected"
            loads = self._zygote is not None and not self._zygote.has_made_all
            detail = "importing torch" if loads else here
            self._wait_a_moment(f"{ranks_in_words(missing)} did not start", [*missing], detail)
        return self.engines

    def _wait_a_moment(self, complaint: str, late: list[int | None], detail: str) -> None:
        """Sleep for a moment; raise if a process has ended, or if the ``late`` ones exceed the deadline."""
        ended = [rank for rank in {*late, None} if self.exit_code(rank) is not None]
        if ended:
            first = min(ended, key=lambda rank: (rank is None, rank))  # a rank's log says why the zygote has ended
            raise ClusterError(f"{_name(first)} ended during the start{self.log_tail(first)}")
        if self.is_overdue():
            raise ClusterError(f"{complaint} in time{self.advice(*late)}")
        self._notices.notice(f"starting {len(self.engines)} rank{'' if len(self.engines) == 1 else 's'}", detail)
        time.sleep(_POLL_S)

    def is_overdue(self) -> bool:
        """Return whether no process has made progress for the time that the start may take."""
        if not super().is_overdue():
            return False
        used_s = {process: _cpu_s(process) for process in self._processes()}
        works = any(used - self._used_s.get(process, 0.0) >= PROGRESS_S for process, used in used_s.items())
        self._used_s = used_s
        if works:
            self.deadline = time.monotonic() + self._timeout_s
        return not works

    def _processes(self) -> list[psutil.Process]:
        """Return the ranks' processes so far, and the zygote that imports torch for them."""
        own = [each.process for rank, each in self._watched.items() if rank is not None and each.process is not None]
        return own if self._zygote is None else [*own, self._zygote.process]

    def exit_code(self, rank: int | None) -> int | None:
        """Return the exit code of a rank's process (None: of the controller's), None while it runs."""
        return self._watched[rank].returncode

    def ending(self, rank: int | None) -> str:
        """Return how the process of a rank (None: the controller) ended, in words; ``""`` while it runs.

        Examples: ``the process was killed by SIGKILL (as when memory runs out)``; ``the process was killed by SIGSEGV
        (line 3, in train_step)``.
        """
        watched = self._watched[rank]
        if watched.returncode is None:
            return ""
        who = "the process" if rank is not None else "the cluster's controller"
        if isinstance(watched, ForkedProcess) and watched.died_with_zygote:
            who = "the process that ranks are forked from"
        if watched not in self._lacked_memory:
            self._lacked_memory[watched] = watched.returncode == -signal.SIGKILL and self._is_killed_for_memory()
        has_lacked_memory = self._lacked_memory[watched]
        return f"{who} {_ending(watched.returncode, self._crash(rank), has_lacked_memory=has_lacked_memory)}"

    def _is_killed_for_memory(self) -> bool:
        """Return whether the kernel has killed more processes because memory ran out than this was asked for before."""
        now, before = processes.num_oom_kills(), self._oom_kills
        if now is None or before is None or now <= before:
            return False
        self._oom_kills = before + 1
        return True

    def is_running(self, rank: int) -> bool:
        """Return whether the process of ``rank`` runs; False as soon as it has ended, even before ``on_exit``."""
        process = self._watched[rank].process
        return self.exit_code(rank) is None and process is not None and not processes.has_ended(process)

    def log_tail(self, rank: int | None) -> str:
        """Return the last lines of a process's log, as the end of a message."""
        crash = self._crash(rank)
        if lines := _last_lines(crash):
            return f"; the end of its log:\n{os.linesep.join(lines)}"
        return "" if crash.reason else "; its log is empty"

    def _log_lines(self, rank: int | None) -> list[str]:
        return _last_lines(self._crash(rank))

    def _crash(self, rank: int | None) -> Crash:
        """Return the last crash in a process's log."""
        try:
            return read_crash(self._log_file(rank).read_text(errors="replace"))
        except OSError:
            return read_crash("")

    def advice(self, rank: int | None, *others: int | None) -> str:
        """Return the end of a message about processes (None: the controller) that are too slow.

        It has a line of what to do, a line of facts, and the end of the first log that is not empty.
        """
        which = next((each for each in (rank, *others) if self._log_lines(each)), rank)
        log = self._log_lines(which)
        empty = "their logs are" if others else "its log is"
        memory = psutil.virtual_memory()
        free, total = (f"{num_bytes / 2**30:.1f}" for num_bytes in (memory.available, memory.total))
        facts = (
            f"memory: {free} of {total} GiB free; load: {os.getloadavg()[0]:.1f} on "
            f"{processes.usable_cores()} cores; ports on {LOOPBACK}: the controller listens on "
            f"{self._num_listening()} of {_PORTS}"
        )
        half = len(self.engines) // 2
        fewer = f"start fewer ranks (%fsdp start -n {half}), " if half else ""
        todo = (
            f"{fewer}give it more time (%fsdp start -n {len(self.engines)} --timeout {2 * self._timeout_s:.0f}), free "
            f"memory or cores, or allow traffic on {LOOPBACK} (firewall, VPN); to test two ranks, run workbench doctor "
            f"in a terminal"
        )
        tail = [f"the end of the log of {_name(which)}:", *log] if log else []
        return "\n".join(["" if log else f" ({empty} empty)", todo, facts, *tail])

    def _num_listening(self) -> int:
        """Return on how many ports the controller and its heartbeat process listen."""
        controller = self._watched[None].process
        if controller is None:
            return 0
        try:
            processes = [controller, *controller.children(recursive=True)]
            sockets = [each for process in processes for each in process.net_connections("tcp")]
        except psutil.Error:  # it has ended
            return 0
        return len({each.laddr for each in sockets if each.status == psutil.CONN_LISTEN})

    def _log_file(self, rank: int | None) -> Path:
        return self._root / ("controller.log" if rank is None else f"rank-{rank}.log")

    def end(self) -> str:
        """End all processes except a zygote that can be reused, and remove all files. Idempotent."""
        adopted = [watched.process for watched in self._watched.values() if watched.process is not None]
        zygote, self._zygote = self._zygote, None
        with ExitStack() as last:  # runs from the last line up; a callback that raises does not stop the others
            last.callback(shutil.rmtree, self._root, ignore_errors=True)
            last.callback(self._reaper.close, STOP_GRACE_S)
            if zygote is not None:
                last.callback(KEEPER.keep, zygote, STOP_GRACE_S)
            for watched in self._watched.values():
                if isinstance(watched, ChildProcess):
                    last.callback(watched.join, STOP_GRACE_S)
            last.callback(processes.end, self._id, adopted, grace_s=STOP_GRACE_S)
            if zygote is not None and not zygote.has_made_all:
                last.callback(zygote.end, STOP_GRACE_S)  # ranks that it forks from now on could not be ended
        return ""


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if it has ended."""
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)


def _last_lines(crash: Crash) -> list[str]:
    """Return the last lines of a log, without the stacks of crashes, of which :func:`_ending` has the line."""
    return crash.rest.splitlines()[-_LOG_LINES:]


def _ending(code: int, crash: Crash, *, has_lacked_memory: bool) -> str:
    """Return an exit code in words. Example: -9 -> ``was killed by SIGKILL (as when memory runs out)``.

    Args:
        code: the exit code; negative: the signal.
        crash: the last one in the log.
        has_lacked_memory: whether the kernel has killed a process because memory ran out.
    """
    if code >= 0:
        return f"ended with exit code {code}"
    name = {number.value: number.name for number in signal.Signals}.get(-code, f"signal {-code}")
    why = str(crash) if crash.signal in ("", name) else ""  # else another process of this rank wrote it
    if name == "SIGKILL":
        why = "as when memory runs out"
        if has_lacked_memory:
            why = "memory ran out: the kernel has counted a process that it killed for it"
    return f"was killed by {name}" + (f" ({why})" if why else "")


def _name(rank: int | None) -> str:
    return "the controller" if rank is None else f"the process of rank {rank}"


def is_complete(path: Path) -> bool:
    """Return whether a JSON file exists and is complete."""
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
