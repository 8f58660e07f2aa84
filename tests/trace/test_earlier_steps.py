"""Earlier steps: bounded, the same however the rows were split, and with them a fold spans the whole run."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.trace_strategies import any_packed_rows, cuttings, example_trace, rows_from, traces
from workbench.events import Kind
from workbench.replay import training
from workbench.trace import check, load, merge, save
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.earlier_steps import EarlierSteps


@given(any_packed_rows(), st.integers(1, 12), st.data())
def test_any_split_gives_the_same_few_rows(packed, max_rows, data):
    rows = rows_from(packed)
    whole, split = EarlierSteps().then(rows, max_rows), EarlierSteps()
    for part in data.draw(cuttings(len(rows))):
        split = split.then(rows[part], max_rows)
    assert split == whole
    assert len(whole.rows) <= max_rows


@given(traces(whole=True, max_ranks=2), st.data())
def test_a_fold_with_them_is_that_of_all_rows(trace, data):
    for part in trace.ranks:
        at = data.draw(st.integers(0, len(part.rows)))
        newest = replace(part.cut(at, part.end_seq), earlier=EarlierSteps().then(part.rows[:at]))
        assert training.fold(newest, with_earlier=True) == training.fold(part)
        assert check(Trace(trace.header, (newest,))) == []


def thinned(max_rows=20):
    """Return a rank of 32 steps with the newest 100 rows, and the steps before that fit into ``max_rows``."""
    trace = example_trace(num_ranks=1, num_units=2, steps=32)
    part = trace.rank(0)
    at = len(part.rows) - 100
    return trace.header, replace(part.cut(at, part.end_seq), earlier=EarlierSteps().then(part.rows[:at], max_rows))


def test_with_too_many_every_second_step_is_dropped_until_they_fit():
    _, part = thinned()
    numbers = part.earlier.rows["step"][part.earlier.rows["kind"] == Kind.STEP]
    assert part.earlier.every == 8
    assert np.unique(numbers).tolist() == [0, 8, 16, 24]


def test_a_cut_on_the_left_has_none_and_one_on_the_right_has_all():
    header, part = thinned()
    trace = Trace(header, (part,))
    first, last = int(part.steps[0]), int(part.steps[-1])
    assert trace.slice(first=first).rank(0).earlier == EarlierSteps()
    assert trace.slice(last=last - 1).rank(0).earlier == part.earlier
    assert part.cut(part.start.seq + 1, part.end_seq).earlier == EarlierSteps()
    assert merge(Trace(replace(header, strings=("x",))), trace).rank(0).earlier.rows["module"].max() == 1


def test_a_file_has_them(tmp_path):
    header, part = thinned()
    trace = Trace(header, (part,))
    save(trace, tmp_path / "a.trace")
    assert load(tmp_path / "a.trace") == trace


def test_rows_that_are_not_earlier_or_of_no_kind_break_a_rule():
    header, part = thinned()
    for name, value in (("seq", part.start.seq), ("kind", 200), ("module", 99)):
        rows = part.earlier.rows.copy()
        rows[name][-1] = value
        broken = RankTrace(0, part.rows, part.start, 0, replace(part.earlier, rows=rows))
        assert "earlier steps" in check(Trace(header, (broken,)))[0]
