"""Engines of a running cluster in the panel: attached, detached, viewed from another notebook."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.ipp_engines import running_profile
from tests.helpers.jupyterlab import LONG_SCENES, jupyterlab, open_notebook, write_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import SHOW, headline, panel, process_of, reply, section, shot, to, tool
from tests.helpers.warm_python import WARM

pytestmark = LONG_SCENES

profile = running_profile

CELLS = [f"%%fsdp{CELL}{UNHURRIED}", "%fsdp shard model --wrap Block", "%fsdp step 1000000 --background"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium, profile):
    """A JupyterLab with the panel open, on a notebook whose kernel has loaded nothing; there is another notebook."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("lab")
    with jupyterlab(folder, CELLS, panel=built_panel(), has_one_kernel=False) as url:
        write_notebook(folder / "other.ipynb", ["1 + 1"])
        with open_notebook(url, chromium) as lab:
            lab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            lab.page.evaluate(f"() => {SHOW}")
            yield lab


def ranks(lab):
    return section(lab, "Ranks").get_by_role("listitem")


def attach(lab, **fields):
    """Fill in the form and submit it."""
    panel(lab).get_by_role("combobox", name="From").select_option("attach")
    for label, text in fields.items():
        panel(lab).get_by_label(label.replace("_", " "), exact=True).fill(text)
    tool(lab, "Attach").click()


def copies(lab, button, line):
    """Check that a button's context menu copies the equivalent line."""
    button.click(button="right")
    lab.page.get_by_text("Copy as %fsdp Line").click()
    lab.page.wait_for_function("async (line) => (await navigator.clipboard.readText()) === line", arg=line)


def test_rarely_used_settings_are_under_more(lab):
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    expect(panel(lab).get_by_label("Engines", exact=True)).to_be_hidden()
    panel(lab).get_by_text("More", exact=True).click()
    for name in ("Engines", "Profile", "Interface"):
        expect(panel(lab).get_by_label(name, exact=True)).to_be_visible()
    shot(lab, "start_more")
    panel(lab).get_by_role("combobox", name="From").select_option("attach")
    expect(panel(lab).get_by_label("Engines", exact=True)).to_have_count(0)
    expect(panel(lab).get_by_label("Take", exact=True)).to_be_visible()
    shot(lab, "attach_form")


def test_a_missing_cluster_is_reported(lab):
    attach(lab, Profile="nowhere")
    expect(section(lab, "Commands")).to_contain_text("IPython profile 'nowhere' does not exist")
    expect(tool(lab, "Attach")).to_be_enabled()


def test_an_attach_that_waits_for_engines_can_be_cancelled(lab, profile):
    engines = [fork for fork in WARM.forks() if fork.parent() in WARM.processes]
    assert len(engines) == 3
    for engine in engines:
        engine.suspend()
    try:
        attach(lab, Profile="running")
        expect(tool(lab, "Attaching\u2026")).to_be_disabled()
        expect(panel(lab)).to_contain_text(re.compile("have not answered yet|connecting the ranks"))
        shot(lab, "attach_waits")
        tool(lab, "Cancel").click()
        expect(reply(lab)).to_contain_text("The attach was cancelled: the cluster keeps running")
    finally:
        for engine in engines:
            engine.resume()
    expect(tool(lab, "Attach")).to_be_enabled()


def test_engines_of_a_profile_become_ranks_and_train(lab):
    panel(lab).get_by_label("Profile", exact=True).fill("running")
    panel(lab).get_by_label("Ranks", exact=True).fill("2")
    panel(lab).get_by_role("combobox", name="Device").select_option("cpu")
    copies(lab, tool(lab, "Attach"), "%fsdp attach --num-ranks 2 --profile running --device cpu")
    tool(lab, "Attach").click()
    expect(ranks(lab)).to_have_count(2)
    expect(tool(lab, "Detach")).to_be_enabled()
    for number in range(3):
        lab.do(number)
    expect(headline(lab)).to_contain_text("of 1000000 steps")
    expect(tool(lab, "Detach")).to_be_disabled()  # the ranks are at work
    shot(lab, "attached")


def test_another_notebook_views_the_ranks_and_names_the_holder(lab, profile):
    pids = [process_of(lab, rank).pid for rank in range(2)]
    to(lab, "other.ipynb")
    file = profile / "security" / "ipcontroller-one-client.json"
    attach(lab, File=str(file))
    expect(ranks(lab)).to_have_count(2)
    assert [process_of(lab, rank).pid for rank in range(2)] == pids
    expect(headline(lab)).to_contain_text("View only: the notebook of ")
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)
    expect(panel(lab).locator(".fsdp-Numbers")).to_have_text(
        re.compile(r"^step \d+\s*step time .+loss [\d.e-]+ of step \d+$")
    )  # it trains
    expect(tool(lab, "Pause inside the step")).to_be_disabled()
    expect(tool(lab, "Stop the ranks")).to_have_count(0)
    expect(section(lab, "Shard")).to_have_count(0)
    shot(lab, "looking")
    copies(lab, tool(lab, "Stop watching"), "%fsdp detach")
    tool(lab, "Stop watching").click()
    expect(ranks(lab)).to_have_count(0)
    expect(section(lab, "Commands")).to_contain_text("Detached")


def test_free_ranks_are_taken_by_one_click(lab):
    attach(lab)  # as before
    expect(headline(lab)).to_contain_text("View only: the notebook of ")
    to(lab, "run.ipynb")
    tool(lab, "Abort").click()
    expect(tool(lab, "Detach")).to_be_enabled()
    expect(panel(lab).locator(".fsdp-Reply")).to_contain_text("Aborted.")
    tool(lab, "Detach").click()
    expect(ranks(lab)).to_have_count(0)
    to(lab, "other.ipynb")
    expect(headline(lab)).to_contain_text("These ranks are free now.")
    expect(reply(lab)).to_have_count(0)  # the reply to the attach, which says view only
    shot(lab, "free")
    tool(lab, "Take these ranks").click()
    expect(headline(lab)).to_contain_text("2 ranks, idle")
    expect(section(lab, "Shard")).to_contain_text("model (Net)")


def test_detached_ranks_keep_their_variables(lab):
    pids = [process_of(lab, rank).pid for rank in range(2)]
    tool(lab, "Detach").click()
    expect(ranks(lab)).to_have_count(0)
    attach(lab, Profile="running", Cluster_id="one", File="")
    expect(ranks(lab)).to_have_count(2)
    assert [process_of(lab, rank).pid for rank in range(2)] == pids
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)
    expect(section(lab, "Shard")).to_contain_text("model (Net)")
    tool(lab, "Stop the ranks").click()
    expect(ranks(lab)).to_have_count(0)


def test_no_outside_requests_and_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
