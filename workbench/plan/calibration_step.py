"""Small training programs that a machine is calibrated with: run on its ranks, and planned, by name.

``python -m workbench.plan.calibration_step NAME`` takes a few steps, as a script would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.engine import MixedPrecisionPolicy, fully_shard
from workbench.zoo import GPT, Block, GPTConfig, next_token_loss


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training program.

    Attributes:
        width: of the model.
        blocks: number of its blocks; 0: the model of :class:`Various` instead.
        num_sequences, num_tokens: of a batch.
        is_bf16: computes in bfloat16.
        is_sharded: whether it is sharded, each block a unit.
        is_fused: whether the optimizer is the fused one.
    """

    width: int
    blocks: int = 2
    num_sequences: int = 4
    num_tokens: int = 64
    is_bf16: bool = False
    is_sharded: bool = False
    is_fused: bool = False

    def make(self, device: torch.device) -> Callable[[], None]:
        """Return the function of one step."""
        torch.manual_seed(0)
        if not self.blocks:
            return Various(self.width).make(self.num_sequences * self.num_tokens)
        config = GPTConfig(vocab_size=256, num_blocks=self.blocks, width=self.width, max_tokens=self.num_tokens)
        model = GPT(config).to(device)
        dtype = torch.bfloat16
        if self.is_sharded:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
            policy = precision if self.is_bf16 else MixedPrecisionPolicy()
            for module in [module for module in model.modules() if isinstance(module, Block)]:
                fully_shard(module, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        elif self.is_bf16:
            model = model.to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.is_fused or None)
        ids = torch.randint(256, (self.num_sequences, self.num_tokens + 1), device=device)

        def step() -> None:
            next_token_loss(model(ids[:, :-1]), ids[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


class Various(nn.Module):
    """Operations that a GPT does not have: of other activations, norms, dropout, convolutions and optimizers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.norm, self.drop = nn.RMSNorm(width), nn.Dropout(0.1)
        self.conv, self.batch_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return a number for rows ``[N, D]``."""
        y = self.down(F.silu(self.up(self.norm(x_ND))) * torch.relu(self.up(x_ND)))
        images = torch.relu(self.batch_norm(self.conv(x_ND[: 3 * (len(x_ND) // 3)].view(-1, 3, 8, x_ND.shape[1] // 8))))
        loss: Tensor = self.drop(torch.sigmoid(y) + torch.tanh(x_ND)).square().mean() + images.mean()
        return loss

    def make(self, rows: int) -> Callable[[], None]:
        """Return the function of one step."""
        device = next(self.parameters()).device
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        x_ND = torch.randn(rows, self.up.in_features, device=device)

        def step() -> None:
            self(x_ND).backward()
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return step


MEASURED = {
    **{f"width {width}": Training(width=width) for width in (32, 64, 128, 256, 384, 512)},
    **{f"width {width}, bf16": Training(width=width, is_bf16=True, is_fused=True) for width in (64, 128, 256)},
    **{f"width {width}, fused": Training(width=width, is_fused=True) for width in (64, 256, 512)},
    **{f"various, {width}": Training(width=width, blocks=0) for width in (64, 256)},
    "256 tokens": Training(width=128, num_tokens=128),
}
"""Trainings whose operations are measured."""

STEPS = {
    "6 blocks of width 32": Training(width=32, blocks=6, is_sharded=True),
    "3 blocks of width 192": Training(width=192, blocks=3, is_sharded=True),
    "4 blocks of width 320, fused": Training(width=320, blocks=4, is_sharded=True, is_fused=True),
    "3 blocks of width 192, bf16": Training(width=192, blocks=3, is_sharded=True, is_bf16=True, is_fused=True),
}
"""Trainings that are run and planned: the host's time for a unit is fitted to the first, the others only check."""


def main(name: str) -> None:
    """Take steps of a training of :data:`STEPS`, until the process is ended."""
    step = STEPS[name].make(torch.device("cpu"))
    for _ in range(3):
        step()


if __name__ == "__main__":
    main(sys.argv[1])
