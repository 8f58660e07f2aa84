"""A user who types nothing: an example, its steps, every view, a trace, all from the panel in a real browser."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import LONG_SCENES, jupyterlab, open_notebook, write_notebook
from tests.helpers.panel_page import dashboard, headline, panel, reply, run, section, shot, to, tool
from workbench.views import VIEWS

pytestmark = LONG_SCENES

NARROW = 250  # width of the panel in pixels

# a class with a name longer than the panel is wide
LONG = """%%fsdp
from torch import nn
class TransformerDecoderLayerWithCrossAttentionAndMixtureOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return self.inner(x)
wide = nn.Sequential(*(TransformerDecoderLayerWithCrossAttentionAndMixtureOfExperts() for _ in range(2)))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel, on a notebook whose kernel has loaded nothing; there is another notebook."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("lab")
    with jupyterlab(folder, [LONG], panel=built_panel(), has_one_kernel=False) as url:
        write_notebook(folder / "other.ipynb", ["1 + 1"])
        with open_notebook(url, chromium) as lab:
            lab.folder = folder
            yield lab


def view(lab, name):
    return section(lab, "Views").get_by_role("button", name=name, exact=True)


def test_the_icon_in_the_toolbar_opens_the_panel(lab):
    lab.page.evaluate("() => window.jupyterapp.shell.activateById('filebrowser')")
    expect(panel(lab)).to_be_hidden()
    lab.page.locator('.jp-NotebookPanel-toolbar [data-jp-item-name="fsdp-panel"]').click()
    expect(panel(lab)).to_be_visible()


def test_a_start_shows_progress_and_can_be_cancelled(lab):
    panel(lab).get_by_label("Ranks", exact=True).fill("2")
    panel(lab).get_by_label("Device").select_option("cpu")
    tool(lab, "Start 2 ranks").click()
    expect(tool(lab, "Starting\u2026")).to_be_disabled()
    tool(lab, "Cancel").click()
    expect(reply(lab)).to_contain_text(re.compile("[Cc]ancelled|2 ranks started"))  # if the start was quicker
    expect(reply(lab)).not_to_have_class(re.compile("fsdp-mod-bad"))  # the user asked for it
    if panel(lab).get_by_role("button", name="Stop the ranks").count():
        tool(lab, "Stop the ranks").click()
    expect(tool(lab, "Start 2 ranks")).to_be_enabled()


def test_starting_many_ranks_on_few_cores_is_warned_about(lab):
    panel(lab).get_by_label("Ranks", exact=True).fill("1000")
    expect(panel(lab)).to_contain_text(re.compile(r"cores? here: 1000 ranks share .* and the start may take minutes"))
    tool(lab, "Start 1000 ranks").click()
    dialog = lab.page.get_by_role("dialog")
    expect(dialog).to_contain_text("Start 1000 ranks on ")
    expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()  # the Enter that sent the form starts nothing
    shot(lab, "crowd")
    dialog.get_by_role("button", name="Cancel").click()
    panel(lab).get_by_label("Ranks", exact=True).fill("2")
    tool(lab, "Start 2 ranks").click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)


def test_a_disabled_button_explains_why(lab):
    step = tool(lab, "Train 1 step")
    expect(step).to_have_attribute("title", "Train 1 step: Define a model in a %%fsdp cell, and run the cell.")
    step.click(force=True)  # disabled for Playwright, but users can press it
    expect(reply(lab)).to_contain_text("Define a model in a %%fsdp cell, and run the cell.")


def test_a_long_name_of_a_class_does_not_push_the_form_out_of_the_panel(lab):
    lab.do(0)
    expect(section(lab, "Shard").get_by_role("row").first).to_contain_text("units")
    panel(lab).evaluate("(node, width) => { node.style.width = `${width}px`; }", NARROW)
    wide = panel(lab).evaluate(
        """(node) => [...node.querySelectorAll(".fsdp-Form *")].map((each) => each.getBoundingClientRect().right
            - node.getBoundingClientRect().left)"""
    )
    shot(lab, "long_name")
    assert max(wide) <= NARROW
    label = section(lab, "Shard").get_by_title("TransformerDecoderLayerWithCrossAttentionAndMixtureOfExperts")
    expect(label).to_contain_text("\u00d72")
    panel(lab).evaluate("(node) => { node.style.width = ''; }")


