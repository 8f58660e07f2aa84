"""Stacks of the Python threads of several ranks in few lines: the user's frames, equal stacks once. Pure.

::

    ranks 0-1, MainThread:
        0  cell:21 in forward: x = block(x)
        1  cell:30 in train_step: loss = model(batch).mean()
        and 42 library frames, now in workbench/engine/cancellable_waits.py:196 in block
    ranks 0-3, in library code alone: Thread-2, Thread-3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from workbench.base.text_formats import plural
from workbench.protocol.rank_messages import Frame, Thread
from workbench.replay.grouping import by_value, label


def users_frames(thread: Thread) -> tuple[Frame, ...]:
    """Return the user's frames."""
    return tuple(frame for frame in thread.frames if frame.number is not None)


def library_place(thread: Thread) -> str:
    """Return the library position of a thread, preferring ones outside Python's own; empty in the user's code."""
    libraries = [frame for frame in thread.frames if frame.number is None]
    if not libraries or thread.frames[0].number is not None:
        return ""
    place = next((frame.text for frame in libraries if not frame.is_python), libraries[0].text)
    return place.partition(": ")[0]  # without the line's text


def _shown(thread: Thread) -> tuple[object, ...]:
    """Return what is shown of a thread, except its name; of the threads of libraries nothing else is shown."""
    users = users_frames(thread)
    return not thread.is_main, not users, users or (thread.is_main and library_place(thread))


def lines_of(threads: Mapping[int, Sequence[Thread]]) -> list[str]:
    """Return the lines for the threads of all ranks: main threads first, then others that run the user's code."""
    alike = by_value(((rank, thread), _shown(thread)) for rank, own in threads.items() for thread in own)
    return [line for shown in sorted(alike, key=lambda shown: shown[:2]) for line in _lines(alike[shown])]


def _lines(alike: Sequence[tuple[int, Thread]]) -> Iterator[str]:
    """Yield the lines of threads with equal stacks."""
    names = ", ".join(dict.fromkeys(thread.name for _, thread in alike))
    ranks = label({rank for rank, _ in alike})
    users = users_frames(alike[0][1])
    if not users and not alike[0][1].is_main:
        yield f"{ranks}, in library code alone: {names}"
        return
    others = _libraries(alike)
    yield f"{ranks}, {names}:" if users else f"{ranks}, {names}: {others}"
    for frame in users:
        yield f"  {frame.number:>3}  {frame.text}"
    if users and others:
        yield f"       and {others}"


def _libraries(alike: Sequence[tuple[int, Thread]]) -> str:
    """Return the number of library frames, and the current one of the threads, as text; empty if none."""
    count = max(len(thread.frames) - len(users_frames(thread)) for _, thread in alike)
    if not count:
        return ""
    now = by_value((rank, library_place(thread)) for rank, thread in alike)
    total = plural(count, "library frame")
    places = [_place(text, ranks if len(now) > 1 else ()) for text, ranks in now.items() if text]
    return f"{total}, now in {'; '.join(places)}" if places else total


def _place(text: str, ranks: Iterable[int]) -> str:
    return f"{text} ({label(ranks)})" if ranks else text
