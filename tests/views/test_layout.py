from __future__ import annotations

import re
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.figure_checks import num_marks, subtitle, title, words
from tests.helpers.trace_strategies import Setup, example_trace, simulate
from tests.replay.test_shards import make_flat, make_param, make_unit
from workbench.base.text_formats import plural
from workbench.errors import UsageError
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views.layout import MAX_BARS, layout


def bars(fig, name):
    return [
        (y, base, width, text, hover)
        for trace in fig.data
        if trace.name == name
        for y, base, width, text, hover in zip(trace.y, trace.base, trace.x, trace.text, trace.hovertext, strict=True)
    ]


def trace_of(*units, world_size):
    return Trace(Header(world_size=world_size, units=units))


def test_each_rank_gets_a_segment_as_wide_as_its_rows():
    fig = layout(trace_of(make_unit(make_param((5, 3), 4)), world_size=4))
    held = bars(fig, "held")
    assert [text for *_, text, _ in held] == ["rows 0-1", "rows 2-3", "row 4"]
    assert [round(width, 1) for _, _, width, _, _ in held] == [1.0, 1.0, 0.5]
    assert [int(base) for _, base, *_ in held] == [0, 1, 2]
    assert [(int(base), text) for _, base, _, text, _ in bars(fig, "padding")] == [(2, "")]
    assert [(int(base), text) for _, base, _, text, _ in bars(fig, "empty shard")] == [(3, "empty")]


def test_hover_shows_rows_shape_and_bytes():
    fig = layout(trace_of(make_unit(make_param((3, 5), 4, shard_dim=1, fqn="head.weight")), world_size=4))
    hover = bars(fig, "held")[-1][-1]
    for part in ("head.weight", "[3, 5] float32", "shard-rank 2", "row 4 of 5 along dim 1", "[3, 1]", "12 B", "24 B"):
        assert part in hover
    assert "all padding: 2 rows, 24 B" in bars(fig, "empty shard")[0][-1]


def test_title_and_subtitle_total_the_bytes_at_rest():
    fig = layout(trace_of(make_unit(make_param((5, 256), 4)), world_size=4))
    assert title(fig) == "Each of 4 ranks keeps 2.00 KiB of 5.00 KiB of parameters"
    assert "each rank keeps 40.0% of the full parameters between uses" in subtitle(fig)
    assert "padding wastes 3.00 KiB (60.00%)" in subtitle(fig)
    assert "1 empty shard" in subtitle(fig)


def test_parameters_in_no_unit_are_named_as_not_counted():
    header = Header(world_size=4, units=(make_unit(make_param((8,), 4)),), unmanaged=("model.scale",))
    assert "not counted, as they are in no unit: model.scale" in subtitle(layout(Trace(header, ())))
    assert "no unit" not in subtitle(layout(Trace(replace(header, unmanaged=()), ())))


def test_without_padding_nothing_is_hatched():
    fig = layout(trace_of(make_unit(make_param((8,), 4)), world_size=4))
    assert {trace.name for trace in fig.data if trace.type == "bar"} == {"held"}
    assert "no padding" in subtitle(fig)


def test_copies_of_a_replicated_model_share_a_column():
    fig = layout(trace_of(make_unit(make_param((3,), 2), replicate_size=2), world_size=4))
    assert fig.layout.xaxis.ticktext == ("ranks 0, 2", "ranks 1, 3")
    assert "in each of 2 copies" in subtitle(fig)
    assert len(bars(fig, "held")) == 2


def test_a_simulated_2d_mesh_is_drawn_as_one_copy():
    fig = layout(simulate(Setup(num_ranks=8, copies=2, steps=0)))
    assert fig.layout.xaxis.ticktext == ("0, 4", "1, 5", "2, 6", "3, 7")


