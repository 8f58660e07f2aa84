"""Engines started by an ipyparallel launcher: local processes, over SSH or MPI, or as jobs of a queue.

This wraps ipyparallel's ``Cluster``, configured as usual by a profile's ``ipcluster_config.py``. It adds a thread with
an event loop, a marker by which processes on this machine are found, and a log of the launcher's messages.

The controller listens where ipyparallel is configured to have it listen. Without configuration, and with engines on
other hosts, it listens only on this host's address on the route to them. Its connections are encrypted and
authenticated (CURVE), unless configured otherwise.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import secrets
import shlex
import shutil
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ipyparallel
from ipyparallel.cluster.launcher import (
    BaseLauncher,
    BatchSystemLauncher,
    LocalEngineSetLauncher,
    LSFLauncher,
    SSHLauncher,
)
from traitlets.config.loader import Config, load_pyconfig_files

from workbench.cluster import processes, ssh_launch
from workbench.cluster.engine_probe import ELSEWHERE, address_towards, interfaces_here
from workbench.cluster.engine_provider import EngineProvider, Registered, WaitNotices, unused
from workbench.cluster.job_queue import JobQueue
from workbench.cluster.local_launch import profile_directory
from workbench.cluster.pending_replies import ranks_in_words
from workbench.cluster.reaper import Reaper, remove
from workbench.errors import ClusterError, UsageError, did_you_mean

LAUNCHERS = "ipyparallel.engine_launchers"
"""Entry point group of engine launchers."""

HEARTBEAT_MS, HEARTBEAT_MISSES = 450, 2
"""Heartbeat period of engines, and allowed misses; one more and the engine counts as gone, after 1.8 s.

An engine answers heartbeats in a thread that does not need the interpreter, so also while it is busy.
"""

ALONE_S = 60.0
"""Time in seconds without the controller's heartbeats after which engines end themselves."""

_CHECK_MS = 500  # an engine allows this much more than the controller's heartbeat period

STOP_S = 60.0
"""Timeout in seconds of launchers that end their engines."""

_PROGRAMS = ("mpi_cmd", "submit_command", "ssh_cmd")
"""Traits of launchers with the command line of the program that they run on this machine."""

_INNARDS = "Create ShellCommandSend object"  # ipyparallel's log message for an SSH connection
_GRACE_S = 2.0
_POLL_S = 0.02
_LINES, _COMPLAINTS = 12, 3


def launchers() -> tuple[str, ...]:
    """Return the names of the installed launchers."""
    return tuple(sorted({entry.name.lower() for entry in entry_points(group=LAUNCHERS)}))


def check_launcher(name: str) -> None:
    """Check that there is an engine launcher called ``name``.

    Raises:
        UsageError: there is none; the message lists the installed ones.
    """
    if name.lower() not in launchers():
        meant = did_you_mean(name.lower(), launchers(), cutoff=0.6) or ";"
        raise UsageError(f"ipyparallel has no engine launcher {name!r}{meant} launchers: {', '.join(launchers())}")


def configures_launcher(profile: str) -> bool:
    """Return whether a profile configures the engine launcher.

    Raises:
        UsageError: the profile does not exist, or its configuration cannot be read.
    """
    return "engine_launcher_class" in _configured(profile_directory(profile), "ipcluster_config.py").Cluster


