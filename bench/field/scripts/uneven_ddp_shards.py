"""DDP on files that do not divide by the ranks: the last rank runs out of batches first."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("FIELD_TIMEOUT_S", "1800"))))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)

samples = torch.randn(41, 6)
labels = samples.sum(1, keepdim=True)
lo = rank * 14
mine = TensorDataset(samples[lo : lo + 14], labels[lo : lo + 14])  # 14, 14 and 13 samples
loader = DataLoader(mine, batch_size=2, drop_last=True)  # <- here

model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
seen = torch.zeros(1)
for x, y in loader:  # <- here
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()  # <- here
    optimizer.step()
    seen += len(x)

dist.barrier()  # <- here
dist.all_reduce(seen)
if rank == 0:
    print("samples", int(seen), flush=True)
dist.destroy_process_group()
