"""Engines that one of ipyparallel's launchers starts: processes of this machine, over SSH or MPI, or jobs of a queue.

All of it is ipyparallel's ``Cluster``, configured as its users do: ``ipcluster_config.py`` of a profile. Here it gets a
thread with an event loop for as long as it lasts, a marker by which processes on this machine are found again, and what
its launcher says is kept to be shown.

The controller listens where ipyparallel is configured to have it listen. Where nothing is configured, and engines are
on other hosts, that is this host's address on the route to them, and no other. Its connections are encrypted and
authenticated (CURVE), unless that is configured otherwise.
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
from collections import deque
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
from workbench.cluster.engine_provider import EngineProvider, Registered, WaitNotices
from workbench.cluster.job_queue import JobQueue
from workbench.cluster.local_launch import profile_directory
from workbench.cluster.reaper import Reaper, remove
from workbench.errors import ClusterError, UsageError

LAUNCHERS = "ipyparallel.engine_launchers"
"""Entry points that name launchers of engines."""

HEARTBEAT_MS, HEARTBEAT_MISSES = 450, 2
"""How often an engine is asked for a sign of life; after so many that did not come, and one more, it is gone: 1.8 s.

An engine gives it in a thread that needs no interpreter, however busy it is otherwise.
"""

ALONE_S = 60.0
"""How long engines go on that hear nothing of their controller, in seconds; then they end."""

_CHECK_MS = 500  # ipyparallel has an engine expect a heartbeat so much later than the controller's period

STOP_S = 60.0
"""How long launchers may take to end what they have started, in seconds."""

_PROGRAMS = ("mpi_cmd", "submit_command", "ssh_cmd")
"""Traits of launchers that hold the command line of the program that they run here."""

_INNARDS = "Create ShellCommandSend object"  # what ipyparallel says of an SSH connection
_GRACE_S = 2.0
_POLL_S = 0.02
_LINES, _COMPLAINTS = 12, 3


def launchers() -> tuple[str, ...]:
    """Return the names of the launchers that are installed."""
    return tuple(sorted({entry.name.lower() for entry in entry_points(group=LAUNCHERS)}))


def check_launcher(name: str) -> None:
    """Raise unless there is a launcher of engines called ``name``.

    Raises:
        UsageError: there is none; the message lists those there are.
    """
    if name.lower() not in launchers():
        raise UsageError(f"ipyparallel has no launcher of engines called {name!r}; there are {', '.join(launchers())}")


def configures_launcher(profile: str) -> bool:
    """Tell whether a profile says which launcher starts engines.

    Raises:
        UsageError: the profile does not exist, or its configuration cannot be read.
    """
    return "engine_launcher_class" in _configured(profile_directory(profile), "ipcluster_config.py").Cluster


def _configured(profile_directory: Path, file: str) -> Config:
    """Return what a configuration file of a profile says; ipyparallel itself would pass over one that fails.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return load_pyconfig_files([file], str(profile_directory))
    except Exception as error:
        raise UsageError(f"{profile_directory / file} fails: {type(error).__name__}: {error}") from error


def _unless_set(defaults: Mapping[str, object], config: Config, given: Iterable[str]) -> list[str]:
    """Return arguments for those of ``defaults``, ``Class.trait`` -> value, that are neither configured nor given."""
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
    """Keeps the last lines that launchers log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the lines of ``record``."""
        lines = record.getMessage().splitlines()
        self.lines.extend(line.rstrip() for line in lines if line.strip() and not line.startswith(_INNARDS))


