"""CI ends after 90 minutes, too few for all exhaustive tests: each commit runs those of one half of the files.

The commit's hash says which half, so that a run can be repeated. Without CI set, all run.
"""

import functools
import os
import subprocess
import zlib
from pathlib import Path

WHY = "CI runs the exhaustive tests of half of the files, by the commit's hash; all run with -m '' and CI not set"


def leaves_out(path: Path, commit: str) -> bool:
    """Return whether CI leaves out the exhaustive tests of the file ``path`` at ``commit``; empty: it is unknown."""
    return commit != "" and (zlib.crc32(path.name.encode()) + int(commit[-1], 16)) % 2 == 1


@functools.cache
def current_commit() -> str:
    """Return the commit that CI tests, in hexadecimal; empty outside of CI, or if git cannot say."""
    if "CI" not in os.environ:
        return ""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
