"""A sum over ranks in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def add_others(chunks: Sequence[torch.Tensor], rank: int, output: torch.Tensor) -> None:
    """Add ``chunks`` (F - 1 times ``[S]``, of the other ranks in order) to ``output`` ``[S]``, this rank's own chunk.

    The order is ``((p0 + p1) + p2) + ...``, so the result is bit-equal on every rank.
    """
    before, after = chunks[:rank], chunks[rank:]
    if before:
        total = before[0]
        for chunk in before[1:]:
            total = total + chunk if total is before[0] else total.add_(chunk)
        torch.add(total, output, out=output)
    for chunk in after:
        output.add_(chunk)
