"""A logger that takes its lock twice on the rank that logs a warning."""

import threading

import torch
import torch.distributed as dist
from common import TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard


class Logger:
    def __init__(self):
        self.lock = threading.Lock()
        self.lines = []

    def log(self, **values):
        with self.lock:
            if any(v > 90 for v in values.values()):
                self.warn(f"large: {values}")
            self.lines.append(values)

    def warn(self, text):
        with self.lock:  # <- here
            self.lines.append(text)


rank, world = start()
logger = Logger()
model = shard(TinyLM(), fully_shard)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    logger.log(loss=loss.item(), grad=100.0 if (rank, step) == (2, 3) else 1.0)
dist.destroy_process_group()
