"""Ranks on GPUs; if there are fewer GPUs than ranks, the ranks share them."""

import multiprocessing
import os
from multiprocessing import forkserver, resource_tracker

import psutil
import torch

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of c10d, by the type of the ranks' devices."""

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes that may use CUDA, whatever this process has done, from a server that has imported torch."""
CONTEXT.set_forkserver_preload(["tests.helpers.forked_ranks", "tests.helpers.small_models"])


def take(rank: int, num_ranks: int) -> None:
    """Make this process, a rank that has not used CUDA yet, compute on its GPU."""
    num_devices = torch.cuda.device_count()
    if num_ranks > num_devices:  # NCCL uses a device twice only on hosts of different names
        os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % num_devices)


class _Starters:
    """The helper processes of multiprocessing's fork server."""

    @property
    def processes(self) -> frozenset[psutil.Process]:
        """The fork server, and the tracker of the resources that its processes share."""
        pids = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
        return frozenset(psutil.Process(pid) for pid in pids if pid is not None and psutil.pid_exists(pid))

    def end(self) -> None:
        """End both."""
        forkserver._forkserver._stop()
        resource_tracker._resource_tracker._stop()


STARTERS = _Starters()
