"""A process that a signal has ended, as :mod:`faulthandler` describes it."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_PART = r"Current thread.*|Thread 0x.*|  .*|Python runtime state: .*|Extension modules: .*|<.*>|"
_CRASH = re.compile(rf"^Fatal Python error: (.+)\n(?:(?:{_PART})\n)*", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?: {2}[^\n]*\n?)*)", re.MULTILINE)
_CALL = re.compile(r'^ {2}File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$")
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_USERS = (*_LIBRARIES, f"{Path(__file__).parents[1]}/", "<")  # <: as of frozen modules


def is_file_of_a_cell(path: str) -> bool:
    """Return whether a file is the temporary one of a cell."""
    return _CELL.search(path) is not None


class StackCall(NamedTuple):
    """A call on a stack: its file, line and function."""

    file: str
    line: int
    function: str

    @property
    def is_of_a_cell(self) -> bool:
        """Whether the code is that of a cell."""
        return is_file_of_a_cell(self.file)

    def __str__(self) -> str:
        name = self.file.rpartition("/")[2]
        place = f"line {self.line}" if self.is_of_a_cell else f"line {self.line} of {name}"
        if self.function != "<module>":
            return f"{place}, in {self.function}"
        return f"{place} of the cell" if self.is_of_a_cell else place


@dataclass(frozen=True, kw_only=True)
class Crash:
    """How a signal has ended a process.

    Attributes:
        reason: faulthandler's words, such as ``Segmentation fault``; empty: the signal is no error.
        thread: identifier of the thread that received the signal; None: that thread runs no Python code.
        stacks: the calls of each thread, innermost first, by identifier; the main thread is the last one.
        rest: the text without crashes.
    """

    reason: str
    thread: int | None
    stacks: dict[int, tuple[StackCall, ...]]
    rest: str = ""

    @property
    def signal(self) -> str:
        """The name of the signal, such as ``SIGSEGV``; empty: Python itself has ended the process."""
        return _SIGNALS.get(self.reason, "")

    @property
    def place(self) -> str:
        """Where the user's code was, such as ``line 3, in train_step``; empty if unknown.

        These are the innermost call outside libraries and the innermost one in a cell. If the thread that got the
        signal has neither, like one of autograd, they are those of another thread, which the text says.
        """
        own = self.stacks.get(self.thread or 0, ())
        for calls in (own, *reversed(self.stacks.values())):
            users = [call for call in calls if not call.file.startswith(_NOT_USERS)]
            cells = [call for call in users if call.is_of_a_cell]
            if users:
                places = dict.fromkeys(map(str, [users[0], *cells[:1]]))
                return "; ".join(places) + ("" if calls is own else ", while another thread crashed")
        return str(own[0]) if own else ""

    def __str__(self) -> str:
        """The place, after the words of Python itself."""
        return "; ".join(word for word in ("" if self.signal else self.reason, self.place) if word)


def read_crash(text: str) -> Crash:
    """Return the last crash in what a process wrote; one without a reason if no crash is in it."""
    found = [*_CRASH.finditer(text)]
    threads = [*_THREAD.finditer(found[-1][0] if found else text)]
    current = [int(thread[2], 16) for thread in threads if thread[1] == "Current thread"]
    return Crash(
        reason=found[-1][1] if found else "",
        thread=current[0] if current else None,
        stacks={int(thread[2], 16): _calls(thread[3]) for thread in threads},
        rest=_CRASH.sub("", text),
    )


def _calls(stack: str) -> tuple[StackCall, ...]:
    return tuple(StackCall(file, int(line), function) for file, line, function in _CALL.findall(stack))
