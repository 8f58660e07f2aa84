"""Plain c10d: gradients are averaged with asynchronous all-reduces, and counters by objects."""

import torch
import torch.distributed as dist
from common import start
from torch import nn

rank, world = start()
torch.manual_seed(5)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
for p in net.parameters():
    dist.broadcast(p.data, src=0)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(8):
    net(torch.randn(4, 6)).pow(2).mean().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in net.parameters()]
    for work in works:
        work.wait()
    for p in net.parameters():
        p.grad /= world
    opt.step()
    opt.zero_grad()
seen = [None] * world
dist.all_gather_object(seen, {"rank": rank, "steps": 8})
choice = [f"run-{len(seen)}" if rank == 0 else None]
dist.broadcast_object_list(choice, src=0)
dist.monitored_barrier()
dist.destroy_process_group()
