"""Steps on a rank: calls of the user's step function, and detection of optimizers in the user's own loop."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from workbench.engine import StepAborted
from workbench.engine._torch import local_of
from workbench.engine.cancellable_waits import cancellation
from workbench.engine.explain import explain
from workbench.engine.fsdp_state import missed_grads
from workbench.errors import UsageError
from workbench.events import Category, Edge
from workbench.protocol.commands import Step, StepReply
from workbench.runtime.model_summary import name_from_models, sharded_variables, unmanaged
from workbench.runtime.namespace import lookup
from workbench.runtime.recorder import Recorder

_LOOK_S = 0.001  # between two polls of a device that runs behind


def find_step_function(name: str) -> Callable[[], Any]:
    """Return the user's step function.

    Raises:
        UsageError: there is none, or it is not callable.
    """
    function = lookup(name)
    if not callable(function):
        raise UsageError(f"{name!r} is a {type(function).__name__}, not a function; define it in a %%fsdp cell")
    called: Callable[[], Any] = function
    return called


def loss_of(result: Any) -> float | None:  # noqa: ANN401 - whatever the user's function returned
    """Return the number in ``result``, or None.

    Raises:
        TypeError: ``result`` is a DTensor, whose value on one rank may be only that rank's part.
    """
    if isinstance(result, DTensor):
        raise TypeError(
            "the step function returned a DTensor; on one rank its value may be only that rank's part: "
            "return result.full_tensor().item()"
        )
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return float(result.detach())
    is_number = isinstance(result, (int, float)) and not isinstance(result, bool)
    return float(result) if is_number else None


class Trainer:
    """Runner of steps, which also reports to the recorder what the engine cannot see: steps, optimizers, metrics.

    Attributes:
        optimizer_steps: number of optimizer steps on this rank.
        not_finite_since: first of the latest consecutive steps with a NaN or infinite loss; None: the last was finite.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running = False
        self._named_at = -1  # version of the header when units got their names
        self._state: weakref.WeakKeyDictionary[Optimizer, _StateBytes] = weakref.WeakKeyDictionary()
        self.optimizer_steps = 0
        self.not_finite_since: int | None = None

    def install(self) -> list[RemovableHandle]:
        """Watch every forward and every optimizer of the process; return the handles of the optimizer hooks."""
        self._recorder.on_forward = self._before_forward
        return [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def run(self, command: Step) -> StepReply:
        """Call the step function ``command.count`` times.

        Raises:
            UsageError: there is no such function.
            StepAborted: this rank was aborted because another one failed.
        """
        function = find_step_function(command.fn)
        losses, seconds = [], []
        unreduced: dict[str, None] = {}
        first_step = self._recorder.next_step
        self.note_models()
        self._running = True
        try:
            for _ in range(command.count):
                begin_ns = time.monotonic_ns() - self._recorder.held_ns
                losses.append(self._one_step(function))
                seconds.append((time.monotonic_ns() - self._recorder.held_ns - begin_ns) / 1e9)
                unreduced |= dict.fromkeys(missed_grads())
            self._recorder.wait_for_device(lambda: cancellation.sleep(_LOOK_S))
        except RuntimeError as error:
            explain(error)
            reason = self._translated(error)
            if reason is error:
                raise
            raise reason from error
        finally:
            self._running = False
            self._recorder.give_up_step()
        return StepReply(
            steps_done=len(losses),
            losses=tuple(losses) if any(loss is not None for loss in losses) else None,
            seconds=tuple(seconds),
            optimizer_steps=self.optimizer_steps,
            first_step=first_step,
            unreduced=tuple(unreduced),
        )

    def _one_step(self, function: Callable[[], Any]) -> float | None:
        cancellation.check()
        self._recorder.begin_step()
        loss = loss_of(function())
        if loss is not None:
            self._recorder.metric("loss", loss)
            if math.isfinite(loss):
                self.not_finite_since = None
            elif self.not_finite_since is None:
                self.not_finite_since = self._recorder.step
        self._recorder.end_step()
        return loss

    @staticmethod
    def _translated(error: RuntimeError) -> RuntimeError:
        """Return the reason of an abort instead of its consequence (a shut socket inside a user's collective)."""
        if isinstance(error, StepAborted):
            return error
        try:
            cancellation.check_after_failure()
        except StepAborted as aborted:
            return aborted
        return error

    def _before_forward(self) -> None:
        """Open a step for a training forward outside of :meth:`run`; evaluation is not a step."""
        if not self._running and not self._recorder.is_aside and torch.is_grad_enabled():
            models = sharded_variables()
            if self._recorder.header_version != self._named_at:  # a root became known just now, or a unit anew
                name_from_models(models.values())
                self._named_at = self._recorder.header_version
            found = unmanaged(models, buffers=False)
            self._recorder.note_unmanaged(found.params, found.hooks)
            self._recorder.begin_step()

    def note_models(self) -> None:
        """Put the names of units, and the parts of models that the engine does not manage, into the trace's header."""
        models = sharded_variables()
        name_from_models(models.values())
        found = unmanaged(models)
        self._recorder.note_unmanaged(found.params, found.hooks)
        self._recorder.note_buffers(found.buffers)

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
