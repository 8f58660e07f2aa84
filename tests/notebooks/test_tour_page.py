"""The page that the demo writes, in a browser with the network off."""

import pytest

from tests.browser import figures, open_offline

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

VIEWS = 9  # layout, training, timeline, states, memory, comms; again comms, memory, states


def test_all_figures_are_drawn_and_nothing_is_fetched(demo_run, chromium):
    page = demo_run.folder / "tour.html"
    with open_offline(chromium, page) as opened:
        opened.page.wait_for_function(f"document.querySelectorAll('.plotly-graph-div').length >= {VIEWS}")
        drawn = figures(opened.page)
        assert len(drawn) == VIEWS
        assert all(f["width"] > 500 and f["height"] > 150 and f["marks"] > 0 for f in drawn), drawn
        assert opened.page.title() == "FSDP workbench: the tour"
        assert "held-out loss" in opened.page.inner_text("body")
        assert opened.outside == []
        assert opened.complaints == []


def test_plotly_is_inside_once(demo_run):
    text = (demo_run.folder / "tour.html").read_text(encoding="utf-8")
    assert text.count("* plotly.js v") == 1
    assert len(text) < 15e6
