"""The time of ``fully_shard`` itself: a large model without memory, on one rank of a simulated world."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.cases import OURS, TORCH
from bench.training import shard_per_block
from workbench.zoo import GPT, GPTConfig

WORLD_SIZE = 64
CONFIG = GPTConfig(vocab_size=256, num_blocks=24, width=1664, num_heads=26, max_tokens=1024)
"""0.8 B parameters."""


def measure_sharding(implementation: str, num_times: int, config: GPTConfig = CONFIG) -> list[int]:
    """Return the nanoseconds of sharding ``num_times`` new models per block; the first is the process's first call."""
    fully_shard = _FUNCTIONS[implementation]()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE, store=FakeStore())
    return [_sharding_ns(fully_shard, config) for _ in range(num_times)]


def _theirs() -> Callable[..., object]:
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def _ours() -> Callable[..., object]:
    from workbench.engine import fully_shard

    return fully_shard


_FUNCTIONS = {TORCH: _theirs, OURS: _ours}


def _sharding_ns(fully_shard: Callable[..., object], config: GPTConfig) -> int:
    with torch.device("meta"):
        model = GPT(config)
    begin = time.perf_counter_ns()
    shard_per_block(model, fully_shard)
    return time.perf_counter_ns() - begin
