"""Views select units with the same patterns as breakpoints."""

import re

import pytest

from tests.helpers.figure_checks import title, words
from tests.helpers.trace_strategies import example_trace
from workbench.errors import UsageError
from workbench.events import unit_words
from workbench.views import draw
from workbench.views.unit_selection import meant

UNITS = example_trace(num_units=5, steps=0).header.units


@pytest.mark.parametrize(
    ("unit", "names"),
    [
        ("blocks.2", ["blocks.2"]),
        ("(root)", ["(root)"]),
        ("blocks.*", [f"blocks.{number}" for number in range(4)]),
        (None, [unit_words(unit.name) for unit in UNITS]),
    ],
)
def test_a_name_a_pattern_or_the_root(unit, names):
    assert [unit_words(found.name) for found in meant(UNITS, unit)] == names


@pytest.mark.parametrize("view", ["layout", "states", "comms"])
def test_a_missing_unit_is_refused_with_a_list(view):
    with pytest.raises(UsageError, match=r"no unit 'block.1'; the units, nearest first: blocks.1"):
        draw(view, example_trace(num_units=5), unit="block.1")


def test_states_of_one_unit_are_drawn_alone():
    trace = example_trace(num_units=5)
    fig = draw("states", trace, unit="blocks.2")
    assert list(fig.layout.yaxis.ticktext) == ["blocks.2"]
    assert re.fullmatch(r"Step 2: blocks.2 unsharded for [\d.]+ [µm]s", title(fig))
    assert len(draw("states", trace, unit="blocks.*").layout.yaxis.ticktext) == 4


def test_collectives_of_one_unit_are_counted_alone():
    fig = draw("comms", example_trace(num_units=5), unit="blocks.2")
    assert title(fig).startswith("Step 2, blocks.2: all-gathers 2 of 2, reduce-scatters 1 of 1: as expected")
    assert "blocks.1" not in words(fig)
