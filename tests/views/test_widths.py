"""Every view is readable from 250 to 2,000 pixels: no texts overlap or are cut off, the legend covers no plot.

From 300 pixels on, a view is no wider than its page, so that nothing at its right edge requires scrolling.

Each view is drawn at each width, and so is each trace; all views of all traces at one width with ``-m exhaustive``.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
from plotly.offline import get_plotlyjs

from tests.helpers.browser import open_offline
from tests.helpers.held_ranks import stopped_before
from tests.helpers.many_ranks import Scale, trace_of
from tests.helpers.pairwise import quick, rows_of
from tests.helpers.simulated_job import Setup, simulate
from tests.replay.test_shards import make_flat, make_param, make_unit
from workbench.events import Kind
from workbench.trace.columns import Trace
from workbench.trace.schema import Header
from workbench.views import VIEWS, compare, draw
from workbench.views.projector_theme import SCALE, for_talk
from workbench.views.responsive import LEAST
from workbench.widgets.js_bundle import joined

pytestmark = [pytest.mark.browser, pytest.mark.lasting_browser]

WIDTHS = (180, 250, 300, 320, 400, 500, 600, 700, 1400, 2000)
TALK_WIDTHS = (375, 450, 600, 2000)
MOST_EMPTY = 12
"""Pixels below a legend."""

TRACES = ("deep", "held", "copies", "many")

_PAGE = """<!doctype html><meta charset=utf-8><body style='margin:0'><div id=around></div><script>PLOTLY</script>
<script type=module>FIGURES Object.assign(window, {drawAnew, followWidth});</script>"""

# a figure on a page that takes several widths in turn; the measures are those at the last one
_DRAW = """async ([figure, widths]) => {
    const around = document.getElementById("around"), place = document.createElement("div");
    const frames = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    around.replaceChildren(place);
    around.style.width = `${widths[0]}px`;
    const graph = await Plotly.newPlot(place, figure.data, figure.layout, {displayModeBar: false});
    let drawn = Promise.resolve();
    const end = followWidth(graph, () => { drawn = drawAnew(Plotly, graph); });
    for (const width of widths) {
        around.style.width = `${width}px`;
        await frames();
        await drawn;
        await Plotly.Plots.resize(graph);
    }
    for (let before; before !== drawn;) { // it draws once more without what is empty below
        before = drawn;
        await drawn;
        await frames();
    }
    end();
    const box = (element) => {
        const {left, right, top, bottom} = element.getBoundingClientRect();
        return [left, top, right, bottom];
    };
    const isSeen = (text) => text.textContent.trim() && text.getBoundingClientRect().width > 1 &&
        getComputedStyle(text).visibility !== "hidden" && text.getAttribute("transform") !== "scale(0)";
    const texts = [...place.querySelectorAll("svg text")].filter(isSeen)
        .filter((text) => !text.closest(".hoverlayer, .table, .modebar"));
    const whole = box(place.querySelector("svg.main-svg"));
    const cells = [...place.querySelectorAll(".table .column-cell")].map((cell) => {
        const [rect, text] = [cell.querySelector("rect"), cell.querySelector("text")];
        return {text: text.textContent, cell: box(rect), box: box(text)};
    });
    const titles = [...place.querySelectorAll(".gtitle, .gtitle-subtitle")].map(box);
    const {_size: {l, t, w, h}} = place._fullLayout;
    const legends = [...place.querySelectorAll(".legend .bg")].map(box);
    return {texts: texts.map((text) => ({text: text.textContent, box: box(text)})), whole, legends, cells,
        titles, width: around.clientWidth, scrolls: around.scrollWidth, plot: [l, t, l + w, t + h]};
}"""

FLAT = tuple(
    make_unit(make_flat((64, 12288, 6, 4096, 64, 16384, 16384), 4), name=f"model.layers.{i}", index=i) for i in range(3)
)

WIDE = make_unit(
    replace(
        make_param((3, 4096, 1024), 4, shard_dim=1, fqn="self_attn.fused_qkv_projection"), global_shape=(3, 8192, 1024)
    ),
    name="model.layers.0",
    compute_dtype="bfloat16",
    offload=True,
    reshard_after_forward=2,
)

_ENDINGS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm", "mlp.up": "mlp.gate_up_proj"}


def long_names(trace):
    """Return the trace with names as long as those of published models."""

    def named(text):
        text = text.replace("blocks.", "base_model.model.layers.").replace("attn.", "self_attn.")
        for short, long in _ENDINGS.items():
            text = text.replace(short, long)
        return text

    units = tuple(
        replace(u, name=named(u.name), params=tuple(replace(p, fqn=named(p.fqn)) for p in u.params))
        for u in trace.header.units
    )
    return Trace(replace(trace.header, units=units), trace.ranks)


@cache
def figures():
    deep = long_names(simulate(Setup(num_ranks=4, num_units=13, steps=3, samples=True)))
    kept = long_names(simulate(Setup(num_ranks=4, num_units=13, steps=3, reshard_after_forward=False)))
    held = stopped_before(long_names(simulate(Setup(num_ranks=2, num_units=4, steps=3))), Kind.BACKWARD, number=9)
    copies = long_names(simulate(Setup(num_ranks=8, copies=2, num_units=4, steps=3, compute_itemsize=2)))
    many = long_names(trace_of(Scale(num_ranks=48, copies=6, num_units=28, width=64, late=30, ended=7, larger=41)))
    traces = dict(zip(TRACES, (deep, held, copies, many), strict=True))
    found = {f"{name} of {what}": draw(name, trace) for name in VIEWS for what, trace in traces.items()}
    found["memory with the process"] = draw("memory", deep, process=True)
    found["memory of three steps"] = draw("memory", deep, steps=3)
    found["a unit alone"] = draw("layout", deep, unit="base_model.model.layers.2")
    found["flat parameters"] = draw("layout", Trace(Header(world_size=4, units=FLAT)))
    found["a long label"] = draw("layout", Trace(Header(world_size=4, units=(WIDE,))))
    found["few differences"] = compare.draw(held, held, names=("before.trace", "last, steps 3..5"))
    found["nothing to draw"] = draw("training", Trace.empty())
    found["compare"] = compare.draw(deep, kept, names=("before.trace", "this run, steps 3-5"))
    return found


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    file = tmp_path_factory.mktemp("widths") / "page.html"
    text = _PAGE.replace("FIGURES", joined("figures.js")).replace("PLOTLY", get_plotlyjs())
    file.write_text(text, encoding="utf-8")
    with open_offline(chromium, file) as opened:
        opened.page.set_viewport_size({"width": 2100, "height": 1200})
        yield opened.page
        assert opened.complaints == []


def overlap(first, second):
    """Return the overlap of two boxes in pixels, the smaller of both directions."""
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    return min(across, down)


def complaints(measured, least=LEAST):
    left, top, right, bottom = measured["whole"]
    texts = measured["texts"]
    for place, one in enumerate(texts):
        x0, y0, x1, y1 = one["box"]
        if x0 < left - 1 or x1 > right + 1 or y0 < top - 1 or y1 > bottom + 1:
            yield f"{one['text']!r} is cut off"
        for other in texts[place + 1 :]:
            if overlap(one["box"], other["box"]) > 2:
                yield f"{one['text']!r} lies over {other['text']!r}"
    if right - left > max(measured["width"], least) + 1:
        yield f"it is {right - left - measured['width']:.0f} pixels wider than the page"
    if right - left > measured["scrolls"] + 1:
        yield "what is wider than the page cannot be scrolled to"
    if any(title[2] > measured["width"] + 1 for title in measured["titles"]):
        yield "its titles are wider than the page"
    yield from _misplaced(measured["legends"], measured["plot"], bottom)
    yield from _cells_too_small(measured["cells"])


def _misplaced(legends, plot, bottom):
    for legend in legends:
        if legend[1] > plot[3] and bottom - legend[3] > MOST_EMPTY:
            yield f"{bottom - legend[3]:.0f} pixels below the legend are empty"
        if overlap(legend, plot) > 1:
            yield "the legend covers the plot"


def _cells_too_small(cells):
    for cell in cells:
        if cell["box"][2] > cell["cell"][2] + 1 or cell["box"][3] > cell["cell"][3] + 1:
            yield f"{cell['text']!r} does not fit into its cell"


def figures_at(width, widths):
    """Return the figures by name: those of a width in rows that have every pair of values, and those of one trace."""
    views = {f"{name} of {what}" for name, what, at in rows_of("pairs", list(VIEWS), TRACES, widths) if at == width}
    every = {f"{name} of {what}" for name in VIEWS for what in TRACES}
    return {name: figure for name, figure in figures().items() if name in views or name not in every}


def complaints_of(page, width, found, least=LEAST):
    """Return what is wrong with figures at a width."""
    return [
        f"{name}: {complaint}"
        for name, figure in found.items()
        for complaint in complaints(page.evaluate(_DRAW, [json.loads(figure.to_json()), [width]]), least)
    ]


@pytest.mark.parametrize("width", quick(WIDTHS, (300, 1400)))
def test_nothing_overlaps_and_nothing_is_cut_off(page, width):
    assert complaints_of(page, width, figures_at(width, WIDTHS)) == []


@pytest.mark.exhaustive
def test_no_view_of_any_trace_overlaps_in_a_narrow_window(page):
    assert complaints_of(page, 320, figures()) == []


@pytest.mark.parametrize("width", quick(TALK_WIDTHS, (600,)))
def test_a_figure_for_a_projector_is_readable_as_well(page, width):
    found = {name: for_talk(figure) for name, figure in figures_at(width, TALK_WIDTHS).items()}
    assert complaints_of(page, width, found, LEAST * SCALE) == []


@pytest.mark.parametrize(
    ("width", "name"),
    [*((width, "memory") for width in (320, 400, 500, 517)), (1400, "states"), (1400, "timeline"), (1400, "comms")],
)
def test_a_legend_under_the_plot_is_right_below_the_axis(page, width, name):
    """Even if its entries take fewer lines than allowed, there is no gap in place of the others."""
    figure = json.loads(figures()[f"{name} of deep"].to_json())
    measured = page.evaluate(_DRAW, [figure, [width]])
    ((_, top, _, _),) = measured["legends"]
    (axis,) = [text["box"] for text in measured["texts"] if text["text"].startswith(("time ", "issue to end"))]
    assert -2 <= top - axis[3] <= 12


def test_a_figure_is_restored_when_its_page_is_wide_again(page):
    figure = json.loads(figures()["memory of deep"].to_json())
    wide, narrow, again = (
        page.evaluate(_DRAW, [figure, widths]) for widths in ([1000], [1000, 250], [1000, 250, 1000])
    )
    assert again == wide
    assert narrow["scrolls"] > narrow["width"] == 250
    assert narrow["whole"][3] > wide["whole"][3]


@pytest.mark.parametrize("view", ["layout", "memory"])
def test_a_figure_on_a_wider_page_has_nothing_of_its_narrow_layout(page, view):
    """Layouts for wide pages leave out what narrow ones change, such as the labels of an axis."""
    figure = json.loads(figures()[f"{view} of deep"].to_json())
    alone, after_narrow = (page.evaluate(_DRAW, [figure, widths]) for widths in ([700], [300, 700]))
    assert after_narrow == alone


@pytest.mark.parametrize("widths", [[595, 505], [505, 595], [395, 360, 395]])
def test_a_legend_keeps_its_rows_where_the_layout_stays(page, widths):
    """As where a notebook shows a cell again with another width of its scroll bar."""
    figure = json.loads(figures()["memory of deep"].to_json())
    assert list(complaints(page.evaluate(_DRAW, [figure, widths]))) == []


def test_the_check_finds_overlaps(page):
    """The measure reports a legend over the plot, and texts at the same position."""
    figure = draw("memory", long_names(simulate(Setup(num_ranks=2, num_units=3, steps=1))))
    figure.update_layout(legend={"x": 0.5, "y": 0.5}, meta=None)  # without the layouts for other widths
    figure.add_annotation(text="over the axis title", x=0.5, y=-0.1, xref="paper", yref="paper", showarrow=False)
    figure.add_annotation(text="over the axis title", x=0.5, y=-0.1, xref="paper", yref="paper", showarrow=False)
    figure.layout.title.text = figure.layout.title.text.replace("<br>", " ") * 2
    found = list(complaints(page.evaluate(_DRAW, [json.loads(figure.to_json()), [600]])))
    assert "the legend covers the plot" in found
    assert any("lies over" in complaint for complaint in found)
    assert "its titles are wider than the page" in found
