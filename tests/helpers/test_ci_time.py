from dataclasses import dataclass

import pytest

from tests.helpers.ci_time import BEGAN, LIMIT, gives_way


@dataclass
class _Test:
    """What is asked of a test."""

    mark: str = ""

    def get_closest_marker(self, name):
        return self.mark == name or None


@pytest.mark.parametrize(
    ("mark", "began", "seconds", "found"),
    [
        ("thorough", "1000", LIMIT, False),
        ("thorough", "1000", LIMIT + 1, True),
        ("exhaustive", "1000", LIMIT + 1, True),
        ("", "1000", LIMIT + 1, False),
        ("thorough", "", LIMIT + 1, False),
    ],
)
def test_marked_tests_give_way_once_ci_has_run_for_an_hour(monkeypatch, mark, began, seconds, found):
    monkeypatch.setenv(BEGAN, began)
    assert gives_way(_Test(mark), 1000 + seconds) is found


def test_a_test_that_begins_now_is_judged_by_the_clock(monkeypatch):
    monkeypatch.setenv(BEGAN, "0")
    assert gives_way(_Test("thorough"))
    monkeypatch.delenv(BEGAN)
    assert not gives_way(_Test("thorough"))
