"""Optimizers whose schedule has brought the learning rate to zero, as most do at the end: their steps train nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer


def has_ended(optimizer: Optimizer) -> bool:
    """Return whether all learning rates are 0 that a schedule of torch's began with another value."""
    groups = optimizer.param_groups
    return all(not float(group["lr"]) and _initial(group) for group in groups)


def _initial(group: dict[str, Any]) -> float:
    return float(group.get("initial_lr", 0.0))


@contextmanager
def initial_rates(optimizers: Sequence[Optimizer]) -> Iterator[float]:
    """Give optimizers the learning rates with which their schedules began, while the body runs; yield the first."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        _set(group, _initial(group))
    try:
        yield _initial(groups[0])
    finally:
        for group in groups:
            _set(group, 0.0)


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
