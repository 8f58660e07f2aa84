"""Ranks on several hosts in the panel: grouped by host, and with the cable of one unplugged."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import SHOW, dashboard, headline, panel, run, section, shot, status_bar, tool
from tests.integration import test_hosts_attached

pytestmark = [
    pytest.mark.exhaustive,
    *test_hosts_attached.pytestmark,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.timeout(900),
]

network, running = test_hosts_attached.network, test_hosts_attached.running

CELLS = [f"%%fsdp{CELL}{UNHURRIED}", "%fsdp shard model --wrap Block --mesh hosts", "%fsdp step 1000000 --background"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium, running):
    """A JupyterLab with the panel open, on the controller's machine."""
    expect.set_options(timeout=PATIENCE_MS)
    with (
        jupyterlab(tmp_path_factory.mktemp("lab"), CELLS, panel=built_panel(), has_one_kernel=False) as url,
        open_notebook(url, chromium) as lab,
    ):
        lab.page.evaluate(f"() => {SHOW}")
        yield lab


def ranks_on(lab, host):
    """Return the rows of the ranks of a host."""
    group = section(lab, "Ranks").get_by_role("group", name=f"ranks on {host}")
    return group.get_by_role("listitem")


def in_both_themes(lab, name):
    """Save a screenshot of the page in both themes."""
    for theme in ("Light", "Dark"):
        lab.change_theme(theme)
        shot(lab, f"{name}_{theme.lower()}")


def test_engines_of_several_hosts_become_ranks_by_host_and_train(lab, network, running):
    panel(lab).get_by_role("combobox", name="From").select_option("attach")
    panel(lab).get_by_label("File", exact=True).fill(running.file)
    panel(lab).get_by_role("combobox", name="Device").select_option("cpu")
    tool(lab, "Attach").click()
    for host in network.names:
        expect(ranks_on(lab, host)).to_have_count(2)
    for number in range(3):
        lab.do(number)
    expect(headline(lab)).to_contain_text(re.compile(r"[1-9]\d* of 1000000 steps"))
    in_both_themes(lab, "hosts")


def test_a_host_that_loses_its_cable_is_named_with_its_ranks(lab, network):
    run(lab, "fsdp:open-dashboard")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("training")
    lost = network.names[2]
    with network.unplugged(lost):
        for where in (headline(lab), dashboard(lab)):
            expect(where).to_contain_text("ranks 4-5 died")
            expect(where).to_contain_text(lost)
        expect(status_bar(lab)).to_have_class("fsdp-mod-bad")
        in_both_themes(lab, "host_lost")
        expect(tool(lab, "Abort")).to_be_disabled()  # the step is over; otherwise a dialog asks whether to stop
        tool(lab, "Stop the ranks").click()
        expect(section(lab, "Ranks")).to_have_count(0)


def test_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
