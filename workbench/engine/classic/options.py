"""Options of a wrapper: sharding, prefetch, precision, offload and state dicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from workbench.engine._torch import BatchNorm
from workbench.engine.policies import check_bools, check_dtypes


class ShardingStrategy(Enum):
    """What a unit splits over its ranks, and when it frees full parameters.

    Attributes:
        FULL_SHARD: parameters, gradients and optimizer state are split; full parameters are freed after forward and
            after backward.
        SHARD_GRAD_OP: the same are split; full parameters are kept from forward to backward.
        NO_SHARD: nothing is split; gradients are all-reduced, as in DistributedDataParallel.
        HYBRID_SHARD: FULL_SHARD within a group of ranks, replicated over groups.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a group of ranks, replicated over groups.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When backward starts the all-gather of the next unit.

    Attributes:
        BACKWARD_PRE: before the current unit's gradients are computed: most overlap; the peak has two units' parameters
            and one unit's gradients.
        BACKWARD_POST: after they are computed and the unit's parameters are freed: one unit's parameters less at the
            peak.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class WrapperTrainingState(Enum):
    """A wrapper's current activity.

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
    """The dtypes of a unit; ``None`` means no cast. Shards and the optimizer keep their dtype.

    Attributes:
        param_dtype: dtype of the full parameters: all-gather, forward and backward.
        reduce_dtype: dtype of the reduction; None: ``param_dtype``.
        buffer_dtype: dtype of buffers, from the first forward on.
        keep_low_precision_grads: keep gradients in the dtype of the reduction; False: cast them to the shards' dtype.
        cast_forward_inputs: cast floating-point inputs of this unit's forward to ``param_dtype``.
        cast_root_forward_inputs: the same for the root, even if its ``cast_forward_inputs`` is False.
        _module_classes_to_ignore: with an ``auto_wrap_policy``, modules of these classes become separate units that
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
        """Raise TypeError or ValueError for a value that is not a floating-point dtype, bool or module class."""
        check_dtypes(self, "param_dtype", "reduce_dtype", "buffer_dtype")
        check_bools(self, "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
        module_classes_of("MixedPrecision: _module_classes_to_ignore", self._module_classes_to_ignore)


@dataclass
class CPUOffload:
    """CPU offload of shards, their gradients and the optimizer state between uses.

    Attributes:
        offload_params: whether to offload them.
    """

    offload_params: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError if the value is not a bool."""
        check_bools(self, "offload_params")


class StateDictType(Enum):
    """The format that ``state_dict`` returns and ``load_state_dict`` takes.

    Attributes:
        FULL_STATE_DICT: whole tensors under their names, as for an unsharded model.
        LOCAL_STATE_DICT: this rank's flat shard, which only the same sharding can load.
        SHARDED_STATE_DICT: this rank's part of every tensor under its name, which any sharding can load.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """The keys of an optimizer's state dict.

    Attributes:
        PARAM_NAME: names of parameters, as in the unsharded model.
        PARAM_ID: their indices over all groups of the optimizer, from 0 on.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Options of a state dict; use one of the subclasses.

    Attributes:
        offload_to_cpu: whether its tensors are on the CPU.
    """

    offload_to_cpu: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError if a field is not a bool; all fields of all subclasses are bools."""
        check_bools(self, *self.__dataclass_fields__)


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: whether only rank 0 gets it, and the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a ``LOCAL_STATE_DICT``."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a ``SHARDED_STATE_DICT``.

    Attributes:
        _use_dtensor: accepted for compatibility; values are always DTensors, because ShardedTensors are deprecated.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options of an optimizer's state dict; use one of the subclasses.

    Attributes:
        offload_to_cpu: whether its tensors are on the CPU.
    """

    offload_to_cpu: bool = True

    def __post_init__(self) -> None:
        """Raise TypeError if a field is not a bool; all fields of all subclasses are bools."""
        check_bools(self, *self.__dataclass_fields__)


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's state dict with ``FULL_STATE_DICT``.

    Attributes:
        rank0_only: whether only rank 0 gets it, and the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's state dict with ``LOCAL_STATE_DICT``."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's state dict with ``SHARDED_STATE_DICT``.

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
    """The state dict type of a model and its optimizer, with matching configs."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        """Raise TypeError for a class of another package, ValueError for a config of another state dict type."""
        for name, kind in (
            ("state_dict_type", StateDictType),
            ("state_dict_config", StateDictConfig),
            ("optim_state_dict_config", OptimStateDictConfig),
        ):
            check_kind(f"StateDictSettings: {name}", getattr(self, name), kind)
        came = (type(self.state_dict_config), type(self.optim_state_dict_config))
        if came != self.configs():
            expected, got = (" and ".join(kind.__name__ for kind in kinds) for kinds in (self.configs(), came))
            raise ValueError(f"StateDictSettings: with {self.state_dict_type.name} pass {expected}, got {got}")

    def configs(self) -> tuple[type[StateDictConfig], type[OptimStateDictConfig]]:
        """Return the config classes that belong to the state dict type."""
        return _CONFIGS[self.state_dict_type]

    @classmethod
    def of(
        cls,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Return the settings of a state dict type; None for a config means the type's defaults.

        Raises:
            TypeError: an argument is not a state dict type or config.
            ValueError: a config belongs to another type.
        """
        check_kind("state_dict_type", state_dict_type, StateDictType)
        config, optim_config = _CONFIGS[state_dict_type]
        return cls(state_dict_type, state_dict_config or config(), optim_state_dict_config or optim_config())


def check_kind(what: str, value: object, kind: type) -> None:
    """Raise TypeError if ``value`` is not a ``kind``; torch's wrapper has classes of the same names."""
    if not isinstance(value, kind):
        came = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{what} must be a workbench.engine.classic.{kind.__name__}, got {value!r}, a {came}")


def module_classes_of(what: str, classes: Iterable[type[nn.Module]]) -> tuple[type[nn.Module], ...]:
    """Return module classes as a tuple for ``isinstance``.

    Raises:
        TypeError: ``classes`` is not an iterable, or contains something else.
    """
    given = tuple(classes) if isinstance(classes, Iterable) and not isinstance(classes, type) else None
    if given is None or any(not (isinstance(kind, type) and issubclass(kind, nn.Module)) for kind in given):
        raise TypeError(f"{what} must be a set or a sequence of subclasses of nn.Module, got {classes!r}")
    return given
