"""A training script with the shapes of Llama 3, for plans: ``workbench plan --ranks 64 -m workbench.zoo.llama 70b``.

It has no data and no rotary embedding, which holds no bytes for backward that depend on a policy.

Shape suffixes: B sequences, T tokens per sequence, D width, V vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True, kw_only=True)
class LlamaSizes:
    """Sizes of a model, and of the batch of a rank.

    Attributes:
        blocks: transformer blocks.
        width: elements of a token's vector, D.
        heads: attention heads; they divide the width.
        kv_heads: heads of keys and values; they divide the heads.
        hidden: elements within the MLP.
        vocab: distinct tokens, V.
        sequences: sequences of a rank's batch, B.
        tokens: tokens of a sequence, T.

    Raises:
        ValueError: a size is below 1, or heads do not divide what they should.
    """

    blocks: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    sequences: int = 1
    tokens: int = 4096

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 1:
                raise ValueError(f"{each.name} is at least 1, not {getattr(self, each.name)}")
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"heads divide the width, and kv_heads the heads: {self.width}, {self.heads}, {self.kv_heads} do not"
            )


SIZES: Mapping[str, LlamaSizes] = {
    "8b": LlamaSizes(blocks=32, width=4096, heads=32, kv_heads=8, hidden=14336),
    "70b": LlamaSizes(blocks=80, width=8192, heads=64, kv_heads=8, hidden=28672),
    "405b": LlamaSizes(blocks=126, width=16384, heads=128, kv_heads=8, hidden=53248),
}
"""Llama 3, with one sequence of 4096 tokens a rank."""


class LlamaAttention(nn.Module):
    """Causal attention whose queries share keys and values in groups."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        width = sizes.width
        self.head = width // sizes.heads
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, sizes.kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output of each token, ``(B, T, D)``."""
        q, k, v = (each(x_BTD).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q, self.k, self.v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y_BTD: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return y_BTD


class LlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output, ``(B, T, D)``."""
        y_BTD: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class LlamaBlock(nn.Module):
    """Attention and MLP, each with a norm before it and its input added."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention, self.mlp = LlamaAttention(sizes), LlamaMLP(sizes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output, ``(B, T, D)``."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        y_BTD: Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class Llama(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.blocks))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits, ``(B, T, V)``."""
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def main(sizes: LlamaSizes, steps: int = 2) -> None:
    """Train: computed in bfloat16 and reduced in float32, with AdamW."""
    with torch.device("meta"):
        model = Llama(sizes)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for each in model.blocks:
        fully_shard(each, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        batch_BT = torch.randint(sizes.vocab, (sizes.sequences, sizes.tokens + 1), device="cuda")
        loss = F.cross_entropy(model(batch_BT[:, :-1]).flatten(0, 1).float(), batch_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model with the shapes of Llama 3.")
    parser.add_argument("size", choices=SIZES, help="whose sizes, where no other is given")
    for each in fields(LlamaSizes):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, metavar="N")
    given = vars(parser.parse_args())
    try:
        sizes = replace(SIZES[given.pop("size")], **given)
    except ValueError as error:
        parser.error(str(error))
    main(sizes)
