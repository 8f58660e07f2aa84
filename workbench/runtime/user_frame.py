"""Which line of a cell the main thread of this rank is at."""

from __future__ import annotations

import linecache
import sys
import threading

from workbench.protocol.rank_messages import CellLine
from workbench.runtime.namespace import user_namespace
from workbench.runtime.stacks import is_of_a_cell


def user_line() -> CellLine | None:
    """Return where the main thread is in the innermost function that a cell has defined, or in the cell itself.

    None: no code of a cell runs.

    Called in another thread, while the main one runs.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    cells = user_namespace()
    while frame is not None and not (frame.f_globals is cells and is_of_a_cell(frame)):
        frame = frame.f_back
    if frame is None:
        return None
    code, line = frame.f_code, frame.f_lineno
    return CellLine(line=line, function=code.co_name, text=linecache.getline(code.co_filename, line).strip())
