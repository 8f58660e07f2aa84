"""Deferred Ctrl-C: counted, instead of raised in the middle of code that must finish."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class CountInterrupts:
    """Context manager in which Ctrl-C is counted instead of raised.

    Outside the main thread, where signals never arrive, it does nothing. It may be entered again while active; the
    first exit ends it.
    """

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> CountInterrupts:
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._before is not None:
            before, self._before = self._before, None
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
