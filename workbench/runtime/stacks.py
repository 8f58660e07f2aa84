"""What every Python thread of this rank is doing."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Any


def stacks() -> list[dict[str, Any]]:
    """Return the stacks of all Python threads but the one that asks, the main thread's first.

    Returns:
        per thread its ``thread`` name and its ``frames``, outermost first, each such as
        ``model.py:12 in forward: x = f(x)``.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, asking = threading.main_thread().ident, threading.get_ident()
    current = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    return [
        {
            "thread": names.get(ident, f"thread {ident}"),
            "frames": [_line(frame) for frame in traceback.extract_stack(stack)],
        }
        for ident, stack in current
        if ident != asking or ident == main
    ]


def _line(frame: traceback.FrameSummary) -> str:
    path = frame.filename.rpartition("site-packages/")[2]
    return f"{path}:{frame.lineno} in {frame.name}" + (f": {frame.line}" if frame.line else "")
