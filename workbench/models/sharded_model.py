"""A sharded model, whichever engine runs it: its units, this rank's tensors, its groups, and a plain copy of it.

Each engine has a class in a file of its own: :class:`ShardedModel` is what ``lint``, ``verify``, ``inspect`` and faults
ask, and they ask nothing else. A model whose parts are run by different engines is one of each.
"""

from __future__ import annotations

import functools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from workbench.engine import UnshardHandle
from workbench.engine._torch import local_of
from workbench.engine.full_param import local_tensor
from workbench.engine.module_names import clean, named_params
from workbench.engine.unsharding import full_tensor
from workbench.errors import UsageError
from workbench.events import Engine, ParamTensors, Unit, unit_words
from workbench.protocol.commands import ReplicaSum, UnmanagedState

Optimizers = Sequence[torch.optim.Optimizer]
Largest = Callable[[int], int]
"""Returns the largest of a number that each rank passes; collective."""
Averaged = Callable[[str, torch.Tensor, torch.Tensor, Sequence[dist.ProcessGroup]], None]
"""Gets a parameter's name, this rank's gradient, its average, and the groups over which it was averaged in turn."""
OwnGrads = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the gradients of a copy's parameters that this rank would have without any average, by name."""


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """Where a unit is: its modules and ranks.

    Attributes:
        modules: its modules.
        shard_ranks: ranks that share one copy with this one.
        replicas: ranks that hold the same shard as this one; None: unknown.
    """

    modules: tuple[nn.Module, ...]
    shard_ranks: tuple[int, ...]
    replicas: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Casts:
    """The casts of one call of ``fully_shard``, or of one wrapper.

    Attributes:
        modules: its modules.
        input_dtype: dtype of the inputs of their forward; None: as given.
        output_dtype: dtype of their outputs; None: as computed.
        param_dtype: dtype in which parameters are used; None: their own.
        params: the own dtype of each parameter, a module that has it, and its name there.
    """

    modules: tuple[nn.Module, ...]
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    param_dtype: torch.dtype | None
    params: tuple[tuple[torch.dtype, nn.Module, str], ...]


