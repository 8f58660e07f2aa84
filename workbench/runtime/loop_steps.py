"""Steps of a training loop that does not announce them, and the optimizers of the process."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from workbench.engine._torch import local_of
from workbench.engine.backends.memory_aliasing import storage_address
from workbench.events import NOT_SPLIT, Category, Edge
from workbench.models.patches import Patches
from workbench.runtime.emptied_tensors import held
from workbench.runtime.recorder import NO_STEP, Recorder


class LoopSteps:
    """Reports to the recorder what no source announces: steps of a loop, optimizer steps, optimizer state.

    A step of a loop begins with the first training forward after the last one, and ends with a step of an optimizer.

    In a whole program without a sharded model no source announces forwards. There a step begins as soon as an optimizer
    has ended the last one; the begin of the first is unknown, so it is outside of any step. After the last one, nothing
    follows the begin, and none is recorded.

    Attributes:
        optimizer_steps: number of optimizer steps on this rank.
        trained_steps: number of steps that led to the current state of the training; a checkpoint sets it.
        has_stepped: whether no training forward ran since the last step of an optimizer.
        is_repeating: whether what runs off the record repeats, and so leads to the state, what was done before.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running = False  # a step function, which begins and ends its steps itself
        self._first_of_program: int | None = None
        self._has_forwards = False
        self._state: weakref.WeakKeyDictionary[Optimizer, _StateBytes] = weakref.WeakKeyDictionary()
        self.optimizer_steps = self.trained_steps = 0
        self.has_stepped = True
        self.is_repeating = False

    def install(self, patches: Patches | None = None) -> list[RemovableHandle]:
        """Watch every forward and every optimizer of the process; return the handles of the optimizer hooks.

        Args:
            patches: in a program that is not ours, makes hooks whose failure it does not notice.
        """
        self._recorder.on_forward = self._before_forward
        before, after = self._before_optimizer, self._after_optimizer
        if patches is not None:
            where = "a step of an optimizer"
            before, after = patches.hook(before, where), patches.hook(after, where)
        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    @contextmanager
    def whole_program(self) -> Iterator[None]:
        """Take the body for a whole program, not for a cell; drop a step that is open at its end."""
        self._first_of_program, self._has_forwards = self._recorder.next_step, False
        try:
            yield
        finally:
            self._first_of_program = None
            self._recorder.give_up_step()

    def expect_no_forwards(self) -> None:
        """Begin each step at the end of the last one, until a forward is announced again."""
        self._has_forwards = False

    @property
    def steps_of_program(self) -> int:
        """Number of steps that the program has ended."""
        is_open = self._recorder.step != NO_STEP
        return self._recorder.next_step - (self._first_of_program or 0) - is_open

    def _before_forward(self) -> None:
        """Open a step for a training forward outside of one; evaluation is not a step."""
        self._has_forwards = True
        if not self._recorder.is_aside and torch.is_grad_enabled():
            self.has_stepped = False
        if not self._running and not self._recorder.is_aside and torch.is_grad_enabled():
            self.before_step()
            self._begin_step()

    def _begin_step(self, *, is_expected: bool = False) -> None:
        self._recorder.begin_step(is_expected=is_expected)

    def before_step(self) -> None:
        """Called before a step of a loop begins."""

    def _before_optimizer(self, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self._recorder.optimizer_edge(Edge.BEGIN)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:  # noqa: ANN401 - hook signature
        self.has_stepped = self.has_stepped or not self._recorder.is_aside
        self.optimizer_steps += 1  # first: a rank that is held and aborted at the END has taken the step
        self._recorder.optimizer_edge(Edge.END)
        if self._recorder.is_recording:
            self.account(optimizer)
        if not self._running:
            self._end_step()

    def _end_step(self) -> None:
        """End the step, and begin the next if no forward will announce it."""
        self.trained_steps += self.is_repeating or not self._recorder.is_aside
        if self._recorder.is_aside:
            return
        self._recorder.end_step()
        if self._first_of_program is not None and not self._has_forwards:
            self._recorder.next_step = max(self._recorder.next_step, self._first_of_program + 1)
            self._begin_step(is_expected=True)

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
            known.set(state_bytes(optimizer, _split_params(self._recorder)))


class SampledSteps(LoopSteps):
    """Steps of a program outside the notebook; records only each step whose number is a multiple of ``every``.

    The others run off the record.
    """

    def __init__(self, recorder: Recorder, every: int) -> None:
        super().__init__(recorder)
        self._every = every
        self._first_of_program = recorder.next_step
        self._left_out = ExitStack()  # the step that runs off the record

    def _begin_step(self, *, is_expected: bool = False) -> None:
        if self._recorder.next_step % self._every:
            self._recorder.next_step += 1
            self._left_out.enter_context(self._recorder.unrecorded())
        else:
            super()._begin_step(is_expected=is_expected)

    def _end_step(self) -> None:
        self.close()
        super()._end_step()

    def close(self) -> None:
        """End a step that runs off the record; no-op in another one."""
        self._left_out.close()


class _StateBytes:
    """Bytes of one optimizer's state, recorded as freed when the optimizer is gone."""

    def __init__(self, recorder: Recorder) -> None:
        self.entries = 0
        self._recorder = recorder
        self._num_bytes: Counter[str] = Counter()

    def set(self, num_bytes: Counter[str]) -> None:
        """Record the differences to the last values, by owner."""
        before, self._num_bytes = self._num_bytes, num_bytes
        for owner in {**before, **num_bytes}:
            if delta := num_bytes[owner] - before[owner]:
                self._recorder.memory(Category.OPTIMIZER_STATE, -1, delta, owner)

    def __del__(self) -> None:
        self.set(Counter())


def state_bytes(optimizer: Optimizer, is_split: Callable[[torch.Tensor], bool] = lambda _: False) -> Counter[str]:
    """Return the bytes of an optimizer's state tensors on this rank, without padding.

    Args:
        optimizer: the optimizer.
        is_split: whether a parameter is of a sharded unit: its state has no owner, that of others :data:`NOT_SPLIT`.
    """
    found: Counter[str] = Counter()
    for param, state in optimizer.state.items():
        values = (v for v in state.values() if isinstance(v, torch.Tensor))
        num_bytes = sum((local_of(v) if isinstance(v, DTensor) else v).nbytes for v in values)
        found["" if is_split(param) else NOT_SPLIT] += num_bytes
    return found


def _split_params(recorder: Recorder) -> Callable[[torch.Tensor], bool]:
    """Return what tells whether an optimizer's parameter is of a sharded unit, or shares memory with one that is."""
    units = [unit.index for unit in recorder.header.units if unit.in_use and unit.shard_size > 1]
    ids = set().union(*(held_ids(recorder, unit) for unit in units))
    shards = (each.shard for unit in units for each in recorder.tensors(unit).values())
    addresses = {_address(shard) for shard in shards if isinstance(shard, torch.Tensor)} - {0}
    return lambda param: id(param) in ids or _address(param) in addresses


def _address(tensor: torch.Tensor) -> int:
    return storage_address(local_of(tensor) if isinstance(tensor, DTensor) else tensor)


def held_ids(recorder: Recorder, unit: int) -> set[int]:
    """Return the ids of the parameters of a unit that an optimizer may hold."""
    tensors = recorder.tensors(unit).values()
    placed = (held(cast("nn.Module", owner), name) for each in tensors for owner, name in each.places)
    return {id(each) for each in (*(each.shard for each in tensors), *placed)}
