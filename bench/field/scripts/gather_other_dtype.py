"""Embeddings for a contrastive loss are gathered in half precision on all ranks but one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import start
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world = start()
encoder = DDP(nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 1024)))
opt = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
amp = rank != 2  # autocast was switched off on one host


def all_embeddings(z):
    parts = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(parts, z)  # <- here
    return torch.cat(parts).float()


for step in range(4):
    z = F.normalize(encoder(torch.randn(64, 12)), dim=-1)
    with torch.no_grad():
        others = all_embeddings(z.detach().to(torch.float16 if amp else torch.float32))
    logits = z @ others.T
    target = torch.arange(64) + 64 * rank
    F.cross_entropy(logits / 0.1, target).backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