class EventLoop:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Begin ``work``, and return what will be its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float) -> None:
        """End the loop once it is idle; a launcher that is stuck keeps its thread until it is not."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)


class IppLaunch(EngineProvider):
    """A controller and engines that ipyparallel starts; the constructor begins with the controller.

    Args:
        num_ranks: number of engines.
        engines: name of the launcher; empty: the profile's.
        profile: name of the IPython profile whose configuration applies; None: the default one's.
        timeout_s: time in seconds after which nothing more is expected of what has not gone on; in a queue none is.
        interface: that engines of other hosts reach the controller on; empty: the one on the route to them.
        on_exit: called in a thread of its own with None when the controller has ended.
        notices: takes what is waited for.

    Raises:
        UsageError: there is no such launcher, profile or interface, or what the launcher runs is missing here.
    """

    is_remote = True
    tells_ends = False

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
        self._said, log = LauncherLog(), logging.Logger("ipyparallel")
        log.addHandler(self._said)
        self._cluster = _cluster(profile, engines, n=num_ranks, log=log)
        self._check_installed()
        self._id = secrets.token_hex(8)
        self._batch_files: list[Path] = []
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
        """Name the launcher, as in messages."""
        return f"ipyparallel's {self._launcher_class.__name__}"

    def _check_installed(self) -> None:
        """Raise unless what starts the engines is there: before the controller is started, which takes seconds.

        Raises:
            UsageError: its program is not on PATH, or it knows no hosts.
        """
        configured, name = self._settings(self._launcher_class), self._launcher_class.__name__
        file = f"{Path(self._cluster.profile_dir) / 'ipcluster_config.py'}"
        if self._is_ssh and hasattr(configured, "engines") and not configured.engines:
            raise UsageError(
                f"{self._words} has no hosts: name them in {file}, c.{name}.engines = {{'HOST': {self._num_ranks}}}, "
                "and start with --profile NAME"
            )
        trait, command = next(
            ((trait, getattr(configured, trait)) for trait in _PROGRAMS if getattr(configured, trait, None)), ("", [])
        )
        if not trait or self._is_here or shutil.which(command[0]):
            return
        missing = f"{command[0]} is not installed here, or not on PATH"
        if issubclass(self._launcher_class, BatchSystemLauncher):
            raise UsageError(
                f"{missing}: start the notebook on a machine that submits jobs, or name it in {file}, "
                f"c.{name}.{trait} = ['/path/to/{command[0]}']"
            )
        raise UsageError(f"{missing}: install it, or name it in {file}, c.{name}.{trait} = ['/path/to/{command[0]}']")

    # ---- where the controller listens

    def _listen_on(self, interface: str) -> None:
        """Have the controller listen where engines reach it, unless that is configured."""
        cluster = self._cluster
        own = self._configured("ipcontroller_config.py").IPController
        if interface:
            cluster.controller_ip = _address_of(interface)
        elif not cluster.controller_ip and not {"ip", "engine_ip"} & set(own) and not self._is_here:
            cluster.controller_ip = address_towards(self._first_host()) or address_towards(ELSEWHERE)

    @property
    def _is_here(self) -> bool:
        """Whether engines are processes of this machine."""
        return issubclass(self._launcher_class, LocalEngineSetLauncher) and not self._is_ssh

    @property
    def _is_ssh(self) -> bool:
        return issubclass(self._launcher_class, SSHLauncher)

    def _first_host(self) -> str:
        """Return the address of a host on which engines are to be started; empty: it is not known before."""
        hosts = getattr(self._settings(self._launcher_class), "engines", {}) if self._is_ssh else {}
        for host in hosts:
            with suppress(OSError):
                return socket.gethostbyname(str(host).rpartition("@")[2].partition(":")[0])
        return ""

    def _settings(self, launcher: type[BaseLauncher]) -> Any:  # noqa: ANN401 - ipyparallel is untyped
        """Return a launcher of this class that starts nothing: it has what was configured."""
        return launcher(parent=self._cluster, profile_dir=self._cluster.profile_dir, log=self._cluster.log)

    # ---- starting, in the loop's thread

    async def _start_controller(self) -> None:
        cluster = self._cluster
        environment = {
            "IPP_ENABLE_CURVE": "1",
            "IPP_SESSION_KEY": secrets.token_hex(32),  # messages are signed as well, or the client warns of it
            **self._settings(cluster.controller_launcher_class).environment,
            processes.MARKER: self._id,
        }
        cluster.controller_args = [*cluster.controller_args, *self._controller_arguments()]
        await cluster.start_controller(environment=environment)
        cluster.controller.on_stop(lambda _: self._on_exit(None))
        await cluster.controller.get_connection_info()

    async def _start_engines(self) -> None:
        configured = self._settings(self._launcher_class)
        if self._is_ssh and self._cluster.send_engines_connection_env:
            # they are told in their environment how to connect: no key need lie on their hosts
            self._cluster.config.SSHEngineLauncher.setdefault("to_send", [])
        settings = {
            "environment": {**configured.environment, processes.MARKER: self._id},
            "engine_args": [*configured.engine_args, *self._engine_arguments(configured.engine_args)],
        }
        self._complaints.parent.mkdir(parents=True, exist_ok=True)
        complaining = ["sh", "-c", f'exec "$0" "$@" 2>>{shlex.quote(str(self._complaints))}']
        if issubclass(self._launcher_class, BatchSystemLauncher) and not issubclass(self._launcher_class, LSFLauncher):
            settings["submit_command"] = [*complaining, *configured.submit_command]  # LSF is given it in another way
        if self._is_ssh:
            # what waits here for an engine there is found by the marker and ended as well
            settings["ssh_cmd"] = ["env", f"{processes.MARKER}={self._id}", *complaining, *configured.ssh_cmd]
            self._cluster.engine_launcher_class = ssh_launch.patient(self._launcher_class, self._gives_up)
        await self._cluster.start_engines(self._num_ranks, **settings)

    def _controller_arguments(self) -> list[str]:
        """Have the controller find engines gone soon, unless it is configured how soon."""
        defaults = {
            "HeartMonitor.period": HEARTBEAT_MS,
            "HeartMonitor.max_heartmonitor_misses": HEARTBEAT_MISSES,
        }
        launcher = self._settings(self._cluster.controller_launcher_class)
        given = [*self._cluster.controller_args, *launcher.controller_args]
        return _unless_set(defaults, self._configured("ipcontroller_config.py"), given)

    def _engine_arguments(self, given: Sequence[str]) -> list[str]:
        """Have engines end that are alone, unless it is configured after how many heartbeats."""
        period = self._configured("ipcontroller_config.py").HeartMonitor.get("period", HEARTBEAT_MS)
        misses = max(1, round(1000 * ALONE_S / (period + _CHECK_MS)))
        return _unless_set({"IPEngine.max_heartbeat_misses": misses}, self._configured("ipengine_config.py"), given)

    def _configured(self, file: str) -> Config:
        return _configured(Path(self._cluster.profile_dir), file)

    # ---- waiting for it

    def wait_for_controller(self) -> Path:
        """Wait until the controller listens, begin to start engines, and return its connection file for clients.

        Raises:
            ClusterError: it did not come up.
        """
        while not self._controller_started.done():
            self._wait_a_moment("waiting for the controller")
        self._check(self._controller_started, "start the controller")
        self._engines_started = self._loop.submit(self._start_engines())
        return Path(self._cluster.controller.connection_files["client"])

    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Wait until all engines have registered; in a queue without a limit.

        Raises:
            ClusterError: some did not come, or the launcher refused; the message has what it said.
        """
        while not self._engines_started.done():
            begun = len(getattr(self._cluster.engine_set, "launchers", ()))  # one after the other, over SSH
            self._wait_a_moment(f"{begun} of {self._num_ranks} engines are being started")
        self._check(self._engines_started, f"start {self._num_ranks} engines")
        engine_set = self._cluster.engine_set
        if engine_set.n < self._num_ranks:
            raise ClusterError(
                f"{self._words} is configured to start {engine_set.n} engines, not {self._num_ranks}: add hosts to "
                f"c.{type(engine_set).__name__}.engines, or %fsdp start -n {engine_set.n}"
            )
        if isinstance(engine_set, BatchSystemLauncher):
            self.deadline = float("inf")
        self._reaper.leave(self._commands_to_end(), self._note_batch_file())
        self._wait_until_here(engine_set, registered)
        self.deadline = time.monotonic() + self._timeout_s
        return tuple(sorted(registered(), key=registered().__getitem__))

    def _commands_to_end(self) -> list[list[str]]:
        """Return the commands that end what was started as a job, or on other hosts."""
        started = (self._cluster.engine_set, self._cluster.controller)
        jobs = [each for each in started if isinstance(each, BatchSystemLauncher)]
        return [
            *([*job.delete_command, job.job_id] for job in jobs),
            *(ssh_launch.command_to_end(of_host) for of_host in self._hosts()),
        ]

    def _hosts(self) -> list[list[SSHLauncher]]:
        """Return what has started an engine over SSH, by host; nothing where another kind of launcher did."""
        launchers = getattr(self._cluster.engine_set, "launchers", {}).values() if self._is_ssh else ()
        return ssh_launch.by_host([launcher for launcher in launchers if launcher.state == "running"])

    def _note_batch_file(self) -> list[Path]:
        """Note what ipyparallel has written into the directory of this moment, as later it may be another."""
        engine_set = self._cluster.engine_set
        if isinstance(engine_set, BatchSystemLauncher) and not self._batch_files:
            self._batch_files.append(Path(engine_set.batch_file).resolve())
        return self._batch_files

    def _wait_until_here(self, engine_set: Any, registered: Registered) -> None:  # noqa: ANN401 - untyped in ipyparallel
        self._queue = queue = JobQueue(engine_set)
        job = getattr(engine_set, "job_id", "")
        while (num_here := len(registered())) < self._num_ranks:
            what = f"{num_here} of {self._num_ranks} engines are here"
            if queue.has_ended:
                raise ClusterError(f"the queue has ended job {job}: {queue.state}; {what}{self.log_tail(None)}")
            what += f", in the queue as job {job}" if job else ""
            what += f": {queue.state}" if queue.state else ""
            if engine_set.state == "after":
                raise ClusterError(f"engines ended while they started: {what}{self.log_tail(None)}")
            self._wait_a_moment(what)
            queue.look()

    def _wait_a_moment(self, what: str) -> None:
        """Sleep for a moment, and tell what is waited for, unless nothing has come of it for too long."""
        if what != self._waits_for:
            self._waits_for, self.deadline = what, max(self.deadline, time.monotonic() + self._timeout_s)
        if time.monotonic() > self.deadline:
            raise ClusterError(f"{what}, and no more for {self._timeout_s:.0f} s{self.advice(None)}")
        self._notices.notice(what, self._said.lines[-1] if self._said.lines else "")
        time.sleep(_POLL_S)

    def _check(self, started: Future[Any], what: str) -> None:
        error = started.exception()
        if error is None:
            return
        where = advice = ""
        for launcher in getattr(self._cluster.engine_set, "launchers", {}).values():
            if self._is_ssh and launcher.state == "before":  # the one at which it ended
                where = f" on {launcher.location}"
                advice = f"\nlook whether ssh {launcher.location} works from here without a password"
        file = self._complaints
        lines = file.read_text(errors="replace").splitlines()[-_COMPLAINTS:] if file.exists() else []
        said = " ".join([str(error), *lines])
        raise ClusterError(f"{self._words} could not {what}{where}: {said}{self.log_tail(None)}{advice}") from error

    @property
    def _complaints(self) -> Path:
        """A file for what ssh, or a queue that takes no job, says on stderr; removed with the cluster's others."""
        return Path(self._cluster.profile_dir) / "log" / f"complaints-{self._cluster.cluster_id}.log"

    # ---- what is known of it

    def is_running(self, _rank: int) -> bool:
        """Tell whether the controller runs, from which it is known which engines do."""
        controller = self._cluster.controller
        return controller is not None and controller.state == "running"

    def ending(self, _rank: int | None) -> str:
        """Say how the controller ended; ``""`` while it runs."""
        controller = self._cluster.controller
        if controller is None or controller.state != "after":
            return ""
        code = (controller.stop_data or {}).get("exit_code")
        return "the cluster's controller has ended" + ("" if code is None else f" with exit code {code}")

    def ask_why_gone(self, tell: Callable[[str], object]) -> None:
        """Have ``tell`` called with what the queue says of its job; at once and with nothing where there is none."""
        queue = self._queue
        if queue is None or not queue.can_be_asked:
            tell("")
        else:  # the loop may have to end while the queue is silent
            threading.Thread(target=lambda: tell(queue.word_on_the_end()), name="asks the queue", daemon=True).start()

    def log_tail(self, _rank: int | None) -> str:
        """Return the last lines that the launcher said as the end of a message."""
        return f"; the launcher said:\n{chr(10).join(self._said.lines)}" if self._said.lines else ""

    def advice(self, rank: int | None, *_others: int | None) -> str:
        """Return what there is to look at, and to do, when engines do not come."""
        ip = self._cluster.controller_ip
        heard = f"the controller listens on {ip}" if ip else "the controller listens on this machine alone"
        return (
            f"{self.log_tail(rank)}\n{heard}: other hosts must reach it there (firewall, VPN; --interface NAME for "
            f"another address), and find Python with the workbench (c.{self._launcher_class.__name__} in "
            f"{Path(self._cluster.profile_dir) / 'ipcluster_config.py'})"
        )

    # ---- the end

    def end(self) -> str:
        """End controller and engines, take back what is queued, and remove all files; may be called again."""
        if self._is_ending:
            return ""
        self._is_ending = True
        self._gives_up.set()
        with ExitStack() as last:  # from the last line up, and each whether or not those before it could be done
            last.callback(self._remove_files)
            last.callback(self._reaper.close, _GRACE_S)
            last.callback(self._loop.close, _GRACE_S)
            last.callback(processes.end, self._id, (), grace_s=_GRACE_S)
            last.callback(self._stop)
        if not self._out_of_reach:
            return ""
        were = "was" if len(self._out_of_reach) == 1 else "were"
        return (
            f"{', '.join(self._out_of_reach)} {were} not reached: what runs there ends by itself once it has heard "
            f"nothing for {ALONE_S:.0f} s, or for as long as c.IPEngine.max_heartbeat_misses says"
        )

    def _stop(self) -> None:
        self._note_batch_file()
        with suppress(Exception):  # whatever a launcher raises, what it has left here is ended next
            self._loop.submit(self._stop_all()).result(STOP_S)

    async def _stop_all(self) -> None:
        """Have the launchers end what they have started, on every host that answers."""
        launchers, hosts = getattr(self._cluster.engine_set, "launchers", {}), self._hosts()
        ended_here = {launcher for host in hosts for launcher in host}
        for name, launcher in tuple(launchers.items()):
            if launcher in ended_here or launcher.state == "before":
                launchers.pop(name).state = "after"  # else each fetches what its engine wrote, one after the other
        answers = await asyncio.gather(*(asyncio.to_thread(ssh_launch.end_there, host) for host in hosts))
        self._out_of_reach = [host[0].location for host, has_ended in zip(hosts, answers, strict=True) if not has_ended]
        await self._cluster.stop_cluster()
        with suppress(ClusterError):  # it is gone as well
            self._reaper.leave([])

    def _remove_files(self) -> None:
        """Remove what ipyparallel leaves in the profile's directory, and in that where this began."""
        for path in (*map(Path, glob.glob(self._own_files)), *self._batch_files):
            remove(path)


def _address_of(interface: str) -> str:
    """Return this host's address on the first interface of a list that it has.

    Raises:
        UsageError: it has none of them.
    """
    here = interfaces_here()
    for name in interface.split(","):
        if name in here:
            return here[name]
    raise UsageError(f"this machine has no address on {interface!r}; it has {', '.join(sorted(here))}")
