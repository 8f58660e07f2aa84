"""Pairing of BEGIN and END rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.events import NUMBERED, Edge
from workbench.trace.schema import Rows


def partners(rows: Rows) -> NDArray[np.int64]:
    """Return, per row, the position of the other end of its span; -1 where there is none.

    The two ends of what is numbered in a group share kind, unit, ``comm_group`` and ``comm_seq``. The ends of other
    spans share kind and unit; the innermost span closes first. An INSTANT has no partner, nor has a span that is not
    ended or began before ``rows``.

    Example: ``FORWARD BEGIN 0, FORWARD BEGIN 1, FORWARD END 1, FREE, FORWARD END 0`` -> ``[4, 2, 1, -1, 0]``.

    Args:
        rows: consecutive rows of one rank.
    """
    partner = np.full(len(rows), -1, np.int64)
    ends = np.flatnonzero(rows["edge"] != Edge.INSTANT)
    key = _keys(rows, ends)
    order = np.lexsort(key)
    ends = ends[order]
    is_begin = rows["edge"][ends] == Edge.BEGIN
    run = _runs(key[:, order])
    # depth within the run; both ends of a span have the same level
    depth = np.cumsum(np.where(is_begin, 1, -1))
    level = depth + ~is_begin
    order = np.lexsort((level, run))
    ends, is_begin, run, level = ends[order], is_begin[order], run[order], level[order]
    neighbours = (run[1:] == run[:-1]) & (level[1:] == level[:-1])
    first = np.flatnonzero(neighbours & is_begin[:-1] & ~is_begin[1:])
    partner[ends[first]], partner[ends[first + 1]] = ends[first + 1], ends[first]
    return partner


def _keys(rows: Rows, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """What both ends of a span share, one column per row of ``at``; only two numbers, because each costs a sort."""
    kind, unit, group, comm_seq = (
        rows[name][at].astype(np.int64) for name in ("kind", "unit", "comm_group", "comm_seq")
    )
    is_numbered = np.isin(kind, NUMBERED)
    whose = (kind << 32) + (unit + 2**15 << 16) + np.where(is_numbered, group + 2**15, 0)
    return np.array([np.where(is_numbered, comm_seq, -1), whose])


def _runs(sorted_keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the runs of equal columns."""
    changes = np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)
    return np.concatenate([np.zeros(min(1, sorted_keys.shape[1]), np.int64), np.cumsum(changes)])