class ShardedModel(ABC):
    """A sharded model, or those of its parts that one engine runs.

    Args:
        model: the model.

    Attributes:
        engine: what runs it.
        module_class: the class that ``fully_shard`` gives the modules that it is called on, which alone gather in
            forward; None if the engine has no such class.
        wrapper_class: the class of its wrappers around modules of the program; None if it has none.
    """

    engine: ClassVar[Engine]
    module_class: ClassVar[type | None] = None
    wrapper_class: ClassVar[type[nn.Module] | None] = None

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @classmethod
    @abstractmethod
    def runs(cls, model: nn.Module) -> bool:
        """Return whether the engine runs a part of a model."""

    # ---- names

    @functools.cached_property
    def paths(self) -> dict[nn.Module, str]:
        """The path of each module, without wrappers."""
        return {module: clean(path) for path, module in self.model.named_modules()}

    @property
    def names(self) -> dict[int, str]:
        """The name, without wrappers, of each parameter that the modules hold now, by its id."""
        found: dict[int, str] = {}
        for module, path in self.paths.items():
            for name, param in module.named_parameters(recurse=False):
                found.setdefault(id(param), join(path, name))
        return found

    # ---- units

    @property
    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """Its units, in the order of its modules."""

    @abstractmethod
    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""

    @abstractmethod
    def layout_of(self, unit: int) -> UnitLayout:
        """Return where a unit is."""

    def num_backwards(self, unit: int) -> int | None:
        """Return how many backwards of a unit were averaged, or None if the engine does not count them."""
        return None

    def is_left_unaveraged(self, unit: int) -> bool:
        """Return whether the engine replicates a unit over several ranks without averaging its gradients."""
        return False

    def replicas(self, unit: int) -> Sequence[int]:
        """Return the ranks that hold the same shard of a unit as this one; empty: it is the only one, or unknown."""
        return self.layout_of(unit).replicas or ()

    def replica_sums(self) -> tuple[ReplicaSum, ...]:
        """Return the checksums of the shards of units that several groups of ranks have a copy of."""
        found = []
        for unit in self.units:
            replicas = self.replicas(unit.index)
            if len(replicas) > 1:
                tensors = self.tensors(unit.index).values()
                own = {id(each.shard): each.shard for each in tensors if isinstance(each.shard, torch.Tensor)}.values()
                crc = 0
                for each in own:
                    crc = checksum(local_tensor(each), crc)
                found.append(ReplicaSum(unit=unit_words(unit.name), first_rank=min(replicas), crc32=crc))
        return tuple(found)

    @abstractmethod
    def owned(self, unit: int) -> set[int]:
        """Return the ids of the parameters of a unit that an optimizer may hold."""

    def part_of(self, unit: Unit, name: str) -> tuple[str, set[int]]:
        """Return the part of the model that has a parameter, as text, and the ids of what an optimizer may hold of it.

        Args:
            unit: its unit.
            name: its name.
        """
        return f"unit {unit_words(unit.name)}", self.owned(unit.index)

    # ---- parameters, gradients and buffers

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients a step changes."""
        return tuple(self.model.parameters())

    @abstractmethod
    def whole_values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names, without wrappers, and the whole values of all parameters; collective."""

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers with their names without wrappers."""
        for module, path in self.paths.items():
            yield from ((join(path, name), buffer) for name, buffer in module.named_buffers(recurse=False))

    @abstractmethod
    def groups(self) -> Mapping[str, Sequence[dist.ProcessGroup]]:
        """Return the process groups over which the gradient of each parameter is averaged in turn, by name."""

    @abstractmethod
    def unreduced(self) -> tuple[int, ...]:
        """Return the units with gradients that were not reduced."""

    @abstractmethod
    def drop_full_grads(self, units: Iterable[int]) -> None:
        """Drop the gradients of full parameters of units."""

    @abstractmethod
    def reshard(self) -> None:
        """Free all full parameters."""

    def gathered_early(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which this rank gathers a unit before the root, which is the wrong order.

        Args:
            module: the unit's.
        """
        raise NotImplementedError(f"{self.engine.name} gathers no unit of its own, such as {type(module).__name__}")

    # ---- what the engine does not manage

    @abstractmethod
    def in_no_unit(self) -> Sequence[str]:
        """Return the names of the trained parameters that are in no unit, so that nothing averages their gradients."""

    def unaveraged(self) -> Sequence[str]:
        """Return the names of :meth:`in_no_unit` whose gradients nothing that is known averages."""
        return self.in_no_unit()

    def ignored(self) -> Sequence[str]:
        """Return the names of :meth:`in_no_unit` that the user told the engine to leave alone, such as of experts."""
        return ()

    def late(self) -> Sequence[str]:
        """Return the names of :meth:`in_no_unit` that were added or unfrozen after the engine took the model."""
        return ()

    def uncalled_hooks(self) -> Sequence[str]:
        """Return the names of the sharded parameters with a hook that autograd never calls."""
        return ()

    def own_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that nothing keeps equal on all ranks, with their names without wrappers."""
        yield from ((clean(name), buffer) for name, buffer in self.model.named_buffers())

    @property
    def unmanaged(self) -> UnmanagedState:
        """The parts of the model that the engine does not manage, with the checksums of buffers."""
        return UnmanagedState(
            params=tuple(self.in_no_unit()), hooks=tuple(self.uncalled_hooks()), buffers=self.buffer_sums()
        )

    def buffer_sums(self) -> dict[str, int]:
        """Return the CRC-32 of each of :meth:`own_buffers` that every rank has whole, by name."""
        return {name: checksum(buffer) for name, buffer in self.own_buffers() if _is_plain(buffer)}

    # ---- a plain copy

    def check_can_copy(self, name: str, largest: Largest) -> None:
        """Raise UsageError if no plain copy of the model ``name`` can be made that trains alike; collective."""
        return

    @abstractmethod
    def copy(
        self, memo: dict[int, Any], optimizers: Optimizers, largest: Largest
    ) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        """Return plain copies of the model and its optimizers; collective.

        Args:
            memo: as of :func:`copy.deepcopy`.
            optimizers: those of its parameters.
            largest: to compare what ranks hold.

        Raises:
            HoldingsDiffer: only some ranks hold a gradient or optimizer state.
        """

    @abstractmethod
    def casts(self) -> Iterator[Casts]:
        """Yield what each call of ``fully_shard`` or each wrapper casts."""

    def average(self, reference: nn.Module, averaged: Averaged) -> OwnGrads:
        """Let a plain copy average its gradients; return what returns the gradients of this rank alone, if known."""
        groups = self.groups()
        for name, plain in named_params(reference):
            if name in groups and plain.requires_grad:
                hook = functools.partial(_average, groups[name], functools.partial(averaged, name))
                plain.register_post_accumulate_grad_hook(hook)
        return dict

    def flat_parts(self) -> Iterator[list[str]]:
        """Yield the names of the parameters in each flat parameter: all get a gradient if one of them is used."""
        yield from ()

    def complete_grads(self, params: Mapping[str, nn.Parameter]) -> None:
        """Give unused parameters of a copy the gradient 0, as in a flat parameter of which another part is used."""
        for names in self.flat_parts():
            parts = [params[name] for name in names if name in params]
            for param in parts if any(part.grad is not None for part in parts) else ():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)


class HoldingsDiffer(UsageError):
    """Ranks hold different gradients or optimizer state; raised on all ranks."""


def check_same_holdings(holds: str, largest: Largest) -> None:
    """Raise HoldingsDiffer if ranks hold other gradients or optimizer state; ``holds`` describes them; collective."""
    known = zlib.crc32(holds.encode())
    if largest(known) != -largest(-known):
        raise HoldingsDiffer(
            "the ranks hold gradients or optimizer state of different parameters, so no copy can be made of them: "
            "let all ranks take the same steps, and clear gradients before verify"
        )


def join(path: str, name: str) -> str:
    """Return the name of a parameter or buffer from the path of its module; the root's path is empty."""
    return f"{path}.{name}" if path else name


