"""A communication hook of DDP compresses gradients, and fails on one rank."""

import torch
import torch.distributed as dist
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()


class Compressor:
    def __init__(self):
        self.calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        if rank == 1 and self.calls == 4:
            raise RuntimeError("error feedback buffer has the wrong size")  # <- here
        small = bucket.buffer().to(torch.float16).to(torch.float32) / world
        return dist.all_reduce(small, async_op=True).get_future().then(lambda f: f.value()[0])


def main():
    net = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    net.register_comm_hook(None, Compressor().__call__)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        net(torch.randn(4, 8)).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
    dist.destroy_process_group()


main()
