"""CPU time that tests use, which says what they cost however busy the machine is."""

from contextlib import suppress

import psutil


class CpuTime:
    """CPU time of this process and of all below it; an ended process counts in the one that waited for it."""

    def __init__(self) -> None:
        self._last_s = _now_s()

    def since_last(self) -> float:
        """Return the seconds since the last call; without what a process used that lost its parent and ended."""
        last_s, self._last_s = self._last_s, _now_s()
        return max(0.0, self._last_s - last_s)


def _now_s() -> float:
    here = psutil.Process()
    return sum(map(_used_s, [here, *here.children(recursive=True)]))


def _used_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # it ends at this moment
        times = process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0
