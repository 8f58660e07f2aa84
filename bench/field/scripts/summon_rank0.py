"""The classic wrapper: rank 0 looks at full weights for a histogram, and the others wait for it in a barrier."""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.fc(x)


def weight_histogram(model):
    with FSDP.summon_full_params(model, writeback=False):  # <- here
        return {n: p.abs().mean().item() for n, p in model.named_parameters()}


dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("FIELD_TIMEOUT_S", "1800"))))
rank = dist.get_rank()
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 16), *[Layer(16) for _ in range(3)], nn.Linear(16, 1))
net = FSDP(
    net,
    auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer}),
    device_id=torch.device("cpu"),
)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)

for it in range(5):
    opt.zero_grad()
    x = torch.randn(4, 8)
    loss = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    opt.step()
if rank == 0:
    print(loss.item(), weight_histogram(net), flush=True)
dist.barrier()
dist.destroy_process_group()
