import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings

from tests.helpers import trace_strategies
from tests.helpers.figure_checks import num_marks, subtitle, title, words
from tests.helpers.trace_strategies import Setup, traces
from tests.replay.test_differences import holding_on, slower
from tests.replay.test_shards import make_flat
from tests.views.test_contract import EVIL, same_with_names
from workbench.errors import UsageError
from workbench.events import TORCH_FULLY_SHARD, Category, Kind
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views.compare import MAX_POINTS, draw

simulate = cache(trace_strategies.simulate)
example_trace = cache(trace_strategies.example_trace)


def test_equal_traces_are_reported_as_equal():
    fig = draw(example_trace(), example_trace())
    assert title(fig) == "the same, event for event"
    assert not fig.layout.shapes
    assert [trace.type for trace in fig.data] == ["scatter", "scatter"]


def test_additional_steps_on_one_side_are_ignored():
    """As with a file that was written in the middle of a recording."""
    before, after = example_trace(steps=2), example_trace(steps=5)
    for fig in (draw(before, after), draw(after, before)):
        assert title(fig) == "the same, event for event in the 2 steps that both have (of 5)"


def test_a_unit_that_stays_unsharded_is_named_with_its_price():
    a = example_trace()
    b = holding_on(a, 0, ranks=(2,))
    assert title(draw(a, b)) == "peak +193 KiB: blocks.0 unsharded through backward"
    assert title(draw(b, a)) == "peak -193 KiB: blocks.0 no longer unsharded through backward"
    assert "showing rank 2 of ranks 0-3" in subtitle(draw(a, b))
    assert "MiB, the higher in step 1" in subtitle(draw(a, b))
    assert "first difference: memory at the start of unshard of blocks.2, step 1" in subtitle(draw(a, b))


def test_leftovers_of_an_aborted_step_differ_from_kept_bytes():
    """Gradients that nothing freed before the first compared step do not depend on the policy."""
    trace = example_trace(steps=4)
    a, b = trace.slice(first=2, last=3), trace.slice(first=1, last=2)
    kept = zip(holding_on(b, 0, (0,)).ranks, b.ranks, strict=True)
    b = Trace(b.header, tuple(replace(r, start=with_grads(before.start, 200_000)) for r, before in kept))
    found = title(draw(a, b, rank=0))
    left_over = "sharded grads left over from an earlier step (+195 KiB)"
    assert found.endswith(f"{left_over}, units unsharded through forward (+193 KiB)")
    assert "first difference: memory at the start of step 2 (1)" in subtitle(draw(a, b, rank=0))
    assert "sharded grads no longer left over from an earlier step" in title(draw(b, a, rank=0))


def without(trace, kind):
    ranks = (RankTrace(rank.rank, rank.rows[rank.rows["kind"] != kind]) for rank in trace.ranks)
    return Trace(trace.header, tuple(ranks))


def run_by(trace, engine):
    units = tuple(replace(unit, engine=engine) for unit in trace.header.units)
    return Trace(replace(trace.header, units=units), trace.ranks)


def test_of_two_engines_the_costs_are_compared_and_not_each_event():
    ours = simulate(Setup())
    torchs = run_by(without(ours, Kind.COPY_IN), TORCH_FULLY_SHARD)
    fig = draw(torchs, slower(ours, Kind.BACKWARD, 1, 5_000_000))
    assert title(fig).startswith("the same collectives a step, and the same peak; step time +")
    told = subtitle(fig)
    assert "run by torch.fully_shard -&gt; by workbench.engine" in told
    assert "first difference" not in told
    assert not fig.layout.shapes
    assert "backward of blocks.1 +5.00 ms" in told
    assert "run by" not in subtitle(draw(torchs, torchs))


def with_grads(start, num_bytes):
    """Return the key frame with more bytes of gradients."""
    held = list(start.bytes_by_category)
    held[Category.SHARDED_GRADS] += num_bytes
    return replace(start, bytes_by_category=tuple(held))


def test_fewer_collectives_are_counted_and_tabled():
    fig = draw(simulate(Setup()), simulate(Setup(reshard_after_forward=False)))
    assert "3 fewer all-gathers a step (blocks.0-2)" in title(fig)
    columns = table(fig)
    assert columns["<b>unit</b>"][:3] == ["blocks.0", "blocks.1", "blocks.2"]
    assert columns["<b>calls<br>a step</b>"][:3] == ["2<br>-> 1"] * 3
    assert columns["<b>payload</b>"][:3] == ["385 KiB<br>-> 193 KiB"] * 3


def table(fig):
    """Return the cells below the plot, from the top, by column heading."""
    columns = {}
    for each in fig.layout.annotations:
        if each.yref == "paper":
            columns.setdefault(each.x, []).append(each.text)
    return {heading: cells for heading, *cells in columns.values()}


def test_the_root_is_named_without_a_second_pair_of_brackets():
    kept, again = simulate(Setup()), simulate(Setup(reshard_root=True))
    assert "1 more all-gather a step of (root)" in title(draw(kept, again))


