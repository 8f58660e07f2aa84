"""A trace as long as wanted, made of copies of a short one, each later than the one before."""

import numpy as np

from tests.trace.simulation import Setup, simulate
from workbench.trace.columns import RankTrace, Trace


def long_trace(num_ranks=8, rows_per_rank=200_000, num_units=6):
    """A job of ``num_ranks``, each with about ``rows_per_rank`` rows: what its second and third step did, repeated."""
    short = simulate(Setup(num_ranks=num_ranks, num_units=num_units, steps=3))
    return Trace(short.header, tuple(_repeated(rank_trace, rows_per_rank) for rank_trace in short.ranks))


def _repeated(rank_trace, count):
    rows = rank_trace.rows
    first, last = (np.flatnonzero(rows["step"] == step)[0] for step in (1, 2))
    once = rows[first:last]
    copies = -(-(count - first) // len(once))
    many = np.tile(once, copies)
    copy = np.arange(len(many)) // len(once)
    many["step"] += copy.astype(many["step"].dtype) * (many["step"] >= 0)
    many["t_ns"] += copy * int(rows["t_ns"][last] - rows["t_ns"][first])
    seqs = once["comm_seq"][once["comm_seq"] >= 0]  # none on one rank
    is_comm = many["comm_seq"] >= 0
    many["comm_seq"][is_comm] += copy[is_comm] * len(np.unique(seqs))
    many = np.concatenate([rows[:first], many])
    many["seq"] = np.arange(len(many))
    return RankTrace(rank_trace.rank, many, rank_trace.start)
