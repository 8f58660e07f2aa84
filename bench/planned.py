"""Training under the policies that a plan is compared with; ``python -m bench.planned MODEL POLICY`` is the script."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from workbench.engine import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from workbench.engine.classic import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy
from workbench.zoo import GPT, Block, GPTConfig, next_token_loss

STEPS = 7
SEQUENCES, TOKENS, VOCAB = 4, 64, 256
_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
_MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    "one unit": {"one_unit": True},
    "bf16": {"mp_policy": _HALF},
    "bf16, reduced in fp32": {"mp_policy": _MIXED},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "checkpoint": {"checkpoint": True},
    "checkpoint, kept": {"checkpoint": True, "reshard_after_forward": False},
    "copies": {"mesh": True},
    "wrapper": {"classic": ShardingStrategy.FULL_SHARD},
    "wrapper, kept": {"classic": ShardingStrategy.SHARD_GRAD_OP},
}
"""By name: arguments of ``fully_shard``, and what else differs."""


class Layers(nn.Module):
    """A block of two layers, unlike those of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return rows of the same width."""
        return x + self.down(torch.relu(self.up(x)))


def _gpt(width: int, blocks: int, **more: Any) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    config = GPTConfig(vocab_size=VOCAB, num_blocks=blocks, width=width, max_tokens=TOKENS, **more)
    ids = torch.randint(VOCAB, (SEQUENCES, TOKENS + 1))
    return GPT(config), lambda model: next_token_loss(model(ids[:, :-1]), ids[:, 1:])


def _layers(width: int, blocks: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    rows = torch.randn(SEQUENCES * TOKENS, width)
    model = nn.Sequential(*(Layers(width) for _ in range(blocks)), nn.Linear(width, 3))
    return model, lambda model: model(rows).square().mean()


MODELS = {
    "GPT of width 256": partial(_gpt, 256, 4),
    "GPT of width 144, tied": partial(_gpt, 144, 6, tie_weights=True),
    "layers of width 384": partial(_layers, 384, 4),
}
"""By name: returns a model and the function of its loss."""


def make(model: str, policy: str) -> Callable[[], None]:
    """Return the function of one step."""
    torch.manual_seed(0)
    whole, loss = MODELS[model]()
    options = dict(POLICIES[policy])
    blocks = [module for module in whole.modules() if isinstance(module, (Block, Layers))]
    if options.pop("checkpoint", False):
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if options.pop("one_unit", False):
        blocks = []
    if options.pop("mesh", False):
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    strategy = options.pop("classic", None)
    if strategy is not None:
        whole = FullyShardedDataParallel(
            whole,
            auto_wrap_policy=ModuleWrapPolicy({Block, Layers}),
            sharding_strategy=strategy,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    else:
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(whole, **options)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-4)

    def step() -> None:
        loss(whole).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def train(model: str, policy: str, steps: int) -> None:
    """Train for some steps."""
    step = make(model, policy)
    for _ in range(steps):
        step()


if __name__ == "__main__":
    train(*sys.argv[1:3], STEPS)
