"""DDP with a static graph and activation checkpointing."""

import torch
import torch.distributed as dist
from common import Block, start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

rank, world = start()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x):
        for block in self.inner:
            x = checkpoint(block, x, use_reentrant=False)
        return x


model = DDP(Checkpointed(), static_graph=True)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(7):
    model(torch.randn(4, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
