"""The panel in JupyterLab, in a real browser, on real ranks; the only magic typed defines a model."""

import re
from contextlib import suppress

import psutil
import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, open_notebook, write_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import SHOW, headline, panel, process_of, reply, run, section, shot, status_bar, tool

pytestmark = [pytest.mark.browser, pytest.mark.lasting_browser, pytest.mark.cluster, pytest.mark.timeout(900)]

CELLS = [f"%%fsdp{CELL}{UNHURRIED}"]

# number of lines of the headline in a panel of 250 pixels, and how many of them are hidden
IN_A_NARROW_PANEL = """(line) => {
    const panel = line.closest(".fsdp-Panel-body");
    panel.style.width = "250px";
    const height = parseFloat(getComputedStyle(line).lineHeight), {clientHeight, scrollHeight} = line;
    panel.style.width = "";
    return [clientHeight, scrollHeight - clientHeight].map((pixels) => Math.round(pixels / height));
}"""

# whether the lower right end of a figure larger than its tab can be scrolled to
SEEN_BY_SCROLLING = """() => {
    const tab = document.querySelector(".fsdp-Picture"), figure = tab.querySelector(".main-svg");
    if (tab.scrollHeight <= tab.clientHeight || tab.scrollWidth <= tab.clientWidth) return false;
    tab.scrollTo(1e6, 1e6);
    const [end, seen] = [figure, tab].map((element) => element.getBoundingClientRect());
    tab.scrollTo(0, 0);
    return end.right <= seen.right && end.bottom <= seen.bottom;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel open, on a notebook whose kernel has loaded nothing; there is another notebook."""
    folder = tmp_path_factory.mktemp("lab")
    expect.set_options(timeout=PATIENCE_MS)
    with jupyterlab(folder, CELLS, panel=built_panel(), has_one_kernel=False) as url:
        write_notebook(folder / "other.ipynb", ["1 + 1"])
        with open_notebook(url, chromium) as lab:
            lab.page.evaluate(f"() => {SHOW}")
            yield lab


def test_ranks_are_started_by_a_form_in_a_notebook_that_has_loaded_nothing(lab):
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    shot(lab, "not_loaded")
    fields = panel(lab).locator(".fsdp-Form :is(input, select):visible")
    assert len({(box["x"], box["width"]) for box in (field.bounding_box() for field in fields.all())}) == 1
    panel(lab).get_by_label("Ranks", exact=True).fill("2")
    panel(lab).get_by_label("Device").select_option("cpu")
    tool(lab, "Start 2 ranks").click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)
    expect(section(lab, "Ranks")).to_contain_text("idle")
    expect(section(lab, "Units")).to_contain_text("No model is sharded.")


def test_until_ranks_have_been_stopped_no_others_can_be_started(lab):
    process = process_of(lab, 1)
    process.suspend()  # makes stopping the ranks take a while
    tool(lab, "Stop the ranks").click()
    expect(panel(lab)).to_contain_text("The ranks are stopping.")
    expect(tool(lab, re.compile("^Start"))).to_be_disabled()
    shot(lab, "stopping")
    with suppress(psutil.NoSuchProcess):
        process.resume()
    expect(tool(lab, re.compile("^Start"))).to_be_enabled()
    expect(panel(lab)).not_to_contain_text("The ranks are stopping.")
    panel(lab).get_by_role("spinbutton", name="Ranks").fill("2")
    panel(lab).get_by_role("combobox", name="Device").select_option("cpu")
    tool(lab, "Start 2 ranks").click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)
    expect(section(lab, "Commands")).not_to_contain_text("being started or stopped")


def test_a_model_is_sharded_by_a_form_with_a_preview(lab):
    lab.run(0)
    lab.ends(0)
    shard = section(lab, "Shard")
    expect(shard).to_contain_text("model (Net)")
    shard.get_by_label(re.compile("^Block")).check()
    expect(shard.get_by_role("row").first).to_have_text("units4")  # three blocks and the root
    expect(shard.get_by_role("status")).to_contain_text("each rank sends per step")
    shard.get_by_label("Precision").select_option("bf16")
    shard.get_by_label("Prefetch").fill("2")
    shot(lab, "shard")
    shard.locator("button[type=submit]").click()
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)  # including blocks, which is not a unit
    expect(section(lab, "Commands")).to_contain_text("%fsdp shard model")
    expect(reply(lab)).to_contain_text("4 units")
    submit = shard.locator("button[type=submit]")
    expect(submit).to_have_text("Reshard")
    expect(submit).to_have_attribute("title", "No setting has changed.")
    shard.get_by_label("Prefetch").press("Enter")  # changes nothing either
    expect(section(lab, "Commands")).not_to_contain_text("%fsdp reshard")
    expect(shard.get_by_role("row").first).to_have_text("units4")  # the preview of a reshard without changes


