"""A cluster of ranks, independent of how its engines are started."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from workbench.base.codec import decode, encode
from workbench.base.crash import Crash, read_crash
from workbench.base.devices import AUTO, CHOICES, HOST
from workbench.cluster import engine_probe
from workbench.cluster._ipyparallel import INSTALL, Wire
from workbench.cluster.attached import AttachedEngines, AttachTarget, holder_here, is_gone
from workbench.cluster.channels import Channels
from workbench.cluster.deferred_interrupts import CountInterrupts
from workbench.cluster.engine_provider import NOTICE_S, EngineProvider, OnWait, WaitNotices, no_wait
from workbench.cluster.ipp_launch import IppLaunch, check_launcher, configures_launcher
from workbench.cluster.local_launch import LocalLaunch
from workbench.cluster.pending_replies import PendingReplies, ranks_in_words, select
from workbench.cluster.rank_assignment import EngineInfo, boots, in_order, lookouts, misfits, seats
from workbench.cluster.release_ranks import free, late
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError
from workbench.protocol.commands import START_TIMEOUT_S, RankRequest
from workbench.protocol.starting import Boot, ClusterOwner, Connect, ConnectReply, RankPast, World, private_file

R = TypeVar("R")

RUNTIME = "workbench.runtime.rank"
MAX_RANKS = 64
"""Limit of the fast start on this machine."""

_QUICK_S = 2.0  # a start on this machine shows no notices before that
_STOPPED = "the other ranks were stopped"
_START_CANCELLED = "The start was cancelled: no ranks are running"
_ATTACH_CANCELLED = "The attach was cancelled: the cluster keeps running and can be attached again"
_SHUTDOWN_S = 2.0
_PATIENCE_S = 1.0
_HOLD_S = 2.0
_ANSWER_S = 20.0  # until an engine without an answer counts as busy; an idle one may be slow because its machine is
_WHO_S = 2.0  # period of the check whether another notebook has taken the ranks
_LOSS_S = 2.0
_SILENT_S = 0.2  # period at which two ranks are polled for silent hosts

PROGRAM = Path(engine_probe.__file__).read_text(encoding="utf-8")
"""Program run on every engine before it is a rank; sent as text, as an engine may lack the workbench."""


class Cluster:
    """Ranks 0 to ``num_ranks - 1``, each in a separate process.

    Args:
        num_ranks: number of ranks; 1 to 64 with the fast start.
        device: one of :data:`workbench.base.devices.CHOICES`.
        profile: an IPython profile whose ``ipcluster_config.py``, ``ipcontroller_config.py``, ``ipengine_config.py``
            and startup files apply.
        engines: the ipyparallel launcher that starts them, such as ``ssh``, ``slurm``, ``mpi``; empty: the one that the
            profile configures, else the fast start on this machine.
        interface: network interface between the hosts, or a list of which each host has one; empty: the interface of
            the route to the controller.
        runtime: module of the rank side, with the functions ``boot, connect, handle_request, shutdown``; imported on
            the ranks only.
        start_timeout_s: time in seconds :meth:`start` may take; on this machine, without progress.

    Attributes:
        on_loss: called in another thread with a rank that is lost, and how it was, in words.

    A cluster that is still running when Python exits is stopped then; if Python is killed, the reaper ends it.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        num_ranks: int = 4,
        device: str = AUTO,
        profile: str | None = None,
        *,
        engines: str = "",
        interface: str = "",
        runtime: str = RUNTIME,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        is_number = isinstance(num_ranks, int) and not isinstance(num_ranks, bool)
        if not is_number or num_ranks < 1 or (num_ranks > MAX_RANKS and not engines and profile is None):
            raise UsageError(f"the number of ranks is 1 to {MAX_RANKS}, not {num_ranks!r}")
        if device not in CHOICES:
            raise UsageError(f"the device is one of {', '.join(CHOICES)}, not {device!r}")
        if engines:
            check_launcher(engines)
        self.num_ranks = num_ranks
        self.device = device
        self.on_loss: Callable[[int, str], object] = lambda rank, how: None
        self._profile = profile
        self._launcher = engines
        self._interface = interface
        self._runtime = runtime
        self._start_timeout_s = start_timeout_s
        self._target: AttachTarget | None = None
        self._takes = self._looks = False
        self._num_wanted: int | None = num_ranks
        self._holder: ClusterOwner | None = None
        self._is_free = False
        self._ask_who_at = 0.0
        self._notices = WaitNotices(no_wait)
        self._provider: EngineProvider | None = None
        self._channels: Channels | None = None
        self._rank_info: tuple[ConnectReply, ...] = ()
        self._session = uuid.uuid4().hex  # names files of the ranks

    @classmethod
    def attached(
        cls,
        target: AttachTarget,
        num_ranks: int | None = None,
        *,
        take: bool = False,
        look: bool = False,
        **settings: Any,  # noqa: ANN401
    ) -> Self:
        """Return a cluster of running engines; :meth:`start` finds them, :meth:`stop` ends no process.

        Engines that are ranks already keep their variables. Ranks that another notebook holds can only be viewed
        (:attr:`held_by`).

        Args:
            target: which cluster.
            num_ranks: how many of its engines become ranks; None: all.
            take: take the ranks even if another notebook holds them.
            look: only view the ranks, also if no notebook holds them; nothing changes for them.
            settings: ``device, interface, runtime, start_timeout_s``, as of the constructor.

        Raises:
            UsageError: an argument is invalid.
        """
        made = cls(1 if num_ranks is None else num_ranks, engines="", profile="", **settings)
        made._target, made._takes, made._looks, made._num_wanted = target, take, look, num_ranks
        return made

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ------------------------------------------------------------------ start and stop

    def start(self, on_wait: OnWait = no_wait) -> None:
        """Start all ranks and join them into one process group.

        Args:
            on_wait: receives notices of what a long start waits for; a KeyboardInterrupt raised in it cancels the
                start.

        Raises:
            UsageError: they are started already; the profile does not exist; the device is not available.
            ClusterError: a rank failed to start or timed out; all are stopped again.
            Interrupted: Ctrl-C; all are stopped again.
        """
        if self._provider is not None:
            raise UsageError("the ranks are already started: first %fsdp stop")
        atexit.register(self._stop_at_exit, os.getpid())
        self._notices = WaitNotices(on_wait, 0.0 if self._launcher else _QUICK_S)
        try:
            self._provider = provider = self._open()
            wire = self._connect(provider)
            self._rank_info = self._join(provider, wire) or self._boot(provider, self._seat(provider, wire))
            for rank in lookouts(self._rank_info):
                self._watch_hosts(self._reach(), rank, frozenset())
        except KeyboardInterrupt as interrupt:
            raise Interrupted(_START_CANCELLED if self._target is None else _ATTACH_CANCELLED) from interrupt
        finally:
            if not self._rank_info:
                self.stop()

    def heal(self, pasts: Mapping[int, RankPast], on_wait: OnWait = no_wait) -> None:
        """Start a process for each lost rank, and join all ranks into one process group; the others keep theirs.

        All ranks become ranks anew, so nothing of theirs is sharded or recorded; the variables of the others stay.

        Args:
            pasts: what each rank continues.
            on_wait: as in :meth:`start`.

        Raises:
            UsageError: the launcher cannot start single engines.
            ClusterError: a rank did not start, or another one was lost meanwhile; :meth:`heal` may be called again.
            Interrupted: Ctrl-C, as after a failure.
        """
        provider, channels = self._provider, self._reach()
        if provider is None:
            return
        self._notices = WaitNotices(on_wait, _QUICK_S)
        lost = [rank for rank, is_alive in enumerate(self.alive()) if not is_alive]
        try:
            new = provider.replace(lost, channels.registered, channels.engines)
            engines = tuple(new.get(rank, engine) for rank, engine in enumerate(channels.engines))
            self._open_channels(provider, channels.wire, engines)
            requests = self._boots_again(provider)
            self._install(provider, self._rank_info)  # first, so that a rank can be freed if another one is lost now
            self._rank_info = self._boot(provider, {r: replace(b, past=pasts.get(r)) for r, b in requests.items()})
        except KeyboardInterrupt as interrupt:
            raise Interrupted("The heal was cancelled: %fsdp heal begins it again") from interrupt
        for rank in lookouts(self._rank_info):
            self._watch_hosts(self._reach(), rank, frozenset())

    def _boots_again(self, provider: EngineProvider) -> dict[int, Boot]:
        """Return the boot request of each rank, some of which have new engines."""
        answers = self._survey(self._reach(), counts_devices=self.device != HOST)
        self._wait(provider, answers, "report its host and versions")
        infos = self._infos(answers, answers.ranks)
        seated = in_order(dict(zip(self._reach().engines, infos, strict=True)))
        if wrong := misfits(seated, engine_probe.workbench_version()):
            raise ClusterError("\n".join(wrong))
        return boots(seated, self.device, self._interface)

    def _open(self) -> EngineProvider:
        """Begin to start or find the engines, without waiting."""
        if self._target is not None:
            return AttachedEngines(self._target, self._num_wanted, self._start_timeout_s)
        if self._launcher or (self._profile is not None and configures_launcher(self._profile)):
            return IppLaunch(
                self.num_ranks,
                self._launcher,
                self._profile,
                self._start_timeout_s,
                interface=self._interface,
                on_exit=self._on_exit,
                notices=self._notices,
            )
        return LocalLaunch(
            self.num_ranks,
            self._profile,
            self._start_timeout_s,
            self._on_exit,
            device=self.device,
            preload=self._runtime,
            notices=self._notices,
        )

    def _connect(self, provider: EngineProvider) -> Wire:
        """Wait for the controller and the engines, open channels to them in the provider's order, return the wire."""
        connection_file = provider.wait_for_controller()
        on_silence = None if provider.tells_ends else self._on_silence
        connecting: Future[Wire] = Future()

        def connect() -> None:
            try:
                connecting.set_result(Wire(connection_file, self._start_timeout_s, self._on_gone, on_silence))
            except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                connecting.set_exception(error)

        # in a thread: ipyparallel's client waits for the controller, without a way to cancel the wait or report it
        threading.Thread(target=connect, name="connect to the controller", daemon=True).start()
        try:
            while not connecting.done():
                futures.wait([connecting], NOTICE_S)
                if not connecting.done():
                    self._notice(self._num_wanted, "the controller has not answered yet")
            wire = connecting.result()
        except KeyboardInterrupt:
            connecting.add_done_callback(_close)
            raise
        except TimeoutError as error:
            ended = provider.ending(None)
            late = ended or f"the controller has not answered within {self._start_timeout_s:.0f} s"
            raise ClusterError(f"{late}{provider.advice(None)}") from error
        self._channels = Channels(wire, ())  # so that the wire is closed if the next line fails
        self._open_channels(provider, wire, provider.wait_for_engines(wire.engines))
        return wire

    def _open_channels(self, provider: EngineProvider, wire: Wire, engines: tuple[str, ...]) -> None:
        """Open channels to ``engines``, by rank.

        One assignment: the threads that report deaths never see engines without their channels.
        """
        self._channels = Channels(wire, engines)
        for rank in range(len(engines)):  # it may have ended before its channel was open
            if not provider.is_running(rank):
                self._on_exit(rank)
        for engine in set(engines) - set(wire.engines()):
            self._on_gone(engine)

    def _join(self, provider: EngineProvider, wire: Wire) -> tuple[ConnectReply, ...]:
        """Join the running ranks of an attached cluster; hold them, or only view them if another notebook does.

        Returns:
            The replies of the ranks when they connected; empty: the engines are no ranks yet.

        Raises:
            UsageError: their number is not the requested one, or the engines are no ranks that could be viewed.
            ClusterError: an engine does not answer.
        """
        if self._target is None:
            return ()
        world = self._find_world(provider)
        if world is None:
            if self._looks:
                raise UsageError("its engines are no ranks yet: there is nothing to view")
            return ()
        if self._num_wanted not in {None, len(world.engines)}:
            raise UsageError(
                f"{len(world.engines)} of its engines are already ranks and keep their variables: attach without -n; "
                f"or attach, %fsdp stop (the engines keep running), and attach again with -n"
            )
        self.num_ranks = len(world.engines)
        self._open_channels(provider, wire, world.engines)
        if self._looks:
            self._holder = world.holder
            return world.ranks
        takes = self._takes or (world.holder is not None and is_gone(world.holder))
        holders = self._hold({"holder": encode(holder_here()), "take": takes})
        self._holder = next((holder for holder in holders if holder not in {None, holder_here()}), None)
        return world.ranks

    def _find_world(self, provider: EngineProvider) -> World | None:
        """Return the world of the engines, None if they are no ranks; busy engines reply on their control channel."""
        channels = self._reach()
        answers = self._survey(channels, counts_devices=False)  # counting imports torch, which may take long
        reported: dict[int, World | None] = {}
        until = time.monotonic() + _ANSWER_S
        while busy := self._busy(answers, reported):
            self._notice(len(channels.engines), f"{len(busy)} {'has' if len(busy) == 1 else 'have'} not answered yet")
            replies = channels.hold({}, busy, _HOLD_S)
            reported |= {rank: world for rank, world in replies.items() if not isinstance(world, Exception)}
            silent = [rank for rank in busy if rank not in reported and not answers.done(rank)]
            if silent and time.monotonic() > until:
                raise ClusterError(
                    f"{len(silent)} of {len(channels.engines)} engines do not answer{provider.advice(None)}"
                )
        others = sorted(set(answers.ranks) - set(reported))
        reported |= {rank: one.world for rank, one in zip(others, self._infos(answers, others), strict=True)}
        worlds = {channels.engines[rank]: world for rank, world in reported.items()}
        # an engine that could not be reached when its world was stopped still reports that world
        found = [each for each in worlds.values() if each and None not in map(worlds.get, {*each.engines} & {*worlds})]
        if not found:
            stranded = [rank for rank in reported if reported[rank] is not None]
            free(channels, stranded, answers, _STOPPED, interrupts=False)
        return max(found, key=lambda world: len(world.engines), default=None)

    @staticmethod
    def _busy(answers: PendingReplies, reported: Mapping[int, object]) -> list[int]:
        """Wait up to ``_PATIENCE_S`` for answers; return the ranks that neither answered nor are in ``reported``."""
        answers.wait(_PATIENCE_S)
        return [rank for rank in answers.ranks if rank not in reported and not answers.done(rank)]

    def _hold(self, request: dict[str, Any]) -> list[ClusterOwner | None]:
        """Send a hold request to all living ranks and return the holder of each afterwards."""
        channels = self._reach()
        living = [rank for rank in range(len(channels.engines)) if not channels.is_lost(rank)]
        replies = channels.hold(request, living, _HOLD_S).values()
        return [world.holder for world in replies if isinstance(world, World)]

    def _survey(self, channels: Channels, *, counts_devices: bool) -> PendingReplies:
        count_for = engine_probe.workbench_version() if counts_devices else ""
        return channels.evaluate(PROGRAM, f"survey({self._interface!r}, count_for={count_for!r})")

    @staticmethod
    def _infos(answers: PendingReplies, ranks: Iterable[int]) -> list[EngineInfo]:
        return [decode(EngineInfo, json.loads(answers.result(rank)), f"engine {rank}") for rank in sorted(ranks)]

    def _seat(self, provider: EngineProvider, wire: Wire) -> dict[int, Boot]:
        """Survey the engines, assign a rank to each, and return the boot request of each rank."""
        channels = self._reach()
        answers = self._survey(channels, counts_devices=self.device != HOST)
        self._wait(provider, answers, "report its host and versions")
        found = dict(zip(channels.engines, self._infos(answers, answers.ranks), strict=True))
        seated = seats(found, self.num_ranks if self._target is None else self._num_wanted)
        self.num_ranks = len(seated)
        if wrong := misfits(seated, engine_probe.workbench_version()):
            raise ClusterError("\n".join(wrong))
        engines = tuple(seat.engine for seat in seated)
        if engines != channels.engines:
            self._open_channels(provider, wire, engines)
        return boots(seated, self.device, self._interface)

    def _boot(self, provider: EngineProvider, requests: Mapping[int, Boot]) -> tuple[ConnectReply, ...]:
        """Build the process group and set up the control channels; return the reply of each rank when it connected."""
        named = {rank: replace(request, session=self._session) for rank, request in requests.items()}
        booted = self._begin(provider, named)
        address = booted[0]
        if address is None:
            raise ClusterError("rank 0 did not send the address of the process group")
        connected = self._begin(provider, dict.fromkeys(requests, Connect(address=address)))
        info = tuple(connected.values())
        self._install(provider, info)
        return info

    def _install(self, provider: EngineProvider, info: tuple[ConnectReply, ...]) -> None:
        """Set up the control channel of every rank."""
        world = encode(World(engines=self._reach().engines, ranks=info, holder=holder_here()))
        look_at = lookouts(info)
        handler = f"{self._runtime}:handle_request"
        args = {rank: (handler, world, encode(look_at.get(rank, {}))) for rank in range(len(info))}
        self._on_all(provider, INSTALL, args)

    def _begin(self, provider: EngineProvider, requests: Mapping[int, RankRequest[R]]) -> dict[int, R]:
        """Run a start request in the main thread of every rank, and return the replies."""
        word, reply = requests[0].word, requests[0].reply
        args = {rank: (encode(request),) for rank, request in requests.items()}
        answers = self._on_all(provider, f"{self._runtime}:{word}", args)
        try:
            return {rank: decode(reply, answer, f"reply of rank {rank}") for rank, answer in answers.items()}
        except ValueError as wrong:
            raise ClusterError(f"a rank sent an invalid reply to {word!r}: {wrong}") from wrong

    def _on_all(self, provider: EngineProvider, name: str, args: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call ``name`` on every rank during the start; the first failure ends the start."""
        pending = self._reach().call(name, args)
        try:
            self._wait(provider, pending, f"finish {name}")
        except ClusterError:
            if self._rank_info:  # ranks that were to begin again wait for one that does not
                living = [rank for rank, is_alive in enumerate(self.alive()) if is_alive]
                free(self._reach(), living, pending, "another rank was lost")
                pending.wait(_PATIENCE_S)
                self.raise_loss()
            raise
        return pending.results()

    def _wait(self, provider: EngineProvider, pending: PendingReplies, what: str) -> None:
        """Wait for ``pending`` during the start; the first failure ends the start."""
        while not (is_done := pending.wait(NOTICE_S, or_error=True)):
            if provider.is_overdue() or any(map(pending.error, pending.ranks)):
                break
            self._notice(len(pending.ranks), "connecting the ranks")
        try:
            pending.raise_error()
        except RankError as error:
            if error.ename == UsageError.__name__:
                raise UsageError(error.evalue) from error
            raise ClusterError(f"rank {error.rank} did not start: {error.ename}: {error.evalue}") from error
        if not is_done:
            late = [rank for rank in pending.ranks if not pending.done(rank)]
            raise ClusterError(f"{ranks_in_words(late)} did not {what} in time{provider.advice(*late)}")

    def _notice(self, num_ranks: int | None, detail: str) -> None:
        """Report what a start or an attach waits for; ``num_ranks`` None means all engines."""
        what = "all engines" if num_ranks is None else f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
        self._notices.notice(f"{'starting' if self._target is None else 'attaching'} {what}", detail)

    def stop(self) -> str:
        """Stop all ranks and remove their files; no-op when they are not started.

        Idle ranks leave their process groups first; busy ones are asked to end, and killed 2 s later. The process that
        CPU ranks are forked from is kept for the next start (zygote_cache.py).

        Returns:
            A sentence on the hosts that could not be reached and what happens there; empty: everything has ended.

        Raises:
            Interrupted: Ctrl-C was pressed during the stop; the ranks are stopped all the same.
        """
        left = [""]
        with CountInterrupts() as interrupts, ExitStack() as last:  # last line first; each runs even if another raises
            last.callback(self._forget)
            if self._provider is not None:
                last.callback(self._end, self._provider, left)
            if self._channels is not None:
                last.callback(self._channels.close)
                if self._provider is not None and self._provider.is_remote:
                    last.callback(self._channels.shut_down_engines)
                last.callback(self._shut_down, self._channels)
        if interrupts.count:
            raise Interrupted("\n".join(filter(None, ["Interrupted, but the ranks are stopped", left[-1]])))
        return left[-1]

    def _end(self, provider: EngineProvider, left: list[str]) -> None:
        left.append(provider.end())
        for rank in range(self.num_ranks):  # of ranks that were killed, on this host
            private_file(self._session, rank).unlink(missing_ok=True)
        for info in self._rank_info:
            if info.crash_file:
                Path(info.crash_file).unlink(missing_ok=True)

    def detach(self) -> None:
        """Release the ranks without stopping them; they keep their variables and can be attached again.

        Raises:
            UsageError: they are not started, or were started here.
        """
        self._reach()
        if self._target is None:
            raise UsageError(
                "these ranks were started here and end with this notebook: %fsdp stop. For ranks that outlive it: "
                "ipcluster start, then %fsdp attach"
            )
        with ExitStack() as last:
            last.callback(self._forget)
            last.callback(self._reach().close)
            if not self.held_by:
                last.callback(self._hold, {"holder": None, "take": True})

    def _forget(self) -> None:
        atexit.unregister(self._stop_at_exit)
        self._holder, self._is_free, self._looks = None, False, False
        self._provider = self._channels = None
        self._rank_info = ()

    def _shut_down(self, channels: Channels) -> None:
        if self._rank_info and not self.held_by:
            idle = [rank for rank in range(self.num_ranks) if self.alive()[rank] and not channels.is_busy(rank)]
            left = channels.call(f"{self._runtime}:shutdown", dict.fromkeys(idle, ()))
            if not left.wait(_SHUTDOWN_S) and self._target is not None:  # busy for a notebook that is gone
                free(channels, late(left, idle), left, _STOPPED)
                left.wait(_SHUTDOWN_S)
            if self._target is not None:
                self._hold({"leave": True})

    def _stop_at_exit(self, pid: int) -> None:
        if os.getpid() != pid:  # a forked child does not own the ranks
            return
        if self._target is not None and self.is_started:
            self.detach()
        else:
            self.stop()

    def _on_exit(self, rank: int | None) -> None:
        """Mark ranks lost whose process has ended (None: the controller's, so all); called in a separate thread."""
        provider, channels = self._provider, self._channels
        if provider is None or channels is None:
            return
        how = f"{'cannot be reached' if rank is None else 'died'}: {provider.ending(rank)}"
        for lost in range(len(channels.engines)):
            if rank in {None, lost}:
                self._lose(channels, lost, how, provider.log_tail(rank))

    def _on_silence(self) -> None:
        """Mark all ranks lost, as the controller sends no heartbeat any more; called in a separate thread."""
        provider, channels = self._provider, self._channels
        if provider is None or channels is None:
            return
        how = provider.ending(None) or "the cluster's controller has ended, or its host is gone"
        for rank in range(len(channels.engines)):
            self._lose(channels, rank, f"cannot be reached: {how}", provider.log_tail(None))

    def _on_gone(self, engine: str) -> None:
        """Mark the rank of an engine lost that the controller reports gone; called in the client's IO thread."""
        provider, channels = self._provider, self._channels
        if provider is None or channels is None or engine not in channels.engines:
            return
        rank = channels.engines.index(engine)
        info = self._rank_info
        host = f" on {info[rank].host}" if info else ""
        crash, where = _crash_of(info[rank]) if info and not provider.tells_ends else (None, "")

        def report(why: str) -> None:
            if self._channels is channels:  # else the cluster was stopped meanwhile
                how = f"died: the process{host} has ended" + (f": {why}" if why else f", or its host is gone{where}")
                if crash is not None:
                    how = f"died: the process{host} was killed by {crash.signal or 'Python'} ({crash})"
                self._lose(channels, rank, how, "")

        provider.ask_why_gone(report)

    def _watch_hosts(self, channels: Channels, rank: int, known: frozenset[str], silent: Sequence[str] = ()) -> None:
        """Mark the ranks on ``silent`` hosts lost, and poll ``rank`` for further silent hosts.

        The rank is polled, it pushes nothing: a message it sends after the controller is gone would keep the
        ipyparallel process between the two alive for ever.
        """
        if self._channels is not channels or channels.is_lost(
            rank
        ):  # stopped, or cut off: to a lost rank all hosts are silent
            return
        for info, engine in zip(self._rank_info, channels.engines, strict=True):
            if info.host in silent and info.host not in known:
                self._on_gone(engine)
        channels.ask_for_silent(rank, _SILENT_S, partial(self._watch_hosts, channels, rank, known.union(silent)))

    def _lose(self, channels: Channels, rank: int, how: str, log: str) -> None:
        is_new = rank not in channels.losses
        channels.losses.setdefault(rank, how)
        channels.lose(rank, RankDied(f"rank {rank} {how}{log}", ranks=(rank,)))
        if is_new:
            self.on_loss(rank, how)

    # ------------------------------------------------------------------ state

    @property
    def is_started(self) -> bool:
        """Whether the ranks are started and not stopped."""
        return bool(self._rank_info)

    @property
    def held_by(self) -> str:
        """Who else controls these ranks, in words, so that they can only be viewed here; empty: this notebook does."""
        return ("no notebook" if self._looks else "") if self._holder is None else str(self._holder)

    @property
    def is_free(self) -> bool:
        """Whether the notebook that held these ranks has detached or ended, so that they can be attached."""
        return self._is_free

    @property
    def outlives(self) -> bool:
        """Whether the engines were started elsewhere and keep running after :meth:`stop`."""
        return self._target is not None

    @property
    def one_job(self) -> str:
        """The launcher that starts and ends all ranks as one job, which cannot be replaced alone; empty: each can."""
        return "" if self._provider is None else self._provider.one_job

    def _ask_who_holds(self, channels: Channels) -> None:
        """Check every ``_WHO_S`` seconds whether another notebook has taken or released attached ranks."""
        now = time.monotonic()
        if self._target is None or not self._rank_info or now < self._ask_who_at:
            return
        self._ask_who_at = now + _WHO_S
        one = [rank for rank in range(len(channels.engines)) if not channels.is_lost(rank)][:1]
        for world in channels.hold({}, one, _HOLD_S).values():
            if isinstance(world, World) and world.holder != holder_here():
                has_let_go = world.holder is None or is_gone(world.holder)
                self._is_free = has_let_go and self._holder is not None
                self._holder = self._holder if has_let_go else world.holder

    def _check_held(self) -> None:
        if self.held_by:
            raise UsageError(
                f"{self.held_by} controls these ranks; here you can only view them: views, the dashboard, "
                "%fsdp status. To take control: %fsdp detach there, then %fsdp attach here; if it is gone: "
                "%fsdp attach --take"
            )

    @property
    def rank_info(self) -> tuple[ConnectReply, ...]:
        """The reply of each rank when it connected."""
        self._reach()
        return self._rank_info

    def alive(self) -> tuple[bool, ...]:
        """Return for each rank whether its process runs and can be reached; all False when not started."""
        provider, channels = self._provider, self._channels
        if provider is None or channels is None:
            return (False,) * self.num_ranks
        return tuple(provider.is_running(rank) and not channels.is_lost(rank) for rank in range(self.num_ranks))

    def losses(self) -> dict[int, str]:
        """Return how each lost rank was lost, such as ``died: the process was killed by SIGKILL (...)``."""
        return {} if self._channels is None else dict(sorted(self._channels.losses.copy().items()))

    # ------------------------------------------------------------------ requests

    def raise_loss(self) -> None:
        """Raise RankDied if a rank is lost, or turns out to be within two seconds: others may fail before that."""
        if self._channels is not None:
            self._channels.has_loss.wait(_LOSS_S)
        if lost := self.losses():
            how = "; ".join(f"rank {rank} {words}" for rank, words in lost.items())
            raise RankDied(f"{how}. %fsdp heal begins again", ranks=tuple(lost))

    def apply(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> PendingReplies:  # noqa: ANN401 - plain data
        """Call the function ``"module:function"`` in the main thread of ``ranks`` (default: all).

        Args:
            name: the function; its module is imported on the rank.
            args: plain data; the return value must be plain data too, as the kernel unpickles it.
            ranks: the ranks to call.

        Raises:
            UsageError: the ranks are not started, or there is no such rank.
        """
        channels = self._reach()
        self._check_held()
        return channels.call(name, dict.fromkeys(self._select(ranks), args))

    def run_cell(self, code: str, ranks: Iterable[int] | None = None) -> PendingReplies:
        """Run ``code`` as an IPython cell in the user's namespace of ``ranks`` (default: all).

        Raises:
            UsageError: the ranks are not started, or there is no such rank.
        """
        channels = self._reach()
        self._check_held()
        return channels.cell(code, self._select(ranks))

    def ask(
        self, request: RankRequest[R], ranks: Iterable[int] | None = None, timeout_s: float = 2.0
    ) -> dict[int, R | Exception]:
        """Send ``request`` to the control thread of ``ranks`` (default: all), which answers while the rank is busy.

        Args:
            request: for the ``handle_request`` function of the rank side.
            ranks: the ranks to ask; may be empty, as when all have died.
            timeout_s: time in seconds to wait for the replies.

        Returns:
            For each rank, in order, its reply or an exception: :class:`RankError` when ``handle_request`` raised,
            :class:`RankDied` when the rank is lost, :class:`ClusterError` when the reply timed out or is invalid.

        Raises:
            UsageError: the ranks are not started, or there is no such rank.
        """
        channels = self._reach()
        if request.looks:
            self._ask_who_holds(channels)
        else:
            self._check_held()
        return channels.ask(request, self._select(ranks, may_be_none=True), timeout_s)

    def interrupt(self, ranks: Iterable[int] | None = None) -> None:
        """Send SIGINT to ``ranks`` (default: all; may be empty); an idle rank ignores it.

        Raises:
            UsageError: the ranks are not started, or there is no such rank.
        """
        channels = self._reach()
        self._check_held()
        channels.interrupt(self._select(ranks, may_be_none=True))

    def _select(self, ranks: Iterable[int] | None, *, may_be_none: bool = False) -> tuple[int, ...]:
        return select(ranks, self.num_ranks, may_be_none=may_be_none)

    def _reach(self) -> Channels:
        if self._channels is None:
            raise UsageError("the ranks are not started: first %fsdp start")
        return self._channels


def _crash_of(info: ConnectReply) -> tuple[Crash | None, str]:
    """Return the crash of a lost rank, if its file is here; else where that would be, as the end of a message."""
    if not info.crash_file:
        return None, ""
    path = Path(info.crash_file)
    try:
        if path.stat().st_uid != os.getuid():
            return None, ""
        crash = read_crash(path.read_text(errors="replace"))
        path.unlink()
    except OSError:
        return None, f"; if C code ended it, {path} on {info.host} has its stacks"
    return (crash if crash.reason else None), ""


def _close(connecting: Future[Wire]) -> None:
    """Close a connection that was established after the start was cancelled."""
    if connecting.exception() is None:
        connecting.result().close()
