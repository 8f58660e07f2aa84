"""The tests' browser: one for all pages of a module, with a profile for each page."""

import pytest

from tests.helpers.browser import open_offline

pytestmark = pytest.mark.browser


def test_pages_of_a_module_share_a_browser_and_nothing_else(chromium, tmp_path):
    file = tmp_path / "page.html"
    file.write_text("<!doctype html><title>page</title>")
    with open_offline(chromium, file) as one:
        browser = one.page.context.browser
        one.page.evaluate("() => { localStorage.kept = 'here'; }")
        assert one.page.evaluate("() => localStorage.kept") == "here"
    with open_offline(chromium, file) as other:
        assert other.page.context.browser is browser
        assert other.page.evaluate("() => localStorage.kept ?? null") is None
    assert browser.contexts == []
