"""The workbench in JupyterLab, in a real browser: cells run, figures are drawn, nothing is fetched."""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import sync_playwright

from tests.browser import FLAGS
from tests.integration.model import CELL
from tests.waiting import wait_until
from workbench.cli import lab_command

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

SHOTS = Path(__file__).parents[2] / "build" / "screenshots"
TOKEN = "test"
KERNEL = "window.jupyterapp?.shell.currentWidget?.context?.sessionContext?.session?.kernel?.status"
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


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab of its own on a notebook with CELLS."""
    folder = tmp_path_factory.mktemp("lab")
    notebook = folder / "run.ipynb"
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}  # else JupyterLab asks for one
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), notebook)
    runtime = folder / "runtime"
    pages = folder / "config" / "labconfig" / "page_config.json"
    pages.parent.mkdir(parents=True)
    pages.write_text(json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}))
    env = os.environ | {"JUPYTER_RUNTIME_DIR": str(runtime), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    extra = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.port=0",
        f"--IdentityProvider.token={TOKEN}",
        "--LabApp.expose_app_in_browser=True",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(lab_command(notebook, extra), env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: process.poll() is not None or _address(runtime), timeout_s=60)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        url = _address(runtime)
        yield f"{url}lab/tree/run.ipynb?token={TOKEN}&reset"
    finally:
        process.terminate()
        process.wait(30)


def _address(runtime):
    """Address that the server has written down, once it answers there; else None."""
    try:
        url = json.loads(next(runtime.glob("jpserver-*.json")).read_text())["url"]
        with urllib.request.urlopen(f"{url}api?token={TOKEN}"):
            return url
    except (StopIteration, ValueError, OSError):  # not written yet, half written, or not listening yet
        return None


@pytest.fixture(scope="module")
def ran(lab, chromium):
    """The notebook in the browser after all its cells were run, with what the page asked for and complained about."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        requests, errors = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(lab)
        page.wait_for_selector(".jp-CodeCell", timeout=60_000)
        page.click(".jp-CodeCell .cm-content")
        page.wait_for_function(f"() => {KERNEL} === 'idle'", timeout=60_000)
        page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
        _wait_for_the_last_cell(page)
        yield page, requests, errors
        browser.close()


def _wait_for_the_last_cell(page, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while "UsageError" not in page.locator(".jp-CodeCell").last.inner_text():
        assert time.monotonic() < deadline, page.locator(".jp-Notebook").inner_text()[-2000:]
        page.wait_for_timeout(200)


@pytest.mark.parametrize("name", sorted(CELL_OF))
def test_every_view_is_drawn(ran, name):
    page = ran[0]
    cell = page.locator(".jp-CodeCell").nth(CELL_OF[name])
    cell.scroll_into_view_if_needed()
    figure = cell.locator(".js-plotly-plot")
    figure.wait_for(timeout=20_000)
    box = figure.bounding_box()
    assert box["width"] > 500
    assert box["height"] > 200
    assert figure.locator(".main-svg").count() > 0
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"lab_{name}.png").write_bytes(cell.screenshot())


def test_progress_ends_full_and_says_what_came_out(ran):
    cell = ran[0].locator(".jp-CodeCell").nth(CELLS.index("%fsdp step 3"))
    cell.scroll_into_view_if_needed()  # JupyterLab empties cells that are out of sight
    cell.get_by_text("step 3 of 3").wait_for(timeout=20_000)
    cell.get_by_text("3 steps, loss").wait_for(timeout=20_000)


def test_an_error_is_one_sentence_with_the_nearest_word(ran):
    cell = ran[0].locator(".jp-CodeCell").last
    cell.scroll_into_view_if_needed()
    cell.get_by_text("did you mean 'timeline'?").wait_for(timeout=20_000)
    assert cell.get_by_text("Traceback").count() == 0


def test_nothing_is_fetched_from_elsewhere_and_nothing_complains(ran):
    _, requests, errors = ran
    here = ("http://127.0.0.1", "http://localhost", "data:", "blob:")
    assert [url for url in requests if not url.startswith(here)] == []
    assert errors == []