def test_the_form_shows_the_current_policy_and_sends_only_changes(lab):
    shard = section(lab, "Shard")
    precision, prefetch = shard.get_by_label("Precision"), shard.get_by_label("Prefetch")
    expect(shard.get_by_label(re.compile("^Block"))).to_be_checked()
    expect(shard.get_by_label("Mesh")).to_have_value("2")
    expect(precision).to_have_value("bf16")
    expect(prefetch).to_have_value("2")
    shot(lab, "sharded")
    precision.select_option("off")
    prefetch.fill("0")
    shard.locator("button[type=submit]").click()
    expect(section(lab, "Commands")).to_contain_text("%fsdp reshard model --mp off --prefetch 0")
    expect(section(lab, "Commands")).to_contain_text("resharded")
    expect(precision).to_have_value("off")
    expect(prefetch).to_have_value("0")


def test_a_running_step_is_paused_inspected_and_continued(lab):
    panel(lab).get_by_label("Training steps").fill("100000")
    assert panel(lab).get_by_label("Training steps").evaluate("(field) => field.scrollWidth <= field.clientWidth")
    tool(lab, "Train 100000 steps").click()
    expect(headline(lab)).to_contain_text("of 100000 steps")
    expect(status_bar(lab)).to_contain_text("steps/s")
    tool(lab, "Pause inside the step").click()
    expect(section(lab, "Ranks").locator(".fsdp-mod-held").first).to_be_visible()
    expect(status_bar(lab)).to_have_class("fsdp-mod-held")
    shot(lab, "paused")
    tool(lab, "Run to the next event").click()
    expect(section(lab, "Commands")).to_contain_text("%fsdp next")
    section(lab, "Units").locator("[data-fsdp-unit='blocks.1'] .fsdp-Unit-row").click()
    section(lab, "Units").get_by_role("button", name="blocks.1.norm.weight").click()
    expect(section(lab, "Commands")).to_contain_text("%fsdp inspect blocks.1.norm.weight")
    result = section(lab, "Commands").get_by_role("region", name="Result of %fsdp inspect blocks.1.norm.weight")
    expect(result).to_have_css("white-space", "pre")  # a table: its columns stay aligned
    result.focus()  # so that keys scroll it
    expect(result).to_be_focused()
    tab = lab.page.get_by_role("tab", name="inspect (FSDP)")
    expect(tab).to_be_visible()
    table = lab.page.locator(".fsdp-Picture:visible table").last
    expect(table).to_contain_text("rank 1")
    shot(lab, "inspected")
    tab.locator(".lm-TabBar-tabCloseIcon").click()
    tool(lab, "Continue").click()
    expect(headline(lab)).to_contain_text("of 100000 steps")


def test_a_breakpoint_is_set_on_a_unit_turned_off_and_cleared(lab):
    tool(lab, "Pause inside the step").click()  # set while the ranks run, it may come too late for one of them
    expect(headline(lab)).to_contain_text("2 ranks stopped")
    unit = section(lab, "Units").locator("[data-fsdp-unit='blocks.2'] .fsdp-Unit-row")
    unit.click(button="right")
    shot(lab, "menu")
    lab.page.get_by_text("Break before Its Backward").click()
    breakpoints = section(lab, "Breakpoints")
    expect(breakpoints.get_by_role("checkbox")).to_be_checked()
    tool(lab, "Continue").click()
    expect(headline(lab)).to_contain_text("2 ranks stopped before backward of blocks.2")
    expect(headline(lab)).to_have_attribute("title", re.compile(r"\(breakpoint 1: backward:blocks\.2\)$"))
    lines, hidden = headline(lab).evaluate(IN_A_NARROW_PANEL)
    assert (lines, hidden) == (2, 0)
    breakpoints.get_by_role("checkbox").click()
    expect(breakpoints).to_contain_text("1 off")
    breakpoints.get_by_role("button", name=re.compile("^Clear")).click()
    expect(breakpoints.get_by_role("checkbox")).to_have_count(0)
    tool(lab, "Continue").click()
    expect(headline(lab)).to_contain_text("of 100000 steps")


