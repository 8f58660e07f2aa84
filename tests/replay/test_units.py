from tests.trace.strategies import example_trace
from workbench.replay.units import unit_name


def test_a_unit_is_called_by_its_path_and_the_root_is_called_root():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in range(3)] == ["blocks.0", "blocks.1", "(root)"]


def test_a_unit_the_header_does_not_know_is_called_by_its_number():
    header = example_trace(num_units=3).header
    assert [unit_name(header, unit) for unit in (3, -1)] == ["unit 3", "unit -1"]
