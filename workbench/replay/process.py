"""The memory of a rank's whole process, split into what the engine owns and the rest.

``resident = owned + not owned``: *owned* covers all memory classes, including what pools hold; *not owned* is the rest:
activations, Python and libraries. It includes the baseline, the memory of the process before anything was sharded.
Arrays: ``N`` samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.events import MOVES, Category, Kind
from workbench.replay.memory import envelope
from workbench.replay.spans import Ints, of_kind
from workbench.trace.columns import RankTrace
from workbench.trace.schema import Header


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessSeries:
    """A rank's process at the moments its memory was sampled; arrays are ``[N]``.

    Attributes:
        t_ns: time of each sample.
        seq: its row.
        resident: bytes of the process in memory.
        owned: bytes of all memory classes together, RESERVED included. May exceed ``resident``: memory that is
            allocated but never touched is not resident.
        baseline_bytes: memory of the process before anything was sharded; 0 if unknown.
    """

    t_ns: Ints
    seq: Ints
    resident: Ints
    owned: Ints
    baseline_bytes: int

    def __len__(self) -> int:
        return len(self.t_ns)

    @property
    def not_owned(self) -> Ints:
        """Resident bytes outside all memory classes; never below 0. ``[N]``."""
        rest: Ints = np.maximum(self.resident - self.owned, 0)
        return rest

    @property
    def baseline(self) -> Ints:
        """The part of ``not_owned`` that is the baseline. ``[N]``."""
        return np.minimum(self.not_owned, self.baseline_bytes)


def loading(header: Header, rank_trace: RankTrace) -> dict[str, int]:
    """Return the most resident bytes after each part of loading, such as ``"reading model.pt"``, in sequence."""
    rows = rank_trace.rows
    rows = rows[(rows["kind"] == Kind.RESIDENT) & (rows["module"] >= 0)]
    found: dict[str, int] = {}
    for place, num_bytes in zip(rows["module"], rows["num_bytes"], strict=True):
        name = header.strings[place]
        found[name] = max(found.get(name, 0), int(num_bytes))
    return found


@dataclass(frozen=True, kw_only=True)
class LoadingPeak:
    """A process that used most of its memory while it loaded.

    Attributes:
        rank: its rank.
        after: what it had just done, such as ``"reading model.pt"``.
        num_bytes: resident bytes then.
        other_bytes: the most at any other moment.
    """

    rank: int
    after: str
    num_bytes: int
    other_bytes: int


def loading_peak(header: Header, ranks: Sequence[RankTrace], margin: float) -> LoadingPeak | None:
    """Return the rank that used most memory while it loaded, if that is more than at any other moment of it.

    Args:
        header: of the trace.
        ranks: whole traces of ranks.
        margin: the fraction by which it has to be more.
    """
    found = []
    for each in ranks:
        used = loading(header, each)
        rows = each.rows[(each.rows["kind"] == Kind.RESIDENT) & (each.rows["module"] < 0)]
        if used and len(rows):
            after = max(used, key=lambda name: used[name])
            others = int(rows["num_bytes"].max())
            found.append(LoadingPeak(rank=each.rank, after=after, num_bytes=used[after], other_bytes=others))
    most = max(found, key=lambda each: each.num_bytes, default=None)
    return most if most is not None and most.num_bytes > (1 + margin) * most.other_bytes else None


def series(header: Header, rank_trace: RankTrace, max_moments: int | None = None) -> ProcessSeries:
    """Return the samples in a rank's trace; empty for a trace without samples.

    Args:
        header: of the trace.
        rank_trace: a rank's trace.
        max_moments: about how many samples to return, always with the highest; None: all.
    """
    rows = rank_trace.rows
    places = np.flatnonzero(rows["kind"] == Kind.RESIDENT)
    moves = of_kind(rows, MOVES) & (rows["category"] < len(Category))
    owned = sum(rank_trace.start.bytes_by_category) + np.cumsum(np.where(moves, rows["num_bytes"], 0))
    if max_moments is not None and len(places) > max_moments:
        bins = max(max_moments // 4, 1)
        places = places[envelope(rows["t_ns"][places], rows["num_bytes"][places], bins)]
    baselines = {info.rank: info.baseline_bytes for info in header.ranks}
    return ProcessSeries(
        t_ns=rows["t_ns"][places],
        seq=rows["seq"][places],
        resident=rows["num_bytes"][places],
        owned=owned[places],
        baseline_bytes=baselines.get(rank_trace.rank, 0),
    )
