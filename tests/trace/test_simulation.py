"""The example traces that other tests use are correct themselves."""

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.simulated_job import full_bytes, padded_bytes
from tests.helpers.trace_strategies import example_trace, setups, simulate, traces
from workbench.events import Category, Edge, Kind
from workbench.trace import advance, check, steps


@given(traces())
def test_every_generated_trace_obeys_the_rules(trace):
    assert check(trace) == []


@given(setups())
def test_equal_setups_give_equal_traces(setup):
    assert simulate(setup) == simulate(setup)


@given(setups())
def test_after_the_job_only_shards_grads_and_optimizer_state_live(setup):
    trace = simulate(setup)
    lasting = {Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.OPTIMIZER_STATE}
    for rank in trace.ranks:
        end = advance(rank.start, rank.rows)
        assert {c for c in Category if end.bytes_by_category[c]} <= lasting
        assert (end.unit_states, end.reducing) == ({}, {})


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 2 * 4 - 1), (False, 4)])
def test_the_example_has_the_closed_forms_number_of_collectives(reshard, gathers):
    trace = example_trace(reshard_after_forward=reshard)
    for step in steps(trace):
        for rank in trace.slice(step=step).ranks:
            begun = rank.rows[rank.rows["edge"] == Edge.BEGIN]["kind"]
            assert np.count_nonzero(begun == Kind.ALL_GATHER) == gathers
            assert np.count_nonzero(begun == Kind.REDUCE_SCATTER) == 4


def test_the_example_has_padding_and_an_empty_shard():
    units = example_trace().header.units
    assert all(padded_bytes(u) > full_bytes(u) for u in units)
    assert any(0 in p.rows_per_rank for u in units for p in u.params)


def test_a_job_of_one_rank_has_no_collective_and_no_wait():
    (rank,) = example_trace(num_ranks=1).ranks
    assert not np.isin(rank.rows["kind"], (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.WAIT)).any()