def test_under_tensor_parallelism_columns_are_shard_ranks_and_the_global_shape_is_shown():
    param = replace(make_param((8, 4), 2), global_shape=(16, 4))
    fig = layout(trace_of(make_unit(param), world_size=4))
    assert fig.layout.xaxis.ticktext == ("shard-rank 0", "shard-rank 1")
    assert fig.layout.yaxis.ticktext == ("w [8, 4] of [16, 4]",)
    assert "this rank's part of [16, 4]" in bars(fig, "held")[0][-1].replace("&#x27;", "'")
    assert title(fig) == "Each of 4 ranks keeps 64 B of 256 B of parameters"


def test_the_sharded_dimension_is_named_unless_it_is_the_first():
    fig = layout(trace_of(make_unit(make_param((3, 8), 2, shard_dim=1), make_param((8,), 2, fqn="b")), world_size=2))
    assert fig.layout.yaxis.ticktext == ("w [3, 8] by dim 1", "b [8]")


def headings(fig):
    """Return the lines above the bars as one string."""
    lines = [each.text.replace("<br>", " ") for each in fig.layout.annotations]
    return " ".join(re.sub("</?b>", "", line) for line in lines)


def test_a_unit_shows_its_special_policy():
    special = {"compute_dtype": "bfloat16", "offload": True, "reshard_after_forward": 2}
    policy = "computes in bfloat16, reduces in float32, shards kept in host memory, on 2 ranks after forward"
    units = [make_unit(make_param((8,), 4), index=0), make_unit(make_param((8,), 4), index=1, name="a", **special)]
    fig = layout(trace_of(*units, world_size=4))
    assert f"on a rank, {policy}" in headings(fig)
    assert policy not in subtitle(fig)
    fig = layout(trace_of(units[1], world_size=4))
    assert (headings(fig), policy in subtitle(fig)) == ("a: 8 B on a rank", True)
    assert "computes" not in words(layout(example_trace()))


def test_bytes_added_by_training_are_shown():
    fig = layout(trace_of(make_unit(make_param((5, 3), 4)), world_size=4))
    assert "training adds 24 B of gradients and up to 52 B of Adam state" in subtitle(fig)


def flat_unit(numels, num_ranks, **unit):
    return make_unit(make_flat(numels, num_ranks), **unit)


def test_a_flat_parameter_is_its_parameters_end_to_end_cut_where_a_column_ends_and_padded_at_the_end():
    fig = layout(trace_of(flat_unit((3, 6), 2), world_size=2))
    held, padding = bars(fig, "held"), bars(fig, "padding")
    assert [text for *_, text, _ in held] == ["p0", "p1 …", "… p1"]
    assert [round(width / 0.992, 2) for _, _, width, _, _ in held] == [0.6, 0.4, 0.8]
    assert [round(width / 0.992, 2) for _, _, width, _, _ in padding] == [0.2]
    assert "p1 [6]: elements 2-5 of 6, 16 B" in held[-1][-1]
    assert "p0 [3]: all elements, 12 B" in held[0][-1]
    assert fig.layout.yaxis.ticktext == ("2 parameters [9]",)
    assert "2 parameters in 1 unit, packed into 1 flat parameter" in subtitle(fig)
    assert "padding wastes 4 B" in subtitle(fig)


def test_tensor_parallel_parts_of_a_flat_parameter_are_marked():
    flat = make_flat((3, 6), 2)
    parts = (flat.parts[0], replace(flat.parts[1], global_shape=(12,)))
    fig = layout(trace_of(make_unit(replace(flat, parts=parts, global_shape=(15,))), world_size=4))
    text = words(fig).replace("&#x27;", "'")
    assert "p1 [6], this rank's part of [12]: elements 0-1 of 6" in text
    assert "p0 [3]: all elements" in text


