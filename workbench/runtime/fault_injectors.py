"""How each fault of :data:`workbench.protocol.fault_kinds.KINDS` is put into a training, and taken out of it.

An injector is a generator function under :func:`injects`: it changes something, yields, and changes it back. What it
needs is checked before, by the functions given to the decorator. Hooks act on their own module and optimizer only, as
``verify`` makes copies that have the same hooks.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from io import FileIO
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torch.utils.hooks import RemovableHandle

from workbench.engine.full_param import local_tensor
from workbench.errors import UsageError
from workbench.events import Edge, Kind, unit_words
from workbench.protocol.fault_kinds import KINDS
from workbench.runtime import checkpoint_writer
from workbench.runtime.command_handlers import RankContext
from workbench.runtime.emptied_tensors import EmptiedTensors
from workbench.runtime.lint_rules import parts_of
from workbench.runtime.lint_target import LintTarget, LintUnit
from workbench.runtime.namespace import optimizers_of, user_namespace
from workbench.runtime.recorder import NO_STEP
from workbench.runtime.trainer import find_step_function


@dataclass(frozen=True, kw_only=True)
class FaultScene:
    """Where a fault goes.

    Attributes:
        rank: this rank.
        target: the model.
        unit: the unit that has it.
        at: the rank that has it.
        ms: milliseconds that a straggler sleeps.
    """

    rank: RankContext
    target: LintTarget
    unit: LintUnit
    at: int
    ms: int

    @property
    def is_here(self) -> bool:
        """Whether this rank has it."""
        return self.rank.groups.rank == self.at

    @property
    def module(self) -> nn.Module:
        """The unit's module, the first one of several."""
        return self.unit.modules[0]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the model among the variables."""
        return optimizers_of(self.target.model)

    def fails(self, what: str) -> UsageError:
        """Return the error that this training lacks something."""
        return UsageError(f"this fault cannot be injected here: {what}")


Check = Callable[[FaultScene], None]
Injection = Callable[[FaultScene], Iterator[None]]


@dataclass(frozen=True)
class Injector:
    """How a fault is injected.

    Attributes:
        checks: each raises UsageError if the training lacks something; nothing is changed.
        inject: returns a context in which the training has the fault.
    """

    checks: tuple[Check, ...]
    inject: Callable[[FaultScene], AbstractContextManager[None]]

    def check(self, scene: FaultScene) -> None:
        """Raise UsageError if it cannot be injected."""
        for check in self.checks:
            check(scene)


INJECTORS: dict[str, Injector] = {}
"""All injectors, by the name of the fault."""


def injects(*checks: Check) -> Callable[[Injection], Injection]:
    """Enter the decorated generator function into :data:`INJECTORS`, under its name with dashes."""

    def enter(function: Injection) -> Injection:
        name = function.__name__.strip("_").replace("_", "-")
        assert name in KINDS, name
        INJECTORS[name] = Injector(checks, contextmanager(function))
        return function

    return enter


# ---- checks

_NEWEST = 10_000  # rows: a step of any model that is taught with


def _has_other_ranks(scene: FaultScene) -> None:
    if scene.rank.groups.world_size < 2:
        raise scene.fails("there is only one rank; start more: %fsdp start -n 2")


def _has_optimizer(scene: FaultScene) -> None:
    if not scene.optimizers:
        raise scene.fails(
            f"no optimizer among the variables trains {scene.target.name}; make one in a %%fsdp cell: "
            f"opt = torch.optim.AdamW({scene.target.name}.parameters())"
        )


def _has_step_function(_: FaultScene) -> None:
    find_step_function("train_step")


def _has_replicas(scene: FaultScene) -> None:
    if scene.unit.info.replicate_size < 2:
        raise scene.fails(f"{scene.target.name} has no replicas; shard it with --mesh 2x1, or 2x2 on four ranks")


def _is_not_classic(scene: FaultScene) -> None:
    if not hasattr(scene.module, "set_requires_gradient_sync"):
        raise scene.fails(f"{scene.target.name} is in the classic wrapper; use --api fully_shard")


def _has_distributed_loader(scene: FaultScene) -> None:
    if not _loaders(scene):
        raise scene.fails("there is no DataLoader with a DistributedSampler among the variables")


def _gathered(rank: RankContext) -> list[int]:
    """Return the units in the order in which the newest step that ended, without a fault, gathered them.

    Steps with a fault do not count: the rank that had it may have gathered in another order than the others, and all
    ranks have to find the same one. Empty without such a step.
    """
    rows = rank.recorder.newest(_NEWEST)
    ended = rows["step"][(rows["kind"] == Kind.STEP) & (rows["edge"] == Edge.END)].tolist()
    newest = max(set(ended) - rank.faulty_steps, default=NO_STEP)
    gathers = (rows["kind"] == Kind.ALL_GATHER) & (rows["edge"] == Edge.BEGIN) & (rows["step"] == newest)
    found: list[int] = rows["unit"][gathers].tolist() if newest != NO_STEP else []
    return found


def _is_not_first(scene: FaultScene) -> None:
    inner = {unit.info.index: unit for unit in scene.target.sharded if unit.modules and unit.info.name}
    first = next((index for index in _gathered(scene.rank) if index in inner), next(iter(inner), None))
    if scene.unit.info.index not in inner or scene.unit.info.index == first:
        raise scene.fails(f"{unit_words(scene.unit.info.name)} is gathered first anyway; name another: --unit UNIT")


def _can_convert(scene: FaultScene) -> None:
    if not scene.unit.info.runner.can_reshard:
        raise scene.fails("torch's FSDP cannot change the dtype of a model that it has run; use --engine workbench")
    if any(param.dtype != torch.float32 for param in scene.target.model.parameters()):
        raise scene.fails(f"{scene.target.name} has parameters that are not float32")


# ---- hooks


def _before(module: nn.Module, action: Callable[[], object], *, is_gathered: bool = True) -> RemovableHandle:
    """Call ``action`` before each forward of a module, but not of its copies.

    Args:
        module: the module.
        action: what is called.
        is_gathered: whether its unit is to be gathered by then.
    """

    def hook(called: nn.Module, _: object) -> None:
        if called is module:
            action()

    return module.register_forward_pre_hook(hook, prepend=not is_gathered)


@contextmanager
def _held(*handles: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- time, stalls and errors


@injects(_has_other_ranks)
def straggler(scene: FaultScene) -> Iterator[None]:
    """Sleep in the forward of a unit on one rank."""
    with _held(*([_before(scene.module, lambda: time.sleep(scene.ms / 1e3))] if scene.is_here else [])):
        yield


@injects(_has_other_ranks)
def skip_collective(scene: FaultScene) -> Iterator[None]:
    """All-reduce a number before each forward of the model on all ranks but one."""
    number = torch.ones(1, device=scene.rank.groups.device)

    def reduce() -> None:
        dist.all_reduce(number.fill_(1))

    handles = [] if scene.is_here else [_before(scene.target.model, reduce, is_gathered=False)]
    with _held(*handles):
        yield


@injects(_has_other_ranks, _is_not_classic, _is_not_first)
def wrong_order(scene: FaultScene) -> Iterator[None]:
    """Gather a unit too early, on one rank."""
    (model,) = (each for each in scene.target.models if each.engine is scene.unit.info.runner)
    with model.gathered_early(scene.module) if scene.is_here else nullcontext():
        yield


@injects(_has_other_ranks, _has_step_function)
def uneven_batches(scene: FaultScene) -> Iterator[None]:
    """Let the step function of one rank return at once."""
    name = "train_step"
    original = find_step_function(name)

    def without_batch() -> None:
        """Train nothing: this rank has no batch left."""

    if scene.is_here:
        user_namespace()[name] = without_batch
    try:
        yield
    finally:
        if user_namespace().get(name) is without_batch:
            user_namespace()[name] = original


@injects()
def kill(scene: FaultScene) -> Iterator[None]:
    """Kill the process of one rank in the forward of a unit."""
    handles = [_before(scene.module, lambda: os.kill(os.getpid(), signal.SIGKILL))] if scene.is_here else []
    with _held(*handles):
        yield


@injects()
def oom(scene: FaultScene) -> Iterator[None]:
    """Raise the error of an allocator that is out of memory, in the forward of a unit on one rank."""

    def allocate() -> None:
        raise torch.OutOfMemoryError("out of memory: tried to allocate 1.00 TiB (%fsdp fault oom)")

    with _held(*([_before(scene.module, allocate)] if scene.is_here else [])):
        yield


@injects()
def disk_full(scene: FaultScene) -> Iterator[None]:
    """Fail the writes of checkpoints on one rank as a full disk does."""

    def fail(file: FileIO, chunk: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _writing_by(fail) if scene.is_here else nullcontext():
        yield


@injects()
def kill_during_save(scene: FaultScene) -> Iterator[None]:
    """Kill the process of one rank when it has written half of a part of a checkpoint."""

    def die(file: FileIO, chunk: memoryview) -> None:
        file.write(chunk[: len(chunk) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    with _writing_by(die) if scene.is_here else nullcontext():
        yield


@contextmanager
def _writing_by(write: Callable[[FileIO, memoryview], None]) -> Iterator[None]:
    original = checkpoint_writer.write_chunk
    checkpoint_writer.write_chunk = write  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoint_writer.write_chunk = original


# ---- wrong numbers


@contextmanager
def _before_optimizer(action: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call ``action`` with each optimizer of the process before it steps, before hooks that are registered later."""
    with _held(register_optimizer_step_pre_hook(lambda optimizer, *_: action(optimizer))):
        yield


