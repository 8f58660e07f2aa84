from pathlib import Path

from tests.helpers.ci_halves import current_commit, leaves_out
from tests.helpers.package_source import REPO

FILES = sorted((REPO / "tests").rglob("test_*.py"))


def test_two_commits_that_differ_run_all_tests():
    even, odd = ({path for path in FILES if leaves_out(path, commit)} for commit in ("a0", "a1"))
    assert even | odd == set(FILES)
    assert not even & odd
    assert 0.3 < len(even) / len(FILES) < 0.7


def test_nothing_is_left_out_outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    current_commit.cache_clear()
    try:
        assert current_commit() == ""
        assert not leaves_out(Path("test_any.py"), "")
    finally:
        current_commit.cache_clear()
