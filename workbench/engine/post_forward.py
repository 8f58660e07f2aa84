"""A unit's shard between forward and backward with ``reshard_after_forward=K``: split over groups of K ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from workbench.engine import probe
from workbench.engine.mesh import FSDPMeshInfo
from workbench.engine.param import FSDPParam
from workbench.engine.shard_layout import ShardLayout
from workbench.events import Category


class PostForwardShard:
    """This rank's part of the full parameters: larger than its shards, and gathered from fewer ranks.

    Attributes:
        flat: slots one after another, in the param dtype.
        mesh_info: the smaller mesh.
    """

    def __init__(
        self,
        unit: int,
        params: Sequence[FSDPParam],
        mesh_info: FSDPMeshInfo,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.mesh_info = mesh_info
        self._layouts = [cast("ShardLayout", p.post_forward) for p in params]
        sizes = [layout.slot_numel for layout in self._layouts]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self._handle = probe.BufferHandle(Category.SHARDED_PARAMS, unit, self.flat.nbytes)
        for param, slot in zip(params, self.flat.split(sizes), strict=True):
            param.to_sharded(param.post_forward_form(slot, mesh_info))

    def by_rank(self, padded_fulls: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a view ``[K, ...]`` of each parameter's padded full, whose part r is that of rank r of the K."""
        return [layout.by_rank(full) for layout, full in zip(self._layouts, padded_fulls, strict=True)]
