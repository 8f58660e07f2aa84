"""The limit of open files of this process, which the processes that it starts inherit."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

from workbench.errors import UsageError

_PLENTY = 4096  # of one process; a limit without end makes some programs close files for seconds


def raise_limit(least: int = 0) -> int:
    """Raise the limit as far as it may be, to ``least`` or what is plenty; return it: ``sys.maxsize`` if there is none.

    A process at its limit does not end: libraries wait for connections that they cannot accept, or abort.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    wanted = max(least, _PLENTY)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted > soft:
        with suppress(ValueError, OSError):  # the system has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def check_open_files(needed: int, who: str, where: str) -> None:
    """Raise the limit, and check that it suffices.

    Args:
        needed: files.
        who: what needs them: ``"2 ranks"``.
        where: the terminal in which the limit can be raised: ``"the terminal that starts Jupyter"``.

    Raises:
        UsageError: the limit may not be raised so far.
    """
    limit = raise_limit(needed)
    if limit < needed:
        raise UsageError(f"this process may open {limit} files, too few for {who}: run ulimit -n {needed} in {where}")
