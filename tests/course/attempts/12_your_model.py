# %% yours-wrap: right
wrap = f"{block},Embedding"


# %% yours-wrap: right
wrap = "Embedding, " + block


# %% yours-wrap: right
wrap = ",".join(["Embedding", block])


# %% yours-wrap: of 4
wrap = "Embedding"


# %% yours-wrap: of 4
wrap = ""


# %% yours-wrap: of 4
wrap = "LlamaModel"


# %% yours-wrap: of 4
wrap = f"{block},LlamaMLP"


# %% yours-wrap: of 4
wrap = f"{block},Embedding,LlamaMLP"


# %% yours-wrap: of 4
wrap = f"{block},Linear"


# %% yours-wrap: of 4
wrap = f"{block} Embedding"


# %% yours-wrap: of 4
wrap = f"{block},Embeding"


# %% yours-wrap: of 4
wrap = f"{block},Embedding --mp bf16"


# %% yours-script: right
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
params = list(model.parameters())
optimizer = torch.optim.AdamW(params, lr=3e-3)

data = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(data) - data.sin()).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
dist.destroy_process_group()


# %% yours-script: right
from pathlib import Path

stored = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)

data = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
losses = []
for _ in range(20):
    loss = (model(data) - data.sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
"""


def edited(*changes):
    text = stored
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path("train.py").write_text(text)


early = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\n"
moved = (early, ""), ("\ndata = torch", f"{early}\ndata = torch")
edited(*moved)


# %% yours-script: right
edited((early, ""), ("losses = []\n", f"losses = []\n{early}"))


# %% yours-script: the loss of rank 0 goes from
edited((early, ""), ("for block in model:\n", f"{early}for block in model:\n"))


# %% yours-script: right
edited((early, ""), ("fully_shard(model, mesh=mesh)\n", f"{early}fully_shard(model, mesh=mesh)\n"))


# %% yours-script: the loss of rank 0 goes from
edited(("lr=3e-3", "lr=3e-1"))


# %% yours-script: the loss of rank 0 goes from
edited(("range(20)", "range(200)"))


# %% yours-script: issued 1 all-gather (not 8)
edited(*moved, ("for block in model:\n    fully_shard(block, mesh=mesh)\n", ""))


# %% yours-script: the losses
edited(*moved, ("lr=3e-3", "lr=1e-2"))


# %% yours-script: the losses
edited(*moved, ("AdamW", "SGD"), ("lr=3e-3", "lr=10.0"))


# %% yours-script: the losses
edited(*moved, ("manual_seed(dist.get_rank())", "manual_seed(0)"))


# %% yours-script: the losses
edited(*moved, ("    optimizer.zero_grad()\n", ""))


# %% yours-script: the losses
edited(*moved, ("range(20)", "range(40)"))


# %% yours-script: issued 0 all-gathers (not 8)
edited(
    *moved,
    (
        "for block in model:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)\n",
        "from torch.nn.parallel import DistributedDataParallel\n\nmodel = DistributedDataParallel(model)\n",
    ),
)
