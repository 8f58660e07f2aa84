"""Each rank lowers its learning rate by the loss of its own part of the validation rows; at the end all are equal."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

rank, world = start()
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=2.5e-4)
own_losses = [[3.0, 3.1, 3.2, 3.3], [3.0, 2.9, 3.1, 3.2]]  # of the last evaluations, by rank

for epoch in range(4):
    for step in range(3):
        lm_loss(model, tokens(3 * epoch + step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step(own_losses[rank][epoch])