def test_an_example_is_put_into_the_notebook_and_run(lab):
    run(lab, "fsdp:example")
    expect(lab.page.locator(".jp-CodeCell")).to_have_count(2)
    run(lab, "fsdp:example")  # finds the existing one
    expect(lab.page.locator(".jp-CodeCell")).to_have_count(2)
    run(lab, "notebook:run-cell")
    expect(section(lab, "Shard")).to_contain_text("model (GPT)")
    expect(panel(lab)).to_contain_text("Choose below how to shard the model.")
    shot(lab, "example")


def test_it_is_sharded_and_trained_by_buttons(lab):
    form = section(lab, "Shard")
    form.get_by_label("Model").select_option("model")
    expect(form.get_by_role("row").first).to_have_text("units5")
    form.locator("button[type=submit]").click()
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(6)
    expect(reply(lab)).to_contain_text("5 units")
    expect(reply(lab).get_by_role("term").first).to_have_text("units")
    expect(reply(lab).get_by_role("definition").first).to_have_text("(root), blocks.0, blocks.1, blocks.2, blocks.3")
    shot(lab, "facts")
    panel(lab).get_by_label("Training steps").fill("2")
    tool(lab, "Train 2 steps").click()
    expect(reply(lab)).to_contain_text("%fsdp step 2")
    expect(panel(lab).locator(".fsdp-Numbers")).to_have_text(re.compile(r"step 1$"))
    panel(lab).get_by_role("button", name="Close the reply").click()
    expect(reply(lab)).to_have_count(0)


@pytest.mark.parametrize("word", VIEWS)
def test_every_view_has_a_button_a_command_and_a_tab(lab, word):
    view(lab, word.capitalize()).click()
    tab = lab.page.get_by_role("tab", name=f"{word} (FSDP)", exact=True)
    expect(tab).to_be_visible()
    expect(lab.page.locator(".fsdp-Picture:visible .js-plotly-plot .main-svg").first).to_be_visible()
    run(lab, f"fsdp:view-{word}")
    expect(tab).to_have_count(1)  # the same tab is reused
    shot(lab, f"view_{word}")
    tab.locator(".lm-TabBar-tabCloseIcon").click()


def test_an_explanation_is_shown_with_its_picture_below_it(lab):
    views = section(lab, "Views")
    views.get_by_label("Explain").fill("step")
    view(lab, "Explain").click()
    tab = lab.page.get_by_role("tab", name="explain (FSDP)", exact=True)
    expect(tab).to_be_visible()
    shown = lab.page.locator(".fsdp-Picture:visible")
    expect(shown.locator("strong")).to_contain_text("step 1 took ")
    expect(shown.locator("> .fsdp-note")).to_have_text("as of step 1; press Explain again to refresh")
    expect(shown.locator(".gtitle")).to_contain_text("Step 1: ")
    shown.get_by_role("button", name=re.compile("^rank 1: ")).click()  # a line of evidence
    expect(shown.locator('.shapelayer path[style*="stroke-width: 3px"]')).to_have_count(1)
    shot(lab, "explain")
    views.get_by_label("Explain").fill("nothing.here")
    views.get_by_label("Explain").press("Enter")
    expect(reply(lab)).to_contain_text("there is no unit 'nothing.here'")
    expect(reply(lab)).to_have_class(re.compile("fsdp-mod-bad"))
    tab.locator(".lm-TabBar-tabCloseIcon").click()


def test_a_fault_is_injected_named_and_removed_by_buttons(lab):
    views = section(lab, "Views")
    views.get_by_label("Fault").select_option("straggler")
    expect(views.get_by_role("button", name="Inject")).to_have_attribute("title", re.compile("^Rank R sleeps MS ms"))
    views.get_by_role("button", name="Inject").click()
    expect(reply(lab)).to_contain_text(re.compile(r"rank \d sleeps 200 ms in every forward of unit"))
    views.get_by_role("button", name="Remove").click()
    expect(reply(lab)).to_contain_text("straggler")
    expect(reply(lab)).not_to_have_class(re.compile("fsdp-mod-bad"))


def test_a_step_is_verified_and_failures_are_red(lab):
    view(lab, "Verify").click()
    expect(reply(lab)).to_contain_text("sharded training is the same as unsharded")
    section(lab, "Record").get_by_label("Export to").fill("run.nothing")
    section(lab, "Record").get_by_role("button", name="Export").click()
    expect(reply(lab)).to_have_class(re.compile("fsdp-mod-bad"))
    expect(reply(lab).get_by_role("button", name="Show in a tab")).to_have_count(0)


