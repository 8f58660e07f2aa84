"""A dashboard in a saved notebook: JupyterLab and nbconvert's page show its last picture without the kernel."""

import re

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.helpers.built_panel import built_panel
from tests.helpers.jupyterlab import KERNEL, LONG_SCENES, SHOTS, jupyterlab, open_notebook
from tests.helpers.simulated_job import example_trace
from workbench.trace.file import save

pytestmark = LONG_SCENES

CELLS = ["%load_ext workbench", "%fsdp open run.trace", "%fsdp dashboard"]
SHOW = 2
SAVE = "() => window.jupyterapp.commands.execute('docmanager:save')"
IMAGES = "(still) => [...still.querySelectorAll('img')].map(({naturalWidth, alt}) => [naturalWidth > 100, alt])"
PICTURES = ["loss", "step time", "exposed", "memory in use, by class", "units", "timeline"]


@pytest.fixture
def lab(tmp_path, chromium):
    save(example_trace(), tmp_path / "run.trace")
    with jupyterlab(tmp_path, CELLS, panel=built_panel()) as url, open_notebook(url, chromium) as lab:
        for number in range(len(CELLS)):
            lab.do(number)
        lab.cell(SHOW).locator(".fw-dashboard").scroll_into_view_if_needed()
        lab.page.wait_for_function("() => document.querySelector('.fw-dashboard')?.dashboard.model.now")
        yield lab


def test_its_last_picture_is_shown_without_the_kernel(lab, tmp_path):
    live = lab.page.query_selector(".fw-dashboard")
    lab.page.evaluate(SAVE)
    assert live.is_visible(), "the live one continues"

    saved = nbformat.read(tmp_path / "run.ipynb", 4)
    page, _ = HTMLExporter().from_notebook_node(saved)
    images = [image for image in re.findall("<img [^>]*>", page) if "data:image/png;base64," in image]
    assert [re.findall('alt="(.*?)"', image) for image in images] == [[name] for name in PICTURES]
    assert "The dashboard when the notebook was saved." in page

    lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.sessionContext.shutdown()")
    lab.page.reload()
    lab.page.wait_for_function(f"() => {KERNEL} === 'idle'")
    still = lab.cell(SHOW).locator(".fw-still")
    still.scroll_into_view_if_needed()
    assert still.evaluate(IMAGES) == [[True, name] for name in PICTURES]
    assert still.locator("button").count() == 0
    assert not lab.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.model.dirty")
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "dashboard_still.png").write_bytes(still.screenshot())
