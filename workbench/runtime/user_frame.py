"""The line of a cell that the main thread of this rank runs."""

from __future__ import annotations

import linecache
import sys
import threading

from workbench.protocol.rank_messages import CellLine
from workbench.runtime.namespace import user_namespace
from workbench.runtime.stacks import is_of_a_cell


def user_line() -> CellLine | None:
    """Return the current line of the innermost function from a cell, or of the cell itself, in the main thread.

    None: no code of a cell runs. Called from another thread.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    cells = user_namespace()
    while frame is not None and not (frame.f_globals is cells and is_of_a_cell(frame)):
        frame = frame.f_back
    if frame is None:
        return None
    code, line = frame.f_code, frame.f_lineno
    return CellLine(line=line, function=code.co_name, text=linecache.getline(code.co_filename, line).strip())
