"""Units without a reduction in a step whose optimizer stepped while full gradients were left."""

from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.trace_strategies import Setup, simulate
from workbench.events import TORCH_DDP, Category, Edge, Kind, unit_words
from workbench.replay.unreduced import unreduced_units
from workbench.reports.explanations import explain
from workbench.trace.columns import RankTrace, Trace

SETUP = Setup(num_ranks=2, steps=3)
STEP = 2


def without(trace, unit, *, ranks=(0, 1), keeps_grads=True):
    """Return the trace without the reductions of a unit in the last step, and without the end of its gradients."""
    parts = []
    for part in trace.ranks:
        rows = part.rows
        own = (rows["unit"] == unit) & (rows["step"] == STEP)
        is_reduced = own & np.isin(rows["kind"], (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE))
        is_free = own & (rows["kind"] == Kind.FREE) & (rows["category"] == Category.UNSHARDED_GRADS)
        gone = is_reduced | (is_free if keeps_grads else False)
        rows = rows[~gone].copy() if part.rank in ranks else rows.copy()
        rows["seq"] = np.arange(len(rows))
        parts.append(RankTrace(part.rank, rows))
    return Trace(trace.header, tuple(parts))


@pytest.fixture(scope="module")
def trace():
    return simulate(SETUP)


def last_unit(trace):
    return max(unit.index for unit in trace.header.units)


def test_a_right_step_has_none(trace):
    assert [unreduced_units(trace, step) for step in (0, 1, 2, 7)] == [{}] * 4
    assert explain(trace).faults == ()


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_unit_is_named_with_its_ranks(trace, ranks):
    unit = last_unit(trace)
    assert unreduced_units(without(trace, unit, ranks=ranks), STEP) == {unit: ranks}


def test_without_gradients_that_are_left_nothing_is_wrong(trace):
    """As of a unit whose parameters are frozen."""
    assert unreduced_units(without(trace, last_unit(trace), keeps_grads=False), STEP) == {}


def test_a_model_of_data_parallel_and_gradients_of_other_units_are_not_judged(trace):
    """Of an earlier model gradients are left, and the reductions of the newest are invisible."""
    unit = last_unit(trace)
    earlier = without(without(trace, unit), unit - 1, keeps_grads=False)
    assert unreduced_units(earlier, STEP) == {unit: (0, 1)}
    units = tuple(replace(each, engine=TORCH_DDP if each.index == unit else "") for each in trace.header.units)
    assert unreduced_units(Trace(replace(trace.header, units=units), earlier.ranks), STEP) == {}


def test_without_a_step_of_an_optimizer_nothing_is_wrong(trace):
    found = without(trace, last_unit(trace))
    parts = []
    for part in found.ranks:
        rows = part.rows[~((part.rows["kind"] == Kind.OPTIMIZER) & (part.rows["edge"] == Edge.BEGIN))].copy()
        rows["seq"] = np.arange(len(rows))
        parts.append(RankTrace(part.rank, rows))
    assert unreduced_units(Trace(found.header, tuple(parts)), STEP) == {}


def test_explain_names_it_first(trace):
    unit = last_unit(trace)
    report = explain(without(trace, unit))
    name = unit_words(trace.header.units[unit].name)
    assert [fault.rule for fault in report.faults] == ["no-sync-left-on"]
    assert report.answer.verdict == f"gradients of unit {name} were not reduced before the optimizer stepped, in step 2"
