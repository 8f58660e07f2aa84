"""Copies between flat buffers and parameters: many pieces at once, in one kernel where the device has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from workbench.engine._torch import chunk_cat
from workbench.engine.shard_layout import ShardLayout

Grads = Sequence[torch.Tensor | None]
"""Full gradients that make up one sharded parameter; None counts as a zero gradient."""


class LaidOutParam(Protocol):
    """A parameter whose full gradients can be laid out by rank.

    Attributes:
        layout: how the parameter is split.
    """

    layout: ShardLayout

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) copies that lay ``grads`` out in the ``slots`` ``[n, slot_numel]`` of n ranks."""


def _whole(layouts: Sequence[ShardLayout], grads: Sequence[Grads], num_chunks: int) -> list[torch.Tensor]:
    """Return the gradients in the shapes of ``layouts``, if plain chunking lays them out; otherwise an empty list.

    Plain chunking works if each parameter has one gradient, all of one dtype, split by rows over ``num_chunks`` ranks.
    """
    found = [
        grad[0].reshape(layout.shape).contiguous()
        for layout, grad in zip(layouts, grads, strict=True)
        if len(grad) == 1 and grad[0] is not None and grad[0].numel()
        if layout.dim == 0 and layout.num_shards == num_chunks
    ]
    return found if len(found) == len(layouts) and len({grad.dtype for grad in found}) == 1 else []


def copy_out(gathered: torch.Tensor, targets: Sequence[torch.Tensor], *, fuses: bool) -> None:
    """See :meth:`workbench.engine.backends.base.Backend.copy_out`; ``fuses`` is :attr:`Backend.fuses_copies`."""
    num_ranks = len(gathered)
    sizes = [target.numel() // num_ranks for target in targets]
    if fuses and all(
        t.dtype == gathered.dtype and t.shape == (num_ranks, size) and t.is_contiguous()
        for t, size in zip(targets, sizes, strict=True)
    ):
        torch.split_with_sizes_copy(gathered, sizes, dim=1, out=list(targets))
        return
    pairs = zip(targets, gathered.split_with_sizes(sizes, dim=1), strict=True)
    slots = [slot if slot.shape == target.shape else slot.view(target.shape) for target, slot in pairs]
    torch._foreach_copy_(list(targets), slots)


def copy_in(
    params: Sequence[LaidOutParam], grads: Sequence[Grads], chunks: torch.Tensor, first_rank: int, *, fuses: bool
) -> None:
    """See :meth:`workbench.engine.backends.base.Backend.copy_in`; ``fuses`` is :attr:`Backend.fuses_copies`."""
    wholes = _whole([param.layout for param in params], grads, len(chunks)) if fuses else []
    if wholes:
        chunk_cat(wholes, len(chunks), out=chunks)
        return
    slots = chunks.split_with_sizes([param.layout.slot_numel for param in params], dim=1)
    pairs = [pair for p, g, s in zip(params, grads, slots, strict=True) for pair in p.copy_in_pairs(g, s, first_rank)]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
