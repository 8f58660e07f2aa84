"""A trace of any length, made of copies of a short one, each later than the one before."""

import numpy as np

from tests.helpers.simulated_job import Setup, simulate
from workbench.trace.columns import RankTrace, Trace


def long_trace(num_ranks=8, rows_per_rank=200_000, num_units=6):
    """Return a job of ``num_ranks``, each with about ``rows_per_rank`` rows: its second step, repeated."""
    short = simulate(Setup(num_ranks=num_ranks, num_units=num_units, steps=3))
    return Trace(short.header, tuple(_repeated(rank_trace, rows_per_rank) for rank_trace in short.ranks))


def _repeated(rank_trace, count):
    run = Repeated(rank_trace)
    copies = -(-(count - len(run.before)) // run.num_rows)
    return RankTrace(rank_trace.rank, np.concatenate([run.before, run.copies(0, copies)]), rank_trace.start)


class Repeated:
    """Copies of a rank's second step, each a step of its own and later than the one before.

    Attributes:
        before: the rank's rows before this step.
        num_rows: of one step.
        step_ns: duration of one step.
    """

    def __init__(self, rank_trace):
        rows = rank_trace.rows
        first, last = (np.flatnonzero(rows["step"] == step)[0] for step in (1, 2))
        self.before, self._once = rows[:first], rows[first:last]
        self.num_rows = len(self._once)
        self.step_ns = int(rows["t_ns"][last] - rows["t_ns"][first])
        seqs = self._once["comm_seq"][self._once["comm_seq"] >= 0]  # empty on one rank
        self._num_comms = len(np.unique(seqs))

    def copies(self, begin, end):
        """Return the rows of the copies ``begin`` to ``end - 1``, counted from 0."""
        many = np.tile(self._once, end - begin)
        copy = begin + np.arange(len(many)) // self.num_rows
        many["step"] += copy.astype(many["step"].dtype) * (many["step"] >= 0)
        many["t_ns"] += copy * self.step_ns
        is_comm = many["comm_seq"] >= 0
        many["comm_seq"][is_comm] += copy[is_comm] * self._num_comms
        many["seq"] = len(self.before) + begin * self.num_rows + np.arange(len(many))
        return many
