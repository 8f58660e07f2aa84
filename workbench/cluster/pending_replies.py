"""The pending replies of a request to several ranks: one answer per rank, each with its own arrival time."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from workbench.cluster.step_marks import Steps
from workbench.errors import ClusterError, RankError, UsageError

OutputKind = Literal["stdout", "stderr", "display", "update", "result", "clear"]


@dataclass(frozen=True)
class Output:
    """Something a rank wrote or displayed.

    Attributes:
        kind: ``stdout`` and ``stderr`` carry text; ``display``, ``update`` (of an earlier display with the same
            ``display_id``) and ``result`` (value of a cell's last line) carry data; ``clear`` empties what was shown.
        text: text of a stream, unescaped.
        data: value per MIME type, as in the Jupyter protocol.
        metadata: metadata per MIME type.
        display_id: id of a display that can be updated; empty: it cannot.
        is_draft: an update follows soon; only for consumers that replace displays.
        ends_drafts: it is the update in the place of drafts; consumers that do not replace displays show it.
        steps: where in ``text`` the part of each training step begins; empty: no step has begun in it.
    """

    kind: OutputKind
    _: KW_ONLY
    text: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str = ""
    is_draft: bool = False
    ends_drafts: bool = False
    steps: Steps = field(default=(), compare=False)


@dataclass(frozen=True)
class Answer:
    """The answer of one rank so far.

    Attributes:
        future: completes with the value or the exception.
        outputs: outputs in order of arrival; append-only.
    """

    future: Future[Any] = field(default_factory=Future)
    _: KW_ONLY
    outputs: list[Output] = field(default_factory=list)


def settle(future: Future[Any], outcome: object) -> None:
    """Complete ``future`` with a value or an exception; the first outcome wins."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def select(ranks: Iterable[int] | None, num_ranks: int, *, may_be_none: bool = False) -> tuple[int, ...]:
    """Return the selected ranks, ascending and unique; None selects all.

    Raises:
        UsageError: a rank does not exist, or the selection is empty and must not be.
    """
    chosen = tuple(sorted(set(range(num_ranks) if ranks is None else ranks)))
    unknown = [rank for rank in chosen if rank not in range(num_ranks)]
    if unknown or not (chosen or may_be_none):
        what = f"there is no rank {', '.join(map(str, unknown))}" if unknown else "no rank was selected"
        raise UsageError(f"{what}: the ranks are 0 to {num_ranks - 1}")
    return chosen


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as text, runs as ranges: ``(3,)`` -> ``"rank 3"``; ``(5, 0, 1, 2)`` -> ``"ranks 0-2, 5"``."""
    numbers = sorted(set(ranks))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    joined = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'' if len(numbers) == 1 else 's'} {joined}"


class PendingReplies:
    """A request that was sent to some ranks.

    Every rank completes: with a value, with :class:`~workbench.errors.RankError` when its code raised, with
    :class:`~workbench.errors.RankDied` when its process is gone, with :class:`~workbench.errors.ClusterError` when the
    cluster was stopped.

    Args:
        answers: one per rank asked.

    Attributes:
        ranks: the ranks asked, ascending.
    """

    def __init__(self, answers: dict[int, Answer]) -> None:
        self._answers = answers
        self.ranks = tuple(sorted(answers))

    def __repr__(self) -> str:
        return f"<Pending: {sum(map(self.done, self.ranks))} of {len(self.ranks)} ranks done>"

    def outputs(self, rank: int, start: int = 0) -> tuple[Output, ...]:
        """Return the outputs of ``rank`` so far, from index ``start`` on."""
        return tuple(self._answer(rank).outputs[start:])

    def wait(self, timeout_s: float | None = None, *, or_error: bool = False) -> bool:
        """Wait until every rank is done, at most ``timeout_s`` seconds; return whether every rank is.

        With ``or_error`` the wait also ends as soon as one rank has failed (:meth:`raise_error` then raises).
        """
        futures = [answer.future for answer in self._answers.values()]
        until = concurrent.futures.FIRST_EXCEPTION if or_error else concurrent.futures.ALL_COMPLETED
        return not concurrent.futures.wait(futures, timeout_s, return_when=until).not_done

    def done(self, rank: int) -> bool:
        """Return whether ``rank`` has answered; its outputs are then complete."""
        return self._answer(rank).future.done()

    def result(self, rank: int, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - whatever the rank returned
        """Wait for the value ``rank`` returned (None for a cell).

        Raises:
            RankError: its code raised.
            RankDied: its process is gone.
            ClusterError: no answer within ``timeout_s`` seconds, or the cluster was stopped.
        """
        try:
            return self._answer(rank).future.result(timeout_s)
        except TimeoutError as error:  # never the rank's: code on the rank raises RankError
            raise ClusterError(f"rank {rank} has not answered within {timeout_s} s") from error

    def error(self, rank: int) -> BaseException | None:
        """Return the exception that ``rank`` ended with; None while it runs and if it returned."""
        future = self._answer(rank).future
        return future.exception() if future.done() else None

    def results(self, timeout_s: float | None = None) -> dict[int, Any]:
        """Wait for all ranks and return the value of each.

        Raises:
            RankError: of the lowest rank whose code raised; ``also`` lists the ranks with an equal exception.
            RankDied: a process is gone, and no rank's code raised.
            ClusterError: not all have answered within ``timeout_s`` seconds, or the cluster was stopped.
        """
        if not self.wait(timeout_s):
            waiting = ", ".join(str(rank) for rank in self.ranks if not self.done(rank))
            raise ClusterError(f"no answer within {timeout_s} s from rank {waiting}")
        self.raise_error()
        return {rank: self.result(rank) for rank in self.ranks}

    def raise_error(self) -> None:
        """Raise the exception that explains best why ranks failed; return if none has failed so far."""
        errors = {rank: error for rank in self.ranks if (error := self.error(rank)) is not None}
        raised = {rank: error for rank, error in errors.items() if isinstance(error, RankError)}
        for rank, error in raised.items():
            error.also = tuple(_equals(error, raised, rank))
            raise error
        for other in errors.values():
            raise other

    def _answer(self, rank: int) -> Answer:
        try:
            return self._answers[rank]
        except KeyError:
            raise UsageError(f"rank {rank} has no request; ranks with one: {', '.join(map(str, self.ranks))}") from None


def _equals(error: RankError, raised: dict[int, RankError], rank: int) -> Iterator[int]:
    for other_rank, other in raised.items():
        if other_rank != rank and (other.ename, other.evalue, other.line) == (error.ename, error.evalue, error.line):
            yield other_rank
