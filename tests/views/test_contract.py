"""What every view guarantees, whatever it draws."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import cache
from html import unescape

import plotly.graph_objects as go
import plotly.io as pio
import pytest
from hypothesis import given, settings
from IPython.core.formatters import DisplayFormatter

from tests.helpers import trace_strategies
from tests.helpers.device_trace import on_devices
from tests.helpers.figure_checks import as_json, axes, num_marks, strings, subtitle, words
from tests.helpers.trace_strategies import Setup, traces
from workbench.errors import UsageError
from workbench.trace import TraceBuilder, advance
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.schema import Header
from workbench.views import VIEWS, compare, draw, theme

MAX_MARKS = 12_000
MAX_TRACES = 200
MAX_JSON_BYTES = 1_500_000

EVIL = '<script>alert("x")</script><a href="javascript:y">%{evil}$z$'

simulate = cache(trace_strategies.simulate)  # traces do not change
example_trace = cache(trace_strategies.example_trace)

every_view = pytest.mark.parametrize("name", VIEWS)


@pytest.fixture(autouse=True)
def _nothing_is_shown(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a view returns its figure and never shows it")

    monkeypatch.setattr(go.Figure, "show", refuse)
    monkeypatch.setattr(pio, "show", refuse)
    default = pio.templates.default
    yield
    assert pio.templates.default == default


def same_with_names(trace, name):
    """Return the trace with every name that a user or a rank chooses replaced by ``name`` and a number."""
    units = tuple(
        replace(unit, name=f"{name}{unit.index}", params=tuple(_renamed(p, name, i) for i, p in enumerate(unit.params)))
        for unit in trace.header.units
    )
    header = replace(
        trace.header,
        producer=name,
        mesh_axes=tuple(name for _ in trace.header.mesh_axes),
        ranks=tuple(replace(rank, host=name, device=name) for rank in trace.header.ranks),
        units=units,
        comm_groups=tuple(replace(group, name=name) for group in trace.header.comm_groups),
        strings=tuple(f"{name}{i}" for i, _ in enumerate(trace.header.strings)),
    )
    return Trace(header, trace.ranks)


def _renamed(param, name, index):
    return replace(param, fqn=f"{name}{index}", dtype=name)


@every_view
def test_a_view_returns_a_figure_with_something_in_it(name):
    fig = draw(name, example_trace())
    assert type(fig) is theme.Figure
    assert fig.data
    assert fig.layout.title.text


@every_view
@pytest.mark.parametrize("talk", [False, True])
def test_a_notebook_draws_it_without_a_script_of_plotlys(name, talk):
    """Plotly's HTML of a figure loads a script from the network."""
    display_formatter = DisplayFormatter()
    shown, _ = display_formatter.format(draw(name, example_trace(), talk=talk))
    assert set(shown) == {theme.PLOTLY_MIME, "text/plain"}
    assert "plotly" not in shown["text/plain"], "a sentence, where there is no picture"
    assert not display_formatter.ipython_display_formatter(draw(name, example_trace()))


@every_view
@pytest.mark.parametrize("talk", [False, True])
def test_no_picture_offers_to_upload_itself_or_links_to_plotly(name, talk):
    fig = draw(name, example_trace(), talk=talk)
    page = re.escape('"displaylogo": false, "showSendToCloud": false')
    assert fig._repr_mimebundle_()[theme.PLOTLY_MIME]["config"] == theme.CONFIG
    assert re.search(page, fig.to_html(include_plotlyjs=False))
    assert json.loads(fig.to_json())["layout"]["template"]["layout"]["modebar"]["remove"] == ["sendChartToCloud"]


def test_a_figure_shown_explicitly_is_the_same_in_a_notebook(monkeypatch):
    renders = []
    monkeypatch.undo()
    monkeypatch.setattr(pio, "show", lambda _, **options: renders.append((options["renderer"], options["config"])))
    for default in ("plotly_mimetype+notebook", "browser"):
        monkeypatch.setattr(type(pio.renderers), "default", default)
        theme.figure("").show()
        theme.figure("").show(renderer="json", config={"displaylogo": True})
    assert [renderer for renderer, _ in renders] == ["plotly_mimetype", "json", None, "json"]
    assert [config for _, config in renders] == [theme.CONFIG, theme.CONFIG | {"displaylogo": True}] * 2


def test_a_figure_can_be_written_as_a_page(tmp_path):
    draw("layout", example_trace()).write_html(tmp_path / "layout.html", include_plotlyjs=False)
    page = (tmp_path / "layout.html").read_text("utf-8")
    assert "Plotly.newPlot" in page
    assert '"showSendToCloud": false' in page


@every_view
def test_called_twice_it_gives_equal_figures_and_leaves_the_trace_as_it_was(name):
    trace = example_trace()
    before = Trace(
        copy.deepcopy(trace.header),
        tuple(RankTrace(r.rank, r.rows.copy(), copy.deepcopy(r.start), r.lost) for r in trace.ranks),
    )
    assert draw(name, trace).to_json() == draw(name, trace).to_json()
    assert trace == before


@every_view
@pytest.mark.parametrize("header", [Header(), Header(world_size=4)], ids=["nothing", "ranks only"])
def test_an_empty_trace_gives_a_sentence(name, header):
    fig = draw(name, Trace(header))
    assert not fig.data
    (annotation,) = fig.layout.annotations
    assert re.fullmatch(r"[A-Z%].{15,}\.", annotation.text)


@every_view
def test_a_model_sharded_and_not_yet_trained_gives_a_figure(name):
    assert type(draw(name, example_trace(steps=0))) is theme.Figure


@every_view
@settings(max_examples=15)
@given(trace=traces())
def test_any_valid_trace_can_be_drawn(name, trace):
    assert type(draw(name, trace)) is theme.Figure


