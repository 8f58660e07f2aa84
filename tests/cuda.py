"""Ranks on GPUs; where there are fewer GPUs than ranks, they share them."""

import os

import torch

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""What c10d communicates with, by the type of the ranks' devices."""


def take(rank: int, num_ranks: int) -> None:
    """Let this process, a rank that has not used CUDA yet, compute on its GPU."""
    num_devices = torch.cuda.device_count()
    if num_ranks > num_devices:  # NCCL takes no device twice, but on hosts of different names it does
        os.environ.update(NCCL_HOSTID=f"host of rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % num_devices)