def test_cut_parameters_of_a_flat_one_are_named_even_if_small():
    def cut(numels, num_ranks, **unit):
        fig = layout(trace_of(flat_unit(numels, num_ranks, **unit), world_size=num_ranks))
        texts = [each.text.replace("<br>", " ") for each in fig.layout.annotations]
        return next((line for line in texts if line.startswith("cut between")), "")

    assert cut((4, 6, 3), 4).startswith("cut between ranks: p1 (1-2), p2 (2-3)")
    assert cut((4, 4), 2) == ""
    assert cut((3, 6), 2, replicate_size=2).startswith("cut between shard-ranks: p1 (0-1)")
    assert "p0 (0-4), p1 (4-6), p2 (6-7) and 1 more" in cut((40, 15, 15, 10, 1), 9)


def test_a_rank_behind_the_end_of_a_flat_parameter_is_empty():
    fig = layout(trace_of(flat_unit((2,), 4), world_size=4))
    assert [(int(base), text) for _, base, _, text, _ in bars(fig, "empty shard")] == [(2, "empty"), (3, "empty")]


def test_narrow_adjacent_parameters_are_one_segment_that_lists_them():
    fig = layout(trace_of(flat_unit((10**6, *[1] * 20, 10**6), 1), world_size=1))
    held = bars(fig, "held")
    assert [text for *_, text, _ in held] == ["p0", "", "p21"]
    assert "p1 [1]: all elements" in held[1][-1]
    assert "and 12 more" in held[1][-1]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 6))
def test_a_flat_parameter_fills_the_columns_from_the_left(numels, num_ranks):
    fig = layout(trace_of(flat_unit(numels, num_ranks), world_size=num_ranks))
    room = -(-sum(numels) // num_ranks)
    widths = {name: sum(width for _, _, width, _, _ in bars(fig, name)) for name in ("held", "padding", "empty shard")}
    column = 1 - min(0.1, 0.004 * num_ranks)
    assert widths["held"] == pytest.approx(sum(numels) / room * column)
    assert sum(widths.values()) == pytest.approx(num_ranks * column)
    begins = [base for _, base, *_ in bars(fig, "held")]
    assert begins == sorted(begins)


def test_equal_units_of_flat_parameters_share_a_bar():
    units = [flat_unit((3, 6), 2, index=i, name=f"blocks.{i}") for i in range(3)]
    units = [replace(u, params=(named(u.params[0], f"blocks.{u.index}."),)) for u in units]
    fig = layout(trace_of(*units, world_size=2), fold=True)
    assert len(bars(fig, "held")) == 3
    assert "blocks.0-2: " in headings(fig)


def named(param, prefix):
    parts = tuple(replace(part, fqn=prefix + part.fqn) for part in param.parts)
    return replace(param, fqn=prefix + param.fqn, parts=parts)


def test_units_on_different_numbers_of_ranks_use_the_whole_width():
    units = make_unit(make_param((8,), 4)), make_unit(make_param((8,), 2), index=1, name="experts")
    fig = layout(trace_of(*units, world_size=4))
    assert [int(base) for _, base, *_ in bars(fig, "held")] == [0, 1, 2, 3, 0, 2]
    assert fig.layout.xaxis.ticktext == ()


def test_one_rank_keeps_everything():
    assert title(layout(example_trace(num_ranks=1))).startswith("One rank keeps all ")


def test_retired_units_are_left_out():
    units = make_unit(make_param((8,), 2, fqn="retired.weight"), retired=True), make_unit(make_param((8,), 2), index=1)
    assert "retired.weight" not in words(layout(trace_of(*units, world_size=2)))
    assert "%fsdp shard" in words(layout(trace_of(units[0], world_size=2)))


def test_many_equal_blocks_share_bars():
    trace = simulate(Setup(num_units=25, steps=0))
    fig = layout(trace)
    assert "blocks.0-23: " in headings(fig)
    assert len(fig.layout.yaxis.ticktext) == 7 + 3
    assert f"{24 * 7 + 3} parameters in 25 units" in subtitle(fig)
    assert len(layout(trace, fold=False).layout.yaxis.ticktext) == MAX_BARS


def test_the_bytes_of_several_parameters_in_a_row_are_those_of_each():
    experts = [make_param((8, 2), 2, fqn=f"moe.experts.{i}.weight") for i in range(4)]
    unit = replace(make_unit(experts[0], name="moe"), params=(*experts, make_param((8,), 2, fqn="moe.bias")))
    assert right_labels(layout(trace_of(unit, world_size=2), fold=True)) == ("32 B each", "16 B")
    alike = [replace(make_unit(make_param((8,), 2, fqn=f"b.{i}.w"), name=f"b.{i}"), index=i) for i in range(2)]
    assert right_labels(layout(trace_of(*alike, world_size=2), fold=True)) == ("16 B",)


def right_labels(fig):
    return fig.layout.yaxis2.ticktext


def test_few_parameters_are_drawn_one_by_one_by_default():
    assert len(layout(example_trace()).layout.yaxis.ticktext) == 24
    assert len(layout(example_trace(), fold=True).layout.yaxis.ticktext) == 10


@pytest.mark.parametrize(
    ("unit", "units", "num_bytes"),
    [("blocks.1", ["blocks.1"], "32 B"), ("blocks.*", ["blocks.0", "blocks.1"], "48 B"), ("(root)", ["(root)"], "8 B")],
)
def test_only_selected_units_are_drawn_and_counted(unit, units, num_bytes):
    made = [
        *(make_unit(make_param((2,), 2, fqn="w")), make_unit(make_param((4,), 2, fqn="w"), index=1, name="blocks.0")),
        make_unit(make_param((8,), 2, fqn="w"), index=2, name="blocks.1", offload=True),
        make_unit(make_param((16,), 2, fqn="w"), index=3, name="blocks.1", retired=True),
    ]
    fig = layout(trace_of(*made, world_size=2), unit=unit)
    assert [name for name in ("(root)", "blocks.0", "blocks.1") if f"{name}: " in headings(fig)] == units
    assert title(fig).endswith(f" of {num_bytes} of the parameters of {unit}")
    assert subtitle(fig).startswith(plural(len(units), "parameter") + f" in {plural(len(units), 'unit')} ")


def test_an_unknown_unit_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"there is no unit 'block.1'; the units, nearest first: blocks.1, blocks.0, "):
        layout(example_trace(), unit="block.1")
    with pytest.raises(UsageError, match="nothing is sharded yet"):
        layout(trace_of(world_size=2), unit="block.1")


