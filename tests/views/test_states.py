from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title, words
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from workbench.errors import UsageError
from workbench.events import Edge, Kind, UnitState
from workbench.replay.spans import extent_ns
from workbench.replay.states import spans
from workbench.trace.columns import RankTrace, Trace
from workbench.views import theme
from workbench.views.states import MAX_UNITS, states


def bar(fig, state):
    return next((t for t in fig.data if t.name == state.words), None)


def test_rows_are_the_units_with_the_root_on_top():
    assert states(example_trace()).layout.yaxis.ticktext == ("(root)", "blocks.0", "blocks.1", "blocks.2")


def test_units_are_in_forward_order():
    trace = example_trace()
    turned = [3, 2, 1, 0]
    units = tuple(replace(trace.header.units[i], index=n, root=0) for n, i in enumerate(turned))
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["unit"] = np.where(rows["unit"] >= 0, 3 - rows["unit"], -1)
        ranks.append(RankTrace(rank.rank, rows))
    fig = states(Trace(replace(trace.header, units=units), tuple(ranks)))
    assert fig.layout.yaxis.ticktext == ("(root)", "blocks.0", "blocks.1", "blocks.2")


@pytest.mark.parametrize("state", list(UnitState))
def test_every_bar_is_a_span_of_its_state(state):
    trace = example_trace()
    drawn, step = bar(states(trace), state), trace.slice(step=2)
    part, (begin_ns, _) = step.rank(0), extent_ns(step)
    found = spans(part)
    mine = (found.state == state) & (found.end_ns > found.begin_ns)
    assert drawn.marker.color == theme.UNIT_STATE_COLOURS[state]
    begin = (found.begin_ns - begin_ns)[mine] / 1e6
    lane = np.array([1, 2, 3, 0])[found.unit[mine]]
    wide = (found.end_ns - found.begin_ns)[mine] / 1e6 > 0.02  # narrower ones may be merged
    drawn_bars = {(round(float(b), 6), int(y)) for b, y in zip(drawn.base, drawn.y, strict=True)}
    assert {(round(float(b), 6), int(y)) for b, y in zip(begin[wide], lane[wide], strict=True)} <= drawn_bars


def test_a_sharded_unit_is_a_thin_line():
    fig = states(example_trace())
    assert set(bar(fig, UnitState.SHARDED).width) == {0.16}
    assert set(bar(fig, UnitState.UNSHARDED).width) == {0.74}


def test_the_title_counts_simultaneously_unsharded_units():
    assert title(states(example_trace())) == "Step 2: at most 2 of 4 units unsharded at once"
    kept = example_trace(reshard_after_forward=False)
    assert title(states(kept)) == "Step 2: all 4 units unsharded at once"
    assert title(states(example_trace(steps=0))) == "Before the first step: at most 0 of 4 units unsharded at once"


def test_an_unsharded_model_is_reported():
    trace = example_trace()
    whole = tuple(replace(unit, shard_size=1, replicate_size=4) for unit in trace.header.units)
    fig = states(Trace(replace(trace.header, units=whole), trace.ranks))
    assert title(fig) == "Step 2: nothing is sharded; at most 2 of 4 units in use at once"
    assert "each rank holds every unit in full; thin line: not in use" in subtitle(fig)
    assert "shard only" not in subtitle(fig)
    some = (replace(whole[0], shard_size=4), *whole[1:])
    assert "each rank holds only its shard" in subtitle(states(Trace(replace(trace.header, units=some), trace.ranks)))


def test_a_bar_shows_unit_state_and_duration():
    hover = bar(states(example_trace()), UnitState.UNSHARDED).hovertext[0]
    assert hover.startswith("<b>(root)</b> unsharded<br>")
    assert " ms, from " in hover


def test_ranks_that_did_the_same_are_named_and_one_that_differs_too():
    trace = example_trace()
    assert "Ranks 0-3 did the same; showing rank 0" in subtitle(states(trace))
    rows = trace.rank(1).rows.copy()
    last = np.flatnonzero((rows["kind"] == Kind.RESHARD) & (rows["edge"] == Edge.INSTANT))[-1]
    rows["kind"][last] = Kind.LOG
    other = Trace(trace.header, tuple(RankTrace(1, rows) if r.rank == 1 else r for r in trace.ranks))
    assert "Ranks 0, 2-3 did the same; showing rank 0 · different: rank 1" in subtitle(states(other))
    chosen = subtitle(states(other, rank=1))
    assert "Rank 1 · different: ranks 0, 2-3" in chosen
    with pytest.raises(UsageError, match="no rank 9; its ranks are: "):
        states(other, rank=9)
    with pytest.raises(UsageError, match="no step 9"):
        states(other, step=9)


def test_retired_units_are_drawn_only_where_they_did_something():
    trace = example_trace()
    units = tuple(replace(unit, retired=True) for unit in trace.header.units)
    retired = Trace(replace(trace.header, units=units), trace.ranks)
    assert len(states(retired).layout.yaxis.ticktext) == 4
    begun = Trace(retired.header, tuple(r.cut(0, 3) for r in retired.ranks))
    assert "No unit is recorded yet" in words(states(begun))


def test_a_rank_without_rows_gives_a_sentence():
    trace = example_trace()
    silent = Trace(trace.header, (trace.rank(0), RankTrace(1, trace.rank(1).rows[:0])))
    assert "No unit is recorded yet" in words(states(silent, rank=1))


def test_a_large_model_is_drawn_as_far_as_there_is_room():
    fig = states(simulate(Setup(num_ranks=1, num_units=MAX_UNITS + 20, steps=1, width=2, vocab=3)))
    assert "20 more units not drawn" in subtitle(fig)
    assert len(fig.layout.yaxis.ticktext) == MAX_UNITS / 2  # every other name
    assert sum(len(t.y) for t in fig.data) <= 2000
