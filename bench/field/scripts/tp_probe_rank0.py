"""Tensor parallelism: rank 0 alone runs the sharded model once more, to print activations."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def main():
    rank, world = start()
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(MLP(), MLP())
    for mlp in model:
        parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    probe = torch.ones(1, 16)
    for step in range(6):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and rank == 0:
            with torch.no_grad():
                print("probe", model(probe).norm().item(), flush=True)  # <- here
        dist.barrier()
    dist.destroy_process_group()


main()
