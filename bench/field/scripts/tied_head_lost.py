"""The head is tied to the embedding, until a checkpoint is loaded with assign=True."""

import torch
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
model = TinyLM(depth=2)
model.head.weight = model.embed.weight
checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
model.load_state_dict(checkpoint, assign=True)  # <- here
shard(model, fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
k = 0


def train_step():
    global k
    loss = lm_loss(model, tokens(k, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    k += 1
    return loss


for _ in range(2):
    train_step()
if rank == 0:
    print("tied:", model.head.weight is model.embed.weight, flush=True)
