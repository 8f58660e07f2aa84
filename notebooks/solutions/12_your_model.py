# %% yours-wrap
wrap = f"{block},Embedding"


# %% yours-script
# %%writefile train.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

data = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(20):
    loss = (model(data) - data.sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
dist.destroy_process_group()
