"""Every view and every export takes at most linear work: the work is counted, as no clock is steady enough.

Counted are the bytecodes that Python executes in our own files, every call of other functions, and the numbers that
numpy reads from arrays derived from a rank's rows. A job twice as large, in steps, ranks or units, must not take much
more than twice the work.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from tests.helpers.package_source import PACKAGE
from tests.helpers.pairwise import quick
from tests.helpers.simulated_job import Setup, simulate
from workbench.export import export
from workbench.trace.columns import RankTrace, Trace
from workbench.views import VIEWS, compare, draw

OWN = (str(PACKAGE), __file__)  # files whose bytecodes are counted
MOST = 2.3
"""Limit of the work for a job twice as large, relative to the smaller one."""

# the smaller jobs are so large that every view already omits or merges what it omits or merges for large ones
SIZES = {
    "steps": (Setup(num_ranks=2, num_units=3, steps=24), Setup(num_ranks=2, num_units=3, steps=48)),
    "ranks": (Setup(num_ranks=12, num_units=3, steps=2), Setup(num_ranks=24, num_units=3, steps=2)),
    "units": (Setup(num_ranks=2, num_units=40, steps=2), Setup(num_ranks=2, num_units=80, steps=2)),
}
# an export omits nothing
EXPORTED = {
    "steps": (Setup(num_ranks=2, num_units=3, steps=8), Setup(num_ranks=2, num_units=3, steps=16)),
    "ranks": (Setup(num_ranks=6, num_units=3, steps=2), Setup(num_ranks=12, num_units=3, steps=2)),
    "units": (Setup(num_ranks=2, num_units=12, steps=2), Setup(num_ranks=2, num_units=24, steps=2)),
}


class CountedArray(np.ndarray):
    """An array that adds the size of all reads, of itself and of derived arrays, to ``Work.numbers``."""

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(found, np.ndarray) and not isinstance(key, str | slice):
            Work.numbers += found.size
        return found

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **more):
        Work.numbers += sum(getattr(each, "size", 1) for each in inputs)
        if out:
            more["out"] = tuple(map(plain, out))
        return counted(getattr(ufunc, method)(*map(plain, inputs), **more))

    def __array_function__(self, function, types, given, named):
        Work.numbers += self.size
        return counted(function(*map(plain, given), **{name: plain(value) for name, value in named.items()}))

    def tolist(self):
        Work.numbers += self.size
        return super().tolist()

    def tobytes(self, *order):
        Work.numbers += self.size
        return super().tobytes(*order)


def plain(value):
    """Return the same value without counting, also within lists."""
    if isinstance(value, CountedArray):
        return value.view(np.ndarray)
    return type(value)(map(plain, value)) if type(value) in {list, tuple} else value


def counted(value):
    """Return the same value with counting, also within tuples and lists."""
    if isinstance(value, np.ndarray):
        return value.view(CountedArray)
    return type(value)(map(counted, value)) if type(value) in {list, tuple} else value


class Work:
    """The work since ``counting`` began: bytecodes and numbers."""

    codes = numbers = 0


@contextmanager
def counting():
    """Count the work of the body; a coverage measurement does not cover it."""
    Work.codes = Work.numbers = 0

    def step(frame, event, _):
        Work.codes += event in {"call", "opcode"}
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step if frame.f_code.co_filename.startswith(OWN) else None

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def recorded(setup):
    """Return the trace of a job."""
    return simulate(setup)


def work(do, setup):
    """Return the bytecodes and the numbers that ``do`` takes for the trace of a job."""
    whole = recorded(setup)
    trace = Trace(whole.header, tuple(RankTrace(r.rank, r.rows.view(CountedArray), r.start) for r in whole.ranks))
    with counting():
        do(trace)
    return Work.codes, Work.numbers


def growth(do, sizes):
    """Return the ratio of the larger job's work to the smaller one's, in bytecodes and in numbers."""
    small, large = sizes
    do(recorded(small))  # imports and caches of the first call do not count
    return [after / max(before, 1) for before, after in zip(work(do, small), work(do, large), strict=True)]


# runs usually grow in ranks; the other two ways seldom cause different work
in_each_way = pytest.mark.parametrize("more", quick(["ranks", "steps", "units"], ["ranks"]))


@in_each_way
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_no_more_than_linear(name, more):
    options = {"steps": 1000} if name in {"memory", "timeline", "states"} else {}
    assert max(growth(lambda trace: draw(name, trace, **options), SIZES[more])) < MOST


@in_each_way
def test_a_comparison_is_no_more_than_linear(more):
    assert max(growth(lambda trace: compare.draw(trace, trace), SIZES[more])) < MOST


@in_each_way
@pytest.mark.parametrize("suffix", quick(["trace", "json", "html"], ["trace", "json"]))
def test_an_export_is_no_more_than_linear(suffix, more, tmp_path):
    assert max(growth(lambda trace: export(trace, tmp_path / f"run.{suffix}"), EXPORTED[more])) < MOST


def test_more_than_linear_work_is_seen():
    """Of Python and of numpy, each separately."""

    def pairs(trace):
        return [a.rank < b.rank for a in trace.ranks for b in trace.ranks]

    def every_row_for_each_rank(trace):
        return [sum(int(r.rows["t_ns"].max()) for r in trace.ranks) for _ in trace.ranks]

    assert growth(pairs, SIZES["ranks"])[0] > MOST
    assert growth(every_row_for_each_rank, SIZES["ranks"])[1] > MOST
    assert max(growth(lambda trace: [int(r.rows["t_ns"].max()) for r in trace.ranks], SIZES["ranks"])) < MOST
