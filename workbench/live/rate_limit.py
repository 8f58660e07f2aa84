"""When to answer a waiting view: as soon as there is something new, but not too often. Times in seconds."""

from __future__ import annotations

BYTES_PER_S = 48 * 1024
"""Limit on the binary data of one open view; with the text of its messages it stays below 64 KiB a second."""

EVERY_S = 0.1
"""Minimum time between two answers."""

LEISURE = 8
"""Rest after an answer, as a multiple of the kernel's work for it; at most IDLE_S."""

LOOK_S = 0.05
"""Time between two checks for something new."""

IDLE_S = 1.0
"""Maximum wait for something new: an answer without news shows the view that the kernel is alive."""


class RateLimit:
    """Schedules the answers to one view."""

    def __init__(self) -> None:
        self._due_s = self._latest_s = float("-inf")
        self._state: object = None
        self._activity: object = None

    def rest_s(self, now_s: float, activity: object = None) -> float:
        """Return how long to wait before the next check.

        Args:
            now_s: the current time.
            activity: state of the ranks' requests; if it differs from that of the last answer, the wait is 0.
        """
        return max(self._due_s - now_s, 0.0) if activity == self._activity else 0.0

    def is_due(self, now_s: float, newest: object) -> bool:
        """Return whether to answer now, after :meth:`rest_s`.

        Args:
            now_s: the current time.
            newest: a value that equals that of the last answer if there is nothing new.
        """
        return newest != self._state or now_s >= self._latest_s

    def answered(self, now_s: float, state: object, spent_s: float, activity: object = None) -> None:
        """Record an answer with state ``state`` and ``activity``, which cost the kernel ``spent_s``."""
        self._state, self._activity = state, activity
        self._due_s = now_s + min(max(EVERY_S, LEISURE * spent_s), IDLE_S)
        self._latest_s = max(now_s + IDLE_S, self._due_s)
