"""The limit of open files: raised as far as it may be, or named."""

import resource
import sys
from contextlib import nullcontext

import pytest

from workbench.base.open_files import check_open_files, raise_limit
from workbench.errors import UsageError


@pytest.fixture
def limits(monkeypatch):
    """Replace the limits of this process by 64, of 64, unless a test sets others; a system may allow 1000."""
    now = {"soft": 64, "hard": 64, "most": 1 << 20}

    def set_limits(_, wanted):
        if wanted[0] > now["most"]:
            raise ValueError("not allowed to raise maximum limit")
        now["soft"], now["hard"] = wanted

    monkeypatch.setattr(resource, "getrlimit", lambda _: (now["soft"], now["hard"]))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    return now


@pytest.mark.parametrize(
    ("limit", "needed", "raised"),
    [
        ({"hard": 64}, 224, 64),
        ({"hard": 300}, 224, 300),
        ({"hard": 1 << 20}, 224, 4096),
        ({"hard": 1 << 20}, 9000, 9000),
        ({"hard": resource.RLIM_INFINITY}, 224, 4096),
        ({"hard": resource.RLIM_INFINITY, "most": 1000}, 224, 64),
        ({"soft": 5000, "hard": 9000}, 224, 5000),
        ({"soft": resource.RLIM_INFINITY, "hard": resource.RLIM_INFINITY}, 224, sys.maxsize),
    ],
)
def test_a_limit_is_raised_or_named(limits, limit, needed, raised):
    limits.update(limit)
    assert raise_limit(needed) == raised
    assert limits["soft"] == (resource.RLIM_INFINITY if raised == sys.maxsize else raised)
    refusal = pytest.raises(UsageError, match="may open 64 files, too few for 2 ranks: run ulimit -n 224 in a shell")
    with refusal if raised < needed else nullcontext():
        check_open_files(needed, "2 ranks", "a shell")
