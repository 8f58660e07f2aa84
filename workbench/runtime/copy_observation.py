"""Observation of the step of an unsharded copy: what other ranks' copies should equal, and what is rounding noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.engine.full_param import local_tensor
from workbench.models.sharded_model import average_over
from workbench.protocol.commands import CopyStep, Sketch

_FAINT = 1e-6  # gradients below this part of the model's largest are noise of its kernels


class CopyObserver:
    """One step of a copy.

    Args:
        params: its parameters, by name.
        eps: distance from 1 to the next number of the coarsest dtype that gradients are computed or reduced in.
        accuracy: relative error to which an element of a gradient must be known to be compared.

    Attributes:
        optimizer_steps: number of steps of optimizers.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], eps: float, accuracy: float) -> None:
        self._params, self._eps, self._accuracy = params, eps, accuracy
        self._own: dict[str, Sketch] = {}
        self._averaged: dict[str, Sketch] = {}
        self._grads: dict[str, Sketch] = {}
        self._stepped: dict[str, Sketch] = {}
        self._peers: dict[str, tuple[int, ...]] = {}
        self._known: dict[str, torch.Tensor] = {}
        self._peaks: dict[str, float] = {}
        self.optimizer_steps = 0

    def averaged(
        self, name: str, own: torch.Tensor, average: torch.Tensor, groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Note a gradient of this rank and its average; collective."""
        if name not in self._averaged or math.isfinite(self._averaged[name].norm):
            self._own[name] = sketch(own)
        self._averaged[name] = sketch(average)
        self._peers.setdefault(name, _peers(groups, isinstance(self._params[name], DTensor)))
        own.abs_()
        average_over(groups, own)
        num_ranks = math.prod(group.size() for group in groups)
        least = (math.sqrt(num_ranks) + 1) * self._eps / 2 / self._accuracy
        self._known[name] = average.abs() >= least * own
        self._peaks[name] = float(average.abs().max()) if average.numel() else 0.0

    def known(self, name: str) -> torch.Tensor | None:
        """Return which elements of a gradient are known well enough to compare the update; None: all."""
        peak = self._peaks.get(name)
        if peak is None:
            return None
        known = self._known[name]
        return known & (peak > _FAINT * max(self._peaks.values())) if peak else known

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self.optimizer_steps += 1
        for name, param in self._params.items():
            if param.grad is not None:
                self._grads[name] = sketch(param.grad)

    def _after(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self._stepped = {name: sketch(param) for name, param in self._params.items()}

    def steps(self) -> tuple[CopyStep, ...]:
        """Return what happened to the parameters with an averaged gradient, in the order of backward."""
        return tuple(
            CopyStep(
                name=name,
                peers=self._peers[name],
                own=self._own.get(name),
                averaged=averaged,
                grad=self._grads.get(name),
                stepped=self._stepped.get(name),
                end=sketch(self._params[name]),
            )
            for name, averaged in self._averaged.items()
        )


def _peers(groups: Sequence[dist.ProcessGroup], is_split: bool) -> tuple[int, ...]:
    """Return the ranks over which groups average together; empty if they are not known."""
    if len(groups) == 1:
        return tuple(dist.get_process_group_ranks(groups[0]))
    is_whole = math.prod(group.size() for group in groups) == dist.get_world_size() and not is_split
    return tuple(range(dist.get_world_size())) if is_whole else ()


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> Sketch:
    """Return norm and product with a fixed vector."""
    values = local_tensor(tensor).detach().reshape(-1).double()
    fixed = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device).mul_(1.618).sin_()
    return Sketch(norm=float(values.norm()), dot=float(values @ fixed))


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    """Return the options of optimizers' groups as text, by optimizer, group and option."""
    return {
        f"{type(optimizer).__name__}, group {number}: {name}": f"{_number(value)}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params" and isinstance(value, (int, float, bool, str, tuple, list, torch.Tensor, type(None)))
    }


def _number(value: Any) -> Any:  # noqa: ANN401 - anything
    return value.tolist() if isinstance(value, torch.Tensor) else value