def local_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's tensors of the parameters, and the buffers of a model."""
    tensors = [local_of(p) for p in model.parameters() if isinstance(p, DTensor)]
    return tensors + [p.data for p in model.parameters() if not isinstance(p, DTensor)] + list(model.buffers())


def _is_plain(buffer: torch.Tensor) -> bool:
    """Return whether every rank holds all elements of a buffer."""
    return not (buffer.is_meta or isinstance(buffer, DTensor) or buffer.layout is not torch.strided)


def checksum(tensor: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, after those with the CRC-32 ``before``."""
    local = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(local.view(torch.uint8).numpy().tobytes(), before) if local.numel() else before


@contextmanager
def gathered_before(model: nn.Module, module: Any, *, prepend: bool) -> Iterator[None]:  # noqa: ANN401 - an FSDPModule
    """Gather a unit before each forward of the model, but not of its copies.

    Args:
        model: the model.
        module: the unit's.
        prepend: whether before all other hooks, so also before the root's own gather.
    """

    def gather(called: nn.Module, _: object) -> None:
        if called is model:
            module.unshard()

    handle = model.register_forward_pre_hook(gather, prepend=prepend)
    try:
        yield
    finally:
        handle.remove()


def prefetch_in_order(model: nn.Module, ahead: int, unit_of: Callable[[nn.Module], object]) -> None:
    """Set the lists of units that each unit prefetches: those that follow it in forward and in backward.

    Args:
        model: the root.
        ahead: length of the lists; 0 empties them.
        unit_of: returns the unit that ``fully_shard`` made of a module, or None if it made none.
    """
    forward, backward = (list(in_order(model, unit_of, set(), backward=is_last)) for is_last in (False, True))
    for place, unit in enumerate(forward, start=1):
        unit.set_modules_to_forward_prefetch(forward[place : place + ahead] if ahead else None)
    for place, unit in enumerate(backward, start=1):
        unit.set_modules_to_backward_prefetch(backward[place : place + ahead])


def in_order(
    module: nn.Module, unit_of: Callable[[nn.Module], object], seen: set[object], *, backward: bool
) -> Iterator[Any]:
    """Yield one module of each unit, outer before inner, otherwise in definition order, or for backward in reverse.

    Each unit comes once, even where modules are shared or a unit has several modules.
    """
    if module in seen:
        return
    unit = unit_of(module)
    if unit is not None and unit not in seen:
        yield module
    seen.update((module, unit))
    children = list(module.children())
    for child in reversed(children) if backward else children:
        yield from in_order(child, unit_of, seen, backward=backward)


# ---- what a plain copy does


def average_over(groups: Sequence[dist.ProcessGroup], tensor: torch.Tensor) -> None:
    """Average a tensor in place over the ranks of groups, one after another."""
    for group in groups:
        dist.all_reduce(tensor, group=group)
    tensor.div_(math.prod(group.size() for group in groups))


def _average(groups: Sequence[dist.ProcessGroup], averaged: Callable[..., None], param: torch.Tensor) -> None:
    """Average a gradient over the ranks of groups; repeating it, as accumulation does, changes nothing."""
    if isinstance(param, DTensor) and isinstance(param.grad, DTensor):
        param.grad = param.grad.redistribute(placements=param.placements)  # reduces a pending sum
    if param.grad is not None:
        grad = local_tensor(param.grad)
        own = grad.clone()
        average_over(groups, grad)
        averaged(own, grad, groups)


def take_setters(model: nn.Module, memo: dict[int, Any], cls: type) -> None:
    """Give the copies of sharded modules no-op versions of the methods of ``cls`` that a step may call.

    A copy averages immediately, whatever is synchronised or gathered when.
    """
    calls: dict[str, Callable[..., object]] = {
        name: _nothing for name, call in vars(cls).items() if callable(call) and not name.startswith("_")
    }
    calls["unshard"] = _gathered
    for module in model.modules():
        if isinstance(module, cls):
            plain = memo[id(module)]
            vars(plain).update({name: call for name, call in calls.items() if not hasattr(plain, name)})


def _nothing(*_args: object, **_settings: object) -> None:
    """Do nothing: the setter of a module whose parameters are whole anyway."""


def _gathered(async_op: bool = False) -> UnshardHandle | None:
    return UnshardHandle(()) if async_op else None


def take_calls_of_a_wrapper(reference: nn.Module) -> None:
    """Give a plain copy the wrapper's methods that a step may call; its own attributes stay."""
    clip = functools.partial(_clip, list(reference.parameters()))
    calls = {"module": reference, "no_sync": nullcontext, "clip_grad_norm_": clip}
    vars(reference).update({name: call for name, call in calls.items() if not hasattr(reference, name)})


@torch.no_grad()
def _clip(params: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip as :func:`torch.nn.utils.clip_grad_norm_` does, which refuses a mix of plain gradients and DTensors.

    Returns:
        the norm before clipping, a plain scalar.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norms = [full_tensor(torch.linalg.vector_norm(grad, norm_type)) for grad in grads]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    for grad in grads:
        local_tensor(grad).mul_(torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total
