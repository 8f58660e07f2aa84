"""A probe that records everything, and helpers to write the expected events."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from workbench.engine import probe
from workbench.events import Category, Comm, Edge, Kind, Phase, Unit

ROOT = "root"


class Recording:
    """The events that a rank announced.

    Attributes:
        rows: (kind, edge, unit index, num_bytes, comm, t_ns) in order.
        deltas: (category, unit index, delta in bytes) in order.
        owners: (owner, delta in bytes) of activations, in order.
        live: bytes alive per category.
        peak: highest number of bytes alive at once per category.
        units: newest description per unit index.
        retired: indices of units announced as undone.
        groups: ranks per communication group.
        phases: every change of phase.
        reads: (edge, last rank) of every wait for readers.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.clear()
        self.units: dict[int, Unit] = {}
        self.retired: list[int] = []
        self.groups: dict[int, tuple[int, ...]] = {}
        self.live: Counter[Category] = Counter()

    def clear(self) -> None:
        """Discard the rows so far; live bytes are kept, and peaks start from them."""
        self.rows: list[tuple[Kind, Edge, int, int, Comm | None, int | None]] = []
        self.deltas: list[tuple[Category, int, int]] = []
        self.owners: list[tuple[str, int]] = []
        self.phases: list[Phase] = []
        self.reads: list[tuple[Edge, int]] = []
        self.peak: Counter[Category] = Counter(getattr(self, "live", {}))

    def event(self, kind, edge, unit, num_bytes, comm, t_ns) -> None:
        self.rows.append((kind, edge, unit, num_bytes, comm, t_ns))

    def readers(self, edge, rank=-1) -> None:
        self.reads.append((edge, rank))

    def memory(self, category, unit, delta_bytes, owner="") -> None:
        assert delta_bytes
        with self._lock:  # a lease may end in any thread that collects garbage, even within this block
            self.deltas.append((category, unit, delta_bytes))
            self.live[category] += delta_bytes
            if owner:
                self.owners.append((owner, delta_bytes))
            assert self.live[category] >= 0, f"{category.name} below zero"
            self.peak[category] = max(self.peak[category], self.live[category])

    def phase(self, phase) -> None:
        self.phases.append(phase)

    def unit(self, info) -> None:
        self.units[info.index] = info
        if info.retired:
            self.retired.append(info.index)

    def comm_group(self, index, ranks, name="") -> None:
        assert index not in self.groups
        self.groups[index] = ranks

    # ---- reading

    def name(self, unit: int) -> str:
        return self.units[unit].name or ROOT

    @property
    def events(self) -> list[str]:
        """Every event as ``KIND EDGE unit``."""
        return [f"{kind.name} {edge.name} {self.name(unit)}" for kind, edge, unit, *_ in self.rows]

    def count(self, kind: Kind, edge: Edge = Edge.BEGIN) -> Counter[str]:
        """Count how often each unit announced ``kind``."""
        return Counter(self.name(unit) for k, e, unit, *_ in self.rows if (k, e) == (kind, edge))

    def payload(self, kind: Kind, edge: Edge = Edge.BEGIN) -> int:
        """Return the sum of the bytes of every ``kind``."""
        return sum(num_bytes for k, e, _, num_bytes, *_ in self.rows if (k, e) == (kind, edge))

    @property
    def alive(self) -> dict[Category, int]:
        """Bytes alive per category, without empty ones and without those that pools keep: see :attr:`reserved`."""
        return {c: num_bytes for c, num_bytes in self.live.items() if num_bytes and c is not Category.RESERVED}

    @property
    def reserved(self) -> int:
        """Bytes that pools keep unused."""
        return self.live[Category.RESERVED]

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what the engine announces inside the block."""
    probe.active = Recording()
    try:
        yield probe.active
    finally:
        probe.active = None


def span(kind: str, unit: str) -> list[str]:
    return [f"{kind} BEGIN {unit}", f"{kind} END {unit}"]


def begin_unshard(unit: str, *, alone: bool = False) -> list[str]:
    """Return the events of the start of an unshard; ``alone``: on a single rank."""
    return [f"UNSHARD BEGIN {unit}"] if alone else [f"UNSHARD BEGIN {unit}", f"ALL_GATHER BEGIN {unit}"]


def end_unshard(unit: str, *, alone: bool = False) -> list[str]:
    """Return the events of the wait for an unshard."""
    waited = [] if alone else [*span("WAIT", unit), f"ALL_GATHER END {unit}"]
    return [*waited, *span("COPY_OUT", unit), f"UNSHARD END {unit}"]


def begin_reduce(unit: str) -> list[str]:
    return [*span("COPY_IN", unit), f"REDUCE_SCATTER BEGIN {unit}"]


def end_reduce(unit: str) -> list[str]:
    return [*span("WAIT", unit), f"REDUCE_SCATTER END {unit}", *span("COPY_OUT", unit)]
