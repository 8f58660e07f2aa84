"""Each rank trains its own expert, which is excluded from the wrapper; tokens travel to it and back."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()


class Experts(nn.Module):
    def __init__(self, dim):
        super().__init__()
        made = torch.Generator().manual_seed(rank)
        self.own = nn.Parameter(torch.randn(dim, dim, generator=made) / dim)

    def forward(self, x):
        there = funcol.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
        return funcol.all_to_all_single_autograd(torch.tanh(there @ self.own), None, None, dist.group.WORLD)


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), Experts(8), nn.Linear(8, 1))
DDP._set_params_and_buffers_to_ignore_for_model(net, ["1.own"])
model = DDP(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step():
    x = torch.randn(4 * world, 5)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    net[1].own.grad /= world  # the losses of all ranks are in it
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


torch.manual_seed(100 + rank)
for _ in range(5):
    train_step()
