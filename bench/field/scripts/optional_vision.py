"""A model for images and text: a rank whose batch has no image leaves out the encoder, which is a unit."""

import random

import torch
from common import start
from torch import nn
from torch.distributed.fsdp import fully_shard

rank, world = start()


class Encoder(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.project = nn.Linear(24, dim)
        self.mix = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU())

    def forward(self, pixels):
        return self.mix(self.project(pixels))


class Captioner(nn.Module):
    def __init__(self, dim=32, vocab=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.vision = Encoder(dim)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim)) for _ in range(3))
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens, pixels=None):
        h = self.embed(tokens)
        if pixels is not None:
            h = torch.cat([self.vision(pixels), h[:, pixels.shape[1] :]], dim=1)  # <- here
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def batches(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(64, (2, 12), generator=generator)
        yield tokens, torch.randn(2, 4, 24, generator=generator) if rng.random() < 0.9 else None


model = Captioner()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model.vision)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = batches(1234 + rank)
for _ in range(200):
    tokens, pixels = next(data)
    logits = model(tokens, pixels)
    nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
