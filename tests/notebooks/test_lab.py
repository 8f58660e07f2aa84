"""The workbench in JupyterLab, in a real browser: cells run, figures are drawn, nothing is fetched."""

import pytest

from tests.helpers.browser import OUTWARD, mode_bars
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import LONG_SCENES, SHOTS, jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL
from tests.views.test_theme import contrast

pytestmark = LONG_SCENES

CELLS = [
    "%load_ext workbench",
    "%fsdp start -n 2 --device cpu",
    f"%%fsdp{CELL}",
    "%fsdp shard model --wrap Block",
    "%fsdp step 3",
    "%fsdp layout",
    "%fsdp memory",
    "%fsdp timeline",
    "%fsdp states",
    "%fsdp comms",
    "%fsdp training",
    "%fsdp stop",
    "%fsdp timelin",
]
CELL_OF = {
    name: CELLS.index(f"%fsdp {name}") for name in ("layout", "memory", "timeline", "states", "comms", "training")
}
NUMBER_OF_THE_LAST = "() => window.jupyterapp.shell.currentWidget.content.widgets.at(-1).model.executionCount"
IS_LARGE = "(figure) => { const box = figure.getBoundingClientRect(); return box.width > 500 && box.height > 200; }"


@pytest.fixture(scope="module")
def ran(tmp_path_factory, chromium):
    """The notebook in the browser, with the panel, after all its cells have run."""
    with (
        jupyterlab(tmp_path_factory.mktemp("lab"), CELLS, panel=built_panel()) as url,
        open_notebook(url, chromium) as lab,
    ):
        lab.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")  # waits until they end
        words = lab.page.locator(".jp-Notebook").inner_text()
        assert lab.page.evaluate(NUMBER_OF_THE_LAST) == len(CELLS), words[-2000:]
        yield lab


@pytest.mark.parametrize("name", sorted(CELL_OF))
def test_every_view_is_drawn(ran, name):
    cell = ran.cell(CELL_OF[name])
    cell.scroll_into_view_if_needed()
    figure = cell.locator(".js-plotly-plot")
    figure.locator(".main-svg").first.wait_for()
    ran.page.wait_for_function(IS_LARGE, arg=figure.element_handle())
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"lab_{name}.png").write_bytes(cell.screenshot())
    (buttons,) = mode_bars(figure)
    assert "Download plot as a PNG" in buttons
    assert not [title for title in buttons if OUTWARD.search(title)]


# for each text of a figure on the page: the text, its visible colour, and the colour behind it
TEXTS = """([cell, wanted]) => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const seen = (...colours) => {
        for (pen.fillStyle of colours) pen.fillRect(0, 0, 1, 1);
        const parts = [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        return "#" + parts.map((part) => part.toString(16).padStart(2, "0")).join("");
    };
    const page = [], style = (place) => getComputedStyle(place);
    for (let place = cell; place !== null; place = place.parentElement) page.unshift(style(place).backgroundColor);
    const texts = [...cell.querySelectorAll(wanted)].flatMap((text) => [text, ...text.querySelectorAll("tspan")]);
    return texts.map((text) => [text.textContent, seen(...page, style(text).fill), seen(...page)]);
}"""
ON_THE_PAGE = (
    ".gtitle, .gtitle-subtitle, .xtitle, .ytitle, .legendtext, .cell-text, .annotation-text, .xtick *, .ytick *"
)


@pytest.mark.parametrize("theme", ["Dark", "Light"])
def test_text_of_figures_has_enough_contrast_in_every_theme(ran, theme):
    ran.change_theme(theme)
    for name, number in CELL_OF.items():
        cell = ran.cell(number)
        cell.scroll_into_view_if_needed()
        cell.locator(".gtitle").first.wait_for()
        texts = ran.page.evaluate(TEXTS, [cell.element_handle(), ON_THE_PAGE])
        assert len(texts) > 5
        assert [found for found in texts if contrast(*found[1:]) < 7] == []
        (SHOTS / f"lab_{name}_{theme.lower()}.png").write_bytes(cell.screenshot())


def test_progress_ends_full_with_the_result(ran):
    cell = ran.cell(CELLS.index("%fsdp step 3"))
    cell.scroll_into_view_if_needed()  # JupyterLab empties cells that are out of sight
    cell.get_by_text("3 of 3 steps").wait_for()
    cell.get_by_text("3 steps, loss").wait_for()


def test_an_error_is_one_sentence_with_a_suggestion(ran):
    cell = ran.cell(len(CELLS) - 1)
    cell.scroll_into_view_if_needed()
    cell.get_by_text("did you mean 'timeline'?").wait_for()
    assert cell.get_by_text("Traceback").count() == 0


def test_no_outside_requests_and_no_console_errors(ran):
    assert ran.outside == []
    assert ran.errors == []
