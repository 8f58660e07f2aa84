"""Stacks of a rank's Python threads: the user's frames, those of libraries around them, and the line of a cell."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType

from workbench.base.crash import is_file_of_a_cell
from workbench.protocol.rank_messages import CellLine, Frame, Thread
from workbench.runtime.enclosing_blocks import block_words
from workbench.runtime.handled_errors import handled_error
from workbench.runtime.namespace import user_namespace

_LIBRARIES = frozenset(
    {
        "torch",
        *("IPython", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "traitlets", "zmq"),
        *sys.stdlib_module_names,
    }
)
_OWN = ("workbench.engine", "workbench.models", "workbench.runtime", "workbench.cluster")
_ROOTS = [f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib", "stdlib")]
_ROOTS.append(f"{Path(__file__).parents[2]}/")
_ABOVE_THE_STEP = "workbench.runtime.rank"

HELD_CELL, HELD_EXPRESSION = "<cell while stopped>", "<expression>"
"""File names of code that runs inside a stopped step."""

_INSIDE = {HELD_CELL: "cell", HELD_EXPRESSION: "expression"}


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the user's frames from ``frame`` outwards, innermost first, up to the start of the step.

    A model's package, such as transformers, counts as the user's; torch, the workbench, Jupyter and Python's standard
    library do not.
    """
    found = []
    while frame is not None and _module_of(frame) != _ABOVE_THE_STEP:
        if not is_of_a_library(frame):
            found.append(frame)
        frame = frame.f_back
    return found


def frames_of_the_step() -> list[FrameType]:
    """Return the user's frames of the step that the calling thread runs, innermost first.

    A thread that autograd made for a device has none above its hooks, so those of the main thread, which waits for it,
    are appended. Frames that have returned, such as a module's forward during its backward, are gone.
    """
    found = users_frames(sys._getframe())
    if threading.current_thread() is not threading.main_thread():
        found += users_frames(sys._current_frames().get(threading.main_thread().ident or -1))
    return found


def place_of(frame: FrameType) -> str:
    """Return the place of a frame, such as ``forward at model.py:12``."""
    return f"{frame.f_code.co_name} at {_path_of(frame).rpartition('/')[2]}:{frame.f_lineno}"


def stacks() -> tuple[Thread, ...]:
    """Return the stacks of all Python threads except the calling one, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, asking = threading.main_thread().ident, threading.get_ident()
    current = sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0]))
    return tuple(
        Thread(name=names.get(ident, f"thread {ident}"), is_main=ident == main, frames=_described(frame))
        for ident, frame in current
        if ident != asking or ident == main
    )


def _described(frame: FrameType) -> tuple[Frame, ...]:
    numbers = {id(users): number for number, users in enumerate(users_frames(frame))}
    return tuple(
        Frame(
            text=_line(each),
            number=numbers.get(id(each)),
            is_python=_top_module_of(each) in sys.stdlib_module_names,
        )
        for each in _outwards(frame)
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _top_module_of(frame: FrameType) -> str:
    return _module_of(frame).partition(".")[0]


def is_of_a_library(frame: FrameType) -> bool:
    """Whether a frame's code is not the user's."""
    module = _module_of(frame)
    if module == "__main__":  # in a process that became a rank, the cells have another __main__
        return frame.f_globals is not user_namespace()
    return _top_module_of(frame) in _LIBRARIES or any(f"{module}.".startswith(f"{own}.") for own in _OWN)


def is_of_a_cell(frame: FrameType) -> bool:
    """Whether a frame's code comes from a cell; a command's frame has the cells' namespace but not their code."""
    path = frame.f_code.co_filename
    return path == HELD_CELL or is_file_of_a_cell(path)


def _is_of_the_script(frame: FrameType) -> bool:
    """Whether a frame's code is that of the script of ``%fsdp run``."""
    return frame.f_code.co_filename == user_namespace().get("__file__")


def _path_of(frame: FrameType) -> str:
    """Return the file of a frame, from its package on; ``cell`` for the code of a cell."""
    if is_of_a_cell(frame):
        return "cell"
    path = frame.f_code.co_filename
    above = next((each for each in _ROOTS if path.startswith(each)), "")
    return path.removeprefix(above)


def place_in_file(frame: FrameType, line: int) -> str:
    """Return the place of a line in a frame's code, such as ``torch/nn/modules/linear.py:134 in forward``."""
    return f"{_path_of(frame)}:{line} in {frame.f_code.co_name}"


def _line(frame: FrameType) -> str:
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return place_in_file(frame, frame.f_lineno) + (f": {source}" if source else "")


def _recorded(frame: FrameType, line: int, after: str) -> str:
    """Return a call as recordings have it: with its whole path, which tells libraries, and the blocks around it."""
    code = frame.f_code
    path = "cell" if is_of_a_cell(frame) else code.co_filename
    source = linecache.getline(code.co_filename, line, frame.f_globals).strip()
    return f"{path}:{line} in {code.co_name}{block_words(code.co_filename, line)}{after}: {source}".rstrip(": ")


def user_line() -> CellLine | None:
    """Return the current line of the innermost function from a cell or script, or of that itself, in the main thread.

    A stopped step may be held in another thread; while that runs a cell or an expression, it is the line there.
    None: no code of either runs. Called from another thread.
    """
    stacks_now, main = sys._current_frames(), threading.main_thread().ident or 0
    held = next((ident for ident, frame in stacks_now.items() if any(map(_inside, _outwards(frame)))), main)
    calls = [(frame, frame.f_lineno) for frame in _outwards(stacks_now.get(held))]
    return _line_in(calls[::-1], handled_error(held))


def _inside(frame: FrameType) -> str:
    """Return the kind of the code of a frame if it runs inside a stopped step, as :class:`CellLine` has it."""
    return _INSIDE.get(frame.f_code.co_filename, "")


def raised_line(error: BaseException) -> CellLine | None:
    """Return the line of a cell or script in which an error was raised, as :func:`user_line` does.

    An error that was raised elsewhere, such as that of an abort, has the line of its cause. None: no cause has one.
    """
    one: BaseException | None = error
    seen: set[int] = set()  # the chain may be cyclic
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        found = _line_in(list(walk_tb(one.__traceback__)))
        if found is not None:
            return found
        one = one.__cause__
    return None


def _line_in(calls: Sequence[tuple[FrameType, int]], handled: tuple[FrameType, str] | None = None) -> CellLine | None:
    """Return the innermost line of a cell or script among calls, each a frame and its line, the outermost first.

    ``handled`` is as :func:`handled_error` returns it.
    """
    cells = user_namespace()
    of_user = [
        bool(_inside(frame)) or (frame.f_globals is cells and (is_of_a_cell(frame) or _is_of_the_script(frame)))
        for frame, _ in calls
    ]
    if not any(of_user):
        return None
    frame, line = next(call for call, is_user in zip(reversed(calls), reversed(of_user), strict=True) if is_user)
    code = frame.f_code
    text = linecache.getline(code.co_filename, line).strip()
    script = Path(code.co_filename).name if _is_of_the_script(frame) else ""
    after = {handled[0]: handled[1]} if handled else {}
    own = (call for call in calls[of_user.index(True) :] if not is_of_a_library(call[0]))
    frames = tuple(_recorded(*call, after.get(call[0], "")) for call in own)
    inside = next(filter(None, (_inside(call) for call, _ in calls)), "")
    return CellLine(line=line, function=code.co_name, text=text, script=script, frames=frames, inside=inside)
