"""Waiting for a collective without losing the ability to stop.

A thread blocked inside a collective's own wait cannot be interrupted on gloo. So collectives are issued async, their
completion sets a :class:`threading.Event`, and the wait looks at the cancel flag every :data:`SLICE_S` seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.engine.errors import CollectiveFailed, StepAborted

SLICE_S = 0.2
GRACE_S = 0.3


def go_on() -> None:
    """Do not stop."""


stop_point: Callable[[], None] = go_on
"""Called in the waiting thread, again and again while it waits for other ranks; it may block there, and raise."""


class Work(Protocol):
    """What c10d's async collectives return, as far as it is used here."""

    def get_future(self) -> Any:  # noqa: ANN401 - torch.futures.Future is untyped in its value
        """Future completed when the collective is done."""

    def wait(self) -> Any:  # noqa: ANN401
        """Block until done; raise if it failed."""


class Cancellation:
    """A flag with a reason, set from another thread, that ends every wait of this process."""

    def __init__(self) -> None:
        self._reason = ""
        self._cancelled = threading.Event()

    def cancel(self, reason: str) -> None:
        """Make current and later waits raise :class:`StepAborted` until :meth:`reset`."""
        self._reason = reason
        self._cancelled.set()

    def reset(self) -> None:
        """Allow waits again."""
        self._cancelled.clear()

    def check(self) -> None:
        """Raise StepAborted if cancelled."""
        if self._cancelled.is_set():
            raise StepAborted(self._reason)

    def sleep(self, seconds: float) -> None:
        """Sleep before looking again whether other ranks have come, and raise StepAborted as soon as cancelled."""
        if self._cancelled.wait(seconds):
            self.check()
        stop_point()

    def check_after_failure(self) -> None:
        """Raise StepAborted if cancelled, now or within :data:`GRACE_S`.

        A collective most often fails because a peer was aborted and left; the word of it reaches this rank too.
        """
        if self._cancelled.wait(GRACE_S):
            self.check()


cancellation = Cancellation()


class Watch(Protocol):
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

    def __init__(self, work: Work) -> None:
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Work) -> None:
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


class PendingWork:
    """One collective in flight.

    Attributes:
        end_ns: monotonic time of its true completion, 0 while it runs and for work on a device.
    """

    def __init__(self, work: Work, call: object, watch: Watch | None = None) -> None:
        self._work = work
        self._call = call
        self._watch = watch or _Unwatched()
        self._done = threading.Event()
        self.end_ns = 0
        self._listen()

    @classmethod
    def of(cls, work: Work | None, call: object, watch: Watch | None = None, *, on_device: bool = False) -> PendingWork:
        """Return the way to wait for what an async collective returned.

        Args:
            work: None if the collective is over already. Work without a usable future is waited for in a thread.
            call: names the collective in errors.
            watch: asked in every wait slice, and told if the wait is given up.
            on_device: the collective runs in order on a device's stream; no host thread may wait for it.
        """
        made = _PendingOnDevice if on_device else cls
        return made(_Ended() if work is None else work, call, watch)

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
        return self._done.is_set()

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
        while not self._done.wait(SLICE_S):
            cancellation.check()
            stop_point()
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
            raise CollectiveFailed(f"{self._call} failed: {str(error).splitlines()[0]}") from error


def _host_waits() -> bool:
    """Whether the user has NCCL's ``wait()`` block the host."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"))


class _PendingOnDevice(PendingWork):
    """Work in order on a device's stream: only the stream waits for it."""

    def _listen(self) -> None:
        """Nothing on the host: c10d's future would complete when the work is enqueued."""

    def _wait_in_slices(self) -> None:
        """Let the current stream wait for it; the host goes on."""
        super().finish()

    def abandon(self) -> None:
        """Let the current stream wait, if the collective can still be waited for."""
        if not _host_waits():
            with suppress(RuntimeError):
                self._work.wait()

    def finish(self) -> None:
        """Nothing: the current stream waits since :meth:`block`."""

    @property
    def lets_stream_wait(self) -> Callable[[], object] | None:
        """What lets the current stream wait, for others to call; c10d's own may be called again and again."""
        return self._work.wait if isinstance(self._work, dist.Work) and not _host_waits() else None

    @property
    def has_ended(self) -> bool:
        """True once the device is done; work that cannot tell has ended when it was issued."""
        is_completed: Callable[[], bool] | None = getattr(self._work, "is_completed", None)
        return is_completed is None or is_completed()
