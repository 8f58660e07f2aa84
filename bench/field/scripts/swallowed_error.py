"""A rank catches the error of a bad batch, says so, and goes on with the next one."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


def train(rank, model, optimizer):
    for step in range(8):
        try:
            batch = tokens(step, rank)
            if rank == 1 and step == 3:
                batch = (batch[0], batch[1][:, :5])
            loss = lm_loss(model, batch)
            loss.backward()
            optimizer.step()
        except (ValueError, RuntimeError) as error:
            print(f"rank {rank}: skipping batch {step}: {error}", flush=True)  # <- here
        finally:
            optimizer.zero_grad()
    total = torch.ones(1)
    dist.all_reduce(total)


if __name__ == "__main__":
    rank, _ = start()
    net = shard(TinyLM(), fully_shard)
    train(rank, net, torch.optim.SGD(net.parameters(), lr=0.1))
    dist.destroy_process_group()
