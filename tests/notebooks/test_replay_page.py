"""The notebook of a recording, as one page that needs no installation and no network."""

import shutil

import nbformat
import pytest

from tests.helpers.browser import figures, open_offline
from tests.helpers.course_notebooks import FOLDER, with_attempts
from tests.helpers.replay_recording import RECORDING
from workbench.cli.demo import execute
from workbench.cli.notebook_page import to_page

pytestmark = [pytest.mark.thorough, pytest.mark.browser]

NUM_FIGURES = 6  # layout, states, memory, comms, timeline, that of explain


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page, with the exercises tried and solved."""
    folder, path = tmp_path_factory.mktemp("replay"), FOLDER / "00_replay.ipynb"
    shutil.copy(RECORDING, folder)
    ran = execute(with_attempts(nbformat.read(path, as_version=4), path, {}), folder)
    page = folder / "replay.html"
    page.write_text(to_page(ran, title="Replay"), encoding="utf-8")
    return page


def test_its_pictures_are_drawn_and_nothing_is_fetched(page, chromium):
    with open_offline(chromium, page) as opened:
        opened.page.wait_for_function(f"document.querySelectorAll('.plotly-graph-div').length >= {NUM_FIGURES}")
        drawn = figures(opened.page)
        assert len(drawn) == NUM_FIGURES
        assert all(figure["width"] > 500 and figure["height"] > 150 for figure in drawn), drawn
        assert "gathers of a block: measured 2" in opened.page.inner_text("body")
        assert (opened.outside, opened.complaints) == ([], [])