def test_a_truncated_reply_can_be_shown_in_a_tab(lab):
    section(lab, "Record").get_by_label("Export to").fill("one line of many words " * 60 + ".nothing")
    section(lab, "Record").get_by_role("button", name="Export").click()
    expect(reply(lab)).to_contain_text("'one line of")
    reply(lab).get_by_role("button", name="Show in a tab").click()
    shot(lab, "long_reply")
    tab = lab.page.get_by_role("tab", name="export (FSDP)", exact=True)
    expect(tab).to_be_visible()
    tab.locator(".lm-TabBar-tabCloseIcon").click()


def test_a_script_is_run_by_a_form_and_a_missing_one_is_named(lab):
    (lab.folder / "train.py").write_text("import sys\nassert sys.argv[1:] == ['--lr', '1e-3']\nlearned = 1\n")
    script = section(lab, "Script")
    script.get_by_label("Path, arguments").fill("trian.py --lr 1e-3")
    script.get_by_role("button", name="Run").click()
    expect(reply(lab)).to_have_class(re.compile("fsdp-mod-bad"))
    expect(reply(lab)).to_contain_text("there is no script trian.py in ")
    script.get_by_label("Path, arguments").fill("train.py --lr 1e-3")
    script.get_by_label("Path, arguments").press("Enter")
    expect(reply(lab)).to_contain_text("%fsdp run --background train.py --lr 1e-3")
    expect(reply(lab)).not_to_have_class(re.compile("fsdp-mod-bad"))
    shot(lab, "script")


def test_the_panel_follows_the_dashboard_in_front(lab):
    view(lab, "Dashboard").click()
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("idle")
    to(lab, "other.ipynb")
    expect(section(lab, "Ranks")).to_have_count(0)
    lab.page.get_by_role("tab", name="run (FSDP)", exact=True).click()
    expect(panel(lab).locator(".fsdp-Whose")).to_have_text("run.ipynb")
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)


def test_a_dashboard_of_a_closed_notebook_counts_the_running_ranks(lab):
    lab.page.evaluate(
        """() => {
            const tabs = [...window.jupyterapp.shell.widgets("main")];
            const notebook = tabs.find((tab) => tab.context?.path === "run.ipynb");
            notebook.context.model.dirty = false; // nobody is asked whether to save it
            notebook.close();
        }"""
    )
    expect(dashboard(lab)).to_contain_text("Its 2 ranks keep running while its kernel runs. Open it to see them here.")
    to(lab, "run.ipynb")
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)
    assert lab.errors == []


def test_a_page_that_was_written_is_opened_by_a_link(lab):
    record = section(lab, "Record")
    record.get_by_label("Export to").fill("run.html")
    record.get_by_role("button", name="Export").click()
    expect(reply(lab)).to_contain_text("opens in any browser, without a network")
    with lab.page.context.expect_page() as opened_page:
        reply(lab).get_by_role("button", name="Open the page").click()
    expect(opened_page.value.locator(".fw-dashboard")).to_be_visible()
    opened_page.value.close()


def test_a_record_is_exported_opened_and_compared(lab):
    record = section(lab, "Record")
    record.get_by_label("Export to").fill("run.trace")
    record.get_by_role("button", name="Export").click()
    expect(reply(lab)).to_contain_text("wrote run.trace")
    run(lab, "fsdp:stop")
    expect(section(lab, "Ranks")).to_have_count(0)
    record.get_by_role("button", name="Open").click()
    expect(panel(lab)).to_contain_text("run.trace is open, without ranks.")
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(6)
    record.get_by_role("button", name="Compare").click()
    expect(lab.page.get_by_role("tab", name="compare (FSDP)")).to_be_visible()
    shot(lab, "record")
    expect(headline(lab)).to_have_count(0)


def test_without_a_notebook_the_launcher_s_card_shows_the_panel(lab):
    lab.page.evaluate("() => window.jupyterapp.shell.activateById('filebrowser')")
    lab.page.evaluate(
        """async () => {
            for (const panel of [...window.jupyterapp.shell.widgets("main")]) {
                if (panel.context?.model) panel.context.model.dirty = false;
                panel.close();
                await new Promise(requestAnimationFrame); // another one is shown, whose toolbar measures itself
            }
        }"""
    )
    lab.page.locator(".jp-LauncherCard", has_text="FSDP Dashboard").click()
    expect(panel(lab)).to_be_visible()
    expect(panel(lab)).to_contain_text("Open a notebook to see its ranks here.")


def test_no_outside_requests_and_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
