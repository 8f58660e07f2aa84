"""Notice of a stalled request: which ranks still run, and where; a line that is updated in place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping

from workbench.errors import UsageError
from workbench.protocol.rank_messages import CellLine
from workbench.replay.grouping import by_value, label

QUIET_S = 3.0
"""Time in seconds without news of a request before the first notice, unless :data:`VARIABLE` says otherwise."""

VARIABLE = "WORKBENCH_STALL_S"

AGAIN_S = 1.0
"""Minimum time between two notices, in seconds."""

MAX_TEXT = 60
"""Limit of the characters shown of a line of code."""

OnStanding = Callable[[str], None]
"""Receives the sentence that replaces the last one; ``""`` removes it, as there is news."""


def chosen_quiet_s() -> float:
    """Return the time in seconds without news before the first notice.

    Raises:
        UsageError: the environment variable is no such time.
    """
    text = os.environ.get(VARIABLE) or str(QUIET_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise UsageError(f"{VARIABLE}={text!r} is no time in seconds; for example {VARIABLE}=5, or unset it")
    return seconds


def no_standing(sentence: str) -> None:
    """Ignore the sentence."""


class StallNotice:
    """Times the notices of a request: which ranks run, from time to time while there is no other news.

    Args:
        clock: monotonic clock, in seconds.
        quiet_s: time in seconds without news before the first notice.

    Attributes:
        text: the current sentence; ``""``: none, as there is news since.
    """

    def __init__(self, clock: Callable[[], float], quiet_s: float = QUIET_S) -> None:
        self._clock, self._quiet_s = clock, quiet_s
        self._began = clock()
        self._activity: object = None
        self._next = self._began + quiet_s
        self._is_urgent = False
        self.text = ""

    def look(
        self, activity: object, sentence: Callable[[float], str], on_standing: OnStanding, *, is_urgent: bool = False
    ) -> None:
        """Call ``on_standing`` with a notice if it is time.

        Args:
            activity: state of the news, in any form; a changed value means news.
            sentence: returns the notice for a duration in seconds.
            on_standing: receives the notice.
            is_urgent: a rank has died, or the user waits for a stop: notify at once, regardless of news.
        """
        now = self._clock()
        if is_urgent:
            self._next = self._next if self._is_urgent else now
        elif activity != self._activity:
            self._next = now + self._quiet_s
            if self.text:
                self.text = ""
                on_standing("")
        self._activity, self._is_urgent = activity, is_urgent
        if now >= self._next:
            self.text = sentence(now - self._began)
            on_standing(self.text)
            self._next = now + max(AGAIN_S, (now - self._began) / 20)  # less often for a long request


def who_works(
    seconds: float,
    working: Iterable[int],
    lines: Mapping[int, CellLine | None],
    ended: Iterable[int],
    deaths: Mapping[int, str] | None = None,
) -> str:
    """Return which ranks run and where, grouped by position; dead ranks come first.

    Example: ``rank 1 has run for 3 s, in dist.barrier() at line 2 of the cell; ranks 0, 2-3 have ended``.

    Args:
        seconds: time since the start, in seconds.
        working: ranks that still run.
        lines: line of a cell or script of each rank that answered; None: in neither.
        ended: the other ranks of the request.
        deaths: how the dead ones among ``ended`` died, such as ``"died (SIGKILL)"``.
    """
    died = by_value(sorted((deaths or {}).items()))
    groups = by_value((r, place_words(lines[r]) if r in lines else " without an answer") for r in sorted(working))
    words = [f"{label(ranks)} {how}" for how, ranks in died.items()]
    words += [f"{label(ranks)} {_have(ranks)} run for {seconds:.0f} s{place}" for place, ranks in groups.items()]
    over = tuple(rank for rank in ended if rank not in (deaths or {}))
    return "; ".join([*words, *([f"{label(over)} {_have(over)} ended"] if over else [])])


def place_words(line: CellLine | None) -> str:
    """Return a position as the end of a sentence: ``", in dist.barrier() at line 2 of the cell"``; empty: unknown."""
    if line is None:
        return ""
    text = line.text if len(line.text) <= MAX_TEXT else f"{line.text[: MAX_TEXT - 1]}…"
    whole = line.script or f"the {line.inside or 'cell'}"
    where = f"of {whole}" if line.function == "<module>" else f"of {line.function}"
    if line.script and line.function != "<module>":
        where = f"{where} in {line.script}"
    return f", in {text} at line {line.line} {where}" if text else f", at line {line.line} {where}"


def _have(ranks: Iterable[int]) -> str:
    return "have" if len(tuple(ranks)) > 1 else "has"