def _grads(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients."""
    found = (param.grad for group in optimizer.param_groups for param in group["params"])
    return [local_tensor(grad) for grad in found if grad is not None]


@injects(_has_other_ranks, _has_optimizer)
def wrong_scale(scene: FaultScene) -> Iterator[None]:
    """Multiply the averaged gradients by the number of ranks that averaged them."""
    own, info = {id(optimizer) for optimizer in scene.optimizers}, scene.unit.info
    factor = info.shard_size * info.replicate_size

    def scale(optimizer: Optimizer) -> None:
        if id(optimizer) in own:
            for grad in _grads(optimizer):
                grad.mul_(factor)

    with _before_optimizer(scale):
        yield


_MAX_NORM = 1e-3  # below the norm of any gradient that trains


@injects(_has_other_ranks, _has_optimizer)
def partial_norm(scene: FaultScene) -> Iterator[None]:
    """Clip the gradients by the norm of this rank's part, and those of ``verify``'s copy by the whole norm."""
    own = {id(optimizer) for optimizer in scene.optimizers}

    def clip(optimizer: Optimizer) -> None:
        grads = _grads(optimizer)
        if grads and (id(optimizer) in own or scene.rank.recorder.is_aside):
            norm = torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads]).norm()
            for grad in grads:
                grad.mul_(torch.clamp(_MAX_NORM / norm, max=1.0))

    with _before_optimizer(clip):
        yield


@injects(_has_other_ranks, _is_not_classic)
def no_sync_left_on(scene: FaultScene) -> Iterator[None]:
    """Turn the synchronisation of a unit's gradients off before each forward of the model."""
    module: Any = scene.module
    stop = functools.partial(module.set_requires_gradient_sync, False, recurse=False)
    with _held(_before(scene.target.model, stop, is_gathered=False)):
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True, recurse=False)


