from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.figure_checks import subtitle, title, words
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from tests.replay.test_memory import with_pool
from workbench.base.text_formats import format_bytes
from workbench.errors import UsageError
from workbench.events import NOT_SPLIT, Category, Kind, UnitState
from workbench.replay import memory as live
from workbench.replay.shards import shards, totals
from workbench.replay.spans import extent_ns
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.keyframe import advance
from workbench.views import draw, theme
from workbench.views.memory import MAX_PANELS, MAX_POINTS, memory

MIB = 2**20


def areas(fig, legend=True):
    return [t for t in fig.data if t.stackgroup and (t.showlegend or not legend)]


def named(fig, name):
    return next(t for t in fig.data if t.name == name)


def with_moves(trace, factor_of_rank):
    """Return the trace with every rank's allocated bytes multiplied by a factor per rank."""
    ranks = []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        rows["num_bytes"] = (rows["num_bytes"] * factor_of_rank(rank.rank)).astype(np.int64)
        ranks.append(RankTrace(rank.rank, rows))
    return Trace(trace.header, tuple(ranks))


def test_the_peak_is_described_in_the_title_and_the_figure():
    fig = memory(example_trace())
    assert title(fig) == "Step 2: memory peaks at 1.40 MiB (backward of blocks.1)"
    (peak,) = fig.layout.annotations
    words = "backward of blocks.1: 2 units unsharded, next all-gather (blocks.0) in flight, gradients of blocks.2"
    assert peak.text == "<b>peak 1.40 MiB</b>"
    assert peak.hovertext == f"{words} being reduced"
    assert f"the peak: {words} being reduced" in subtitle(fig)
    assert peak.y == max(named(fig, "total in use").y)


def test_the_areas_are_the_bytes_of_each_class_in_order():
    trace = example_trace()
    fig, step = memory(trace), trace.slice(step=2)
    part, (begin_ns, _) = step.rank(0), extent_ns(step)
    series = live.series(part)
    shown = [c for c in Category if series.num_bytes[:, c].any()]
    assert [t.name for t in areas(fig)] == [c.words for c in shown]
    for area, category in zip(areas(fig), shown, strict=True):
        assert np.array(area.y[:-1]) * MIB == pytest.approx(series.num_bytes[:, category])
        assert area.line.shape == "hv"
        assert area.fillcolor == theme.CATEGORY_COLOURS[category]
    assert np.array(named(fig, "total in use").x[:-1]) == pytest.approx((series.t_ns - begin_ns) / 1e6)
    assert fig.layout.legend.traceorder == "reversed"  # the legend is in the order of the areas


def test_the_dashed_line_is_the_memory_of_plain_training():
    trace = example_trace()
    fig, alone = memory(trace), simulate(Setup(num_ranks=1))
    plain = advance(alone.rank(0).start, alone.rank(0).rows).bytes_by_category
    kept = [plain[c] for c in (Category.SHARDED_PARAMS, Category.SHARDED_GRADS, Category.OPTIMIZER_STATE)]
    line = named(fig, "without sharding")
    assert line.line.dash == "dash"
    assert list(line.y) == pytest.approx([sum(kept) / MIB] * 2, rel=0.001)  # each rank has one copy of Adam's step
    names = ("parameters", "gradients", "optimizer state")
    parts = ", ".join(f"{name} {format_bytes(b)}" for name, b in zip(names, kept, strict=True))
    assert f"without sharding, every rank would keep {format_bytes(sum(kept))}: {parts}" in subtitle(fig)


NO_UNIT = -1
STATES = {"all split": (), "of one unit": (2,), "of an unsharded model beside it": (NO_UNIT,), "none": (0, 1, 2, 3, 4)}


