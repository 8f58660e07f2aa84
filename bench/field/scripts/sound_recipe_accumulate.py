"""A sound recipe with the classic wrapper: accumulation with the loss divided, tied weights in one unit."""

import torch
from common import Block, TinyLM, lm_loss, start, tokens
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

rank, world = start()
net = TinyLM(depth=2)
net.head.weight = net.embed.weight
model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), use_orig_params=True)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
count = 0


def train_step():
    global count
    optimizer.zero_grad()
    total = 0.0
    for i in range(3):
        loss = lm_loss(model, tokens(3 * count + i, rank)) / 3
        loss.backward()
        total += loss.item()
    optimizer.step()
    count += 1
    return total
