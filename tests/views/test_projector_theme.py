"""A figure for a projector is the same figure, larger and with more contrast."""

import base64
import json

import numpy as np
import pytest

from tests.helpers.figure_checks import strings
from tests.helpers.trace_strategies import example_trace
from workbench.views import VIEWS, compare, draw, theme
from workbench.views.projector_theme import SCALE

every_view = pytest.mark.parametrize("name", VIEWS)


@every_view
def test_it_shows_the_same_in_larger_type(name):
    plain, talk = draw(name, example_trace()), draw(name, example_trace(), talk=True)
    for where in (
        "layout.height",
        "layout.margin.t",
        "layout.title.font.size",
        "layout.title.subtitle.font.size",
        "layout.template.layout.font.size",
    ):
        assert talk[where] == pytest.approx(SCALE * plain[where], abs=1)


@every_view
def test_it_is_near_black_on_white(name):
    talk = draw(name, example_trace(), talk=True)
    assert talk.layout.paper_bgcolor == talk.layout.plot_bgcolor == "#ffffff"
    colours = {text for _, text in strings(json.loads(talk.to_json()))}
    assert not colours & {theme.INK, theme.GRID, theme.FAINT}


def numbers(values):
    """Return the numbers of an array, in any of plotly's encodings."""
    if isinstance(values, dict):
        values = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
    return (
        [None if v is None else float(v) for v in values] if isinstance(values, np.ndarray | list | tuple) else values
    )


@every_view
def test_data_stay_where_they_are(name):
    plain, talk = draw(name, example_trace()), draw(name, example_trace(), talk=True)
    for before, after in zip(plain.data, talk.data, strict=True):
        for field in ("x", "y", "base", "width"):
            if field in before:
                assert str(numbers(after[field])) == str(numbers(before[field]))


def test_a_comparison_has_it_too():
    traces = example_trace(), example_trace(reshard_after_forward=False)
    assert compare.draw(*traces, talk=True).layout.height == pytest.approx(
        SCALE * compare.draw(*traces).layout.height, abs=1
    )
