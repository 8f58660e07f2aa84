"""What a notebook waits for on a real cluster: the first cell, and the control channel of busy ranks."""

import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.stats import spread
from tests.helpers import ranks_on_hosts
from tests.helpers.ipp_engines import engines_on, wait_for_engines
from workbench.cluster import Cluster
from workbench.cluster.attached import AttachTarget
from workbench.protocol.rank_messages import Locate

Tree = dict[str, Any]
LONG_S = 60.0


def measure_start(num_ranks: int) -> Tree:
    """Return the seconds from the start to the end of the first cell, with torch and the process group loaded.

    ``cpu_s`` is the CPU time until then of the ranks and of the process that they were forked from.
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


def measure_attach(num_engines: int, num_times: int) -> Tree:
    """Return the seconds from attaching to the end of the first cell, on the engines of a running cluster.

    ``first_s``: with engines as ``ipcluster`` starts them, which have yet to import torch. The other times follow in
    sequence on engines that have been ranks before, as in a cluster in use.
    """
    with running_engines(num_engines) as target:
        seconds = [_attached_s(target) for _ in range(1 + num_times)]
    return {"median_s": statistics.median(seconds[1:]), "all_s": seconds[1:], "first_s": seconds[0]}


def _attached_s(target: AttachTarget) -> float:
    cluster = Cluster.attached(target, device="cpu")
    begin = time.monotonic()
    cluster.start()
    try:
        cluster.run_cell("import torch\nassert torch.distributed.get_world_size() == world_size").results(LONG_S)
        return time.monotonic() - begin
    finally:
        cluster.stop()


def measure_control_channel_of_hosts(num_hosts: int, num_local: int, num_times: int) -> Tree:
    """Return the results of :func:`measure_control_channel` for ranks on several hosts, and the latency of their links.

    This process, the notebook's side, and the controller have a separate host. ``above_links_ms`` is the worse median
    minus two latencies of a link; without network namespaces, nothing is measured. All hosts compute on the cores of
    this machine. ``with a core each``: only as many ranks compute as there are cores, and the others wait, as if every
    host had its own cores.
    """
    why_not = ranks_on_hosts.why_not()
    if why_not:
        return {"left out": why_not}
    with ranks_on_hosts.network_of(1 + num_hosts) as network:
        network.cables.become(ranks_on_hosts.MEASURED_ON)
        here, *hosts = network.hosts
        here.take()
        with engines_on([seat.namespace for seat in hosts for _ in range(num_local)], here.address) as target:
            num_cores = len(os.sched_getaffinity(0))
            with Cluster.attached(target, device="cpu") as cluster:
                found = _medians(cluster, num_times)
                apart = _medians(cluster, num_times, range(num_hosts * num_local)[:num_cores])
                found["with a core each"] = {name: apart[name] for name in ("python_ms", "torch_ms")}
            latency_ms = _latency_ms(hosts[0].address)
    worst = max(found["python_ms"], found["torch_ms"])
    return {
        "links": str(ranks_on_hosts.MEASURED_ON),
        "latency_ms": latency_ms,
        **found,
        "above_links_ms": worst - 2 * latency_ms,
    }


def _latency_ms(address: str) -> float:
    """Return half of the shortest time in which a connection is refused or made."""
    times_ms = []
    for _ in range(20):
        begin = time.perf_counter()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((address, 9), timeout=LONG_S).close()
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return min(times_ms) / 2


@contextmanager
def running_engines(num_engines: int) -> Iterator[AttachTarget]:
    """Run ipyparallel engines of a new cluster, in a process and a directory that end with the body."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        words = ["start", "-n", str(num_engines), f"--ipython-dir={folder}", "--profile=bench", "--cluster-id=one"]
        command = [sys.executable, "-m", "ipyparallel.cluster", *words]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as started:
            try:
                for line in started.stderr or ():
                    if "engines appear to have started" in line.lower():
                        break
                file = Path(folder) / "profile_bench" / "security" / "ipcontroller-one-client.json"
                wait_for_engines(file, num_engines)
                yield AttachTarget(file=str(file))
            finally:
                started.terminate()
                started.communicate()


def measure_control_channel(num_ranks: int, num_times: int) -> Tree:
    """Return how long all ranks, which compute in their main threads, take to send their positions."""
    with Cluster(num_ranks, "cpu") as cluster:
        return _medians(cluster, num_times)


def _medians(cluster: Cluster, num_times: int, computing: Sequence[int] | None = None) -> Tree:
    found: Tree = {}
    for what in ("python", "torch"):
        times_ms = round_trips_ms(cluster, what, num_times, computing)
        found |= {f"{what}_ms": statistics.median(times_ms), f"{what}_spread": spread(times_ms).as_dict()}
    return found


def round_trips_ms(
    cluster: Cluster, what: str, num_times: int, computing: Sequence[int] | None = None, pause_s: float = 0.02
) -> list[float]:
    """Poll all ranks ``num_times`` while all or some compute, at irregular intervals of about ``pause_s``."""
    seconds = 0.5 + num_times * (pause_s + 0.03)
    pending = cluster.apply("bench.on_rank:compute", what, seconds, ranks=computing)
    draw, times_ms = random.Random(0), []
    time.sleep(0.3)  # ranks start to compute meanwhile; an earlier sample would be of idle ranks
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
