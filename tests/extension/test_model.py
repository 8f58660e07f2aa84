"""The panel's model, connection and texts, in Node: see ``extension/tests``."""

import pytest

from tests.helpers.built_panel import run_script


@pytest.mark.timeout(900)  # the first run of a checkout fetches the packages
def test_the_model_and_the_words_of_the_panel():
    run_script("test")
