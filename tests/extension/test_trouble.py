"""Trouble during a stopped step: the panel shows the true state, and nothing is left running."""

from contextlib import suppress

import psutil
import pytest
from playwright.sync_api import expect

from tests.helpers.browser import PATIENCE_MS
from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import jupyterlab, open_notebook, write_notebook
from tests.helpers.leaks import is_running
from tests.helpers.notebook_model import CELL, UNHURRIED
from tests.helpers.panel_page import (
    SHOW,
    dashboard,
    headline,
    panel,
    process_of,
    run,
    section,
    shot,
    status_bar,
    to,
    tool,
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.browser,
    pytest.mark.lasting_browser,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

CELLS = [
    "import psutil\n%load_ext workbench",
    "%fsdp start -n 2 --device cpu",
    f"%%fsdp{CELL}{UNHURRIED}",
    "%fsdp shard model --wrap Block",
    "%fsdp step 1000000 --background",
    "%fsdp stop",
    "print('mine', *(p.pid for p in [psutil.Process(), *psutil.Process().children(recursive=True)]))",
]
LOAD, START, MODEL, SHARD, STEP, STOP, MINE = range(7)


@pytest.fixture(scope="module")
def lab(tmp_path_factory, chromium):
    """A JupyterLab with the panel open, on a notebook whose kernel has loaded nothing; there is a second one."""
    expect.set_options(timeout=PATIENCE_MS)
    folder = tmp_path_factory.mktemp("lab")
    with jupyterlab(folder, CELLS, panel=built_panel(), has_one_kernel=False) as url:
        write_notebook(folder / "other.ipynb", CELLS)
        with open_notebook(url, chromium) as lab:
            lab.page.evaluate(f"() => {SHOW}")
            yield lab


def train(lab):
    """Start two ranks in the front notebook, and train in the background."""
    for number in (LOAD, START, MODEL, SHARD, STEP):
        lab.do(number)
    expect(headline(lab)).to_contain_text("of 1000000 steps")


def pause(lab):
    tool(lab, "Pause inside the step").click()
    expect(section(lab, "Ranks").locator(".fsdp-mod-held").first).to_be_visible()  # the other one may wait for it
    expect(headline(lab)).to_contain_text("stopped")


def ranks_of(lab):
    return [process_of(lab, rank) for rank in range(2)]


def all_of(lab):
    """Return the processes of the front notebook: its kernel, the kernel's children, and the ranks."""
    lab.do(MINE)
    outputs = lab.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-OutputArea-output").filter(has_text="mine ")
    _, *pids = outputs.last.inner_text().split()
    found = []
    for rank in range(2):
        with suppress(psutil.NoSuchProcess):  # it was killed
            found.append(process_of(lab, rank))
    return [*map(psutil.Process, filter(psutil.pid_exists, map(int, pids))), *found]


def assert_over(processes):
    """Check that the processes have ended, or end soon."""
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_MS / 1000)
    assert not any(map(is_running, alive))


def close(lab):
    """Close the front notebook, and shut its kernel down."""
    lab.page.evaluate(
        """async () => {
            const panel = window.jupyterapp.shell.currentWidget;
            await panel.sessionContext.shutdown();
            panel.context.model.dirty = false; // nobody is asked whether to save it
            panel.close();
        }"""
    )


def test_a_page_reloaded_during_a_stop_shows_where_and_can_continue(lab):
    train(lab)
    pause(lab)
    lab.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    lab.page.reload()
    expect(headline(lab)).to_contain_text("stopped")
    expect(section(lab, "Units").get_by_role("treeitem")).to_have_count(5)
    shot(lab, "reloaded_while_stopped")
    tool(lab, "Continue").click()
    expect(headline(lab)).to_contain_text("of 1000000 steps")


def test_ranks_that_are_paused_can_be_stopped_by_a_line(lab):
    to(lab, "run.ipynb")
    pause(lab)
    processes = ranks_of(lab)
    lab.do(STOP)
    expect(section(lab, "Ranks")).to_have_count(0)
    expect(status_bar(lab)).to_have_count(0)
    expect(tool(lab, "Start 4 ranks")).to_be_enabled()
    assert_over(processes)


def test_a_kernel_that_restarts_in_the_middle_of_a_step_leaves_nothing(lab):
    train(lab)
    _kernel, *processes = all_of(lab)
    pause(lab)
    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    expect(panel(lab)).to_contain_text("The workbench is not loaded in this notebook yet.")
    expect(section(lab, "Ranks")).to_have_count(0)
    assert_over(processes)


def test_each_of_two_notebooks_has_its_own_and_a_rank_killed_under_a_dragged_cursor_is_named(lab):
    train(lab)
    first = [process.pid for process in ranks_of(lab)]
    to(lab, "other.ipynb")
    train(lab)
    second = ranks_of(lab)
    assert not {*first} & {process.pid for process in second}
    run(lab, "fsdp:open-dashboard")
    expect(dashboard(lab).locator(".fw-badge")).to_contain_text("training")
    box = dashboard(lab).locator(".fw-memory").bounding_box()
    lab.page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 40)
    lab.page.mouse.down()
    lab.page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=5)
    second[1].kill()
    lab.page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40, steps=5)
    expect(headline(lab)).to_contain_text("rank 1 died: the process was killed by SIGKILL")
    expect(status_bar(lab)).to_have_class("fsdp-mod-bad")
    expect(dashboard(lab)).to_contain_text("rank 1 died: the process was killed by SIGKILL")
    lab.page.mouse.up()
    shot(lab, "killed_while_dragged")
    to(lab, "run.ipynb")
    expect(headline(lab)).to_contain_text("of 1000000 steps")
    assert [process.pid for process in ranks_of(lab)] == first


@pytest.mark.parametrize("name", ["other.ipynb", "run.ipynb"])
def test_a_notebook_that_is_closed_with_its_kernel_leaves_nothing(lab, name):
    to(lab, name)
    processes = all_of(lab)
    close(lab)
    assert_over(processes)


def test_without_a_notebook_nothing_is_shown_and_no_console_errors(lab):
    expect(panel(lab)).to_contain_text("Open a notebook")
    expect(section(lab, "Ranks")).to_have_count(0)
    expect(status_bar(lab)).to_have_count(0)
    assert lab.outside == []
    assert lab.errors == []
