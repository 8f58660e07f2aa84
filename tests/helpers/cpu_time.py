"""CPU time that tests use: a measure of their cost that does not depend on how busy the machine is."""

from contextlib import suppress

import psutil


class CpuTime:
    """CPU time of this process and its descendants; an ended process counts in the one that waited for it."""

    def __init__(self) -> None:
        self._last_s = _now_s()

    def since_last(self) -> float:
        """Return the seconds since the last call, without those of orphaned processes that ended."""
        last_s, self._last_s = self._last_s, _now_s()
        return max(0.0, self._last_s - last_s)


def _now_s() -> float:
    here = psutil.Process()
    return sum(map(_used_s, [here, *here.children(recursive=True)]))


def _used_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):  # the process just ended
        times = process.cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0
