"""Weight decay is read from a file that only rank 0 has."""

import torch
from common import TinyLM, lm_loss, start, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

rank, world = start()
settings = {"lr": 0.01, "weight_decay": 0.0}
if rank == 0:
    settings["weight_decay"] = 0.3
model = FSDP(TinyLM(depth=2), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), **settings)  # <- here
batches = iter(range(10**6))


def train_step():
    optimizer.zero_grad()
    loss = lm_loss(model, tokens(next(batches), rank))
    loss.backward()
    optimizer.step()
    return loss.item()
