"""What the panel and the dashboard compute, in Node: see ``extension/tests``, and its ``widgets`` for the dashboard."""

import pytest

from tests.helpers.built_panel import run_script


@pytest.mark.timeout(900)  # the first run of a checkout fetches the packages
def test_unit_tests_of_the_front_end():
    run_script("test")
