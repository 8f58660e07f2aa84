"""Marks in the text that a rank writes, from which the notebook learns in which training step each part was written.

A rank's streams send their text several times a second, so one message may have the text of many steps. A mark costs a
few characters, and only steps that write something have one; the notebook removes it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_MARK = re.compile("\ue002([0-9]*)\ue003")

Steps = tuple[tuple[int, int | None], ...]
"""Where in a text the part of each step begins: index of its first character, and the step; None: outside any step."""


class StepMarks:
    """Writes a mark into a stream of ipykernel where the step changes; a request begins outside any step.

    Args:
        stream: the stream; its ``write`` is replaced.
        step: returns the current step; None: outside any.
    """

    def __init__(self, stream: Any, step: Callable[[], int | None]) -> None:  # noqa: ANN401 - ipykernel's OutStream
        self._stream, self._step = stream, step
        self._write: Callable[[str], int | None] = stream.write
        self._request: object = None
        self._marked: int | None = None
        stream.write = self.write

    def write(self, text: str) -> int | None:
        """Write ``text``, after a mark if it is the first of a step."""
        request, step = self._stream.parent_header.get("msg_id"), self._step()
        if request != self._request:
            self._request, self._marked = request, None
        if step == self._marked or not isinstance(text, str):
            return self._write(text)
        self._write(f"\ue002{'' if step is None else step}\ue003{text}")
        self._marked = step  # last: an interrupt before it repeats a mark instead of losing it
        return len(text)


def without_marks(text: str) -> tuple[str, Steps]:
    """Return a text without its marks, and where the steps begin in it."""
    if "\ue002" not in text:
        return text, ()
    first, *rest = _MARK.split(text)
    steps: list[tuple[int, int | None]] = []
    for step, part in zip(rest[::2], rest[1::2], strict=True):
        steps.append((len(first), int(step) if step else None))
        first += part
    return first, tuple(steps)
