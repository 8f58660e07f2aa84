"""Public attributes of a wrapper that scripts read and set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn

from workbench.engine.classic.flat_param import FlatParam, FlatParameter
from workbench.engine.classic.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    WrapperTrainingState,
    check_kind,
)
from workbench.engine.fsdp_state import state_of

if TYPE_CHECKING:
    from workbench.engine.classic.wrapper_state import WrapperState

T = TypeVar("T")


class Fixed(Generic[T]):
    """A read-only attribute; setting it raises an AttributeError with advice.

    Args:
        read: the getter; the attribute has its name and docstring.
        instead: the advice: what to do instead of setting it.
    """

    def __init__(self, read: Callable[[Any], T], instead: str) -> None:
        self._read, self._instead, self.__doc__ = read, instead, read.__doc__

    @overload
    def __get__(self, wrapper: None, owner: type) -> Self: ...
    @overload
    def __get__(self, wrapper: object, owner: type) -> T: ...
    def __get__(self, wrapper: object | None, owner: type) -> T | Self:
        return self if wrapper is None else self._read(wrapper)

    def __set__(self, wrapper: object, value: object) -> NoReturn:
        raise AttributeError(
            f"{self._read.__name__} of a {type(wrapper).__name__} cannot be set to {value!r:.80}: {self._instead}"
        )


def fixed(instead: str) -> Callable[[Callable[[Any], T]], Fixed[T]]:
    """Return a decorator that makes a method a read-only attribute with the advice ``instead``."""
    return lambda read: Fixed(read, instead)


class WrapperAttributes:
    """The public attributes of torch's wrapper."""

    @property
    def _state(self) -> WrapperState:
        """The wrapper's state."""
        return cast("WrapperState", state_of(cast("nn.Module", self)))

    @fixed("wrap the plain module with another process_group=, after unwrap")
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that share one copy."""
        mesh = self._state.mesh
        return mesh.get_group(-1 % mesh.ndim)  # the second of the two axes of hybrid strategies

    @fixed("it is this rank's index in the wrapper's process_group")
    def rank(self) -> int:
        """This rank's index in the process group."""
        return self.process_group.rank()

    @fixed("it is the size of the wrapper's process_group")
    def world_size(self) -> int:
        """Number of ranks in the process group."""
        return self.process_group.size()

    @fixed("wrap the plain module with another device_id=, after unwrap")
    def compute_device(self) -> torch.device:
        """Device of forward and backward."""
        return self._state.comm_ctx.device

    @fixed("wrap the plain module with another sharding_strategy=, after unwrap")
    def sharding_strategy(self) -> ShardingStrategy:
        """What is split, and when full parameters are freed; always NO_SHARD on one rank."""
        return ShardingStrategy.NO_SHARD if self._state.mesh.size() == 1 else self._state.strategy

    @fixed("wrap the plain module with another mixed_precision=, after unwrap")
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes of parameters, reductions and buffers."""
        return self._state.precision

    @fixed("wrap the plain module with another cpu_offload=, after unwrap")
    def cpu_offload(self) -> CPUOffload:
        """Whether shards are on the CPU between uses."""
        return self._state.cpu_offload

    @fixed("the wrapper sets it during each step")
    def training_state(self) -> WrapperTrainingState:
        """The wrapper's current activity."""
        return self._state.doing

    @fixed("load a state dict, or write within summon_full_params")
    def params(self) -> list[FlatParameter]:
        """A list of the flat parameter of the wrapper's own unit; empty if it has none."""
        flat = self._state.flat
        return [] if flat is None else [cast("FlatParameter", flat.sharded_param)]

    @property
    def _has_params(self) -> bool:
        """Whether the wrapper has its own unit; Accelerate reads this and the next two."""
        return self._state.flat is not None

    @property
    def _flat_param(self) -> FlatParameter | None:
        """The flat parameter of the wrapper's own unit; None if it has none."""
        return self.params[0] if self._has_params else None

    @property
    def _handle(self) -> FlatParam | None:
        """The object that manages the flat parameter."""
        return self._state.flat

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward prefetches the next unit's parameters; None: never, they are gathered when needed."""
        return self._state.when_to_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, value: BackwardPrefetch | None) -> None:
        """Set it, from the next backward on."""
        if value is not None:
            check_kind("backward_prefetch", value, BackwardPrefetch)
        self._state.when_to_prefetch = value

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward prefetches the unit that came next in the last iteration."""
        return self._state.forward_prefetch is None

    @forward_prefetch.setter
    def forward_prefetch(self, value: bool) -> None:
        """Set it, from the next forward on."""
        check_flags(forward_prefetch=value)
        self._state.forward_prefetch = None if value else ()

    @property
    def limit_all_gathers(self) -> bool:
        """The value that was given; it has no effect, because at most one unit is ever prefetched."""
        return self._state.limit_all_gathers

    @limit_all_gathers.setter
    def limit_all_gathers(self, value: bool) -> None:
        """Store the value; it has no effect."""
        check_flags(limit_all_gathers=value)
        self._state.limit_all_gathers = value


def check_flags(**flags: object) -> None:
    """Raise TypeError for an argument that is not a bool."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"FullyShardedDataParallel: {name} must be a bool, got {value!r}")
