"""What the Python threads of several ranks are doing, in few lines: the user's frames, equal ones once. Pure.

::

    ranks 0-1, MainThread:
        0  cell:21 in forward: x = block(x)
        1  cell:30 in train_step: loss = model(batch).mean()
        and 42 frames of libraries, now in workbench/engine/waits.py:196 in block
    ranks 0-3, Thread-2, Thread-3: 4 frames of libraries, now in ipykernel/iostream.py:478 in run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.replay.alike import label
from workbench.views.theme import plural


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One function that is under way.

    Attributes:
        text: such as ``model.py:12 in forward: x = f(x)``.
        number: its place among the user's frames of its thread, 0 the innermost; None: it is a library's.
        is_python: whether it is of Python's own library.
    """

    text: str
    number: int | None = None
    is_python: bool = False


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One Python thread of a rank.

    Attributes:
        name: as Python has it.
        is_main: whether it is the main thread.
        frames: innermost first.
    """

    name: str
    is_main: bool
    frames: tuple[Frame, ...]

    @property
    def users(self) -> tuple[Frame, ...]:
        """The user's frames."""
        return tuple(frame for frame in self.frames if frame.number is not None)

    @property
    def now(self) -> str:
        """Where in a library it is, Python's own left out if there is another; empty: in the user's code."""
        libraries = [frame for frame in self.frames if frame.number is None]
        if not libraries or self.frames[0].number is not None:
            return ""
        place = next((frame.text for frame in libraries if not frame.is_python), libraries[0].text)
        return place.partition(": ")[0]  # without the line's text

    @property
    def shown(self) -> tuple[Any, ...]:
        """What is shown of it, but its name."""
        return (not self.is_main, not self.users, self.users or self.now)


def threads_of(answer: Mapping[str, Any]) -> tuple[Thread, ...]:
    """Return the threads that a rank's answer to "stacks" names."""
    return tuple(
        Thread(
            name=str(thread["thread"]),
            is_main=bool(thread["is_main"]),
            frames=tuple(
                Frame(text=str(frame["text"]), number=frame["number"], is_python=bool(frame["is_python"]))
                for frame in thread["frames"]
            ),
        )
        for thread in answer.get("stacks", ())
    )


def lines_of(threads: Mapping[int, Sequence[Thread]]) -> list[str]:
    """Return the threads of all ranks as the module says: main ones first, then those that run the user's code."""
    alike: dict[tuple[Any, ...], list[tuple[int, Thread]]] = {}
    for rank, own in threads.items():
        for thread in own:
            alike.setdefault(thread.shown, []).append((rank, thread))
    return [line for shown in sorted(alike, key=lambda shown: shown[:2]) for line in _lines(alike[shown])]


def _lines(alike: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    """Yield the lines of threads of which the same is shown."""
    names = ", ".join(dict.fromkeys(thread.name for _, thread in alike))
    who = f"{label({rank for rank, _ in alike})}, {names}:"
    users = alike[0][1].users
    others = _libraries(alike)
    yield who if users else f"{who} {others}"
    for frame in users:
        yield f"  {frame.number:>3}  {frame.text}"
    if users and others:
        yield f"       and {others}"


def _libraries(alike: Sequence[tuple[int, Thread]]) -> str:
    """Say how many frames of libraries there are, and in which the threads are now; empty: none."""
    count = max(len(thread.frames) - len(thread.users) for _, thread in alike)
    if not count:
        return ""
    now: dict[str, set[int]] = {}
    for rank, thread in alike:
        now.setdefault(thread.now, set()).add(rank)
    said = plural(count, "frame") + " of libraries"
    places = [_place(text, ranks if len(now) > 1 else ()) for text, ranks in now.items() if text]
    return f"{said}, now in {'; '.join(places)}" if places else said


def _place(text: str, ranks: Iterable[int]) -> str:
    return f"{text} ({label(ranks)})" if ranks else text