def test_the_layout_of_a_unit_opens_in_its_own_tab(lab):
    section(lab, "Units").locator("[data-fsdp-unit='blocks.1'] .fsdp-Unit-row").click(button="right")
    lab.page.get_by_text("Show in Layout").click()
    expect(lab.page.get_by_role("tab", name="layout (FSDP)")).to_be_visible()
    figure = lab.page.locator(".jp-MainAreaWidget .js-plotly-plot")
    expect(figure.locator(".gtitle")).to_contain_text("blocks.1")
    expect(figure).to_contain_text("norm.weight")
    assert figure.bounding_box()["width"] > 300
    expect(section(lab, "Commands")).to_contain_text("%fsdp layout --unit blocks.1")
    shot(lab, "layout")
    lab.page.set_viewport_size({"width": 900, "height": 400})
    lab.page.wait_for_function(SEEN_BY_SCROLLING)
    shot(lab, "layout_narrow")
    lab.page.set_viewport_size({"width": 1400, "height": 1100})
    lab.page.get_by_role("tab", name="layout (FSDP)").locator(".lm-TabBar-tabCloseIcon").click()
    expect(headline(lab)).to_contain_text("of 100000 steps")  # training continued


def test_the_line_of_a_button_can_be_copied(lab):
    lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tool(lab, "Pause inside the step").click(button="right", force=True)
    lab.page.get_by_text("Copy as %fsdp Line").click()
    lab.page.wait_for_function("async () => (await navigator.clipboard.readText()) === '%fsdp pause'")


def test_the_dashboard_is_a_tab_next_to_the_notebook(lab):
    run(lab, "fsdp:open-dashboard")
    expect(lab.page.locator(".fsdp-Dashboard .fw-badge")).to_contain_text("training")
    lab.page.wait_for_function("() => document.querySelector('.fsdp-Dashboard .fw-dashboard').dashboard.model.end > 0")
    lab.page.evaluate("() => new Promise(requestAnimationFrame)")
    shot(lab, "dashboard")


def test_a_reloaded_page_shows_the_truth_again_in_the_middle_of_training(lab):
    lab.page.evaluate("() => window.jupyterapp.serviceManager.workspaces.fetch('default')")
    lab.page.reload()
    expect(panel(lab)).to_be_visible()
    expect(headline(lab)).to_contain_text("of 100000 steps")
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)
    expect(lab.page.locator(".fsdp-Dashboard .fw-badge")).to_contain_text("training")
    shot(lab, "reloaded")


def test_each_notebook_has_its_own_ranks(lab):
    run(lab, "docmanager:open", path="other.ipynb")
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    lab.page.get_by_role("tab", name="run.ipynb", exact=True).click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)


def test_it_is_dark_with_a_dark_theme_and_fits_into_a_narrow_window(lab):
    lab.change_theme("Dark")
    shot(lab, "dark")
    lab.page.set_viewport_size({"width": 700, "height": 900})
    lab.page.evaluate(f"() => {SHOW}")
    expect(tool(lab, "Abort")).to_be_visible()
    box = panel(lab).bounding_box()
    for button in panel(lab).get_by_role("toolbar").get_by_role("button").all():
        inside = button.bounding_box()
        assert inside["x"] + inside["width"] <= box["x"] + box["width"]
    shot(lab, "narrow")
    lab.page.set_viewport_size({"width": 1400, "height": 1100})
    lab.change_theme("Light")


def test_the_controls_hide_what_is_scrolled_below_them_while_the_kernel_is_silent_too(lab):
    opacities = lab.page.evaluate("""() => {
        const body = document.querySelector(".fsdp-Panel-body"), controls = body.querySelector(".fsdp-Controls");
        const opacity = (element) => Number(getComputedStyle(element).opacity);
        body.classList.add("fsdp-mod-silent");
        const found = [controls, controls.firstElementChild, body.querySelector(".fsdp-Section")].map(opacity);
        body.classList.remove("fsdp-mod-silent");
        return found;
    }""")
    assert opacities == [1, 0.55, 0.55]


def test_abort_ends_the_step_and_the_ranks_are_ready(lab):
    tool(lab, "Abort").click()
    expect(section(lab, "Ranks").locator(".fsdp-mod-idle")).to_have_count(2)


def test_after_a_restart_of_the_kernel_nothing_old_is_shown_and_ranks_start_again(lab):
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    expect(section(lab, "Ranks")).to_have_count(0)
    panel(lab).get_by_label("Ranks", exact=True).fill("1")
    tool(lab, "Start 1 rank").click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(1)


def test_no_outside_requests_and_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
