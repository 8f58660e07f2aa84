"""Who still works on a request of which nothing is heard, and where they stand: a line that is renewed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from workbench.protocol.rank_messages import CellLine
from workbench.replay.grouping import label

QUIET_S = 3.0
"""How long nothing must be heard of a request until it is said who works on it, in seconds."""

AGAIN_S = 1.0
"""How often that is said anew at most, in seconds."""

MAX_TEXT = 60
"""Letters shown of a line of code."""

OnStanding = Callable[[str], None]
"""Takes the sentence that replaces the last one; ``""``: something was heard, and there is nothing to say."""


def no_standing(sentence: str) -> None:
    """Take a sentence that nobody looks at."""


class StallNotice:
    """Tells from time to time who works on a request, as long as nothing else is heard of it.

    Args:
        clock: seconds, monotonic.

    Attributes:
        said: the newest sentence; ``""``: something was heard since.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._heard: object = None
        self._next = self._began + QUIET_S
        self._is_urgent = False
        self.said = ""

    def look(
        self, heard: object, sentence: Callable[[float], str], tell: OnStanding, *, is_urgent: bool = False
    ) -> None:
        """Tell if it is time.

        Args:
            heard: what was heard so far, in any form: if it is another than the last time, something was.
            sentence: says who works, given for how many seconds they have.
            tell: is told.
            is_urgent: a rank has died, or the user waits for a stop: that is said at once, and whatever else is heard.
        """
        now = self._clock()
        if is_urgent:
            self._next = self._next if self._is_urgent else now
        elif heard != self._heard:
            self._next = now + QUIET_S
            if self.said:
                self.said = ""
                tell("")
        self._heard, self._is_urgent = heard, is_urgent
        if now >= self._next:
            self.said = sentence(now - self._began)
            tell(self.said)
            self._next = now + max(AGAIN_S, (now - self._began) / 20)  # of what lasts long, less often


def who_works(
    seconds: float,
    working: Iterable[int],
    lines: Mapping[int, CellLine | None],
    ended: Iterable[int],
    deaths: Mapping[int, str] | None = None,
) -> str:
    """Return who works and where, alike ranks together; the dead come first.

    Example: ``rank 1 has run for 3 s, in dist.barrier() at line 2 of the cell; ranks 0, 2-3 have ended``.

    Args:
        seconds: since when.
        working: ranks.
        lines: where those that answered are in a cell; None: in no cell.
        ended: the other ranks that were asked.
        deaths: how those of them died that did: ``"died (SIGKILL)"``.
    """
    died: dict[str, list[int]] = {}
    for rank, how in sorted((deaths or {}).items()):
        died.setdefault(how, []).append(rank)
    groups: dict[str, list[int]] = {}
    for rank in sorted(working):
        groups.setdefault(_place(lines[rank]) if rank in lines else " without an answer", []).append(rank)
    words = [f"{label(ranks)} {how}" for how, ranks in died.items()]
    words += [f"{label(ranks)} {_have(ranks)} run for {seconds:.0f} s{place}" for place, ranks in groups.items()]
    over = tuple(rank for rank in ended if rank not in (deaths or {}))
    return "; ".join([*words, *([f"{label(over)} {_have(over)} ended"] if over else [])])


def _place(line: CellLine | None) -> str:
    if line is None:
        return ""
    text = line.text if len(line.text) <= MAX_TEXT else f"{line.text[: MAX_TEXT - 1]}…"
    where = "of the cell" if line.function == "<module>" else f"of {line.function}"
    return f", in {text} at line {line.line} {where}" if text else f", at line {line.line} {where}"


def _have(ranks: Iterable[int]) -> str:
    return "have" if len(tuple(ranks)) > 1 else "has"
