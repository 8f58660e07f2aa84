from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.ci_parts import PARTS, current_commit, leaves_out
from tests.helpers.package_source import REPO

FILES = sorted((REPO / "tests").rglob("test_*.py"))
COMMITS = [f"c0ffee000{last:x}" for last in range(PARTS)]


@dataclass
class _Marked:
    """What is asked of a test."""

    path: Path
    row: int = 0
    mark: pytest.Mark | None = None

    @property
    def nodeid(self):
        return f"{self.path.name}::test_it[{self.row}]"

    def get_closest_marker(self, name):
        return self.mark if self.mark is not None and self.mark.name == name else None


@pytest.mark.parametrize("mark", [pytest.mark.exhaustive, pytest.mark.exhaustive(alone=True), pytest.mark.thorough])
def test_each_test_runs_at_one_of_four_commits_that_follow_each_other(mark):
    tests = [_Marked(path, mark=mark.mark) for path in FILES]
    ran = {commit: {test.path for test in tests if not leaves_out(test, commit)} for commit in COMMITS}
    assert set().union(*ran.values()) == set(FILES)
    assert sum(map(len, ran.values())) == len(FILES)
    assert all(0.7 < PARTS * len(each) / len(FILES) < 1.3 for each in ran.values())


@pytest.mark.parametrize(
    ("mark", "outcomes"),
    [(pytest.mark.exhaustive, 1), (pytest.mark.thorough, 1), (pytest.mark.exhaustive(alone=True), 2)],
)
def test_tests_of_a_file_are_taken_together_unless_each_is_marked_to_stand_alone(mark, outcomes):
    rows = [_Marked(Path("test_any.py"), row, mark.mark) for row in range(40)]
    assert len({leaves_out(row, COMMITS[0]) for row in rows}) == outcomes


def test_what_make_test_runs_is_never_left_out():
    assert not any(leaves_out(_Marked(path), commit) for path in FILES for commit in COMMITS)


def test_nothing_is_left_out_outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    current_commit.cache_clear()
    try:
        assert current_commit() == ""
        assert not leaves_out(_Marked(Path("test_any.py"), mark=pytest.mark.exhaustive.mark), "")
    finally:
        current_commit.cache_clear()
