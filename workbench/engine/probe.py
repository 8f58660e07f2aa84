"""Announcements of what the engine is about to do, as events of :mod:`workbench.events`.

:data:`active` is ``None`` by default; every announcement then costs one comparison.
"""

from __future__ import annotations

from workbench.events import Category, Comm, Edge, Kind, Phase, Probe

active: Probe | None = None

NO_UNIT = -1
"""Unit index for bytes and events that belong to no unit."""


def event(
    kind: Kind, edge: Edge, unit: int, num_bytes: int = 0, comm: Comm | None = None, t_ns: int | None = None
) -> None:
    """Announce an event to the probe, if there is one."""
    if active is not None:
        active.event(kind, edge, unit, num_bytes, comm, t_ns)


def memory(category: Category, unit: int, delta_bytes: int, owner: str = "") -> None:
    """Announce bytes allocated (positive) or freed (negative); ``owner`` says whose activations they are."""
    if active is not None and delta_bytes:
        active.memory(category, unit, delta_bytes, owner)


def readers(edge: Edge, rank: int = -1) -> None:
    """Announce a wait until other ranks have read shared memory, and the last of them at its end."""
    if active is not None:
        active.readers(edge, rank)


def phase(new: Phase) -> None:
    """Announce a change of phase."""
    if active is not None:
        active.phase(new)


class BufferHandle:
    """Bytes that count as freed when the last reference to this object is dropped.

    Attached to tensors that the engine does not free itself (the user drops gradients). A probe that did not see the
    allocation does not see the release.
    """

    __slots__ = ("_category", "_num_bytes", "_owner", "_probe", "_unit")

    def __init__(self, category: Category, unit: int, num_bytes: int, owner: str = "") -> None:
        self._category, self._unit, self._num_bytes, self._owner = category, unit, num_bytes, owner
        self._probe = active
        memory(category, unit, num_bytes, owner)

    @property
    def category(self) -> Category:
        """Class of the bytes."""
        return self._category

    @property
    def num_bytes(self) -> int:
        """The bytes that it counts."""
        return self._num_bytes

    @property
    def is_announced(self) -> bool:
        """True if the probe that saw the allocation is still active."""
        return self._probe is active

    def __del__(self) -> None:
        if self.is_announced:
            memory(self._category, self._unit, -self._num_bytes, self._owner)
