"""A small GPT, written to be sharded: every block is one module of class ``Block`` in the list ``blocks``.

Shape suffixes: B sequences, T tokens per sequence, D width, H heads, K elements per head (D = H * K), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes of a :class:`GPT`.

    Attributes:
        vocab_size: distinct tokens, V.
        num_blocks: transformer blocks.
        width: elements of a token's vector, D.
        num_heads: attention heads, H; divides ``width``.
        max_tokens: longest sequence, the largest T.
        tie_weights: whether the head shares the token embedding's parameter.

    Raises:
        ValueError: a size is below 1, or the heads do not divide the width.
    """

    vocab_size: int
    num_blocks: int = 4
    width: int = 128
    num_heads: int = 4
    max_tokens: int = 64
    tie_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_blocks", "width", "num_heads", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is at least 1, not {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads divides width; {self.num_heads} heads do not divide {self.width} elements")


class Attention(nn.Module):
    """Causal multi-head self-attention: a token attends to itself and earlier tokens."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output of each token, ``(B, T, D)``."""
        q_BHTK, k_BHTK, v_BHTK = (
            part_BTD.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part_BTD in self.qkv(x_BTD).chunk(3, -1)
        )
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class Block(nn.Module):
    """One transformer block, the natural unit of sharding: 12 * D**2 + 13 * D parameters."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the residual stream after this block, ``(B, T, D)``."""
        x_BTD = x_BTD + self.attention(self.ln_1(x_BTD))
        y_BTD: Tensor = x_BTD + self.mlp(self.ln_2(x_BTD))
        return y_BTD


class GPT(nn.Module):
    """Token and position embedding, blocks, final LayerNorm, head.

    Args:
        config: its sizes.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_tokens, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.num_heads) for _ in range(config.num_blocks))
        self.ln = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tie_weights:
            nn.init.normal_(self.tokens.weight, std=config.width**-0.5)  # as the head, it needs initial scores near 1
            self.head.weight = self.tokens.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the next-token scores, ``(B, T, V)``, for token numbers ``(B, T)``.

        Raises:
            ValueError: a sequence is longer than ``config.max_tokens``.
        """
        num_tokens = ids_BT.shape[-1]
        if num_tokens > self.config.max_tokens:
            raise ValueError(f"a sequence has at most max_tokens = {self.config.max_tokens} tokens, not {num_tokens}")
        x_BTD = self.tokens(ids_BT) + self.positions(torch.arange(num_tokens, device=ids_BT.device))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: Tensor = self.head(self.ln(x_BTD))
        return logits_BTV


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, a scalar."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
