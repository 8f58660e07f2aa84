"""Steps of a training loop that does not announce them, and the optimizers of the process."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from workbench.engine._torch import local_of
from workbench.events import Category, Edge
from workbench.runtime.recorder import Recorder


class LoopSteps:
    """Reports to the recorder what no source announces: steps of a loop, optimizer steps, optimizer state.

    A step of a loop begins with the first training forward after the last one, and ends with a step of an optimizer.

    Attributes:
        optimizer_steps: number of optimizer steps on this rank.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running = False  # a step function, which begins and ends its steps itself
        self._state: weakref.WeakKeyDictionary[Optimizer, _StateBytes] = weakref.WeakKeyDictionary()
        self.optimizer_steps = 0

    def install(self) -> list[RemovableHandle]:
        """Watch every forward and every optimizer of the process; return the handles of the optimizer hooks."""
        self._recorder.on_forward = self._before_forward
        return [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def _before_forward(self) -> None:
        """Open a step for a training forward outside of one; evaluation is not a step."""
        if not self._running and not self._recorder.is_aside and torch.is_grad_enabled():
            self.before_step()
            self._recorder.begin_step()

    def before_step(self) -> None:
        """Called before a step of a loop begins."""

    def _before_optimizer(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self._recorder.optimizer_edge(Edge.BEGIN)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self.optimizer_steps += 1  # first: a rank that is held and aborted at the END has taken the step
        self._recorder.optimizer_edge(Edge.END)
        if self._recorder.is_recording:
            self.account(optimizer)
        if not self._running and not self._recorder.is_aside:
            self._recorder.end_step()

    def account(self, optimizer: Optimizer, *, changed: bool = False) -> None:
        """Record the current bytes of an optimizer's state on this rank.

        An optimizer makes its state once, and reading every tensor after each step would cost more than the step's
        other events together; ``changed`` says that the state was replaced.
        """
        known = self._state.get(optimizer)
        if known is None:
            known = self._state[optimizer] = _StateBytes(self._recorder)
        if changed or known.entries != len(optimizer.state):
            known.entries = len(optimizer.state)
            known.set(state_bytes(optimizer))


class _StateBytes:
    """Bytes of one optimizer's state, recorded as freed when the optimizer is gone."""

    def __init__(self, recorder: Recorder) -> None:
        self.entries = 0
        self._recorder = recorder
        self._num_bytes = 0

    def set(self, num_bytes: int) -> None:
        """Record the difference to the last value."""
        delta, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        if delta:
            self._recorder.memory(Category.OPTIMIZER_STATE, -1, delta)

    def __del__(self) -> None:
        self.set(0)


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of an optimizer's state tensors on this rank, without padding."""
    values = (v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor))
    return sum((local_of(v) if isinstance(v, DTensor) else v).nbytes for v in values)