@pytest.mark.parametrize("num_ranks", [64, 512])
def test_hundreds_of_unlike_parameters_on_many_ranks_stay_bounded(num_ranks):
    params = [make_param((100 + i, 2), num_ranks, fqn=f"layer{i}.weight") for i in range(300)]
    fig = layout(trace_of(make_unit(*params), world_size=num_ranks))
    assert num_marks(fig) <= 3000
    shown = len(fig.layout.yaxis.ticktext)
    assert f"{300 - shown} small parameters not drawn" in subtitle(fig)
    assert fig.layout.yaxis.ticktext[-1] == "layer299.weight [399, 2]"
    assert len(fig.layout.xaxis.ticktext) <= 16


def test_beyond_64_ranks_neighbours_with_equally_many_rows_are_one_segment():
    fig = layout(trace_of(make_unit(make_param((150, 2), 100)), world_size=100))
    assert [text for *_, text, _ in bars(fig, "held")] == ["rows 0-149"]
    assert "shard-ranks 0-74" in bars(fig, "held")[0][-1]
    assert ceil(150 / 100) == 2
    assert "shard-ranks 75-99" in bars(fig, "empty shard")[0][-1]


def test_a_frozen_parameter_is_marked():
    param = replace(make_param((4,), 2), trainable=False)
    assert "frozen" in bars(layout(trace_of(make_unit(param), world_size=2)), "held")[0][-1]


def test_parameters_without_elements_can_be_drawn():
    fig = layout(trace_of(make_unit(make_param((4, 0), 2), make_param((0,), 2, fqn="b")), world_size=2))
    assert title(fig) == "Each of 2 ranks keeps 0 B of 0 B of parameters"
