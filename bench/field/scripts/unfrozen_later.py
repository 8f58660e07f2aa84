"""Gradual unfreezing: the wrapper is made while the body is frozen, and never learns that it is trained later."""

import torch
from common import TinyLM, lm_loss, start, tokens
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
net = TinyLM(depth=2)
for block in net.blocks:
    block.requires_grad_(False)
model = DDP(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)


def train_step(step):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


for step in range(6):
    if step == 3:
        net.blocks[-1].requires_grad_(True)  # <- here
    train_step(step)
