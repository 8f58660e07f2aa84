"""The numbered breakpoints of a started cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from workbench.errors import UsageError
from workbench.protocol.breakpoints import Breakpoint


class Breakpoints:
    """The breakpoints in the order they were added; that of ``step --until`` belongs to its request."""

    def __init__(self) -> None:
        self._all: dict[int, Breakpoint] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Breakpoint]:
        return iter(tuple(self._all.values()))

    def named(self, number: int) -> str:
        """Return breakpoint ``number`` in words."""
        found = self._all.get(number)
        return f"breakpoint {number}" + (f": {found}" if found is not None else "")

    def add(self, event: str, unit: str | None, *, rank: int | None, when: str | None) -> Breakpoint:
        """Add one and return it."""
        added = Breakpoint(id=self._next, event=event, unit=unit, rank=rank, when=when)
        self._next += 1
        self._all[added.id] = added
        return added

    def clear(self, number: int | None) -> int:
        """Remove a breakpoint (None: all); return how many.

        Raises:
            UsageError: there is no such breakpoint.
        """
        chosen = self._chosen(number)
        for found in chosen:
            del self._all[found]
        return len(chosen)

    def switch(self, number: int | None, *, is_on: bool) -> int:
        """Enable or disable a breakpoint (None: all); return how many.

        Raises:
            UsageError: there is no such breakpoint.
        """
        chosen = self._chosen(number)
        for found in chosen:
            self._all[found] = replace(self._all[found], is_on=is_on)
        return len(chosen)

    def _chosen(self, number: int | None) -> list[int]:
        if number is None:
            return list(self._all)
        if number not in self._all:
            known = f"breakpoints: {', '.join(map(str, self._all))}" if self._all else "none is set"
            raise UsageError(f"there is no breakpoint {number}; {known}")
        return [number]
