from __future__ import annotations

import itertools
import json

import numpy as np
import plotly.io as pio
import pytest

from tests.helpers.package_source import REPO
from workbench.events import Category, Kind, UnitState
from workbench.views import theme

DARK_PAGE = "#111111"  # JupyterLab's dark theme
_TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
# how each type of colour vision perceives linear RGB (Machado, Oliveira, Fernandes 2009, severity 1)
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear_rgb(colour):
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    low, high = sorted(_TO_XYZ[1] @ linear_rgb(colour) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour, sight):
    xyz = _TO_XYZ @ np.clip(sight @ linear_rgb(colour), 0, 1) / [0.95047, 1, 1.08883]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def ciede2000(one, other):
    """Return the difference of two CIELAB colours; 1 is just visible side by side, 10 is clear at a glance."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma7 = ((np.hypot(a1, b1) + np.hypot(a2, b2)) / 2) ** 7
    stretch = 1.5 - 0.5 * np.sqrt(chroma7 / (chroma7 + 25**7))
    a1, a2 = a1 * stretch, a2 * stretch
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2(b1, a1)) % 360, np.degrees(np.arctan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180
    light, chroma, hue = (l1 + l2) / 2, (c1 + c2) / 2, (h1 + turn / 2) % 360
    cos = lambda degrees: np.cos(np.radians(degrees))  # noqa: E731 - five uses in the one formula below
    t = 1 - 0.17 * cos(hue - 30) + 0.24 * cos(2 * hue) + 0.32 * cos(3 * hue + 6) - 0.2 * cos(4 * hue - 63)
    by_light = (l2 - l1) / (1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2))
    by_chroma = (c2 - c1) / (1 + 0.045 * chroma)
    by_hue = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / (1 + 0.015 * chroma * t)
    rotation = np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    rotation *= -2 * np.sqrt(chroma**7 / (chroma**7 + 25**7))
    return np.sqrt(by_light**2 + by_chroma**2 + by_hue**2 + rotation * by_chroma * by_hue)


TIMELINE_KINDS = [
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.OPTIMIZER,
    Kind.ALL_GATHER,
    Kind.REDUCE_SCATTER,
    Kind.COPY_IN,
    Kind.WAIT,
    Kind.READERS,
    Kind.GATE,
    Kind.SEND,
    Kind.RECV,
]


def test_the_difference_measure_agrees_with_a_published_pair():
    assert ciede2000((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)


@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
@pytest.mark.parametrize(
    "colours",
    [
        list(theme.CATEGORY_COLOURS.values()),
        list(theme.UNIT_STATE_COLOURS.values()),
        [theme.KIND_COLOURS[kind] for kind in TIMELINE_KINDS],
    ],
    ids=["categories", "states", "timeline"],
)
def test_colours_that_meet_in_a_figure_stay_apart_for_every_sight(colours, sight):
    pairs = itertools.combinations([lab(colour, sight) for colour in colours], 2)
    assert min(ciede2000(*pair) for pair in pairs) >= 9.5


@pytest.mark.parametrize(
    ("table", "words"),
    [(theme.CATEGORY_COLOURS, Category), (theme.UNIT_STATE_COLOURS, UnitState), (theme.KIND_COLOURS, Kind)],
    ids=["categories", "states", "kinds"],
)
def test_every_colour_is_visible_on_light_and_dark_pages(table, words):
    assert set(table) == set(words)
    for colour in table.values():
        assert min(contrast(colour, "#ffffff"), contrast(colour, DARK_PAGE)) >= 1.8


@pytest.mark.parametrize("kind", Kind)
def test_event_colours_have_contrast_on_a_dark_page(kind):
    assert contrast(theme.KIND_COLOURS[kind], DARK_PAGE) >= 3


@pytest.mark.parametrize("page", ["#ffffff", DARK_PAGE])
def test_text_is_legible_on_light_and_dark_pages(page):
    assert contrast(theme.INK, page) >= 4
    assert contrast(theme.WRONG, page) >= 4


def test_a_page_knows_the_text_of_figures_by_its_colours():
    rule = (REPO / "workbench" / "widgets" / "static" / "figures.css").read_text("utf-8")
    for colour in (theme.INK, theme.WRONG):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert f'text[style*="fill: rgb({red}, {green}, {blue})"]' in rule
    assert f'tspan[style*="fill:{theme.WRONG}"]' in rule  # part of a text


def test_waiting_has_its_own_colour():
    assert list(theme.KIND_COLOURS.values()).count(theme.KIND_COLOURS[Kind.WAIT]) == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 64])
def test_each_rank_has_its_colour(num_ranks):
    assert len(set(theme.rank_colours(num_ranks))) == num_ranks


def test_labels_are_words():
    assert Category.ALL_GATHER_BUFFERS.words == "all-gather buffers"
    assert UnitState.ALL_GATHER_IN_FLIGHT.words == "all-gather in flight"
    assert Kind.REDUCE_SCATTER.words == "reduce-scatter"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("<b>&", "&lt;b&gt;&amp;"), ("$x$", "&#36;x&#36;"), ("a'\"", "a&#x27;&#34;"), ("blocks.0", "blocks.0")],
)
def test_escape_leaves_nothing_that_plotly_would_read(text, escaped):
    assert theme.escape(text) == escaped


@pytest.mark.parametrize("width", [5, 10, 31, 32])
def test_shortened_text_keeps_both_ends(width):
    text = "transformer.blocks.11.attn.weight"
    short = theme.shorten(text, width)
    assert len(short) == width
    head, tail = short.split("…")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert theme.shorten(text, 33) == text


def test_a_figure_carries_its_template_and_changes_no_default():
    before = pio.templates.default
    fig = theme.figure("A <title>", "text " * 60, height=300, barmode="stack")
    assert pio.templates.default == before
    assert fig.layout.template == theme.TEMPLATE
    assert fig.layout.title.text == "A &lt;title&gt;"
    assert fig.layout.title.subtitle.text.count("<br>") == 3
    assert fig.layout.barmode == "stack"
    assert fig.layout.margin.t > theme.figure("A title").layout.margin.t


@pytest.mark.parametrize("amount", ["28.4 ms", "2.02 MiB", "512 B", "1.06 s", "5 h", "46 min"])
def test_a_line_of_a_title_does_not_end_between_a_number_and_its_unit(amount):
    for width in range(40):
        text = f"{'x' * width} {amount} of it, {'and more ' * 20}"
        lines, _ = theme.heading(text, text)
        assert all(amount in each for each in (lines["text"], lines["subtitle"]["text"]))


def test_an_empty_figure_shows_its_sentence():
    fig = theme.empty("Nothing <here> yet.")
    assert not fig.data
    assert [a.text for a in fig.layout.annotations] == ["Nothing &lt;here&gt; yet."]
    assert "Nothing" in json.loads(fig.to_json())["layout"]["annotations"][0]["text"]


@pytest.mark.parametrize("width", [700, 900, 1600])
def test_titles_end_before_the_tool_bar(width):
    lines = theme.heading("abcd " * 80, "", width)[0]["text"].split("<br>")
    assert 0.9 * (width - 254) < max(map(len, lines)) * 17 * 0.546 <= width - 254