@pytest.mark.parametrize("units", STATES.values(), ids=STATES)
def test_state_of_parameters_that_are_not_sharded_counts_once_without_sharding(units):
    trace, more = example_trace(), 4 * MIB
    header = replace(trace.header, strings=(*trace.header.strings, NOT_SPLIT))
    ranks, states = [], []
    for rank in trace.ranks:
        rows = rank.rows.copy()
        is_state = rows["category"] == Category.OPTIMIZER_STATE
        if NO_UNIT in units:
            (first, *_) = np.flatnonzero(is_state)
            rows = np.insert(rows, first, rows[first])
            rows["seq"] = np.arange(len(rows))
            rows["unit"][first], rows["num_bytes"][first] = NO_UNIT, more
            is_state = rows["category"] == Category.OPTIMIZER_STATE
        is_whole = is_state & np.isin(rows["unit"], units)
        rows["module"][is_whole] = len(header.strings) - 1
        states.append([rows["num_bytes"][is_state & ~is_whole].sum(), rows["num_bytes"][is_whole].sum()])
        ranks.append(RankTrace(rank.rank, rows))
    split, whole = np.mean(states, axis=0)
    assert f"optimizer state {format_bytes(round(4 * split + whole))}" in subtitle(memory(Trace(header, tuple(ranks))))


def test_without_an_optimizer_or_trained_parameters_the_line_has_no_more_than_there_is():
    assert "KiB, gradients" in subtitle(memory(example_trace(steps=0)))
    assert "optimizer state" not in subtitle(memory(example_trace(steps=0)))
    trace = example_trace(steps=0)
    units = [replace(u, params=tuple(replace(p, trainable=False) for p in u.params)) for u in trace.header.units]
    frozen = memory(Trace(replace(trace.header, units=tuple(units)), trace.ranks))
    whole = format_bytes(totals(shards(trace.header)).bytes_unsharded)
    assert subtitle(frozen).endswith(f"without sharding, every rank would keep {whole}: parameters {whole}")


def test_where_no_parameter_is_split_nothing_is_said_of_training_without_sharding():
    """Its optimizer may still keep only a part of its state on each rank, as in ZeRO-1, and a trace does not tell."""
    fig = memory(simulate(Setup(num_ranks=2, copies=2)))
    assert "without sharding" not in subtitle(fig)
    assert "without sharding" not in [t.name for t in fig.data]


def test_an_unsharded_model_far_above_is_mentioned_and_not_drawn():
    fig = memory(with_moves(example_trace(), lambda _: 0.1))
    assert "without sharding, every rank would keep 1.35 MiB: parameters 626 KiB, gradients 626 KiB" in subtitle(fig)
    assert "without sharding" not in [t.name for t in fig.data]


def test_equal_ranks_share_a_panel_and_the_highest_is_drawn():
    fig = memory(with_moves(example_trace(), lambda rank: 1 + 0.005 * (rank == 1)))
    assert "Ranks 0-3 are alike within 2%; showing rank 1" in subtitle(fig)
    assert len(list(fig.select_yaxes())) == 1


def test_ranks_that_differ_have_their_own_panels():
    fig = memory(with_moves(example_trace(), lambda rank: 1 + (rank == 2)))
    assert title(fig).startswith("Step 2: memory of rank 2 peaks at 2.80 MiB")
    assert "ranks 0-1, 3 are alike within 2%; showing rank 0" in words(fig)
    assert len(list(fig.select_yaxes())) == 2
    assert [t.name for t in areas(fig, legend=False)] == 2 * [t.name for t in areas(fig)]  # each once in the legend


def test_of_many_groups_few_are_drawn():
    fig = memory(with_moves(simulate(Setup(num_ranks=6, steps=1)), lambda rank: 1 + rank))
    assert len(list(fig.select_yaxes())) == MAX_PANELS
    assert "2 more groups of ranks not drawn" in subtitle(fig)


def test_one_rank_can_be_chosen():
    fig = memory(with_moves(example_trace(), lambda rank: 1 + (rank == 2)), rank=2)
    assert len(list(fig.select_yaxes())) == 1
    assert subtitle(fig).startswith("Rank 2 · ")
    with pytest.raises(UsageError, match="no rank 9; its ranks are: "):
        memory(example_trace(), rank=9)


