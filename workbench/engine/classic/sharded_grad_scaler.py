"""Loss scaling for float16 with sharded gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine._torch import GradScalerWithFlags
from workbench.engine.classic.comm_hooks import all_reduce


class ShardedGradScaler(GradScalerWithFlags):
    """torch's ``GradScaler`` for sharded gradients: if one rank finds inf or NaN, all ranks skip the step.

    Gradients may be float16, on any device; a scaled loss keeps its dtype. All ranks of the group call ``unscale_`` or
    ``step`` together, whether they hold gradients or not.

    Args:
        device: device type of the computation.
        init_scale: initial scale of losses.
        backoff_factor: factor for the scale after a skipped step.
        growth_factor: factor for the scale after ``growth_interval`` steps in a row without a skip.
        growth_interval: number of such steps.
        enabled: if False, losses and gradients stay as they are.
        process_group: the ranks that share gradients; None: all ranks.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:  # noqa: ANN401 - a tensor, or an iterable of tensors
        """Return a tensor, or the tensors in a list, tuple or other iterable, times the scale; dtypes stay.

        Raises:
            TypeError: ``outputs`` contains something else.
        """
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable) or isinstance(outputs, str):
            raise TypeError(f"ShardedGradScaler.scale takes a tensor or an iterable of tensors, got {outputs!r}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def share_flags(self, flags: Sequence[torch.Tensor], device: torch.device) -> None:
        """Set every flag to 1 if any flag of any rank is 1."""
        found = torch.stack([flag.to(device) for flag in flags]).amax(0)
        group = self.process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError("ShardedGradScaler needs a process group: call torch.distributed.init_process_group")
        all_reduce(found, dist.ReduceOp.MAX, group, "all-reduce of a grad scaler")
        for flag in flags:
            flag.copy_(found)
