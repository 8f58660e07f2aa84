"""Interruptible waits for collectives in flight.

On gloo, a thread blocked in a collective's own wait cannot be interrupted. So collectives are issued async, their
completion sets a :class:`threading.Event`, and the wait checks the cancel flag once per slice.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.engine import cancellable_waits, probe
from workbench.engine.cancellable_waits import AsyncWork, cancellation
from workbench.engine.errors import CollectiveFailed
from workbench.events import Comm, Edge, Kind


@dataclass(frozen=True)
class CollectiveSpan:
    """A collective that was announced to the probe; its wait and its end are announced too.

    Attributes:
        unit: index of its unit.
        kind: kind of the collective.
        num_bytes: its payload.
        comm: its number.
    """

    unit: int
    kind: Kind
    num_bytes: int
    comm: Comm


class WaitObserver(Protocol):
    """Callbacks during the wait for a collective."""

    def check_peers(self) -> None:
        """Raise if the collective will never end, because a rank does something else."""

    def give_up(self, error: BaseException) -> None:
        """Handle a wait that ended in ``error``."""

    def finished(self, pending: PendingWork) -> None:
        """Handle a wait that ended with the collective."""


class _Unwatched:
    """No-op observer."""

    def check_peers(self) -> None:
        """Do nothing."""

    def give_up(self, error: BaseException) -> None:
        """Do nothing."""

    def finished(self, pending: PendingWork) -> None:
        """Do nothing."""


class _Ended:
    """The work of a collective that had completed when its call returned."""

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self) -> None:
        """Do nothing."""


def has_failed(future: Any) -> bool:  # noqa: ANN401
    """Return whether a future that is done ended in an error."""
    try:
        future.value()
    except Exception:  # noqa: BLE001 - what an error of Python or C++ was raised as
        return True
    return False


class FutureWork:
    """Work that ends with a future."""

    _future: torch.futures.Future[Any]

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future that completes when the work is done."""
        return self._future

    def wait(self) -> None:
        """Block until the work is done; raise if it failed."""
        self._future.wait()


class _WaitedInAThread(FutureWork):
    """Work without a future, given one by a thread that waits for it."""

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


class CombinedWork(FutureWork):
    """Several collectives with one wait, which ends as soon as one fails: the others may then never end."""

    def __init__(self, works: Sequence[AsyncWork]) -> None:
        self._futures = [work.get_future() for work in works]
        self._future = torch.futures.collect_all(self._futures)

    @property
    def has_ended(self) -> bool:
        """True once every collective has completed or failed."""
        return all(future.done() for future in self._futures)


class PendingWork:
    """One collective in flight that the host waits for.

    Args:
        work: the result of the async collective; None if it has completed. A thread waits for work without a usable
            future.
        collective: description for errors.
        watch: checked in every wait slice, and notified when the wait ends.
        span: the collective that its events announce; None if it is not announced.

    Attributes:
        span: as given.
        end_ns: monotonic time of completion; 0 while the collective runs and for work on a device.
    """

    def __init__(
        self,
        work: AsyncWork | None,
        collective: object,
        watch: WaitObserver | None = None,
        span: CollectiveSpan | None = None,
    ) -> None:
        self._work = _Ended() if work is None else work
        self._collective = collective
        self._watch = watch or _Unwatched()
        self.span = span
        self._done = threading.Event()
        self._has_failed = False
        self.end_ns = 0
        self._listen()

    def _listen(self) -> None:
        try:
            future = self._work.get_future()
        except (AttributeError, RuntimeError):  # a custom collective; gloo's reduce-scatter: "not implemented"
            self._work = _WaitedInAThread(self._work)
            future = self._work.get_future()
        future.then(self._completed)

    def _completed(self, future: Any) -> None:  # noqa: ANN401
        self.end_ns = time.monotonic_ns()
        self._has_failed = has_failed(future)
        self._done.set()

    @property
    def lets_stream_wait(self) -> Callable[[], object] | None:
        """On a device, the function that makes the current stream wait, if code outside the engine may call it."""
        return None

    @property
    def has_ended(self) -> bool:
        """True once the collective has completed or failed."""
        return self._done.is_set() and not self.goes_on

    @property
    def goes_on(self) -> bool:
        """True if one part has failed while another still runs, maybe forever."""
        return self._done.is_set() and isinstance(self._work, CombinedWork) and not self._work.has_ended

    def wait(self) -> None:
        """Wait until the collective has completed or failed; on a device, make the current stream wait and return.

        Raises:
            CollectiveFailed: on a device, the collective is known to have failed.
            StepAborted: the wait was cancelled; the collective is still unfinished.
            RanksDisagreeError: another rank is about to do something else; the collective will never finish.
        """
        with self._waiting():
            while not self._done.wait(cancellable_waits.SLICE_S):
                cancellation.check()
                cancellable_waits.stop_point()
                self._watch.check_peers()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Announce the wait in the body and notify the observer of its outcome.

        A collective that failed, such as because a rank has left, has no end: this rank waited for it until then.
        """
        span = self.span
        if span is not None:
            probe.event(Kind.WAIT, Edge.BEGIN, span.unit, comm=span.comm)
        try:
            cancellation.check()
            yield
        except BaseException as error:  # also an interrupt, which leaves the collective unfinished
            self._watch.give_up(error)
            raise
        self._watch.finished(self)
        if span is not None and not self._has_failed:
            probe.event(Kind.WAIT, Edge.END, span.unit, comm=span.comm)
            probe.event(span.kind, Edge.END, span.unit, span.num_bytes, span.comm, self.end_ns or None)

    def abandon(self) -> None:
        """Abandon the collective; on a device the current stream waits, so that its memory is not reused too early.

        The streams of the collectives no longer protect the memory once the work has been waited for.
        """

    def finish(self) -> None:
        """Raise if the collective failed; call after :meth:`wait`, which returns on failure as well.

        Raises:
            CollectiveFailed: the collective ended in an error.
        """
        with self._naming_failures():
            self._work.wait()

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._watch.give_up(error)
            cancellation.check_after_failure()
            raise CollectiveFailed(f"{self._collective} failed: {str(error).splitlines()[0]}") from error


class Transport:
    """Waiting for and aborting the collectives of a process group; in this class the host waits for each of them.

    Attributes:
        host_waits: the host waits for collectives, and checks on the other ranks while it waits.
        pending_class: class of the pending work.
    """

    host_waits = True
    pending_class: type[PendingWork] = PendingWork

    def pending(
        self,
        work: AsyncWork | None,
        collective: object,
        watch: WaitObserver | None = None,
        span: CollectiveSpan | None = None,
    ) -> PendingWork:
        """Return the pending work of an async collective; arguments as in :class:`PendingWork`."""
        return self.pending_class(work, collective, watch, span)

    def abort(self, process_group: dist.ProcessGroup) -> None:
        """Abandon a process group that has an unfinished collective; never blocks.

        The group is kept alive: destroying it joins gloo's threads, and one of them can wait forever to send to a peer
        that has left.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(process_group))