@every_view
@pytest.mark.parametrize("num_ranks", [1, 64])
def test_one_rank_and_many_ranks_stay_bounded(name, num_ranks):
    fig = draw(name, simulate(Setup(num_ranks=num_ranks, num_units=6, steps=1)))
    assert len(fig.data) <= MAX_TRACES
    assert num_marks(fig) <= MAX_MARKS
    assert len(fig.to_json()) <= MAX_JSON_BYTES


@every_view
def test_a_long_trace_of_a_large_model_stays_bounded(name):
    fig = draw(name, simulate(Setup(num_ranks=2, num_units=40, steps=30)))
    assert len(fig.data) <= MAX_TRACES
    assert num_marks(fig) <= MAX_MARKS
    assert len(fig.to_json()) <= MAX_JSON_BYTES


@every_view
def test_a_long_trace_and_a_large_model_fit_on_a_page(name):
    fig = draw(name, simulate(Setup(num_ranks=16, num_units=100, steps=2)))
    assert (fig.layout.height or 450) <= 2200


@every_view
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_axis_has_a_title_with_a_unit_or_names_its_places(name, num_ranks):
    for axis in axes(draw(name, example_trace(num_ranks=num_ranks))):
        names_places = axis.type in ("category", "multicategory") or bool(axis.ticktext)
        hidden = axis.showticklabels is False
        text = axis.title.text or ""
        assert names_places or hidden or text, f"an axis of {name} has no title"
        if not (names_places or hidden) and re.search("time|memory|bytes|payload", text):
            assert re.search(r"\[(B|KiB|MiB|GiB|µs|ms|s)\]", text), f"{text!r} has no unit"


@every_view
def test_a_trace_without_its_beginning_is_marked(name):
    trace = example_trace(steps=4)
    builder = TraceBuilder(max_rows=trace.num_rows // 2)
    builder.update_header(trace.header)
    for rank in trace.ranks:
        builder.append(rank.rank, rank.rows.tobytes(), key_frame=advance(rank.start, rank.rows))
    fig = draw(name, builder.snapshot())
    assert ("Older events before step" in subtitle(fig)) == (name != "layout")
    assert "Older events" not in words(draw(name, trace))


@every_view
def test_names_are_escaped_and_never_part_of_a_template(name):
    fig = draw(name, same_with_names(example_trace(), EVIL))
    found = list(strings(as_json(fig)))
    for field, text in found:
        assert "<script" not in text, field
        assert "<a " not in text, field
        assert "$z$" not in text, field
        if field.endswith("template"):
            assert "evil" not in text, field


@every_view
def test_long_names_are_shortened(name):
    fig = draw(name, same_with_names(example_trace(), "very_long_name_" * 20))
    assert all(len(text) < 600 for _, text in strings(as_json(fig)))


@every_view
def test_colours_and_fonts_come_from_the_theme(name):
    fig = draw(name, example_trace())
    assert fig.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert fig.layout.paper_bgcolor is None
    assert fig.layout.plot_bgcolor is None
    assert fig.layout.font.color is None


@every_view
def test_it_writes_no_outside_address(name):
    assert "http" not in words(draw(name, example_trace()))


def test_the_six_views_are_registered():
    assert list(VIEWS) == ["layout", "memory", "timeline", "states", "comms", "training"]


@pytest.mark.parametrize(("wrong", "near"), [("memmory", "memory"), ("timelines", "timeline"), ("com", "comms")])
def test_an_unknown_name_is_answered_with_the_nearest(wrong, near):
    with pytest.raises(UsageError, match=f"no view '{wrong}'; did you mean '{near}'"):
        draw(wrong, Trace.empty())


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(UsageError, match=r"no view 'xyzzy'; the views are: layout, memory, .*training"):
        draw("xyzzy", Trace.empty())


def test_gpu_times_are_not_claimed_without_device_rows():
    trace, sentence = example_trace(), "imes are when the host enqueued work; GPU times were not"
    for name in ("timeline", "states"):
        assert sentence not in words(draw(name, trace))
        text = words(draw(name, on_devices(trace, has_device_rows=False)))
        assert sentence in text.replace("<br>", " ")
        assert "compute waits for communication" not in text
    text = words(draw("comms", trace))
    assert "<b>time<br>exposed</b>" in text
    assert "compute waited" in text
    text = words(draw("comms", on_devices(trace, has_device_rows=False)))
    assert "<b>expected</b>" in text
    assert "host times say little about collectives" in text.replace("<br>", " ")
    for word in ("<b>time", "exposed", "compute waited"):
        assert word not in text


@pytest.mark.parametrize("name", ["timeline", "states", "comms"])
def test_gpu_times_are_claimed_with_device_rows(name):
    text = unescape(words(draw(name, on_devices(example_trace()))).replace("<br>", " "))
    assert "imes are measured on the GPU, within 6.00 µs" in text
    assert "enqueued" not in text


def test_step_times_are_named_host_times_on_a_device():
    sentence, trace = "tep times are the host's, which enqueues GPU work without waiting for it", example_trace()
    there = on_devices(trace)
    for figure in (draw("training", there), compare.draw(trace, there), compare.draw(there, trace)):
        assert sentence in unescape(subtitle(figure).replace("<br>", " "))
    for figure in (draw("training", trace), compare.draw(trace, trace)):
        assert "host" not in subtitle(figure)


def test_memory_is_named_host_ordered_on_a_device():
    sentence = "in host order and host time"
    for is_device_timed in (False, True):
        figure = draw("memory", on_devices(example_trace(), has_device_rows=is_device_timed))
        assert sentence in unescape(subtitle(figure).replace("<br>", " "))
    assert "host" not in subtitle(draw("memory", example_trace()))
