"""Figures in cells of JupyterLab and Notebook: laid out for the cell's width, and saved as they were made."""

import json

import pytest

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, notebook7, open_notebook
from tests.helpers.panel_page import run, shot
from tests.helpers.simulated_job import example_trace
from workbench.trace import save
from workbench.views import draw
from workbench.views.theme import NARROWEST, PLOTLY_MIME

pytestmark = [pytest.mark.exhaustive, pytest.mark.browser, pytest.mark.lasting_browser, pytest.mark.timeout(600)]

CELLS = ["%load_ext workbench\n%fsdp open run.trace", "%fsdp timeline"]
OPEN, DRAW = 0, 1

# text of the title's lines, their distance from the visible end of the cell, and the height to scroll
SEEN = """() => {
    const graph = document.querySelector(".js-plotly-plot"), around = graph.parentElement;
    const title = graph.querySelector(".gtitle");
    if (!title || !title.getBoundingClientRect().width) return null;
    const {right} = around.getBoundingClientRect(), lines = [...title.querySelectorAll("tspan.line")];
    return {lines: lines.length, room: right - title.getBoundingClientRect().right,
        hidden: around.scrollWidth - around.clientWidth, width: graph.getBoundingClientRect().width};
}"""


NARROW = {"JupyterLab": {"width": 700, "height": 1000}, "Notebook": {"width": 400, "height": 1000}}
"""Windows in which a cell is some 300 pixels wide: JupyterLab has a panel open, Notebook has none."""


@pytest.fixture(scope="module", params=NARROW)
def book(request, tmp_path_factory, chromium):
    """A notebook with a trace, its first cells run."""
    folder = tmp_path_factory.mktemp("figures")
    save(example_trace(), folder / "run.trace")
    serve = jupyterlab if request.param == "JupyterLab" else notebook7
    with serve(folder, CELLS, panel=built_panel()) as url, open_notebook(url, chromium) as book:
        book.page.set_default_timeout(PATIENCE_MS)
        book.folder, book.url, book.name = folder, url, request.param
        for number in (OPEN, DRAW):
            book.do(number)
        yield book


def seen(book, condition):
    """Wait until a figure is drawn and ``condition`` holds; return its measures."""
    book.cell(DRAW).locator(".js-plotly-plot .gtitle").scroll_into_view_if_needed()
    return book.page.wait_for_function(f"() => {{ const f = ({SEEN})(); return f && {condition} && f; }}").json_value()


def test_a_figure_follows_the_width_of_its_cell(book):
    wide = seen(book, f"f.width >= {NARROWEST}")
    assert wide["hidden"] == 0
    book.page.set_viewport_size(NARROW[book.name])
    narrow = seen(book, f"f.lines > {wide['lines']}")
    assert narrow["room"] >= 0
    shot(book, f"figure_narrow_{book.name}")
    book.page.set_viewport_size({"width": 1400, "height": 1100})
    again = seen(book, f"f.lines === {wide['lines']}")
    assert again == wide


def test_a_notebook_keeps_the_figure_that_it_was_given(book):
    run(book, "docmanager:save")
    saved = json.loads((book.folder / "run.ipynb").read_text())
    (output,) = saved["cells"][DRAW]["outputs"]
    given = json.loads(draw("timeline", example_trace()).to_json())
    assert output["data"][PLOTLY_MIME]["layout"] == given["layout"]


def test_figures_of_a_saved_notebook_are_drawn_again(book):
    book.page.set_viewport_size(NARROW[book.name])
    book.page.goto(book.url.replace("&reset", ""))
    again = seen(book, "true")
    assert again["room"] >= 0
    assert again["lines"] > 1
    assert book.outside == []
