"""Start to first ready cell with torch and process group, 4 ranks: forked from one process, and each started alone.

Run as ``python -m tests.cluster.bench_start [TIMES]``; prints seconds and processor seconds, the two ways in turn.
"""

import statistics
import sys
import time

import psutil

from workbench.cluster import Cluster, launch

RANKS = 4


def start_once(forked: bool) -> tuple[float, float]:
    """Seconds until a first cell has run, and processor seconds of the ranks (and their zygote) by then."""
    launch.can_fork = lambda device: forked
    cluster = Cluster(RANKS, "cpu")
    begin = time.monotonic()
    cluster.start()
    cluster.run_cell("rank").results(60)
    seconds = time.monotonic() - begin
    who = [psutil.Process(info["pid"]) for info in cluster.rank_info]
    if forked:
        who.append(who[0].parent())
    spent = sum(sum(process.cpu_times()[:2]) for process in who)
    cluster.stop()
    return seconds, spent


def main(times: int) -> None:
    """Measure and print."""
    measured = {True: [], False: []}
    for _ in range(times):
        for forked, found in measured.items():
            found.append(start_once(forked))
    for forked, found in measured.items():
        seconds, spent = (statistics.median(column) for column in zip(*found, strict=True))
        sys.stdout.write(f"{'forked' if forked else 'alone '}: ready in {seconds:.2f} s, {spent:.2f} s of processor\n")
    ratio = statistics.median(f[0] / a[0] for f, a in zip(*measured.values(), strict=True))
    sys.stdout.write(f"forked / alone: {ratio:.2f}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
