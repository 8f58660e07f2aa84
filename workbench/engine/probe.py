"""The engine's one way to tell what it does, *before* it does it, in the words of :mod:`workbench.events`.

:data:`active` is ``None`` by default; then every announcement costs one comparison.
"""

from __future__ import annotations

from workbench.events import Category, Comm, Edge, Kind, Phase, Probe

active: Probe | None = None

NO_UNIT = -1
"""Stands for a unit where bytes are nobody's."""


def event(
    kind: Kind, edge: Edge, unit: int, num_bytes: int = 0, comm: Comm | None = None, t_ns: int | None = None
) -> None:
    """Announce an event to the probe, if there is one."""
    if active is not None:
        active.event(kind, edge, unit, num_bytes, comm, t_ns)


def memory(category: Category, unit: int, delta_bytes: int) -> None:
    """Announce bytes that came to life (positive) or died (negative)."""
    if active is not None and delta_bytes:
        active.memory(category, unit, delta_bytes)


def phase(new: Phase) -> None:
    """Announce a change of phase."""
    if active is not None:
        active.phase(new)


class BufferHandle:
    """Bytes that die with the last reference to this object.

    Attached to tensors whose life the engine does not end itself (gradients are dropped by the user). A probe that was
    not told of the birth is not told of the death.
    """

    __slots__ = ("_category", "_num_bytes", "_probe", "_unit")

    def __init__(self, category: Category, unit: int, num_bytes: int) -> None:
        self._category, self._unit, self._num_bytes = category, unit, num_bytes
        self._probe = active
        memory(category, unit, num_bytes)

    @property
    def is_told(self) -> bool:
        """True if the probe that was told of the birth still listens."""
        return self._probe is active

    def __del__(self) -> None:
        if self.is_told:
            memory(self._category, self._unit, -self._num_bytes)
