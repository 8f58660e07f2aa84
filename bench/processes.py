"""Ranks in new processes, forked from one that never loads the engine.

So training with torch's own code is free of ours: no hook on its optimizer, no patched module, no memory touched.
(``tests.helpers.forked_ranks`` loads the engine for every rank.)
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # the first DTensor imports it: 0.6 s once here, not in every rank
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor  # as above: imported before the ranks are forked

from tests.helpers import gpu_ranks
from tests.helpers.ranks_on_hosts import Seat

TIMEOUT_S = 600
NO_FAILURE = -1
_FORK = multiprocessing.get_context("fork")


class RankFailure(Exception):
    """A rank raised, died or took too long; the message is its traceback, or what happened."""


def on_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, seats: Sequence[Seat] = (), device: str = "cpu"
) -> list[Any]:
    """Call ``function(*args)`` on forked ranks of one thread each; return the results in rank order.

    ``seats``: the simulated host of each rank, if not this one. ``device``: type of the ranks' devices.

    Raises:
        RankFailure: one of them did not return; its peers were ended.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = _Job(f"{folder}/store", num_ranks, function, args, seats, device)
        pipes = [_FORK.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [_FORK.Process(target=_main, args=(r, end, job)) for r, (_, end) in enumerate(pipes)]
        for process, (_, end) in zip(ranks, pipes, strict=True):
            process.start()
            end.close()
        try:
            return _results([here for here, _ in pipes])
        finally:
            for process, (here, _) in zip(ranks, pipes, strict=True):
                here.close()
                _end(process)


@dataclass(frozen=True)
class _Job:
    """The job of all ranks, and the ``path`` of the file through which they connect."""

    path: str
    num_ranks: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    seats: Sequence[Seat]
    device: str


def _main(rank: int, end: Connection, job: _Job) -> None:
    torch.set_num_threads(1)
    try:
        if job.seats:
            job.seats[rank].take()
        store = dist.FileStore(job.path, job.num_ranks)
        timeout = timedelta(seconds=TIMEOUT_S)
        if job.device == "cuda":
            gpu_ranks.take(rank, job.num_ranks)
        dist.init_process_group(
            gpu_ranks.BACKENDS[job.device], store=store, rank=rank, world_size=job.num_ranks, timeout=timeout
        )
        end.send_bytes(pickle.dumps((NO_FAILURE, job.function(*job.args))))
    except BaseException:  # noqa: BLE001 - every error is sent to the parent
        end.send_bytes(pickle.dumps((time.monotonic_ns(), f"rank {rank}: {traceback.format_exc()}")))
        os._exit(1)  # closes its sockets: the peers do not wait for it
    if "workbench.engine.process_groups" in sys.modules:
        sys.modules["workbench.engine.process_groups"].forget_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def _results(pipes: list[Connection]) -> list[Any]:
    """Return the results of all ranks; raise the failure that came first: the others follow from it."""
    results: dict[Connection, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(results) < len(pipes):
        ready = wait([p for p in pipes if p not in results], max(0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"a rank did not answer within {TIMEOUT_S} s")
        sent = {pipe: _received(pipe, pipes.index(pipe)) for pipe in ready}
        failures = [(failed_ns, what) for failed_ns, what in sent.values() if failed_ns != NO_FAILURE]
        if failures:
            raise RankFailure(min(failures)[1])
        results |= {pipe: result for pipe, (_, result) in sent.items()}
    return [results[pipe] for pipe in pipes]


def _received(pipe: Connection, rank: int) -> tuple[int, Any]:
    """Return (time of the failure, its text), or (NO_FAILURE, result); a rank that died failed first, at time 0."""
    try:
        failed_ns, result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return 0, f"rank {rank}: died"
    return failed_ns, result


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
