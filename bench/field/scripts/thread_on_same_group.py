"""A thread gathers what ranks report every half second, on the group with which the main thread averages gradients."""

import threading
import time

import torch
import torch.distributed as dist
from common import start
from torch import nn

rank, world = start()


class Monitor(threading.Thread):
    def __init__(self, interval):
        super().__init__(daemon=True, name="monitor")
        self.interval, self.step, self.latest = interval, 0, []

    def run(self):
        while True:
            time.sleep(self.interval)
            reports = [None] * world
            dist.all_gather_object(reports, {"rank": rank, "step": self.step})  # <- here
            self.latest = reports


model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
generator = torch.Generator().manual_seed(rank)
monitor = Monitor(0.5)
monitor.start()
for step in range(20_000):
    x = torch.randn(8, 20, generator=generator)
    nn.functional.mse_loss(model(x).squeeze(1), x.sum(1)).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
    optimizer.zero_grad()
    monitor.step = step
