"""CI ends after 90 minutes, and machines differ threefold in speed: each commit runs a part of the marked tests.

Those of ``make test`` always run. Of the tests marked ``exhaustive``, rows that do not need each other, each commit
runs one in :data:`PARTS`; of the tests marked ``thorough``, which share browsers and clusters, those of one file in
:data:`PARTS`. The commit's hash says which, so that a run can be repeated. Without CI set, all run.
"""

import functools
import os
import subprocess
import zlib

import pytest

PARTS = 4
WHY = (
    f"CI runs one in {PARTS} of the tests marked exhaustive, and of the files with tests marked thorough, by the "
    "commit's hash; all run with -m '' and CI not set"
)


def leaves_out(item: pytest.Item, commit: str) -> bool:
    """Return whether CI leaves out a test at ``commit``; empty: it is unknown, and all tests run."""
    if item.get_closest_marker("exhaustive"):
        return _is_of_another_part(item.nodeid, commit)
    return item.get_closest_marker("thorough") is not None and _is_of_another_part(item.path.name, commit)


def _is_of_another_part(name: str, commit: str) -> bool:
    return commit != "" and (zlib.crc32(name.encode()) + int(commit[-4:], 16)) % PARTS > 0


@functools.cache
def current_commit() -> str:
    """Return the commit that CI tests, in hexadecimal; empty outside of CI, or if git cannot say."""
    if "CI" not in os.environ:
        return ""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
