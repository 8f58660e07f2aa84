"""What a script chooses for a wrapper: how it shards, prefetches, computes and offloads, and what a state dict is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from workbench.engine._torch import BatchNorm
from workbench.engine.policies import check_bools, check_dtypes


class ShardingStrategy(Enum):
    """What of a unit is split over its ranks, and when the whole is freed.

    Attributes:
        FULL_SHARD: parameters, gradients and the optimizer's state are split; full parameters are freed after forward
            and after backward.
        SHARD_GRAD_OP: the same is split; full parameters are kept from forward to backward.
        NO_SHARD: nothing is split; gradients are all-reduced, as DistributedDataParallel does.
        HYBRID_SHARD: FULL_SHARD within a group of ranks, copies over the groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a group of ranks, copies over the groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward starts the all-gather of the unit that comes next.

    Attributes:
        BACKWARD_PRE: before the gradients of the present unit are computed; most overlap, and two units' parameters
            beside one unit's gradients at the peak.
        BACKWARD_POST: after they are computed and their parameters are freed; one unit's parameters less at the peak.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class WrapperTrainingState(Enum):
    """What a wrapper does.

    Attributes:
        IDLE: none of the others.
        FORWARD_BACKWARD: its forward or its backward runs.
        SUMMON_FULL_PARAMS: its modules have whole parameters within ``summon_full_params``.
    """

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


@dataclass
class MixedPrecision:
    """Which dtype is used where; ``None`` leaves it as it is. Shards and the optimizer keep their dtype.

    Attributes:
        param_dtype: of the full parameters: all-gather, forward and backward.
        reduce_dtype: of the reduction; None: ``param_dtype``.
        buffer_dtype: of buffers, from the first forward on.
        keep_low_precision_grads: leave gradients in the dtype of the reduction; False: the shards' dtype.
        cast_forward_inputs: cast floating-point inputs of this unit's forward to ``param_dtype``.
        cast_root_forward_inputs: the same for the root, whatever ``cast_forward_inputs`` says there.
        _module_classes_to_ignore: with an ``auto_wrap_policy`` modules of these classes become units of their own that
            compute in the dtype of their shards.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BatchNorm,)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what is no floating-point dtype, no bool or no class of modules."""
        check_dtypes(self, "param_dtype", "reduce_dtype", "buffer_dtype")
        check_bools(self, "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
        module_classes_of("MixedPrecision: _module_classes_to_ignore", self._module_classes_to_ignore)


@dataclass
class CPUOffload:
    """Whether shards, their gradients and the optimizer's state are on the CPU between uses.

    Attributes:
        offload_params: they are.
    """

    offload_params: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError for what is no bool."""
        check_bools(self, "offload_params")


class StateDictType(Enum):
    """What ``state_dict`` returns and ``load_state_dict`` takes.

    Attributes:
        FULL_STATE_DICT: whole tensors under their names, as of a model that is not sharded.
        LOCAL_STATE_DICT: the flat shard of this rank, which only the same sharding can load.
        SHARDED_STATE_DICT: this rank's part of every tensor under its name, which any sharding can load.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """What an optimizer's state dict is keyed by.

    Attributes:
        PARAM_NAME: names of parameters, as in the model that is not sharded.
        PARAM_ID: their places in the optimizer's groups, counted through from 0.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """How a state dict is made; give one of its subclasses.

    Attributes:
        offload_to_cpu: its tensors are on the CPU.
    """

    offload_to_cpu: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError for what is no bool: every field of every subclass is one."""
        check_bools(self, *self.__dataclass_fields__)


@dataclass
class FullStateDictConfig(StateDictConfig):
    """How a ``FULL_STATE_DICT`` is made.

    Attributes:
        rank0_only: rank 0 gets it, the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """How a ``LOCAL_STATE_DICT`` is made."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """How a ``SHARDED_STATE_DICT`` is made.

    Attributes:
        _use_dtensor: taken, as torch's is; values are DTensors in any case, as ShardedTensors are deprecated.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """How an optimizer's state dict is made; give one of its subclasses.

    Attributes:
        offload_to_cpu: its tensors are on the CPU.
    """

    offload_to_cpu: bool = True

    def __post_init__(self) -> None:
        """Raise TypeError for what is no bool: every field of every subclass is one."""
        check_bools(self, *self.__dataclass_fields__)


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict is made along with a ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: rank 0 gets it, the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict is made along with a ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """How an optimizer's state dict is made along with a ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: its values are DTensors; False: ShardedTensors. The wrapper sets it.
    """

    _use_dtensor: bool = False


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass
class StateDictSettings:
    """What state dicts of a model and of its optimizer are; the three belong together."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        """Raise TypeError for another's classes, ValueError for a config of another type of state dict."""
        for name, kind in (
            ("state_dict_type", StateDictType),
            ("state_dict_config", StateDictConfig),
            ("optim_state_dict_config", OptimStateDictConfig),
        ):
            check_kind(f"StateDictSettings: {name}", getattr(self, name), kind)
        came = (type(self.state_dict_config), type(self.optim_state_dict_config))
        if came != self.configs():
            expected, got = (" and ".join(kind.__name__ for kind in kinds) for kinds in (self.configs(), came))
            raise ValueError(f"StateDictSettings: with {self.state_dict_type.name} give {expected}, got {got}")

    def configs(self) -> tuple[type[StateDictConfig], type[OptimStateDictConfig]]:
        """Return the classes of config that go with the type of state dict."""
        return _CONFIGS[self.state_dict_type]

    @classmethod
    def of(
        cls,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Return the settings of a type; a config that is None is the type's own with its defaults.

        Raises:
            TypeError: for what is no type of state dict or no config.
            ValueError: for a config that goes with another type.
        """
        check_kind("state_dict_type", state_dict_type, StateDictType)
        config, optim_config = _CONFIGS[state_dict_type]
        return cls(state_dict_type, state_dict_config or config(), optim_state_dict_config or optim_config())


def check_kind(what: str, value: object, kind: type) -> None:
    """Raise TypeError for what is no ``kind``: of torch's wrapper there are classes of the same names."""
    if not isinstance(value, kind):
        came = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{what} must be a workbench.engine.classic.{kind.__name__}, got {value!r}, a {came}")


def module_classes_of(what: str, classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """Return classes of modules as ``isinstance`` takes them.

    Raises:
        TypeError: something else is among them, or they are not several.
    """
    given = tuple(classes) if isinstance(classes, Iterable) and not isinstance(classes, type) else None
    if given is None or any(not (isinstance(kind, type) and issubclass(kind, nn.Module)) for kind in given):
        raise TypeError(f"{what} must be a set or a sequence of subclasses of nn.Module, got {classes!r}")
    return given