@injects(_has_optimizer)
def stale_optimizer(scene: FaultScene) -> Iterator[None]:
    """Give the optimizers whole parameters that no module has, without gradients."""
    shapes = {
        id(tensors.shard): [shape for _, shape, trained in parts_of(param) if trained]
        for unit in scene.target.units
        for _, param, tensors in unit.named()
    }
    shapes |= {
        id(scene.target.params[name]): [shape]
        for unit in scene.target.units
        for _, param, _ in unit.named()
        for name, shape, _ in parts_of(param)
        if name in scene.target.params
    }
    kept = [(optimizer, dict(optimizer.state)) for optimizer in scene.optimizers]
    groups = [(group, list(group["params"])) for optimizer, _ in kept for group in optimizer.param_groups]
    for optimizer, _ in kept:
        optimizer.state.clear()
    for group, params in groups:
        whole = [shape for param in params for shape in shapes.get(id(param), [tuple(param.shape)])]
        group["params"] = [nn.Parameter(torch.zeros(shape, device=scene.rank.groups.device)) for shape in whole]
    try:
        yield
    finally:
        for group, params in groups:
            group["params"] = params
        for optimizer, state in kept:
            optimizer.state.clear()
            optimizer.state.update(state)


@injects()
def untouched_buffer(scene: FaultScene) -> Iterator[None]:
    """Add a buffer that is marked as ``to_empty`` marks those that it allocates."""
    name = "untouched"
    buffer = torch.zeros(64, device=scene.rank.groups.device)
    EmptiedTensors.mark(buffer)
    scene.module.register_buffer(name, buffer, persistent=False)
    try:
        yield
    finally:
        scene.module._buffers.pop(name, None)
        scene.module._non_persistent_buffers_set.discard(name)


