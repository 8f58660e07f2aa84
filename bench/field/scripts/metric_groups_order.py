"""Two groups of the same ranks: metrics are reduced in the order in which a rank has logged them."""

import torch
import torch.distributed as dist
from common import TIMEOUT, TinyLM, lm_loss, shard, start, tokens
from torch.distributed.fsdp import fully_shard

rank, world = start()
groups = {name: dist.new_group(timeout=TIMEOUT) for name in ("loss", "tokens")}
model = shard(TinyLM(depth=2), fully_shard)
optimizer = torch.optim.Adam(model.parameters())


class Meter(dict):
    def reduce(self):
        for name, value in self.items():
            dist.all_reduce(value, group=groups[name])  # <- here


for step in range(4):
    loss = lm_loss(model, tokens(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    meter = Meter()
    if rank == 2 and step == 2:  # a padded batch logs its tokens before its loss
        meter["tokens"] = torch.tensor([30.0])
    meter["loss"] = loss.detach().reshape(1).clone()
    meter.setdefault("tokens", torch.tensor([36.0]))
    meter.reduce()
dist.destroy_process_group()
