"""DDP with accumulation under no_sync, and a step each third micro-batch."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, start, tokens
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
model = DDP(TinyLM(depth=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
for micro in range(18):
    last = micro % 3 == 2
    with nullcontext() if last else model.no_sync():
        (lm_loss(model, tokens(micro, rank)) / 3).backward()
    if last:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
dist.destroy_process_group()
