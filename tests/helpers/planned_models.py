"""Models to plan, and the policies under which they are trained, on real ranks and on planned ones."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from workbench.engine import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from workbench.engine.classic import FullyShardedDataParallel, ModuleWrapPolicy

DIM, BLOCKS, STEPS = 16, 3, 2

POLICIES = {
    "default": (2, {}),
    "kept": (2, {"reshard_after_forward": False}),
    "resharded": (2, {"reshard_after_forward": True}),
    "bf16": (2, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}),
    "offload": (2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "hybrid": (4, {"mesh": (2, 2)}),
    "fewer": (4, {"reshard_after_forward": 2}),
    "uneven": (5, {}),
    "wrapper": (2, None),
}
"""By name: the number of ranks, and the arguments of ``fully_shard``, or None for the wrapper."""

DATA_PARALLEL = {
    "data parallel": (2, {}),
    "data parallel, views": (3, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004}),
    "data parallel, unused": (2, {"find_unused_parameters": True, "bucket_cap_mb": 0.004}),
    "data parallel, static": (2, {"static_graph": True}),
}
"""By name: the number of ranks, and the arguments of ``DistributedDataParallel``."""

FUSED = ("hybrid", "uneven")
"""Policies whose optimizer is fused."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def shard(model: nn.Module, policy: str) -> nn.Module:
    if policy in DATA_PARALLEL:
        return DistributedDataParallel(model, **DATA_PARALLEL[policy][1])
    options = POLICIES[policy][1]
    if options is None:
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
        )
    if "mesh" in options:
        options = options | {"mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    for block in model[:-1]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(policy: str, steps: int = STEPS) -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(DIM, 5)), policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=policy in FUSED)
    for _ in range(steps):
        loss = model(torch.randn(4, DIM)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _log(f"loss {loss.item():.3f}")


def _log(text: str) -> None:
    """Take what a script would write."""
