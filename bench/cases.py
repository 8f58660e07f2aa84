"""The cases: a model on a number of ranks in one precision; and the implementations that train it.

Every case trains on sequences of 128 tokens, 4 per batch, with one unit per block, one for the rest, and fused
AdamW.
"""

from dataclasses import dataclass

import torch

from workbench.zoo import GPT, GPTConfig

NUM_SEQUENCES = 4
NUM_TOKENS = 128

ALONE, DDP, TORCH, OURS_GLOO, OURS = "alone", "ddp", "torch", "ours gloo", "ours"
IMPLEMENTATIONS = {
    ALONE: "the same arithmetic on every rank without any communication",
    DDP: "torch's DistributedDataParallel",
    TORCH: "torch's fully_shard",
    OURS_GLOO: "our engine over gloo's TCP (WORKBENCH_COMM=gloo)",
    OURS: "our engine with its default communication (WORKBENCH_COMM unset)",
}
CLASSIC, CLASSIC_TORCH = "classic", "classic torch"
CLASSICS = {
    CLASSIC_TORCH: "torch's FullyShardedDataParallel",
    CLASSIC: "our FullyShardedDataParallel with its default communication",
    OURS: "our fully_shard",
}
OF_OURS = (OURS_GLOO, OURS)
WITHOUT_OURS = (ALONE, TORCH)
"""The implementations in the second run, which loads nothing of ours."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table of targets.

    Attributes:
        name: its name for ``--cases``.
        num_ranks: processes of one thread each.
        is_bf16: compute and communicate in bfloat16; parameters at rest and optimizer stay fp32.
        num_hosts: number of hosts, with equally many ranks each; see :mod:`tests.helpers.ranks_on_hosts`.
        is_copied: every host has a copy of the parameters, sharded over its ranks.
        device: torch's type of the devices, one per rank.
    """

    name: str
    config: GPTConfig
    num_ranks: int
    is_bf16: bool = False
    num_hosts: int = 1
    is_copied: bool = False
    device: str = "cpu"

    def describe(self) -> str:
        """Return a description of half a line."""
        millions = num_params(self.config) / 1e6
        digits = 1 if millions >= 1 else 2
        precision = "bf16 params and reduce" if self.is_bf16 else "fp32"
        sizes = f"{self.config.num_blocks} blocks x {self.config.width}"
        hosts = (
            f" on {self.num_hosts} hosts{', each with a copy' if self.is_copied else ''}" if self.num_hosts > 1 else ""
        )
        kind = "" if self.device == "cpu" else f"{self.device} "
        ranks = f"{self.num_ranks} {kind}ranks{hosts}"
        return f"{self.name}: {millions:.{digits}f} M parameters ({sizes}), {ranks}, {precision}"


_LARGE = GPTConfig(vocab_size=256, num_blocks=6, width=512, num_heads=8, max_tokens=NUM_TOKENS)
_SMALL = GPTConfig(vocab_size=256, num_blocks=4, width=256, num_heads=4, max_tokens=NUM_TOKENS)
CASES = {
    case.name: case
    for case in (
        Case(name="19.2M", config=_LARGE, num_ranks=2),
        Case(name="3.3M", config=_SMALL, num_ranks=2),
        Case(name="19.2M-4ranks", config=_LARGE, num_ranks=4),
        Case(name="19.2M-bf16", config=_LARGE, num_ranks=2, is_bf16=True),
    )
}
CLASSIC_CASES = {
    case.name: case
    for case in (
        *(CASES[name] for name in ("19.2M", "3.3M", "19.2M-4ranks")),
        Case(name="3.3M-4ranks", config=_SMALL, num_ranks=4),
    )
}
"""The cases of the wrappers."""
HOSTS_CASES = {
    case.name: case
    for case in (
        Case(name="3hosts", config=_SMALL, num_ranks=6, num_hosts=3),
        Case(name="3hosts-copies", config=_SMALL, num_ranks=6, num_hosts=3, is_copied=True),
    )
}
"""Measured over links of 1 Gbit/s and 2 ms."""

_ON_GPUS = GPTConfig(vocab_size=8192, num_blocks=12, width=1024, num_heads=16, max_tokens=NUM_TOKENS)
GPU_CASES = {
    case.name: case
    for case in (
        Case(name="gpu", config=_ON_GPUS, num_ranks=1, device="cuda"),
        Case(name="gpu-2ranks", config=_ON_GPUS, num_ranks=2, device="cuda"),
        Case(name="gpu-2ranks-bf16", config=_ON_GPUS, num_ranks=2, is_bf16=True, device="cuda"),
    )
}
"""Measured if there is a GPU; ranks share it if it is the only one."""

RECORDED = {
    case.name: case
    for case in (
        Case(
            name="3.7M",
            config=GPTConfig(vocab_size=1024, num_blocks=4, width=256, num_heads=4, max_tokens=NUM_TOKENS),
            num_ranks=2,
        ),
        Case(
            name="0.23M",
            config=GPTConfig(vocab_size=192, num_blocks=4, width=64, num_heads=4, max_tokens=NUM_TOKENS),
            num_ranks=2,
        ),
    )
}
"""Models for measuring the cost of recording and watching."""


def num_params(config: GPTConfig) -> int:
    """Return the number of elements of all parameters; the model is made without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())
