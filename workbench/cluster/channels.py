"""The shell and the control channel of every rank, with the table of their open requests."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from workbench.base.codec import decode, encode
from workbench.cluster._ipyparallel import HOLD, INTERRUPT, REQUEST, SILENT, Exchange, Wire
from workbench.cluster.pending_replies import Answer, PendingReplies, settle
from workbench.errors import ClusterError
from workbench.protocol.commands import RankRequest
from workbench.protocol.starting import World

R = TypeVar("R")


class Channels:
    """Sends requests to ranks and completes every one of them, including those of a lost rank.

    Args:
        wire: connection to the engines; closed by :meth:`close`.
        engines: session id of the engine of each rank.

    Attributes:
        wire: likewise.
        engines: likewise.
        losses: how each lost rank was lost, in words, by rank; filled by the cluster.
        has_loss: set once a rank is lost.
    """

    def __init__(self, wire: Wire, engines: Sequence[str]) -> None:
        self.wire = wire
        self.engines = tuple(engines)
        self.losses: dict[int, str] = {}
        self.has_loss = threading.Event()
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # a Jupyter session counts its messages without a lock
        self._lost: dict[int, ClusterError] = {}
        self._open: dict[int, set[Future[Any]]] = {rank: set() for rank in range(len(engines))}

    def registered(self) -> dict[str, int]:
        """Return the ipyparallel engine id of every engine that has registered, by session id."""
        return self.wire.engines()

    def call(self, name: str, args: Mapping[int, Sequence[Any]]) -> PendingReplies:
        """Call ``"module:function"`` in the main thread of each rank in ``args``, with that rank's arguments."""
        return self._send(args, lambda rank, exchange: self.wire.call(self.engines[rank], name, args[rank], exchange))

    def evaluate(self, program: str, expression: str) -> PendingReplies:
        """Run a program on each rank, even without the workbench; the reply is the value of ``expression``."""
        return self._send(
            range(len(self.engines)),
            lambda rank, exchange: self.wire.evaluate(self.engines[rank], program, expression, exchange),
        )

    def cell(self, code: str, ranks: Iterable[int]) -> PendingReplies:
        """Run ``code`` as a cell in the main thread of each of ``ranks``."""
        return self._send(ranks, lambda rank, exchange: self.wire.cell(self.engines[rank], code, exchange))

    def _send(self, ranks: Iterable[int], send: Callable[[int, Exchange], None]) -> PendingReplies:
        """Call ``send`` with each of ``ranks`` that is not lost, and with the receiver of its reply."""
        answers = {rank: Answer() for rank in ranks}
        for rank, answer in answers.items():
            if self._admit(rank, answer.future):
                with self._sending:
                    send(rank, self.wire.exchange(rank, answer))
        return PendingReplies(answers)

    def ask(self, request: RankRequest[R], ranks: Iterable[int], timeout_s: float) -> dict[int, R | Exception]:
        """Send ``request`` to the control thread of each of ``ranks`` and wait at most ``timeout_s`` s for replies."""
        futures = self._put(REQUEST, encode(request), ranks, timeout_s)
        return {rank: _outcome(request, rank, future) for rank, future in futures.items()}

    def interrupt(self, ranks: Iterable[int], timeout_s: float = 1.0) -> None:
        """Send SIGINT to the main thread of each of ``ranks`` and wait for delivery, ``timeout_s`` s at most.

        It does not interrupt later requests.
        """
        self._put(INTERRUPT, {}, ranks, timeout_s)

    def hold(
        self, request: dict[str, Any], ranks: Iterable[int], timeout_s: float
    ) -> dict[int, World | Exception | None]:
        """Query, set or release the holder of engines (:func:`workbench.cluster._ipyparallel._hold`).

        Returns:
            For each rank its world afterwards, None if it has none, or the exception if it did not answer.
        """
        return {rank: _world(rank, future) for rank, future in self._put(HOLD, request, ranks, timeout_s).items()}

    def ask_for_silent(self, rank: int, delay_s: float, report: Callable[[Sequence[str]], object]) -> None:
        """Ask ``rank``, ``delay_s`` seconds from now, which hosts are silent.

        ``report`` is called with their names in the client's IO thread. The request does not make ``rank`` busy.
        """
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: report(done.result()[0]))

        def ask() -> None:
            if not self.is_lost(rank):
                with self._sending:
                    self.wire.ask(self.engines[rank], rank, SILENT, {}, future)

        self.wire.later(delay_s, ask)

    def _put(self, kind: str, data: dict[str, Any], ranks: Iterable[int], timeout_s: float) -> dict[int, Future[Any]]:
        """Send a request to the control thread of each of ``ranks``; all returned futures are complete."""
        futures: dict[int, Future[Any]] = {rank: Future() for rank in ranks}
        admitted = {rank: future for rank, future in futures.items() if self._admit(rank, future)}
        with self._sending:
            sent = {r: self.wire.ask(self.engines[r], r, kind, data, future) for r, future in admitted.items()}
        concurrent.futures.wait(futures.values(), timeout_s)
        for rank, future in futures.items():
            settle(future, ClusterError(f"the control thread of rank {rank} has not answered within {timeout_s} s"))
        for message_id in sent.values():
            self.wire.forget(message_id)
        return futures

    def _admit(self, rank: int, future: Future[Any]) -> bool:
        """Register ``future`` as open; if its rank is lost, complete it and return False."""
        with self._lock:
            error = self._lost.get(rank)
            if error is None:
                self._open[rank].add(future)
        if error is not None:
            settle(future, error)
            return False
        future.add_done_callback(lambda done: self._dismiss(rank, done))
        return True

    def _dismiss(self, rank: int, future: Future[Any]) -> None:
        with self._lock:
            self._open[rank].discard(future)

    def is_busy(self, rank: int) -> bool:
        """Return whether ``rank`` has unanswered requests."""
        with self._lock:
            return not all(future.done() for future in self._open[rank])  # a completed one is removed a moment later

    def lose(self, rank: int, error: ClusterError) -> None:
        """Complete every open and every later request to ``rank`` with ``error``; the first error wins."""
        with self._lock:
            reason = self._lost.setdefault(rank, error)
            abandoned = tuple(self._open[rank])
        self.has_loss.set()
        for future in abandoned:
            settle(future, reason)

    def is_lost(self, rank: int) -> bool:
        """Return whether ``rank`` is lost."""
        with self._lock:
            return rank in self._lost

    def shut_down_engines(self) -> None:
        """Have every engine end its process, on any host, without waiting."""
        with self._sending:
            self.wire.shut_down_engines()

    def close(self) -> None:
        """Close the connection; every open request completes with an error."""
        for rank in range(len(self.engines)):
            self.lose(rank, ClusterError(f"rank {rank} was stopped"))
        self.wire.close()


def _world(rank: int, future: Future[Any]) -> World | Exception | None:
    error = future.exception()
    if isinstance(error, Exception):
        return error
    found: World | None = decode(World | None, future.result()[0], f"world of rank {rank}")
    return found


def _outcome(request: RankRequest[R], rank: int, future: Future[Any]) -> R | Exception:
    error = future.exception()
    if isinstance(error, Exception):
        return error
    data, buffers = future.result()
    try:
        reply: R = decode(request.reply, data, "reply", buffers)
    except ValueError as wrong:
        return ClusterError(f"rank {rank} sent an invalid reply to {request.word!r}: {wrong}")
    return reply
