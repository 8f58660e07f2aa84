"""The dashboard in a browser that needs longer for its code than anywidget waits: it works all the same."""

from tests.helpers.browser import PATIENCE_MS, SHARED
from tests.helpers.jupyterlab import LONG_SCENES, NotebookPage, begin, jupyterlab

pytestmark = LONG_SCENES

CELLS = ["%load_ext workbench", "dash = %fsdp dashboard\ndash"]
NO_PATIENCE = """const timeout = AbortSignal.timeout.bind(AbortSignal);
AbortSignal.timeout = (ms) => timeout(ms === 2000 ? 0 : ms);"""
"""Ends the wait for the code of a model before the code is there, as in a browser that needs 2 s for it."""


def test_a_dashboard_that_anywidget_has_given_up_gets_its_answers(tmp_path, chromium):
    with jupyterlab(tmp_path, CELLS) as url, SHARED.browser(chromium) as browser:
        lab = NotebookPage(browser.new_page(viewport={"width": 1400, "height": 1100}))
        try:
            lab.page.set_default_timeout(PATIENCE_MS)
            lab.page.on("pageerror", lambda error: lab.errors.append(str(error)))
            lab.page.add_init_script(NO_PATIENCE)
            begin(lab.page, url)
            for number in range(len(CELLS)):
                lab.do(number)
            lab.page.locator(".fw-dashboard").scroll_into_view_if_needed()
            lab.page.wait_for_function("() => document.querySelector('.fw-dashboard')?.dashboard.client.hasBegun")
            assert "[anywidget] Failed to initialize model." in lab.errors
        finally:
            lab.page.close()
