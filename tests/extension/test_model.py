"""What the panel and the dashboard compute, in Node: see ``extension/tests``, and its ``widgets`` for the dashboard."""

import pytest

from tests.helpers.built_panel import run_script


@pytest.mark.timeout(900)  # the first run of a checkout fetches the packages
def test_the_models_and_the_words_of_the_panel_and_the_dashboard():
    run_script("test")
