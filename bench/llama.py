"""A training script with the shapes of Llama 3, for plans: ``workbench plan --ranks 64 bench/llama.py 70b``."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

SIZES = {"8b": (4096, 32, 14336, 32), "70b": (8192, 64, 28672, 80), "tiny": (64, 4, 128, 2)}
DIM, HEADS, HIDDEN, BLOCKS = SIZES[sys.argv[1]]
KV_HEADS, VOCAB, TOKENS = max(HEADS // 8, 1), 128256, 4096


class Attention(nn.Module):
    """Causal attention whose queries share keys and values in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.head = DIM // HEADS
        self.q, self.out = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (nn.Linear(DIM, KV_HEADS * self.head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the same shape [B, T, D]."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the same shape [B, T, D]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and its input added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM), Attention(), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the same shape [B, T, D]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, T, V] of tokens [B, T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


with torch.device("meta"):
    model = Llama()
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for each in model.blocks:
    fully_shard(each, mp_policy=precision)
fully_shard(model, mp_policy=precision)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(10):
    batch = torch.randint(VOCAB, (1, TOKENS + 1), device="cuda")
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
