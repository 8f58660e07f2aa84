"""Early stopping on the loss of a rank: one rank leaves the loop, three go on."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class EarlyStopping:
    def __init__(self, patience):
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def __call__(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def main():
    rank, world = start()
    model = shard(TinyLM(), fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    stopping = EarlyStopping(patience=2)
    for epoch in range(6):
        # rank 2 has harder and harder data; the others repeat theirs
        batch = tokens(epoch if rank == 2 else 0, rank)
        loss = lm_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        valid = loss.item() + (0.5 * epoch if rank == 2 else 0.0)
        if stopping(valid):
            print(f"rank {rank}: early stop after epoch {epoch}", flush=True)
            break  # <- here
    best = torch.tensor([stopping.best])
    dist.all_reduce(best, op=dist.ReduceOp.MIN)  # <- here
    print(rank, best.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