def test_a_slower_step_is_explained_by_its_slower_parts():
    a = example_trace()
    fig = draw(a, slower(a, Kind.FORWARD, 1, 3_000_000))
    assert title(fig) == "the same, event for event; step time +44%: forward of blocks.1 +3.00 ms"
    fig = draw(a, slower(a, Kind.FORWARD, 1, 300_000_000))
    assert title(fig) == "the same, event for event; step time 6.85 ms -&gt; 307 ms: forward of blocks.1 +300 ms"
    fig = draw(a, slower(a, Kind.WAIT, 1, 3_000_000))
    assert "exposed all-gather of blocks.1" in title(fig)


def test_step_times_within_variation_are_not_a_change():
    a = example_trace(steps=4)
    steady, uneven = slower(a, Kind.FORWARD, 1, 3_000_000), slower(a, Kind.FORWARD, 1, 9_000_000, steps=(0, 3))
    assert "step time +" in title(draw(a, steady))
    assert "within step-to-step variation" not in subtitle(draw(a, steady))
    for before, after in ((steady, uneven), (uneven, steady)):
        assert title(draw(before, after)) == "the same, event for event"
        assert re.search(
            r"a step takes [\d.]+ ms -&gt; [\d.]+ ms \(within step-to-step variation\)",
            subtitle(draw(before, after)),
        )


def test_different_payloads_are_reported():
    assert "all-gather payload 1.18 MiB -&gt; 603 KiB a step" in title(
        draw(simulate(Setup()), simulate(Setup(compute_itemsize=2)))
    )


def test_different_events_are_reported_if_nothing_else_differs():
    trace = example_trace()
    rows = trace.rank(0).rows
    fewer = rows[rows["kind"] != Kind.COPY_OUT].copy()
    fewer["seq"] = range(len(fewer))
    fig = draw(trace, Trace(trace.header, (RankTrace(0, fewer),)))
    assert "events fewer, first at the start of copy-out of " in title(fig)


def test_both_curves_reach_their_peaks_and_share_the_axis():
    a, b = simulate(Setup()), simulate(Setup(activations=True))
    fig = draw(a, b, names=("before", "after"))
    assert [trace.name for trace in fig.data[:2]] == ["before", "after"]
    assert list(fig.data[0].x) == list(fig.data[1].x)
    assert "more activations" in title(fig)
    assert subtitle(fig).startswith("before -&gt; after · 3 steps of each compared")


def test_axis_texts_do_not_overlap():
    axis = draw(example_trace(steps=2), example_trace(steps=2)).layout.xaxis
    places = [place for place, text in zip(axis.tickvals, axis.ticktext, strict=True) if not text.startswith("<br>")]
    gaps = [after - before for before, after in pairwise(places)]
    assert min(gaps) >= 0.15 * axis.range[1]
    assert "forward" in axis.ticktext


def test_a_different_number_of_steps_is_reported():
    fig = draw(example_trace(steps=3), example_trace(steps=1))
    assert "only the first step of each compared (of 3 and 1)" in subtitle(fig)


@pytest.mark.parametrize("pair", [(Trace.empty(), Trace(Header(world_size=4))), (Trace.empty(), None)])
def test_nothing_to_compare_is_a_sentence(pair):
    fig = draw(pair[0], pair[1] or example_trace(), names=("x.trace", "last"))
    assert not fig.data
    assert "Nothing to compare: x.trace and last have no events of the same rank." in words(fig).replace("<br>", " ")


def test_a_rank_that_one_lacks_is_refused():
    with pytest.raises(UsageError, match="no rank 3; its ranks are: 0-1"):
        draw(example_trace(), example_trace(num_ranks=2), rank=3)


@settings(max_examples=25)
@given(traces(), traces())
def test_any_two_traces_can_be_compared(a, b):
    assert draw(a, b).to_json() == draw(a, b).to_json()


def test_long_traces_stay_bounded():
    a, b = (simulate(Setup(num_ranks=2, num_units=20, steps=20, prefetch=early)) for early in (True, False))
    fig = draw(a, b)
    assert num_marks(fig) <= 2 * MAX_POINTS + 100
    assert (fig.layout.height or 450) <= 1100


def test_a_long_title_takes_no_room_from_curves_and_table():
    a, b = simulate(Setup()), simulate(Setup(reshard_after_forward=False))
    drawn = [draw(a, b, names=names).layout for names in (("A", "B"), ("a long name " * 4, "another one " * 4))]
    assert drawn[1].margin.t > drawn[0].margin.t
    assert drawn[1].height - drawn[1].margin.t == drawn[0].height - drawn[0].margin.t


def test_names_are_escaped():
    found = words(draw(same_with_names(example_trace(), EVIL), example_trace(), names=(EVIL, EVIL)))
    assert "<script" not in found
    assert "$z$" not in found


def test_a_changed_layout_of_parameters_is_reported():
    a = example_trace()
    flat = [replace(unit, params=(make_flat((3, 6), unit.shard_size),)) for unit in a.header.units]
    b = Trace(replace(a.header, units=tuple(flat)), a.ranks)
    text = subtitle(draw(a, b)).replace("&gt;", ">")
    assert f"{2 * len(flat)} parameters stored separately -> in {len(flat)} flat parameters" in text
    assert "padding" in text
    assert "flat" not in subtitle(draw(a, a))
    assert "padding" not in subtitle(draw(a, a))
