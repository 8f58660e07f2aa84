"""Any error leaves the process at once, so that no rank hangs; one host is taken away."""

import os
import signal
import sys
import traceback

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


def main():
    rank, world = start()
    model = shard(TinyLM(depth=2), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(12):
        if rank == 1 and i == 6:
            os.kill(os.getpid(), signal.SIGTERM)  # <- here
        lm_loss(model, tokens(i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except RuntimeError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
