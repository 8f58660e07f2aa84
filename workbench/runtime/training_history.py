"""The training so far, as ``lint`` needs it where the state of the program no longer shows it.

It is noted where it happens: at steps of optimizers, in ``zero_grad()``, at passes over a ``DistributedSampler`` or a
``DataLoader``, where checkpoints are read, and where a state of the random number generator is set. Nothing of the
program changes, and nothing keeps an object of it alive.
"""

# ruff: noqa: ANN401 - arguments and results of torch's functions are passed on

from __future__ import annotations

import functools
import os
import re
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.hooks import RemovableHandle

from workbench.runtime.emptied_tensors import Place, digest
from workbench.runtime.namespace import variables
from workbench.runtime.training_inputs import TrainingInputs
from workbench.runtime.used_gradients import UsedGradients

_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
_BEGIN = r"(start|first|initial|init|resume|resumed|begin)_?"
_NOW = r"(global|current|last)_?"


@dataclass
class OptimizerHistory:
    """The history of an optimizer.

    Attributes:
        num_steps: steps that it has taken.
        num_unreduced: those at which units of its parameters had gradients that were not reduced.
        unreduced: the indices of these units, at its newest step.
        backwards: numbers of backwards of models in ``DistributedDataParallel``, by unit, at its newest step.
        num_bypassed: steps since whose predecessor such a model had new gradients without such a backward, by unit.
        kept: units whose unreduced gradients ``zero_grad`` did not clear, since its newest step.
        mixed: units into whose gradients such ones went, each with the number of the step.
        resumed: what shows that training was resumed, where it took its first step without any state.
        rates: checksum of the learning rates of all its steps.
        added_to: its newest watched step, if it used the gradients of the step before again; else None.
        num_before: steps that it had taken before the newest ``%fsdp step``.
    """

    num_steps: int = 0
    num_unreduced: int = 0
    unreduced: frozenset[int] = frozenset()
    backwards: dict[int, int] = field(default_factory=dict)
    num_bypassed: dict[int, int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    mixed: dict[int, int] = field(default_factory=dict)
    resumed: tuple[str, ...] = ()
    rates: int = 0
    added_to: int | None = None
    num_before: int = 0


@dataclass
class SamplerHistory:
    """Passes over a sampler.

    Attributes:
        first_epoch: the epoch of its first pass.
        num_passes: passes that have begun.
        epoch: of the newest pass that was drawn to its end while an optimizer took steps; None: none was.
        trained: that optimizer.
        is_set: whether ``set_epoch`` was called since.
        num_repeated: such passes that repeated the order of the one before, by the same optimizer.
    """

    first_epoch: int = 0
    num_passes: int = 0
    epoch: int | None = None
    trained: weakref.ref[Optimizer] | None = None
    is_set: bool = False
    num_repeated: int = 0


@dataclass
class _Pass:
    """The rows that a sampler draws from now to its end: their epoch, and the optimizer that took steps meanwhile."""

    epoch: int
    optimizer: weakref.ref[Optimizer] | None = None


class TrainingHistory:
    """Notes what happens in the training of this process while it is installed.

    Args:
        unreduced: returns the indices of the units whose gradients are not reduced.
        backwards: returns the numbers of backwards of models in ``DistributedDataParallel`` that have gradients.
        held: whether a unit's parameters are among the tensors with these ids.
        survives: whether the unreduced gradients of a unit survive ``zero_grad``.
        copies: yields pairs of places, in two units, of parameters with equal values.
        is_aside: whether the running code is the workbench's own.

    Attributes:
        optimizers: the history of each optimizer that lives.
        samplers: that of each ``DistributedSampler``.
        counters: integers of the checkpoints that were read, by key.
        rng_before: digest of the generator's state before the program first set another one; None: it set none.
        copies: places of parameters that were equal, in two units, when an optimizer took its first step.
        inputs: what models got while a ``DataLoader`` was iterated.
    """

    def __init__(
        self,
        *,
        unreduced: Callable[[], Iterable[int]],
        backwards: Callable[[], Mapping[int, int]],
        held: Callable[[int, set[int]], bool],
        survives: Callable[[int], bool],
        copies: Callable[[], Iterable[tuple[Place, Place]]],
        is_aside: Callable[[], bool],
    ) -> None:
        self._unreduced, self._held, self._survives, self._is_aside = unreduced, held, survives, is_aside
        self._backwards, self._copies = backwards, copies
        self._undo: list[tuple[object, str, object]] = []
        self._handles: tuple[RemovableHandle, ...] = ()
        self._drawn: tuple[weakref.ref[DistributedSampler[Any]], _Pass] | None = None  # the newest row
        self.inputs = TrainingInputs(is_aside)
        self.forget()

    def forget(self) -> None:
        """Forget what happened so far, in an earlier program or under an injected fault."""
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, OptimizerHistory] = weakref.WeakKeyDictionary()
        self.samplers: weakref.WeakKeyDictionary[DistributedSampler[Any], SamplerHistory] = weakref.WeakKeyDictionary()
        self.counters: dict[str, set[int]] = {}
        self.rng_before: int | None = None
        self.copies: list[tuple[Place, Place]] = []
        self._drawn = None
        self._used = UsedGradients()
        self.inputs.forget()

    def install(self) -> TrainingHistory:
        """Begin to note."""
        self._handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(Optimizer, "zero_grad", self._zero_grad)
        self._wrap(nn.Module, "zero_grad", self._zero_grad_of_model)
        self._wrap(DistributedSampler, "__iter__", self._iterate)
        self._wrap(DistributedSampler, "set_epoch", self._set_epoch)
        self._wrap(DataLoader, "__iter__", self._iterate_loader)
        self._wrap(torch, "load", self._load)
        for module in (torch, torch.random):
            self._wrap(module, "set_rng_state", self._set_rng_state)
        return self

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self._undo.append((owner, name, original))
        setattr(owner, name, replacement)

    def remove(self) -> None:
        """Note no more."""
        self.inputs.remove()
        for handle in self._handles:
            handle.remove()
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    # ---- optimizers

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_aside():
            return
        past = self.optimizers.get(optimizer)
        if past is None:
            past = self.optimizers[optimizer] = OptimizerHistory()
        if not past.num_steps:
            self.copies += self._copies()
            if not optimizer.state:
                past.resumed = tuple(dict.fromkeys(self.signs_of_resume(optimizer, _variables_in_frames())))
        past.mixed |= dict.fromkeys(past.kept, past.num_steps)
        past.unreduced, past.kept = self._pending(optimizer), frozenset()
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for unit, number in self._backwards().items():
            if not self._held(unit, ids):
                continue
            past.num_bypassed[unit] = past.num_bypassed.get(unit, 0) + (number == past.backwards.get(unit, 0))
            past.backwards[unit] = number
        again = self._used.before_step(optimizer)
        if again is not None:
            past.added_to = past.num_steps if again else None
        past.num_steps += 1
        rates = (group["lr"] for group in optimizer.param_groups)
        past.rates = hash((past.rates, *(rate for rate in rates if isinstance(rate, float))))
        past.num_unreduced += bool(past.unreduced)
        if self._drawn is not None:
            self._drawn[1].optimizer = weakref.ref(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_aside():
            self._used.after_step(optimizer)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_aside():
            self._used.before_backward()
        return original(*args, **kwargs)

    def watch_gradients(self) -> None:
        """Watch whether the next steps of optimizers use gradients again that earlier steps have used."""
        self._used.watch_again()
        self.inputs.watch_again()
        for past in tuple(self.optimizers.values()):
            past.added_to, past.num_before = None, past.num_steps

    def never_cleared(self, model: nn.Module | None = None) -> tuple[str, ...]:
        """Return the optimizers, of one model or of all, by their variables, whose gradients nothing clears."""
        found = (each for each, past in tuple(self.optimizers.items()) if past.added_to is not None)
        return _named(each for each in found if model is None or _holds_some(each, model))

    def never_reduced(self, sharded: Container[int]) -> tuple[str, ...]:
        """Return the optimizers, by their variables, whose newest step was without gradients of ``sharded`` units.

        These wait to be reduced. Only steps since :meth:`watch_gradients` count.
        """
        stepped = ((each, past) for each, past in tuple(self.optimizers.items()) if past.num_steps > past.num_before)
        return _named(each for each, past in stepped if any(unit in sharded for unit in past.unreduced))

    def _pending(self, optimizer: Optimizer) -> frozenset[int]:
        """Return the units whose gradients are not reduced, of which an optimizer holds parameters."""
        units = tuple(self._unreduced())
        ids = {id(param) for group in optimizer.param_groups for param in group["params"]} if units else set()
        return frozenset(unit for unit in units if self._held(unit, ids))

    def _zero_grad(self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._cleared(lambda each: each is optimizer)
        return original(optimizer, *args, **kwargs)

    def _zero_grad_of_model(self, original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._cleared(lambda each: _holds_some(each, model))
        return original(model, *args, **kwargs)

    def _cleared(self, is_meant: Callable[[Optimizer], bool]) -> None:
        """Record the gradients that ``zero_grad`` leaves, except those that the newest step left out."""
        if self._is_aside() or not any(self._survives(unit) for unit in self._unreduced()):
            return
        for optimizer, past in tuple(self.optimizers.items()):
            if is_meant(optimizer) and not past.unreduced:
                past.kept |= {unit for unit in self._pending(optimizer) if self._survives(unit)}

    # ---- samplers and loaders

    def _iterate_loader(self, original: Callable[..., Any], loader: DataLoader[Any], *args: Any) -> Any:
        iterator = original(loader, *args)
        if not self._is_aside():
            with suppress(Exception):  # a loader or an iterator of the program's own may lack anything
                self.inputs.iterated(loader, iterator)
        return iterator

    def _iterate(
        self, original: Callable[..., Iterator[Any]], sampler: DistributedSampler[Any], *args: Any
    ) -> Iterator[Any]:
        past = self.samplers.get(sampler)
        if past is None:
            past = self.samplers[sampler] = SamplerHistory(first_epoch=sampler.epoch)
        past.num_passes += 1
        return self._draw(past, _Pass(sampler.epoch), original(sampler, *args), weakref.ref(sampler))

    def _draw(
        self, past: SamplerHistory, one: _Pass, rows: Iterator[Any], sampler: weakref.ref[DistributedSampler[Any]]
    ) -> Iterator[Any]:
        for row in rows:
            self._drawn = sampler, one
            yield row
        if one.optimizer is None or (optimizer := one.optimizer()) is None:
            return  # an evaluation, or what feeds nothing
        was = None if past.trained is None else past.trained()
        past.num_repeated += past.epoch == one.epoch and not past.is_set and was is optimizer
        past.epoch, past.trained, past.is_set = one.epoch, one.optimizer, False

    def _set_epoch(self, original: Callable[..., Any], sampler: DistributedSampler[Any], *args: Any) -> Any:
        past = self.samplers.get(sampler)
        if past is not None:
            past.is_set = True
        return original(sampler, *args)

    # ---- resumes

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        for key, number in _counters(found):
            self.counters.setdefault(key, set()).add(number)
        return found

    def _set_rng_state(self, original: Callable[..., Any], new_state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if self.rng_before is None and not caller.startswith("torch."):  # checkpointing of activations sets it too
            self.rng_before = digest(torch.get_rng_state())
        return original(new_state, *args, **kwargs)

    def signs_of_resume(self, optimizer: Optimizer, visible: Iterable[tuple[str, object]]) -> Iterator[str]:
        """Yield what shows that a training continues which other steps preceded, a phrase each.

        Parameters that were loaded show nothing: a new training may begin with them. A schedule, an epoch or a step
        that goes on does.

        Args:
            optimizer: an optimizer that has taken no step.
            visible: the variables, by name.
        """
        visible = tuple(visible)
        counters = {key: set(numbers) for key, numbers in self.counters.items()}
        for _, value in visible:
            if isinstance(value, dict) and _has_state_dict(value):
                for key, number in _counters(value):
                    counters.setdefault(key, set()).add(number)
        for name, value in visible:
            if isinstance(value, LRScheduler) and value.optimizer is optimizer and value.last_epoch > 1:
                yield f"{name} ({type(value).__name__}) is at step {value.last_epoch}"
            elif isinstance(value, int) and not isinstance(value, bool) and _continues(name, value, counters):
                yield f"{name} is {value}, as in the checkpoint"
        sampler = None if self._drawn is None else self._drawn[0]()
        if sampler is not None:
            past = self.samplers[sampler]
            if past.num_passes == 1 and past.first_epoch > 1:
                yield f"epoch {past.first_epoch} is the first that its DistributedSampler draws"
            elif _continues("epoch", sampler.epoch, counters):
                yield f"epoch {sampler.epoch} begins, as in the checkpoint"


def _named(optimizers: Iterable[Optimizer]) -> tuple[str, ...]:
    """Return the variables of optimizers."""
    names = {id(value): name for name, value in variables().items() if isinstance(value, Optimizer)}
    return tuple(names.get(id(each), "the optimizer") for each in optimizers)


def _holds_some(optimizer: Optimizer, model: nn.Module) -> bool:
    ids = {id(param) for param in model.parameters()}
    return any(id(param) in ids for group in optimizer.param_groups for param in group["params"])


def _counters(value: object, *, depth: int = 2) -> Iterator[tuple[str, int]]:
    """Yield the integers of a checkpoint, such as its step, with their keys; those of its state dicts do not count."""
    if isinstance(value, Mapping) and depth:
        for key, each in value.items():
            if isinstance(each, int) and not isinstance(each, bool) and each > 0:
                yield str(key), each
            elif not (isinstance(each, Mapping) and "param_groups" in each):
                yield from _counters(each, depth=depth - 1)


def _has_state_dict(value: Mapping[Any, object]) -> bool:
    states = (each for each in value.values() if isinstance(each, Mapping))
    return any(isinstance(tensor, torch.Tensor) for state in states for tensor in state.values())


def _continues(name: str, value: int, counters: Mapping[str, set[int]]) -> bool:
    """Return whether a variable is a counter of a checkpoint that goes on, or begins after it: step, epoch, ..."""
    for key, numbers in counters.items():
        word = re.escape(key.lower())
        if not re.search("step|epoch|iter", word) or numbers.isdisjoint({value, value - 1}):
            continue
        if re.fullmatch(f"{_BEGIN}{word}", name.lower()):
            return True
        if value > 1 and re.fullmatch(f"({_NOW})?{word}", name.lower()):
            return True
    return False


def _variables_in_frames() -> Iterator[tuple[str, object]]:
    """Yield the variables of the program's functions that run, and attributes of their ``self``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):  # down to the optimizer's step
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name != "<module>" and not _is_ours(frame):
        found = dict(frame.f_locals)
        yield from found.items()
        yield from getattr(found.get("self"), "__dict__", {}).items()
        frame = frame.f_back
    yield from variables().items()


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES[1])
