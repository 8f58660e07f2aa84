"""Training scripts for torchrun, written to files."""

TRAIN = """
import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def build(args):
    torch.manual_seed(0)
    net = Net()
    if args.ddp:
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(args):
    torch.manual_seed(rank)
    loader = DataLoader(TensorDataset(torch.randn(4 * args.steps, 16)), batch_size=4, num_workers=args.workers)
    for (x,) in loader:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        total = loss.detach()
        dist.all_reduce(total)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--ddp", action="store_true")
    args = parser.parse_args()
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    rank, losses = dist.get_rank(), []
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    train(args)
    sys.stdout.write(f"losses of rank {rank}: {' '.join(losses)}\\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
"""
"""Trains a small model, sharded by ``fully_shard`` or in DDP, and writes its losses in hexadecimal."""

RECIPE = """
import argparse
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--scale", type=float, default=1.0)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
for module in (model[0], model):
    fully_shard(module)
    module.set_gradient_divide_factor(2.0 / args.scale)
optimizer = torch.optim.SGD(model.parameters(), 0.5)
data = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def train_step():
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


train_step()
dist.destroy_process_group()
"""
"""Trains, and has a function for ``verify``; ``--scale`` divides the gradients by too little."""


def written(folder, source=TRAIN, name="train.py"):
    """Write a script into ``folder``; return its path."""
    path = folder / name
    path.write_text(source)
    return str(path)
