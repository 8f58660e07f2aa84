"""Pairing of BEGIN and END rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workbench.events import NUMBERED, Edge
from workbench.trace.schema import Rows

_IS_NUMBERED = np.isin(np.arange(256), NUMBERED)  # indexed by the column ``kind``


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
    comm_seq, whose = _keys(rows, ends)
    order = np.lexsort((comm_seq, whose))
    ends, comm_seq, whose = ends[order], comm_seq[order], whose[order]
    is_begin = rows["edge"][ends] == Edge.BEGIN
    is_same = (comm_seq[1:] == comm_seq[:-1]) & (whose[1:] == whose[:-1])
    first = _first_of_pairs(is_begin, is_same)
    partner[ends[first]], partner[ends[first + 1]] = ends[first + 1], ends[first]
    # few are left: outer spans, and ends without the other one
    left = partner[ends] < 0
    run = np.concatenate([np.zeros(min(1, len(ends)), np.int64), np.cumsum(~is_same)])[left]
    ends, is_begin = ends[left], is_begin[left]
    # depth within the run; both ends of a span have the same level
    depth = np.cumsum(np.where(is_begin, 1, -1))
    level = depth + ~is_begin
    order = np.lexsort((level, run))
    ends, is_begin, run, level = ends[order], is_begin[order], run[order], level[order]
    first = _first_of_pairs(is_begin, (run[1:] == run[:-1]) & (level[1:] == level[:-1]))
    partner[ends[first]], partner[ends[first + 1]] = ends[first + 1], ends[first]
    return partner


def _first_of_pairs(is_begin: NDArray[np.bool_], is_same: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions of BEGINs that an END of the same span follows; ``is_same`` compares neighbours."""
    return np.flatnonzero(is_same & is_begin[:-1] & ~is_begin[1:])


def _keys(rows: Rows, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what both ends of a span share, for each row of ``at``; only two numbers, because each costs a sort."""
    kind, unit, group, comm_seq = (
        rows[name][at].astype(np.int64) for name in ("kind", "unit", "comm_group", "comm_seq")
    )
    is_numbered = _IS_NUMBERED[kind]
    whose = (kind << 32) + (unit + 2**15 << 16) + np.where(is_numbered, group + 2**15, 0)
    return np.where(is_numbered, comm_seq, -1), whose
