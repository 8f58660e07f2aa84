from dataclasses import dataclass, field
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
    marks: frozenset = field(default_factory=frozenset)

    @property
    def nodeid(self):
        return f"{self.path.name}::test_it[{self.row}]"

    def get_closest_marker(self, name):
        return name if name in self.marks else None


@pytest.mark.parametrize("mark", ["exhaustive", "thorough"])
def test_each_test_runs_at_one_of_four_commits_that_follow_each_other(mark):
    tests = [_Marked(path, marks=frozenset({mark})) for path in FILES]
    ran = {commit: {test.path for test in tests if not leaves_out(test, commit)} for commit in COMMITS}
    assert set().union(*ran.values()) == set(FILES)
    assert sum(map(len, ran.values())) == len(FILES)
    assert all(0.7 < PARTS * len(each) / len(FILES) < 1.3 for each in ran.values())


def test_rows_are_taken_alone_and_scenes_with_their_file():
    rows, scenes = (
        {leaves_out(_Marked(Path("test_any.py"), row, frozenset({mark})), COMMITS[0]) for row in range(40)}
        for mark in ("exhaustive", "thorough")
    )
    assert (len(rows), len(scenes)) == (2, 1)


def test_what_make_test_runs_is_never_left_out():
    assert not any(leaves_out(_Marked(path), commit) for path in FILES for commit in COMMITS)


def test_nothing_is_left_out_outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    current_commit.cache_clear()
    try:
        assert current_commit() == ""
        assert not leaves_out(_Marked(Path("test_any.py"), marks=frozenset({"exhaustive"})), "")
    finally:
        current_commit.cache_clear()