def test_pooled_bytes_are_hatched_above_the_total_and_move_no_peak():
    trace = example_trace()
    plain, fig = memory(trace), memory(with_pool(trace))
    assert title(fig) == title(plain)
    assert [a.text for a in fig.layout.annotations] == [a.text for a in plain.layout.annotations]
    assert max(named(fig, "total in use").y) == max(named(plain, "total in use").y)
    reserved = areas(fig)[-1]
    assert reserved.name == "reserved"
    assert reserved.fillpattern.shape == "/"
    assert reserved.fillcolor == theme.CLEAR
    most = live.most_reserved(with_pool(trace).slice(step=2).rank(0))
    assert max(reserved.y) * MIB == pytest.approx(most)
    assert f"pools keep up to {format_bytes(most)} more for reuse" in subtitle(fig)
    assert "for reuse" not in subtitle(plain)
    assert fig.layout.yaxis.range[1] >= max(np.add(named(fig, "total in use").y, reserved.y))


def test_several_steps_are_marked():
    fig = memory(example_trace(steps=3), steps=2)
    assert title(fig).startswith("Steps 1-2:")
    assert [a.text for a in fig.layout.annotations if a.text.startswith("step")] == ["step 1", "step 2"]
    with pytest.raises(UsageError, match="no step 7"):
        memory(example_trace(), step=7)


def test_missing_activations_are_mentioned_only_if_missing():
    assert "activations are not measured" in subtitle(memory(example_trace()))
    fig = memory(simulate(Setup(activations=True)))
    assert "activations are not measured" not in subtitle(fig)
    assert "activations" in [t.name for t in areas(fig)]
    assert "MiB besides activations: parameters " in subtitle(fig)
    assert "without sharding, besides activations" in [t.name for t in fig.data]


def test_of_many_moments_few_are_drawn_but_never_without_the_peak():
    trace = simulate(Setup(num_ranks=1, num_units=12, steps=40))
    fig = memory(trace, steps=40)
    assert sum(len(t.y) for t in fig.data) <= MAX_POINTS + 200
    top = live.peak(trace.slice(first=0, last=39).rank(0)).num_bytes
    assert max(named(fig, "total in use").y) * MIB == pytest.approx(top)


def test_before_the_first_step_the_shards_are_shown():
    fig = memory(example_trace(steps=0))
    assert title(fig).startswith("Before the first step: memory peaks at")
    assert "outside forward and backward" in words(fig)


def test_units_unsharded_from_before_are_named():
    trace = example_trace(steps=1)
    full = {0: UnitState.UNSHARDED, 1: UnitState.ALL_GATHER_IN_FLIGHT}
    ranks = (replace(r, start=replace(r.start, unit_states=full)) for r in trace.ranks)
    assert "already unsharded at the start: blocks.0 ·" in subtitle(memory(Trace(trace.header, tuple(ranks)))).replace(
        "<br>", " "
    )
    assert "already unsharded at the start" not in subtitle(memory(trace))


def test_ranks_without_a_byte_give_a_sentence():
    trace = example_trace()
    silent = Trace(trace.header, tuple(RankTrace(r.rank, r.rows[r.rows["kind"] == Kind.STEP]) for r in trace.ranks))
    assert "No memory is recorded yet" in words(memory(silent))


def test_long_unit_names_are_shortened():
    trace = example_trace()
    units = tuple(replace(unit, name=f"{'x' * 300}.{unit.index}") for unit in trace.header.units)
    fig = memory(Trace(replace(trace.header, units=units), trace.ranks))
    assert "xxxxxxxxxx.1)" in title(fig)
    assert len(title(fig)) < 100


def on_page(fig, width):
    """Return the layout changes of a figure on a page of this width in pixels."""
    return [each["layout"] for each in fig.layout.meta["narrow"] if width < each["below"]][-1]


@pytest.mark.parametrize("step", [2, 1])
def test_a_wide_legend_is_below_the_figure(step):
    fig = draw("memory", example_trace(), step=step)
    assert fig.layout.legend.y is None
    for width in (600, 700, 899):
        assert on_page(fig, width)["legend"]["orientation"] == "h"
    for width in (900, 1400):
        assert "orientation" not in on_page(fig, width)["legend"]


def test_no_line_of_a_subtitle_begins_with_the_dot_before_its_sentence():
    fig = draw("memory", example_trace())
    for width in (300, 500, 700, 900, 1400):
        lines = on_page(fig, width)["title"]["subtitle"]["text"].split("<br>")
        assert not any(line.startswith("·") for line in lines)
        assert theme.plain("<br>".join(lines)) == subtitle(fig)
