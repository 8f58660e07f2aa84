"""Gradients that an optimizer has used and that a later backward adds to, because nothing clears them.

After a step of an optimizer, a few elements of a few gradients are kept. If they are the same when the next backward
begins, and other ones when the optimizer steps again, both its steps use the first gradients. Micro-batches between two
steps do not count, and neither do gradients that were cleared or changed in any way after the step.

Only the first steps of an optimizer are watched, and those of each ``%fsdp step``. A device is waited for only where
nothing has written to the gradients since the step.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.optim import Optimizer

from workbench.engine.full_param import local_tensor

NUM_STEPS = 3
"""Steps of an optimizer that are watched."""

NUM_PARAMS = 4
"""Parameters of an optimizer whose gradients are watched, the smallest."""

NUM_ELEMENTS = 64
"""Elements kept of each gradient, the first."""


@dataclass(frozen=True)
class _Used:
    """A gradient that an optimizer has used.

    Attributes:
        param: its parameter.
        version: autograd's count of writes to it.
        values: its first elements.
    """

    param: torch.Tensor
    version: int
    values: torch.Tensor

    @property
    def now(self) -> torch.Tensor | None:
        """The first elements of the parameter's gradient now; None if it has none."""
        grad = _grad_of(self.param)
        return None if grad is None else _head(grad)

    @property
    def is_written(self) -> bool:
        grad = _grad_of(self.param)
        return grad is None or grad._version != self.version

    @property
    def is_same(self) -> bool:
        return self.now is not None and torch.equal(self.now, self.values)


@dataclass
class _Watched:
    """An optimizer that is watched.

    Attributes:
        num_left: its steps that are still to be watched.
        used: gradients that its newest step used, none of which is cleared so far.
        is_added_to: whether a backward has begun since.
    """

    num_left: int = NUM_STEPS
    used: list[_Used] = field(default_factory=list)
    is_added_to: bool = False


class UsedGradients:
    """Finds optimizers whose steps use the gradients of an earlier step again."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = weakref.WeakKeyDictionary()

    def watch_again(self) -> None:
        """Watch the next steps of all optimizers."""
        for watched in self._watched.values():
            watched.num_left = NUM_STEPS

    def before_backward(self) -> None:
        """Note which gradients the backward that begins will add to."""
        for watched in tuple(self._watched.values()):
            if not watched.used:
                continue
            if watched.is_added_to:
                is_kept = all(each.now is not None and bool(each.now.any()) for each in watched.used)
            else:
                is_kept = not any(each.is_written for each in watched.used)
                is_kept = is_kept and all(each.is_same for each in watched.used)
                watched.used = [each for each in watched.used if is_kept and bool(each.values.any())]
                watched.is_added_to = bool(watched.used)
            if not is_kept:
                watched.used, watched.is_added_to = [], False

    def before_step(self, optimizer: Optimizer) -> bool | None:
        """Return whether the step that begins uses gradients of the last one again, or None if that is not watched."""
        watched = self._watched.get(optimizer)
        if watched is None or not watched.num_left:
            return None
        now = [(each.now, each) for each in watched.used] if watched.is_added_to else []
        is_kept = bool(now) and all(grad is not None and bool(grad.any()) for grad, _ in now)
        return is_kept and any(not each.is_same for _, each in now)

    def after_step(self, optimizer: Optimizer) -> None:
        """Keep a few elements of the gradients that a step has used."""
        watched = self._watched.setdefault(optimizer, _Watched())
        watched.used, watched.is_added_to = [], False
        if not watched.num_left:
            return
        watched.num_left -= 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        grads = [(param, grad) for param in params if (grad := _grad_of(param)) is not None]
        for param, grad in sorted(grads, key=lambda pair: pair[1].numel())[:NUM_PARAMS]:
            watched.used.append(_Used(param, grad._version, _head(grad).clone()))


def _grad_of(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient; None if it has none, or none that can be read."""
    grad = None if param.grad is None else local_tensor(param.grad)
    is_readable = grad is not None and grad.layout == torch.strided and not grad.is_meta and grad.numel()
    return grad if is_readable else None


def _head(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach().reshape(-1)[:NUM_ELEMENTS]