def _configured(profile_directory: Path, file: str) -> Config:
    """Return the content of a configuration file of a profile; ipyparallel itself ignores a file that fails.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return load_pyconfig_files([file], str(profile_directory))
    except Exception as error:
        raise UsageError(f"{profile_directory / file} fails: {type(error).__name__}: {error}") from error


def _unless_set(defaults: Mapping[str, object], config: Config, given: Iterable[str]) -> list[str]:
    """Return arguments for the ``defaults`` (``Class.trait`` -> value) that are neither configured nor given."""
    named = {argument.lstrip("-").partition("=")[0] for argument in given}
    unset = {name: value for name, value in defaults.items() if name not in named}
    return [f"--{name}={value}" for name, value in unset.items() if name not in config]


def _cluster(profile: str | None, engines: str, **more: Any) -> Any:  # noqa: ANN401 - ipyparallel is untyped
    where = {} if profile is None else {"profile_dir": str(profile_directory(profile))}
    if engines:
        check_launcher(engines)
        more["engines"] = engines
    cluster = ipyparallel.Cluster(shutdown_atexit=False, parent=None, **where, **more)
    _configured(Path(cluster.profile_dir), "ipcluster_config.py")
    return cluster


class LauncherLog(logging.Handler):
    """Handler that keeps the last lines logged by launchers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Append the lines of ``record``."""
        lines = record.getMessage().splitlines()
        self.lines.extend(line.rstrip() for line in lines if line.strip() and not line.startswith(_INNARDS))


class EventLoop:
    """An event loop in a separate thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start ``work`` and return the future of its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float) -> None:
        """Stop the loop once it is idle; a stuck launcher keeps its thread until it returns."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)


class IppLaunch(EngineProvider):
    """A controller and engines that ipyparallel starts; the constructor begins with the controller.

    Args:
        num_ranks: number of engines.
        engines: name of the launcher; empty: the profile's.
        profile: name of the IPython profile whose configuration applies; None: the default profile.
        timeout_s: time in seconds without progress after which the start times out; engines in a queue have no limit.
        interface: network interface on which engines of other hosts reach the controller; empty: that of the route to
            them.
        on_exit: called in a separate thread with None when the controller has ended.
        notices: receives notices of what the start waits for.

    Raises:
        UsageError: there is no such launcher, profile or interface, or the launcher's program is missing here.
    """

    is_remote = True

    def __init__(
        self,
        num_ranks: int,
        engines: str,
        profile: str | None,
        timeout_s: float,
        *,
        interface: str,
        on_exit: Callable[[int | None], None],
        notices: WaitNotices,
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._num_ranks, self._timeout_s = num_ranks, timeout_s
        self._waits_for = ""
        self._on_exit, self._notices = on_exit, notices
        self._launcher_log, log = LauncherLog(), logging.Logger("ipyparallel")
        log.addHandler(self._launcher_log)
        self._cluster = _cluster(profile, engines, n=num_ranks, log=log)
        self._check_installed()
        self._id = secrets.token_hex(8)
        self._batch_files: list[Path] = []
        self._replaced: list[SSHLauncher] = []
        self._queue: JobQueue | None = None
        self._is_ending = False
        self._gives_up = threading.Event()
        self._out_of_reach: list[str] = []
        self._engines_started: Future[Any] = Future()
        self._listen_on(interface)
        self._own_files = str(Path(glob.escape(self._cluster.profile_dir), "*", f"*{self._cluster.cluster_id}*"))
        self._reaper = Reaper(self._id, self._own_files)
        self._loop = EventLoop("workbench: launcher")
        self._controller_started = self._loop.submit(self._start_controller())

    @property
    def _launcher_class(self) -> type[BaseLauncher]:
        found: type[BaseLauncher] = self._cluster.engine_launcher_class
        return found

    @property
    def _words(self) -> str:
        """The launcher's name, for messages."""
        return f"ipyparallel's {self._launcher_class.__name__}"

    @property
    def one_job(self) -> str:
        """The launcher, unless it starts engines here or over ssh, one by one."""
        return "" if self._is_here or self._is_ssh else self._words

    def _check_installed(self) -> None:
        """Check that the launcher can run, before the controller is started, which takes seconds.

        Raises:
            UsageError: its program is not on PATH, or it has no hosts, or too few engines on them.
        """
        configured, name = self._settings(self._launcher_class), self._launcher_class.__name__
        file = f"{Path(self._cluster.profile_dir) / 'ipcluster_config.py'}"
        if self._is_ssh and hasattr(configured, "engines") and not configured.engines:
            raise UsageError(
                f"{self._words} has no hosts: name them in {file}, c.{name}.engines = {{'HOST': {self._num_ranks}}}, "
                "and start with --profile NAME"
            )
        if self._is_ssh and hasattr(configured, "engines"):
            count = sum(each.get("n", 1) if isinstance(each, dict) else each for each in configured.engines.values())
            if count < self._num_ranks:
                there = f"{count} engine{'s' * (count != 1)}"
                fewer = f", or start fewer ranks: -n {count}" if count else ""
                raise UsageError(
                    f"c.{name}.engines in {file} has {there}, but {self._num_ranks} ranks need one each: add hosts, "
                    f"or engines to a host, as in {{'HOST': {self._num_ranks}}}{fewer}"
                )
        trait, command = next(
            ((trait, getattr(configured, trait)) for trait in _PROGRAMS if getattr(configured, trait, None)), ("", [])
        )
        if not trait or self._is_here or shutil.which(command[0]):
            return
        missing = f"{command[0]} is not installed here, or not on PATH"
        if issubclass(self._launcher_class, BatchSystemLauncher):
            raise UsageError(
                f"{missing}: start the notebook on a machine that submits jobs, or set its path in {file}, "
                f"c.{name}.{trait} = ['/path/to/{command[0]}']"
            )
        raise UsageError(
            f"{missing}: install it, or set its path in {file}, c.{name}.{trait} = ['/path/to/{command[0]}']"
        )

    # ---- where the controller listens

    def _listen_on(self, interface: str) -> None:
        """Have the controller listen where engines can reach it, unless its address is configured."""
        cluster = self._cluster
        own = self._configured("ipcontroller_config.py").IPController
        if interface:
            cluster.controller_ip = _address_of(interface)
        elif not cluster.controller_ip and not {"ip", "engine_ip"} & set(own) and not self._is_here:
            cluster.controller_ip = address_towards(self._first_host()) or address_towards(ELSEWHERE)

    @property
    def _is_here(self) -> bool:
        """Whether engines are processes on this machine."""
        return issubclass(self._launcher_class, LocalEngineSetLauncher) and not self._is_ssh

    @property
    def _is_ssh(self) -> bool:
        return issubclass(self._launcher_class, SSHLauncher)

    def _first_host(self) -> str:
        """Return the address of a host on which engines are to be started; empty: not known yet."""
        hosts = getattr(self._settings(self._launcher_class), "engines", {}) if self._is_ssh else {}
        for host in hosts:
            with suppress(OSError):
                return socket.gethostbyname(str(host).rpartition("@")[2].partition(":")[0])
        return ""

    def _settings(self, launcher: type[BaseLauncher]) -> Any:  # noqa: ANN401 - ipyparallel is untyped
        """Return a launcher of this class, not started, for its configured traits."""
        return launcher(parent=self._cluster, profile_dir=self._cluster.profile_dir, log=self._cluster.log)

    # ---- start, in the loop's thread

    async def _start_controller(self) -> None:
        cluster = self._cluster
        environment = {
            "IPP_ENABLE_CURVE": "1",
            "IPP_SESSION_KEY": secrets.token_hex(32),  # without signed messages the client warns
            **self._settings(cluster.controller_launcher_class).environment,
            processes.MARKER: self._id,
        }
        cluster.controller_args = [*cluster.controller_args, *self._controller_arguments()]
        await cluster.start_controller(environment=environment)
        cluster.controller.on_stop(lambda _: self._on_exit(None))
        await cluster.controller.get_connection_info()

    def replace(self, ranks: Sequence[int], registered: Registered, used: Sequence[str]) -> dict[int, str]:
        """Start another engine for each of ``ranks``: here, or on a host of which an engine has ended.

        Raises:
            UsageError: the launcher starts all engines at once.
            ClusterError: it failed.
        """
        if self.one_job:
            raise UsageError(
                f"{self.one_job} starts and ends all engines as one job, so {ranks_in_words(ranks)} cannot be replaced "
                "alone: %fsdp stop, then %fsdp start"
            )
        more: dict[str, Any] = {}
        newest: list[SSHLauncher] = []
        self._waits_for, self.deadline = "", 0.0
        if self._is_ssh:
            while len(ended := self._ended_engines()) < len(ranks):
                self._wait_a_moment("ssh has yet to report which engines have ended")
            newest = ended[-len(ranks) :]
            more = {"engines": dict(Counter(each.location for each in newest))}
        started = self._loop.submit(self._start_engines(len(ranks), **more))
        while not started.done() or len(unused(registered, used)) < len(ranks):
            if started.done():
                self._check(started, f"start {len(ranks)} engines")
            self._wait_a_moment(f"{ranks_in_words(ranks)} have yet to connect")
        self._replaced += newest
        self._reaper.leave(self._commands_to_end(), self._note_batch_file())
        self.deadline = time.monotonic() + self._timeout_s
        return dict(zip(ranks, unused(registered, used), strict=False))

    def _ended_engines(self) -> list[Any]:
        """Return the launchers of engines that have ended and were not replaced, the newest last."""
        return [each for each in self._ssh_launchers() if each.state == "after" and each not in self._replaced]

    def _ssh_launchers(self) -> list[SSHLauncher]:
        """Return the launcher of each engine, those of replacements last; empty with another kind of launcher."""
        sets = self._cluster.engines.values() if self._is_ssh else ()
        return [each for engine_set in sets for each in engine_set.launchers.values()]

    async def _start_engines(self, count: int = 0, **more: Any) -> None:  # noqa: ANN401 - traits of the launcher
        configured = self._settings(self._launcher_class)
        if self._is_ssh and self._cluster.send_engines_connection_env:
            # their environment has the connection info, so no key file is needed on their hosts
            self._cluster.config.SSHEngineLauncher.setdefault("to_send", [])
        settings = {
            "environment": {**configured.environment, processes.MARKER: self._id},
            "engine_args": [*configured.engine_args, *self._engine_arguments(configured.engine_args)],
        }
        self._complaints.parent.mkdir(parents=True, exist_ok=True)
        complaining = ["sh", "-c", f'exec "$0" "$@" 2>>{shlex.quote(str(self._complaints))}']
        if issubclass(self._launcher_class, BatchSystemLauncher) and not issubclass(self._launcher_class, LSFLauncher):
            settings["submit_command"] = [*complaining, *configured.submit_command]  # LSF's launcher differs
        if self._is_ssh:
            # the local ssh process of each engine gets the marker, so that it is found and ended too
            settings["ssh_cmd"] = ["env", f"{processes.MARKER}={self._id}", *complaining, *configured.ssh_cmd]
            self._cluster.engine_launcher_class = ssh_launch.patient(self._launcher_class, self._gives_up)
        await self._cluster.start_engines(count or self._num_ranks, **settings, **more)

    def _controller_arguments(self) -> list[str]:
        """Return arguments for early detection of lost engines, unless configured."""
        defaults = {
            "HeartMonitor.period": HEARTBEAT_MS,
            "HeartMonitor.max_heartmonitor_misses": HEARTBEAT_MISSES,
        }
        launcher = self._settings(self._cluster.controller_launcher_class)
        given = [*self._cluster.controller_args, *launcher.controller_args]
        return _unless_set(defaults, self._configured("ipcontroller_config.py"), given)

    def _engine_arguments(self, given: Sequence[str]) -> list[str]:
        """Return arguments that make engines end without a controller, unless the number of misses is configured."""
        period = self._configured("ipcontroller_config.py").HeartMonitor.get("period", HEARTBEAT_MS)
        misses = max(1, round(1000 * ALONE_S / (period + _CHECK_MS)))
        return _unless_set({"IPEngine.max_heartbeat_misses": misses}, self._configured("ipengine_config.py"), given)

    def _configured(self, file: str) -> Config:
        return _configured(Path(self._cluster.profile_dir), file)

    # ---- waiting

    def wait_for_controller(self) -> Path:
        """Wait until the controller listens, begin to start engines, and return its connection file for clients.

        Raises:
            ClusterError: it did not start.
        """
        while not self._controller_started.done():
            self._wait_a_moment("waiting for the controller")
        self._check(self._controller_started, "start the controller")
        self._engines_started = self._loop.submit(self._start_engines())
        return Path(self._cluster.controller.connection_files["client"])

    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Wait until all engines have registered; without a limit in a queue.

        Raises:
            ClusterError: some did not register, or the launcher failed; the message includes its log.
        """
        while not self._engines_started.done():
            begun = len(getattr(self._cluster.engine_set, "launchers", ()))  # one after the other, over SSH
            self._wait_a_moment(f"{begun} of {self._num_ranks} engines are being started")
        self._check(self._engines_started, f"start {self._num_ranks} engines")
        engine_set = self._cluster.engine_set
        if isinstance(engine_set, BatchSystemLauncher):
            self.deadline = float("inf")
        self._reaper.leave(self._commands_to_end(), self._note_batch_file())
        self._wait_until_here(engine_set, registered)
        self.deadline = time.monotonic() + self._timeout_s
        return tuple(sorted(registered(), key=registered().__getitem__))

    def _commands_to_end(self) -> list[list[str]]:
        """Return the commands that end queue jobs and engines on other hosts."""
        started = (self._cluster.engine_set, self._cluster.controller)
        jobs = [each for each in started if isinstance(each, BatchSystemLauncher)]
        return [
            *([*job.delete_command, job.job_id] for job in jobs),
            *(ssh_launch.command_to_end(of_host) for of_host in self._hosts()),
        ]

    def _hosts(self) -> list[list[SSHLauncher]]:
        """Return the SSH launchers of running engines, grouped by host; empty with another kind of launcher."""
        return ssh_launch.by_host([launcher for launcher in self._ssh_launchers() if launcher.state == "running"])

    def _note_batch_file(self) -> list[Path]:
        """Record ipyparallel's batch file by its absolute path, as the current directory may change later."""
        engine_set = self._cluster.engine_set
        if isinstance(engine_set, BatchSystemLauncher) and not self._batch_files:
            self._batch_files.append(Path(engine_set.batch_file).resolve())
        return self._batch_files

    def _wait_until_here(self, engine_set: Any, registered: Registered) -> None:  # noqa: ANN401 - untyped in ipyparallel
        self._queue = queue = JobQueue(engine_set)
        job = getattr(engine_set, "job_id", "")
        while (num_here := len(registered())) < self._num_ranks:
            what = f"{num_here} of {self._num_ranks} engines are connected"
            if queue.has_ended:
                raise ClusterError(f"the queue has ended job {job}: {queue.state}; {what}{self.log_tail(None)}")
            what += f", in the queue as job {job}" if job else ""
            what += f": {queue.state}" if queue.state else ""
            if engine_set.state == "after":
                raise ClusterError(f"engines ended during the start: {what}{self.log_tail(None)}")
            self._wait_a_moment(what)
            queue.poll()

    def _wait_a_moment(self, what: str) -> None:
        """Report what the start waits for and sleep for a moment; raise after ``timeout_s`` without progress."""
        if what != self._waits_for:
            self._waits_for, self.deadline = what, max(self.deadline, time.monotonic() + self._timeout_s)
        if time.monotonic() > self.deadline:
            raise ClusterError(f"{what}, without progress for {self._timeout_s:.0f} s{self.advice(None)}")
        self._notices.notice(what, self._launcher_log.lines[-1] if self._launcher_log.lines else "")
        time.sleep(_POLL_S)

    def _check(self, started: Future[Any], what: str) -> None:
        error = started.exception()
        if error is None:
            return
        where = advice = ""
        for launcher in getattr(self._cluster.engine_set, "launchers", {}).values():
            if self._is_ssh and launcher.state == "before":  # the host at which the start failed
                where = f" on {launcher.location}"
                advice = f"\ncheck that ssh {launcher.location} works from here without a password"
        file = self._complaints
        lines = file.read_text(errors="replace").splitlines()[-_COMPLAINTS:] if file.exists() else []
        complaint = " ".join([str(error), *lines])
        raise ClusterError(
            f"{self._words} could not {what}{where}: {complaint}{self.log_tail(None)}{advice}"
        ) from error

    @property
    def _complaints(self) -> Path:
        """File for the stderr of ssh and of the queue's submit command; removed with the cluster's other files."""
        return Path(self._cluster.profile_dir) / "log" / f"complaints-{self._cluster.cluster_id}.log"

    # ---- state

    def is_running(self, _rank: int) -> bool:
        """Return whether the controller runs; only the controller reports ended engines."""
        controller = self._cluster.controller
        return controller is not None and controller.state == "running"

    def ending(self, _rank: int | None) -> str:
        """Return how the controller ended, in words; ``""`` while it runs."""
        controller = self._cluster.controller
        if controller is None or controller.state != "after":
            return ""
        code = (controller.stop_data or {}).get("exit_code")
        return "the cluster's controller has ended" + ("" if code is None else f" with exit code {code}")

    def ask_why_gone(self, report: Callable[[str], object]) -> None:
        """Call ``report`` with how the queue ended the job; immediately with ``""`` where no queue can be queried."""
        queue = self._queue
        if queue is None or not queue.can_be_asked:
            report("")
        else:  # in a thread, as the queue may take time to answer
            threading.Thread(target=lambda: report(queue.word_on_the_end()), name="asks the queue", daemon=True).start()

    def log_tail(self, _rank: int | None) -> str:
        """Return the last lines that the launcher logged, as the end of a message."""
        return (
            f"; the end of the launcher's log:\n{chr(10).join(self._launcher_log.lines)}"
            if self._launcher_log.lines
            else ""
        )

    def advice(self, rank: int | None, *_others: int | None) -> str:
        """Return what to check and to do when engines do not register."""
        ip = self._cluster.controller_ip
        listens = f"the controller listens on {ip}" if ip else "the controller listens on this machine only"
        return (
            f"{self.log_tail(rank)}\n{listens}: other hosts must reach it there (firewall, VPN; --interface NAME for "
            f"another address), and find Python with the workbench (c.{self._launcher_class.__name__} in "
            f"{Path(self._cluster.profile_dir) / 'ipcluster_config.py'})"
        )

    # ---- stop

    def end(self) -> str:
        """End controller and engines, cancel queued jobs, and remove all files. Idempotent."""
        if self._is_ending:
            return ""
        self._is_ending = True
        self._gives_up.set()
        with ExitStack() as last:  # runs from the last line up; a callback that raises does not stop the others
            last.callback(self._remove_files)
            last.callback(self._reaper.close, _GRACE_S)
            last.callback(self._loop.close, _GRACE_S)
            last.callback(processes.end, self._id, (), grace_s=_GRACE_S)
            last.callback(self._stop)
        if not self._out_of_reach:
            return ""
        were = "was" if len(self._out_of_reach) == 1 else "were"
        return (
            f"{', '.join(self._out_of_reach)} {were} not reached: engines there exit after {ALONE_S:.0f} s without "
            f"heartbeats, or as c.IPEngine.max_heartbeat_misses sets it"
        )

    def _stop(self) -> None:
        self._note_batch_file()
        with suppress(Exception):  # local processes that a failed launcher leaves are ended next
            self._loop.submit(self._stop_all()).result(STOP_S)

    async def _stop_all(self) -> None:
        """End all engines, on every host that answers, and the controller."""
        hosts = self._hosts()
        ended_here = {launcher for host in hosts for launcher in host}
        for engine_set in self._cluster.engines.values():
            launchers = getattr(engine_set, "launchers", {})
            for name, launcher in tuple(launchers.items()):
                if launcher in ended_here or launcher.state == "before":
                    launchers.pop(name).state = "after"  # else each fetches its engine's output, one after the other
        answers = await asyncio.gather(*(asyncio.to_thread(ssh_launch.end_there, host) for host in hosts))
        self._out_of_reach = [host[0].location for host, has_ended in zip(hosts, answers, strict=True) if not has_ended]
        await self._cluster.stop_cluster()
        with suppress(ClusterError):  # the reaper is gone
            self._reaper.leave([])

    def _remove_files(self) -> None:
        """Remove ipyparallel's files in the profile's directory, and the batch file."""
        for path in (*map(Path, glob.glob(self._own_files)), *self._batch_files):
            remove(path)


def _address_of(interface: str) -> str:
    """Return this host's address on the first interface of the list that it has.

    Raises:
        UsageError: it has none of them.
    """
    here = interfaces_here()
    for name in interface.split(","):
        if name in here:
            return here[name]
    raise UsageError(f"this machine has no address on {interface!r}; it has {', '.join(sorted(here))}")
