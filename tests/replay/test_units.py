from dataclasses import replace

from tests.helpers.trace_strategies import example_trace
from workbench.replay.units import differing, listed, model_order, unit_name, unmanaged_words


def test_a_unit_is_called_by_its_path_and_the_root_is_called_root():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in range(3)] == ["blocks.0", "blocks.1", "(root)"]


def test_a_unit_the_header_does_not_know_is_called_by_its_number():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in (3, -1)] == ["unit 3", "unit -1"]


def test_units_are_ordered_by_name_below_their_root():
    header = example_trace(num_units=3).header
    assert model_order(header) == [2, 0, 1]
    names = ["blocks.10", "blocks.2", "an.encoder"]
    rootless = tuple(replace(unit, name=name, root=-1) for unit, name in zip(header.units, names, strict=True))
    assert model_order(replace(header, units=rootless)) == [2, 1, 0]


def test_a_long_list_and_a_long_name_are_cut_in_the_middle():
    assert listed(["a", ""]) == "a, (root)"
    assert listed([f"p{i}" for i in range(12)]).count(", ") == 11
    assert listed([f"p{i}" for i in range(20)]).endswith("p9, ... 9 more ..., p19")
    assert [len(listed(["x" * number])) for number in (80, 81, 500)] == [80, 80, 80]
    assert "p9, ... 9 more ..., p19. After backward" in unmanaged_words("model", [f"p{i}" for i in range(20)])


def test_buffers_differ_where_ranks_that_have_them_hold_other_bytes():
    assert differing([{"a": 1, "b": 1}, {"a": 1, "b": 2, "c": 3}, {}]) == ("b",)
