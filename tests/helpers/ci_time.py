"""CI runs every test. It ends after 90 minutes, and machines differ threefold: on a slow one, marked tests give way.

Tests marked ``exhaustive`` or ``thorough`` that would begin later than :data:`LIMIT` after the run of CI are left out,
so that all of ``make test`` and other versions of torch have their turn. The summary counts them.
"""

import os
import time

import pytest

BEGAN = "CI_BEGAN"
"""Environment variable: when CI began, in seconds since 1970; .ci/run sets it."""

LIMIT = 50 * 60
"""Seconds."""

WHY = f"CI has run for {LIMIT // 60} minutes on this machine, so tests marked exhaustive or thorough are left out"


def gives_way(item: pytest.Item, now: float | None = None) -> bool:
    """Return whether a test that would begin at ``now`` is left out; the default is the time of the call.

    Args:
        item: the test.
        now: seconds since 1970.
    """
    began = os.environ.get(BEGAN)
    is_marked = any(item.get_closest_marker(name) for name in ("exhaustive", "thorough"))
    return bool(began and is_marked) and (time.time() if now is None else now) - float(began) > LIMIT
