"""Hypothesis strategies of traces and their parts, and :func:`example_trace`, one fixed trace."""

from __future__ import annotations

import functools

import numpy as np
from hypothesis import strategies as st

from tests.helpers.simulated_job import Setup, example_trace, simulate
from workbench.events import Category, Param, Unit, UnitState
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import ROW, ROW_DTYPE, ClockReading, GroupInfo, Header, HostClock, KeyFrame, RankInfo, Rows

__all__ = [
    "Setup",
    "any_headers",
    "any_key_frames",
    "any_packed_rows",
    "any_traces",
    "cuttings",
    "example_trace",
    "rows_from",
    "setups",
    "simulate",
    "traces",
]


@functools.cache  # Hypothesis validates every new strategy, which takes longer than drawing from it
def setups(*, max_ranks: int = 4, max_units: int = 4, max_steps: int = 2) -> st.SearchStrategy[Setup]:
    """Small training jobs of every policy, including world size 1 and no steps."""
    meshes = [(copies, size) for copies in (1, 2) for size in range(1, max_ranks + 1) if copies * size <= max_ranks]
    return st.sampled_from(meshes).flatmap(lambda mesh: _setups(*mesh, max_units, max_steps))


@functools.cache
def _setups(copies: int, shard_size: int, max_units: int, max_steps: int) -> st.SearchStrategy[Setup]:
    fewer = [n for n in range(2, shard_size) if shard_size % n == 0]
    return st.builds(
        Setup,
        num_ranks=st.just(copies * shard_size),
        copies=st.just(copies),
        num_units=st.integers(1, max_units),
        steps=st.integers(0, max_steps),
        reshard_after_forward=st.sampled_from([True, False, *fewer]),
        compute_itemsize=st.sampled_from([2, 4]),
        reduce_itemsize=st.sampled_from([2, 4]),
        reshard_root=st.booleans(),
        prefetch=st.booleans(),
        activations=st.booleans(),
        samples=st.booleans(),
        width=st.integers(1, 16),
        vocab=st.integers(1, 16),
        heads=st.integers(1, 8),
        seed=st.integers(0, 3),
    )


_is_cut = st.booleans()


@st.composite
def traces(draw: st.DrawFn, *, whole: bool = False, max_ranks: int = 4) -> Trace:
    """Valid traces of a training job.

    Unless ``whole``, each rank's trace may begin late (with the exact key frame) and end early, as after a hang.
    """
    trace = simulate(draw(setups(max_ranks=max_ranks)))
    if whole:
        return trace
    return Trace(trace.header, tuple(_cut(draw, r) for r in trace.ranks))


def _cut(draw: st.DrawFn, rank: RankTrace) -> RankTrace:
    begin = draw(st.integers(0, rank.end_seq)) if draw(_is_cut) else 0
    end = draw(st.integers(begin, rank.end_seq)) if draw(_is_cut) else rank.end_seq
    return rank.cut(begin, end)


@st.composite
def cuttings(draw: st.DrawFn, length: int, *, max_cuts: int = 6) -> list[slice]:
    """Consecutive slices that cover ``range(length)``; some may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=max_cuts)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


def _ints(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else st.integers(0, 2**bits - 1)


_fields = st.tuples(*[_ints(64)] * 3, st.floats(), *[_ints(32)] * 3, *[_ints(16)] * 2, *[_ints(8, signed=False)] * 4)


def any_packed_rows(max_size: int = 8) -> st.SearchStrategy[list[bytes]]:
    """Packed rows of any content, meaningful or not: the formats must preserve all."""
    return st.lists(_fields.map(lambda fields: ROW.pack(*fields)), max_size=max_size)


def rows_from(packed: list[bytes]) -> Rows:
    """Return the rows as an array."""
    return np.frombuffer(b"".join(packed), dtype=ROW_DTYPE)


_size = st.integers(0, 2**40)
_sizes = st.lists(_size, max_size=3).map(tuple)
_names = st.text(max_size=8)

_params = st.builds(
    Param,
    fqn=_names,
    shape=_sizes,
    global_shape=_sizes,
    dtype=_names,
    itemsize=_size,
    shard_dim=st.integers(-4, 4),
    rows_per_rank=_sizes,
    padded_rows=_size,
    trainable=st.booleans(),
)

_units = st.builds(
    Unit,
    index=_size,
    name=_names,
    root=st.integers(-1, 99),
    params=st.lists(_params, max_size=2).map(tuple),
    reshard_after_forward=st.booleans() | _size,
    shard_size=_size,
    replicate_size=_size,
    compute_dtype=_names,
    reduce_dtype=_names,
    compute_itemsize=_size,
    reduce_itemsize=_size,
    offload=st.booleans(),
    comm=_names,
    retired=st.booleans(),
    gone=st.booleans(),
)

_rank_infos = st.builds(
    RankInfo,
    rank=_size,
    host=_names,
    device=_names,
    pid=_size,
    baseline_bytes=_size,
)


_readings = st.builds(ClockReading, t_ns=_ints(64), offset_ns=_ints(64), error_ns=_size)
_clocks = st.builds(HostClock, ranks=_sizes, readings=st.lists(_readings, max_size=3).map(tuple))


def any_headers() -> st.SearchStrategy[Header]:
    """Headers of any content: any text and numbers, consistent or not."""
    return st.builds(
        Header,
        producer=_names,
        world_size=_size,
        mesh_shape=_sizes,
        mesh_axes=st.lists(_names, max_size=3).map(tuple),
        ranks=st.lists(_rank_infos, max_size=2).map(tuple),
        clocks=st.lists(_clocks, max_size=2).map(tuple),
        units=st.lists(_units, max_size=2).map(tuple),
        comm_groups=st.lists(st.builds(GroupInfo, name=_names, ranks=_sizes), max_size=3).map(tuple),
        strings=st.lists(_names, max_size=3).map(tuple),
    )


def any_key_frames() -> st.SearchStrategy[KeyFrame]:
    """Key frames of any content."""
    states = st.sampled_from([state for state in UnitState if state != UnitState.REDUCING])
    return st.builds(
        KeyFrame,
        seq=_size,
        bytes_by_category=st.tuples(*[_ints(64)] * len(Category)),
        unit_states=st.dictionaries(st.integers(0, 99), states, max_size=3),
        reducing=st.dictionaries(st.integers(0, 99), st.integers(0, 9), max_size=3),
    )


@st.composite
def any_traces(draw: st.DrawFn) -> Trace:
    """Traces of any content, valid or not: the file format must preserve all."""
    ranks = draw(st.lists(st.integers(0, 2000), unique=True, max_size=3))
    parts = [RankTrace(rank, rows_from(draw(any_packed_rows())), draw(any_key_frames()), draw(_size)) for rank in ranks]
    return Trace(draw(any_headers()), tuple(parts))
