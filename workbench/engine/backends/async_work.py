"""A collective in flight, and how it is waited for without losing the ability to stop.

A thread blocked inside a collective's own wait cannot be interrupted on gloo. So collectives are issued async, their
completion sets a :class:`threading.Event`, and the wait looks at the cancel flag in slices.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.engine import cancellable_waits
from workbench.engine.cancellable_waits import AsyncWork, cancellation
from workbench.engine.errors import CollectiveFailed


class WaitObserver(Protocol):
    """Who is asked while a collective is waited for."""

    def look(self) -> None:
        """Raise if the collective will never end, because a rank does something else."""

    def give_up(self, error: BaseException) -> None:
        """Learn that the wait ended in ``error``."""


class _Unwatched:
    """A collective that nobody else has to do with."""

    def look(self) -> None:
        """Do nothing."""

    def give_up(self, error: BaseException) -> None:
        """Do nothing."""


class _Ended:
    """The work of a collective that was over when its call returned."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self) -> None:
        """Do nothing."""


class _WaitedInAThread:
    """Gives a future to work that has none, by waiting for it in a thread."""

    def __init__(self, work: AsyncWork) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: AsyncWork) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[Any]:
        """Future completed when the work is done."""
        return self._future

    def wait(self) -> None:
        """Block until it is; raise if it failed."""
        self._future.wait()


class AllOf:
    """Collectives that are waited for as one."""

    def __init__(self, works: Sequence[AsyncWork]) -> None:
        self._futures = [work.get_future() for work in works]
        self._future = torch.futures.collect_all(self._futures)

    @property
    def has_ended(self) -> bool:
        """True once each of them has ended, well or badly."""
        return all(future.done() for future in self._futures)

    def get_future(self) -> Any:  # noqa: ANN401 - see Work
        """Future of them all; it fails as soon as one does."""
        return self._future

    def wait(self) -> None:
        """Wait for all, or until one fails: the others may never end then."""
        self._future.wait()


class PendingWork:
    """One collective in flight, which the host waits for.

    Args:
        work: what the async collective returned; None if it is over already. Work without a usable future is waited for
            in a thread.
        collective: what it is, for errors.
        watch: asked in every wait slice, and told if the wait is given up.

    Attributes:
        end_ns: monotonic time of its true completion, 0 while it runs and for work on a device.
    """

    def __init__(self, work: AsyncWork | None, collective: object, watch: WaitObserver | None = None) -> None:
        self._work = _Ended() if work is None else work
        self._collective = collective
        self._watch = watch or _Unwatched()
        self._done = threading.Event()
        self.end_ns = 0
        self._listen()

    def _listen(self) -> None:
        try:
            future = self._work.get_future()
        except (AttributeError, RuntimeError):  # a custom comm's; gloo's reduce-scatter: "not implemented"
            self._work = _WaitedInAThread(self._work)
            future = self._work.get_future()
        future.then(self._completed)

    def _completed(self, _future: Any) -> None:  # noqa: ANN401
        self.end_ns = time.monotonic_ns()
        self._done.set()

    @property
    def lets_stream_wait(self) -> Callable[[], object] | None:
        """On a device, what lets the current stream wait for the collective, if others than the engine may call it."""
        return None

    @property
    def has_ended(self) -> bool:
        """True once the collective has ended, well or badly."""
        return self._done.is_set() and not self.goes_on

    @property
    def goes_on(self) -> bool:
        """True where a part of it failed, and another is under way: maybe for ever."""
        return self._done.is_set() and isinstance(self._work, AllOf) and not self._work.has_ended

    def block(self) -> None:
        """Wait until the collective has ended, well or badly; on a device, let the current stream wait, and return.

        Raises:
            CollectiveFailed: on a device, the collective is known to have failed.
            StepAborted: cancelled meanwhile; the collective is still unfinished.
            RanksDisagreeError: another rank is about to do something else; it is unfinished for good.
        """
        try:
            cancellation.check()
            self._wait_in_slices()
        except BaseException as error:  # an interrupt as well: whoever gives up leaves the collective unfinished
            self._watch.give_up(error)
            raise

    def _wait_in_slices(self) -> None:
        while not self._done.wait(cancellable_waits.SLICE_S):
            cancellation.check()
            cancellable_waits.stop_point()
            self._watch.look()

    def abandon(self) -> None:
        """Give it up without waiting; on a device the current stream waits, so that its memory is not used too early.

        The streams of the collectives themselves do not do that any more once somebody has waited for them.
        """

    def finish(self) -> None:
        """Take the result; call after :meth:`block` (completion also means failure).

        Raises:
            CollectiveFailed: the collective ended in an error.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            self._watch.give_up(error)
            cancellation.check_after_failure()
            raise CollectiveFailed(f"{self._collective} failed: {str(error).splitlines()[0]}") from error


class Transport:
    """How the collectives of a process group end: here the host waits for each of them.

    Attributes:
        host_waits: who waits for a collective looks at what other ranks do meanwhile; else nobody does by waiting.
    """

    host_waits = True

    def pending(self, work: AsyncWork | None, collective: object, watch: WaitObserver | None = None) -> PendingWork:
        """Return the way to wait for what an async collective returned; arguments as of :class:`PendingWork`."""
        return PendingWork(work, collective, watch)

    def abort(self, process_group: dist.ProcessGroup) -> None:
        """Leave a process group for good that has a collective unfinished; never blocks.

        It is kept alive: ending it joins gloo's threads, and one of them can wait for ever to send to a peer that has
        left.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
