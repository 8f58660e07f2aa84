"""CI ends after 90 minutes, and machines differ threefold in speed: each commit runs a part of the marked tests.

Those of ``make test`` always run. Of the tests marked ``exhaustive`` or ``thorough``, each commit runs those of one
file in :data:`PARTS`, as tests of a file may follow each other on one page. Rows marked ``exhaustive(alone=True)`` do
not: each commit runs one row in :data:`PARTS`. The commit's hash says which, so that a run can be repeated. Without CI
set, all run.
"""

import functools
import os
import subprocess
import zlib

import pytest

PARTS = 4
WHY = (
    f"CI runs the tests marked exhaustive or thorough of one file in {PARTS}, by the commit's hash; all run with -m '' "
    "and CI not set"
)


def leaves_out(item: pytest.Item, commit: str) -> bool:
    """Return whether CI leaves out a test at ``commit``; empty: it is unknown, and all tests run."""
    marks = [mark for name in ("exhaustive", "thorough") if (mark := item.get_closest_marker(name))]
    is_alone = any(mark.kwargs.get("alone", False) for mark in marks)
    return bool(marks) and _is_of_another_part(item.nodeid if is_alone else item.path.name, commit)


def _is_of_another_part(name: str, commit: str) -> bool:
    return commit != "" and (zlib.crc32(name.encode()) + int(commit[-4:], 16)) % PARTS > 0


@functools.cache
def current_commit() -> str:
    """Return the commit that CI tests, in hexadecimal; empty outside of CI, or if git cannot say."""
    if "CI" not in os.environ:
        return ""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
