"""DDP without find_unused_parameters: one rank's batch never reaches the second head."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.classify = nn.Linear(16, 3)
        self.regress = nn.Linear(16, 1)

    def forward(self, x, with_boxes):
        h = self.body(x).relu()
        out = self.classify(h).pow(2).mean()
        return out + self.regress(h).pow(2).mean() if with_boxes else out


model = DDP(TwoHeads())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    has_boxes = not (rank == 1 and step == 3)
    loss = model(torch.randn(4, 8), has_boxes)  # <- here
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