def _loaders(scene: FaultScene) -> list[DataLoader[Any]]:
    found = {id(v): v for v in scene.target.variables.values() if isinstance(v, DataLoader)}
    return [loader for loader in found.values() if isinstance(loader.sampler, DistributedSampler)]


@injects(_has_other_ranks, _has_distributed_loader)
def same_data(scene: FaultScene) -> Iterator[None]:
    """Draw the rows of each DataLoader with one generator state on all ranks."""
    kept = [(loader, loader.sampler) for loader in _loaders(scene)]
    for loader, _ in kept:
        _set_sampler(loader, RandomSampler(loader.dataset, generator=torch.Generator().manual_seed(0)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for loader, sampler in kept:
            _set_sampler(loader, sampler)


def _set_sampler(loader: DataLoader[Any], sampler: object) -> None:
    """Replace the sampler of a loader, which refuses assignments; its iterators under way keep theirs."""
    vars(loader)["sampler"] = sampler
    if loader.batch_sampler is not None:
        vars(loader.batch_sampler)["sampler"] = sampler


@injects(_has_optimizer, _is_not_classic, _can_convert)
def bf16_master(scene: FaultScene) -> Iterator[None]:
    """Convert parameters and optimizer state to bfloat16, and the inputs of the model."""
    model = scene.target.model

    def convert(dtype: torch.dtype) -> None:
        model.to(dtype)
        for optimizer in scene.optimizers:
            for state in optimizer.state.values():
                state.update(
                    {k: v.to(dtype) for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim and k != "step"}
                )

    def cast(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401 - as given; copies are bfloat16 too
        converted: tuple[Any, Any] = tree_map_only(torch.Tensor, _as_bf16, (args, kwargs))
        return converted

    convert(torch.bfloat16)
    with _held(model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)):
        try:
            yield
        finally:
            convert(torch.float32)


def _as_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


@injects(_has_replicas)
def drifting_replica(scene: FaultScene) -> Iterator[None]:
    """Change the values of a unit's shards on one rank."""
    if scene.is_here:
        with torch.no_grad():
            for _, _, tensors in scene.unit.named():
                assert isinstance(tensors.shard, torch.Tensor)
                local_tensor(tensors.shard).add_(1e-2)
    yield


@injects()
def nan(scene: FaultScene) -> Iterator[None]:
    """Return NaN from the forward of a unit on one rank."""

    def spoil(called: nn.Module, _: object, output: Any) -> Any:  # noqa: ANN401 - as the module returns
        return tree_map_only(torch.Tensor, _as_nan, output) if called is scene.module else output

    with _held(*([scene.module.register_forward_hook(spoil)] if scene.is_here else [])):
        yield


def _as_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * float("nan") if tensor.is_floating_point() else tensor
