"""What a notebook waits for on a real cluster: the first cell, an empty cell, and the side door of busy ranks."""

import random
import statistics
import time
from typing import Any

import psutil

from tests.bench.stats import spread
from workbench.cluster import Cluster
from workbench.protocol.messages import Locate

Tree = dict[str, Any]
LONG_S = 60.0


def measure_start(num_ranks: int) -> Tree:
    """Return the seconds from the order to start until a first cell ran, with torch and the process group there.

    ``cpu_s`` is what ranks, and the process they were forked from, had computed by then.
    """
    cluster = Cluster(num_ranks, "cpu")
    begin = time.monotonic()
    cluster.start()
    try:
        ready_s = time.monotonic() - begin
        cluster.run_cell("import torch\nassert torch.distributed.get_world_size() == world_size").results(LONG_S)
        seconds = time.monotonic() - begin
        who = [psutil.Process(info.pid) for info in cluster.rank_info]
        parents = {process.ppid() for process in who} - {psutil.Process().pid}
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in (*who, *map(psutil.Process, parents)))
    finally:
        cluster.stop()
    return {"seconds": seconds, "started_s": ready_s, "cpu_s": cpu_s}


def measure_side_door(num_ranks: int, num_times: int) -> Tree:
    """Return how long all ranks, each of which computes in its main thread, take to say where they are."""
    found: Tree = {}
    with Cluster(num_ranks, "cpu") as cluster:
        for what in ("python", "torch"):
            times_ms = round_trips_ms(cluster, what, num_times)
            found |= {f"{what}_ms": statistics.median(times_ms), f"{what}_spread": spread(times_ms).as_dict()}
    return found


def round_trips_ms(cluster: Cluster, what: str, num_times: int, pause_s: float = 0.02) -> list[float]:
    """Ask ranks that compute for ``num_times``, at irregular intervals of about ``pause_s``."""
    seconds = 0.5 + num_times * (pause_s + 0.03)
    pending = cluster.apply("tests.bench.on_rank:compute", what, seconds)
    draw, times_ms = random.Random(0), []
    time.sleep(0.3)  # by then they compute
    while len(times_ms) < num_times and not any(pending.done(rank) for rank in pending.ranks):
        time.sleep(draw.uniform(0.5, 1.5) * pause_s)
        begin = time.perf_counter()
        replies = cluster.ask(Locate())
        times_ms.append((time.perf_counter() - begin) * 1e3)
        for reply in replies.values():
            if isinstance(reply, Exception):
                raise reply
    pending.results(LONG_S + seconds)
    return times_ms
