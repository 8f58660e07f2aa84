"""Panel, status bar and dashboard after a loss: they show the true state again, and explain it."""

import re

import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import begin, jupyterlab, open_notebook
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import (
    SHOW,
    dashboard,
    headline,
    panel,
    process_of,
    row,
    run,
    section,
    shot,
    status_bar,
    tool,
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

PRINTING = """
silent, number = train_step, iter(range(10**9))

def train_step():
    print("line", next(number), "of", rank)
    return silent()
"""
CELLS = [
    "%load_ext workbench",
    f"%%fsdp{CELL}{UNHURRIED}{PRINTING}",
    "%fsdp shard model --wrap Block",
    "%fsdp step 1000000 --background",
]
LOAD, MODEL, SHARD, STEP = range(4)
SOCKETS = "**/api/kernels/*/channels*"
"""Addresses of the sockets between a page and its kernels."""
SERVER = re.compile(r"/api(\?\d*)?$")
"""Address at which a page asks whether the server answers."""
LOST = 3000
"""Close code of a lost socket. Browsers report 1006 themselves; nobody else may send it."""
ON_PURPOSE = 1001
"""Close code of an intentional close: JupyterLab does not reconnect."""


class Sockets:
    """The sockets between the page and its kernels; the test can cut them, as when a laptop sleeps."""

    def __init__(self, page):
        self._open, self._dead = [], []
        self.is_open = True  # whether a new one reaches the server
        page.route_web_socket(SOCKETS, self._opened)

    def _opened(self, socket):
        if not self.is_open:
            socket.close(code=LOST)
            return
        server = socket.connect_to_server()
        socket.on_message(lambda message: None if socket in self._dead else server.send(message))
        server.on_message(lambda message: None if socket in self._dead else socket.send(message))
        self._open.append(socket)

    def cut(self, code=LOST):
        assert self._open
        while self._open:
            self._open.pop().close(code=code)

    def lose(self):
        """Lose all that the open sockets carry from now on; the page does not notice."""
        self._dead += self._open


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel open, on a notebook whose kernel has loaded nothing."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("lab")
    with (
        jupyterlab(folder, CELLS, panel=built_panel(), has_one_kernel=False) as url,
        open_notebook(url, chromium) as lab,
    ):
        lab.sockets = Sockets(lab.page)
        begin(lab.page, url)  # reload, with sockets that can be cut
        lab.page.evaluate(f"() => {SHOW}")
        yield lab


def train(lab):
    """Start two ranks with the form, and train in the background."""
    panel(lab).get_by_role("spinbutton", name="Ranks").fill("2")
    panel(lab).get_by_role("combobox", name="Device").select_option("cpu")
    tool(lab, "Start 2 ranks").click()
    expect(section(lab, "Ranks").get_by_role("listitem")).to_have_count(2)
    for number in (MODEL, SHARD, STEP):
        lab.do(number)
    expect(headline(lab)).to_contain_text("of 1000000 steps")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("training")
    expect(status_bar(lab)).not_to_have_class("fsdp-mod-bad")


def rank_1_is_said_to_be_gone(lab):
    """Wait until panel, status bar and dashboard report the loss of rank 1."""
    expect(headline(lab)).to_contain_text("rank 1 died: the process was killed by SIGKILL")
    expect(row(lab, 0)).not_to_contain_text("gone")
    expect(row(lab, 1)).to_contain_text("gone")
    expect(row(lab, 1)).to_contain_text("SIGKILL")
    expect(status_bar(lab)).to_contain_text("FSDP: rank 1 died: the process was killed by SIGKILL")
    expect(status_bar(lab)).to_have_class("fsdp-mod-bad")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("ranks died")
    expect(dashboard(lab)).to_contain_text("rank 1 died: the process was killed by SIGKILL")


def test_a_panel_that_was_open_before_the_workbench_was_loaded_notices_it(lab):
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    run(lab, "fsdp:open-dashboard")
    expect(dashboard(lab)).to_contain_text("has not loaded the workbench yet")
    dashboard(lab).get_by_role("button", name="Load the workbench").click()
    expect(panel(lab)).not_to_contain_text("The workbench is not loaded in this notebook yet.")
    expect(tool(lab, re.compile("^Start"))).to_be_enabled()
    expect(dashboard(lab).locator(".fw-badge")).to_be_visible()
    expect(dashboard(lab).get_by_role("button", name="Load the workbench")).to_be_hidden()
    run(lab, "docmanager:open", path="run.ipynb")  # to the front again, where cells are run
    lab.do(LOAD)


def test_a_killed_rank_is_named_everywhere_and_the_status_bar_is_red(lab):
    train(lab)
    process_of(lab, 1).kill()
    rank_1_is_said_to_be_gone(lab)
    red, green, blue = status_bar(lab).evaluate(
        "(button) => getComputedStyle(button).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert red > 2 * max(green, blue)
    shot(lab, "killed")
    expect(tool(lab, "Abort")).to_be_disabled()  # the step has failed on rank 0 too; otherwise a dialog asks


def test_a_button_replaces_the_killed_rank_and_training_goes_on(lab):
    panel(lab).get_by_role("button", name="Replace rank 1").click()
    expect(panel(lab)).to_contain_text("rank 1 was replaced in")
    expect(headline(lab)).to_contain_text("2 ranks, idle")
    expect(dashboard(lab)).to_contain_text("did not finish")
    tool(lab, "Train 1 step").click()
    expect(dashboard(lab)).to_contain_text("was the last")
    expect(headline(lab)).to_contain_text("2 ranks, idle")
    shot(lab, "replaced")
    tool(lab, "Stop the ranks").click()
    expect(section(lab, "Commands")).to_contain_text("Ranks stopped.")
    expect(section(lab, "Ranks")).to_have_count(0)
    expect(status_bar(lab)).to_have_count(0)


def test_after_a_sleep_the_page_reports_lost_sockets_and_a_dead_rank(lab):
    train(lab)
    process = process_of(lab, 1)
    devtools = lab.page.context.new_cdp_session(lab.page)
    devtools.send("Page.setWebLifecycleState", {"state": "frozen"})
    lab.sockets.cut()
    process.kill()
    process.wait(PATIENCE_MS / 1000)
    devtools.send("Page.setWebLifecycleState", {"state": "active"})
    rank_1_is_said_to_be_gone(lab)
    devtools.detach()


def test_after_a_restart_of_the_kernel_nothing_old_is_shown_and_all_of_it_works_again(lab):
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    expect(section(lab, "Ranks")).to_have_count(0)
    expect(status_bar(lab)).to_have_count(0)
    expect(dashboard(lab)).to_contain_text("has not loaded the workbench yet")
    train(lab)
    shot(lab, "restarted")


def lines_of(lab):
    """Return the numbers of the lines in the section "Output", by rank."""
    found = {0: [], 1: []}
    for text in section(lab, "Output").locator(".fsdp-mod-stdout").all_inner_texts():
        _, number, _, rank = text.split()[-4:]
        found[int(rank)].append(int(number))
    return found


def test_output_while_the_page_is_cut_off_is_there_afterwards_once(lab):
    expect(section(lab, "Output")).to_contain_text("line 3 of 1")
    with lab.page.expect_event("websocket"):
        lab.sockets.is_open = False
        lab.sockets.cut()
        expect(panel(lab)).to_contain_text("the connection is lost, and JupyterLab tries to reopen it")
        expect(status_bar(lab)).to_have_text("FSDP: connection lost")
        shot(lab, "cut_off")
        before = max(map(max, lines_of(lab).values()))
        lab.sockets.is_open = True
        tool(lab, "Reconnect").click()
    expect(section(lab, "Output")).to_contain_text(f"line {before + 10} of 1")
    expect(panel(lab)).not_to_contain_text("the connection is lost")
    for numbers in lines_of(lab).values():
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
        assert numbers[0] <= before


def test_a_server_that_does_not_answer_is_named_and_the_panel_reconnects_once_it_does(lab):
    before = max(map(max, lines_of(lab).values()))
    lab.page.route(SERVER, lambda route: route.abort())
    lab.sockets.lose()
    expect(panel(lab)).to_contain_text("the Jupyter server does not answer")
    expect(status_bar(lab)).to_have_text("FSDP: connection lost")
    expect(tool(lab, "Reconnect")).to_be_visible()
    shot(lab, "unreachable")
    with lab.page.expect_event("websocket"):
        lab.page.unroute(SERVER)
    expect(section(lab, "Output")).to_contain_text(f"line {before + 10} of 1")
    expect(panel(lab)).not_to_contain_text("does not answer")
    lab.errors[:] = [each for each in lab.errors if "net::ERR_FAILED" not in each]  # of the browser, for what it lost
    for numbers in lines_of(lab).values():
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]


@pytest.mark.parametrize("place", [panel, dashboard], ids=["panel", "dashboard"])
def test_a_lost_socket_is_reported_and_reopened_by_a_button(lab, place):
    lab.sockets.cut(ON_PURPOSE)
    for view in (panel(lab), dashboard(lab)):
        expect(view).to_contain_text("does not reopen it")
        expect(view.get_by_role("button", name="Reconnect")).to_be_visible()
    expect(section(lab, "Ranks")).to_have_count(0)
    expect(status_bar(lab)).to_have_text("FSDP: connection lost")
    shot(lab, "cut")
    place(lab).get_by_role("button", name="Reconnect").click()
    expect(headline(lab)).to_contain_text("of 1000000 steps")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("training")
    expect(lab.page.get_by_role("button", name="Reconnect")).to_have_count(0)


def test_no_console_errors(lab):
    assert lab.outside == []
    assert lab.errors == []
