"""The panel and the dashboard in Notebook 7, in a real browser, on real ranks."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import notebook7, open_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import dashboard, headline, panel, section, shot, tool

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

CELLS = [f"%%fsdp{CELL}{UNHURRIED}", "%fsdp dashboard"]
MODEL, WIDGET = 0, 1
OF_NOTEBOOK = "Cannot read properties of undefined (reading 'schema')"
"""Error of Notebook 7.6 when it loads its settings, with the panel and without."""

COLOURS = """((place) => {
  const canvas = document.querySelector(`${place} .fw-timeline canvas`);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
})"""


@pytest.fixture(scope="module")
def book(tmp_path_factory, chromium):
    """A Notebook 7 with the panel, on a notebook whose kernel has loaded nothing."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("notebook")
    with notebook7(folder, CELLS, panel=built_panel()) as url, open_notebook(url, chromium) as book:
        yield book


def test_the_panel_is_found_in_the_menu_and_starts_ranks(book):
    book.page.get_by_role("menuitem", name="View", exact=True).click()
    book.page.get_by_text("Left Sidebar", exact=True).click()
    book.page.get_by_text("Show FSDP", exact=True).click()
    expect(panel(book)).to_contain_text("The workbench is not loaded in this notebook yet.")
    panel(book).get_by_label("Ranks", exact=True).fill("2")
    panel(book).get_by_label("Device").select_option("cpu")
    tool(book, "Start 2 ranks").click()
    expect(section(book, "Ranks").get_by_role("listitem")).to_have_count(2)
    shot(book, "notebook7_started")


def test_a_model_is_sharded_and_trains_and_the_ranks_are_shown_live(book):
    book.do(MODEL)
    expect(section(book, "Shard")).to_contain_text("model (Net)")
    status = section(book, "Shard").get_by_role("status")
    expect(status).to_contain_text("each rank sends per step")  # it shifts what is below it
    submit = section(book, "Shard").locator("button[type=submit]")
    submit.click()
    expect(section(book, "Commands")).to_contain_text("%fsdp shard model")
    expect(submit).to_have_text("Reshard")  # offered, like a step, once the ranks have finished
    expect(submit).to_be_disabled()  # nothing has changed
    expect(tool(book, "Train 1 step")).to_be_enabled()
    panel(book).get_by_label("Training steps").fill("100000")
    tool(book, "Train 100000 steps").click()
    expect(headline(book)).to_contain_text("of 100000 steps")
    first = headline(book).inner_text()
    expect(headline(book)).not_to_have_text(first)
    expect(
        section(book, "Ranks").get_by_role("img", name=re.compile("memory of rank 1: .* at the peak"))
    ).to_be_visible()


def test_the_dashboard_is_opened_from_the_command_palette_below_the_notebook(book):
    book.page.keyboard.press("Control+Shift+C")
    book.page.get_by_placeholder("SEARCH").fill("FSDP Dashboard")
    expect(book.page.locator(".lm-CommandPalette-item.lm-mod-active")).to_contain_text("Dashboard")
    book.page.keyboard.press("Enter")
    expect(dashboard(book).locator(".fw-badge")).to_contain_text("training")
    draws(book, ".fsdp-Dashboard")
    shot(book, "notebook7_dashboard")


def test_the_dashboard_is_a_widget_of_a_cell_as_well(book):
    book.do(WIDGET)
    widget = book.cell(WIDGET).locator(".fw-dashboard")
    widget.scroll_into_view_if_needed()
    expect(widget.locator(".fw-badge")).to_contain_text("training")
    draws(book, ".jp-OutputArea-output")
    shot(book, "notebook7_widget")


def draws(book, place):
    """Wait until the dashboard in ``place`` has drawn something, and later a later time."""
    view = f"document.querySelector('{place} .fw-dashboard').dashboard"
    book.page.wait_for_function(f"() => {view}.client.hasBegun && {COLOURS}('{place}') > 3")
    end = book.page.evaluate(f"{view}.model.end")
    book.page.wait_for_function(f"(end) => {view}.model.end > end", arg=end)


def test_abort_ends_the_step_and_the_ranks_are_ready(book):
    tool(book, "Abort").click()
    expect(section(book, "Ranks").locator(".fsdp-mod-idle")).to_have_count(2)


def test_no_outside_requests_and_no_console_errors(book):
    assert book.outside == []
    assert [error for error in book.errors if not error.startswith(f"TypeError: {OF_NOTEBOOK}")] == []
