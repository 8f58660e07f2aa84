"""A bad batch on one rank: the ranks agree to skip it, all of them; and one error is caught and harmless."""

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens

from workbench.engine import fully_shard

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    try:
        extra = {"a": 1}["b" if rank == 1 else "a"]
    except KeyError:
        extra = 0
    loss = lm_loss(model, tokens(step, rank)) + 0 * extra
    ok = torch.tensor([0 if (rank, step) == (1, 4) else 1])
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    if not ok.item():
        optimizer.zero_grad()
        del loss
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
