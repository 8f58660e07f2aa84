"""When a view that has asked is answered: as soon as there is something new, not too often. Times in seconds."""

from __future__ import annotations

BYTES_PER_S = 48 * 1024
"""Binary data for one view of what happens while it is open; with the words beside it that stays below 64 KiB."""

EVERY_S = 0.1
"""Between two answers."""

LEISURE = 8
"""The kernel works for a view one part in this many of the time."""

LOOK_S = 0.05
"""Between two looks whether there is something new."""

IDLE_S = 1.0
"""How long something new is waited for: the view wants to know that somebody is there."""


class RateLimit:
    """The times of one view's answers."""

    def __init__(self) -> None:
        self._due_s = self._latest_s = float("-inf")
        self._told: object = None
        self._asked: object = None

    def rest_s(self, now_s: float, asked: object = None) -> float:
        """Return for how long no look is needed.

        Args:
            now_s: the time.
            asked: what ranks are asked; another thing than at the last answer is told at once.
        """
        return max(self._due_s - now_s, 0.0) if asked == self._asked else 0.0

    def is_due(self, now_s: float, newest: object) -> bool:
        """Return whether to answer now, after the rest.

        Args:
            now_s: the time.
            newest: what could be told; equal to what was told last if there is nothing new.
        """
        return newest != self._told or now_s >= self._latest_s

    def answered(self, now_s: float, told: object, spent_s: float, asked: object = None) -> None:
        """Note that ``told`` was told while ranks were ``asked`` something; the kernel worked ``spent_s`` for it."""
        self._told, self._asked = told, asked
        self._due_s = now_s + min(max(EVERY_S, LEISURE * spent_s), IDLE_S)
        self._latest_s = max(now_s + IDLE_S, self._due_s)
