"""The numbers of steps in the state of optimizers: what each parameter's count is, and how one step raises it.

Optimizers such as Adam count their steps for each parameter and correct its moments by the count. A resume that loses
counts, or loads those of another step on some ranks, trains on without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from workbench.engine.full_param import local_tensor
from workbench.engine.root_checks import clean
from workbench.errors import UsageError
from workbench.fault import listed
from workbench.protocol.commands import StepCounter

_COUNT = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # zero until the first step; the sums of others, such as Adagrad, are not


def held_params(model: nn.Module, managed: set[int], optimizers: Iterable[Optimizer]) -> dict[str, tuple[Any, Any]]:
    """Return each managed parameter that this rank has rows of and an optimizer has, by name, with the optimizer.

    The gradient of a parameter that no unit manages is this rank's own, and so is the number of its steps.

    Args:
        model: the model.
        managed: ids of the parameters of its units that an optimizer may hold.
        optimizers: the optimizers.
    """
    owner = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        clean(name): (param, owner[id(param)])
        for name, param in model.named_parameters()
        if id(param) in managed and id(param) in owner and local_tensor(param).numel()
    }


def _count(param: Any, optimizer: Optimizer) -> int | None:  # noqa: ANN401 - a key of its state
    steps = optimizer.state.get(param, {}).get(_COUNT)
    return None if steps is None else int(steps)


def _grouped(steps: Mapping[str, int | None]) -> tuple[StepCounter, ...]:
    found: dict[int | None, list[str]] = {}
    for name, number in steps.items():
        found.setdefault(number, []).append(name)
    order = sorted(found, key=lambda number: -1 if number is None else number)
    return tuple(StepCounter(steps=number, params=tuple(found[number])) for number in order)


def step_counters(held: Mapping[str, tuple[Any, Any]]) -> tuple[StepCounter, ...]:
    """Return the parameters of each number of steps; ``held`` is from :func:`held_params`."""
    return _grouped({name: _count(*one) for name, one in held.items()})


def reset_counters(held: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Return the parameters with a count of 0 and moments that are not zero."""
    return tuple(name for name, one in held.items() if _count(*one) == 0 and _has_moments(*one))


def _has_moments(param: Any, optimizer: Optimizer) -> bool:  # noqa: ANN401 - a key of its state
    state = optimizer.state.get(param, {})
    return any(isinstance(state.get(key), torch.Tensor) and bool(local_tensor(state[key]).any()) for key in _MOMENTS)


def check_counted(held: Mapping[str, tuple[Any, Any]], largest: Callable[[int], int]) -> None:
    """Check that no optimizer of torch has moments without a count: its next step would raise a KeyError; collective.

    Args:
        held: from :func:`held_params`.
        largest: returns the largest of a number that each rank passes.

    Raises:
        UsageError: on all ranks, if some have.
    """
    lost = [
        name
        for name, (param, optimizer) in held.items()
        if type(optimizer).__module__.startswith("torch.optim")
        and _count(param, optimizer) is None
        and _has_moments(param, optimizer)
    ]
    if largest(len(lost)):
        raise UsageError(
            f"the optimizer has moments without a number of steps ({_COUNT!r}) for {listed(lost) or 'parameters'}, so "
            "it cannot step: load its whole state again, with torch.distributed.checkpoint.state_dict"
        )


class RaisedCounters:
    """The counts that one step raises.

    Args:
        held: from :func:`held_params`.
    """

    def __init__(self, held: Mapping[str, tuple[Any, Any]]) -> None:
        self._held = held
        self._before: dict[str, int] = {}
        self._steps: Counter[int] = Counter()  # by the id of the optimizer
        self._after: dict[str, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the body, one step."""
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._begin(optimizer))
        try:
            yield
            self._after = {name: _count(*self._held[name]) or 0 for name in self._before}
        finally:
            hook.remove()

    def _begin(self, optimizer: Optimizer) -> None:
        self._steps[id(optimizer)] += 1
        for name, (param, own) in self._held.items():
            if own is optimizer and param.grad is not None:
                self._before[name] = _count(param, optimizer) or 0

    def uneven(self) -> tuple[StepCounter, ...]:
        """Return by how much the counts rose of parameters with a gradient, if not by one, or by zero, for all.

        An optimizer that stepped more than once is left out: each of its steps may have had other gradients.
        """
        found: dict[str, int | None] = {}
        for optimizer in self._optimizers():
            rises: dict[str, int | None] = {
                name: self._after[name] - before
                for name, before in self._before.items()
                if self._held[name][1] is optimizer and self._steps[id(optimizer)] == 1
            }
            if set(rises.values()) not in ({0}, {1}):  # 0: a scaler skipped the step, or the optimizer counts none
                found |= rises
        return _grouped(found)

    def _optimizers(self) -> Sequence[Optimizer]:
        return list({id(optimizer): optimizer for _, optimizer in self._held.values()}.values())
