"""The numbers of steps in the state of optimizers: what each parameter's count is, and how one step raises it.

Optimizers such as Adam count their steps for each parameter and correct its moments by the count. A resume that loses
counts, or loads those of another step on some ranks, trains on without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.base.fault import listed
from workbench.engine.full_param import local_tensor
from workbench.errors import UsageError
from workbench.protocol.commands import StepCounter

_COUNT = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # zero until the first step; the sums of others, such as Adagrad, are not


@dataclass(frozen=True)
class HeldParam:
    """A parameter that an optimizer has.

    Attributes:
        name: its name; pieces of one flat parameter have the name of that.
        param: the parameter.
        optimizer: the optimizer.
    """

    name: str
    param: Any
    optimizer: Optimizer

    @property
    def count(self) -> int | None:
        """The number of its steps in the optimizer's state; None if the state has no such number."""
        return count_in(self.optimizer.state.get(self.param, {}))

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer's state has moments of it that are not zero."""
        state = self.optimizer.state.get(self.param, {})
        moments = (state[key] for key in _MOMENTS if isinstance(state.get(key), torch.Tensor))
        return any(bool(local_tensor(moment).any()) for moment in moments)


def count_in(state: Mapping[str, Any]) -> int | None:
    """Return the number of steps in an optimizer's state of a parameter; None if it has no such number."""
    steps = state.get(_COUNT)
    return None if steps is None else int(steps)


Held: TypeAlias = Sequence[HeldParam]


def held_params(names: Mapping[int, str], managed: set[int], optimizers: Iterable[Optimizer]) -> Held:
    """Return each managed parameter that this rank has rows of and an optimizer has.

    The gradient of a parameter that no unit manages is this rank's own, and so is the number of its steps.

    Args:
        names: of parameters, by their ids.
        managed: ids of the parameters of units that an optimizer may hold.
        optimizers: the optimizers.
    """
    return tuple(
        HeldParam(names[id(param)], param, optimizer)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        if id(param) in managed and id(param) in names and local_tensor(param).numel()
    )


def _grouped(steps: Iterable[tuple[str, int | None]]) -> tuple[StepCounter, ...]:
    found: dict[int | None, dict[str, None]] = {}
    for name, number in steps:
        found.setdefault(number, {}).setdefault(name)
    order = sorted(found, key=lambda number: -1 if number is None else number)
    return tuple(StepCounter(steps=number, params=tuple(found[number])) for number in order)


def step_counters(held: Held) -> tuple[StepCounter, ...]:
    """Return the parameters of each number of steps."""
    return _grouped((each.name, each.count) for each in held)


def reset_counters(held: Held) -> tuple[str, ...]:
    """Return the parameters with a count of 0 and moments that are not zero."""
    return tuple(dict.fromkeys(each.name for each in held if each.count == 0 and each.has_moments))


def check_counted(held: Held, largest: Callable[[int], int]) -> None:
    """Check that no optimizer of torch has moments without a count: its next step would raise a KeyError; collective.

    Args:
        held: what optimizers hold.
        largest: returns the largest of a number that each rank passes.

    Raises:
        UsageError: on all ranks, if some have.
    """
    lost = [
        each.name
        for each in held
        if type(each.optimizer).__module__.startswith("torch.optim") and each.count is None and each.has_moments
    ]
    if largest(len(lost)):
        raise UsageError(
            f"the optimizer has moments without a number of steps ({_COUNT!r}) for {listed(lost) or 'parameters'}, so "
            "it cannot step: load its whole state again, with torch.distributed.checkpoint.state_dict"
        )


class RaisedCounters:
    """The counts that one step raises."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._before: dict[int, int] = {}  # by the place in held
        self._steps: Counter[int] = Counter()  # by the id of the optimizer
        self._rises: dict[int, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer))
        try:
            yield
            self._rises = {place: (self._held[place].count or 0) - before for place, before in self._before.items()}
        finally:
            hook.remove()

    def _begin(self, optimizer: Optimizer) -> None:
        self._steps[id(optimizer)] += 1
        for place, each in enumerate(self._held):
            if each.optimizer is optimizer and each.param.grad is not None:
                self._before[place] = each.count or 0

    def uneven(self) -> tuple[StepCounter, ...]:
        """Return by how much the counts rose of parameters with a gradient, if not by one, or by zero, for all.

        An optimizer that stepped more than once is left out: each of its steps may have had other gradients.
        """
        found: list[tuple[str, int | None]] = []
        for optimizer, number in self._steps.items():
            rises = [
                (self._held[place].name, rise)
                for place, rise in self._rises.items()
                if id(self._held[place].optimizer) == optimizer and number == 1
            ]
            if {rise for _, rise in rises} not in ({0}, {1}):  # 0: a scaler skipped it, or the optimizer counts none
                found += rises
        return _grouped(found)
