"""A wrapper's options: torch's names, fields, positions and defaults, and a message for each wrong value."""

import dataclasses
from enum import Enum

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType as TheirKeyType

import workbench.engine.classic as ours
from workbench.engine.classic import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"]
CLASSES = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "StateDictSettings",
]


def of_torch(name):
    return TheirKeyType if name == "OptimStateKeyType" else getattr(theirs, name)


def fields(kind):
    return [(f.name, f.default, f.init, f.kw_only) for f in dataclasses.fields(kind)]


def parameters(kind):
    """Return the dataclass options of a class."""
    return {name: getattr(kind.__dataclass_params__, name) for name in ("frozen", "eq", "order", "unsafe_hash")}


@pytest.mark.parametrize("name", ENUMS)
def test_members_are_torchs(name):
    kind = getattr(ours, name)
    assert issubclass(kind, Enum)
    assert list(kind.__members__) == list(of_torch(name).__members__)


@pytest.mark.parametrize("name", CLASSES)
def test_fields_and_defaults_are_torchs(name):
    kind, like = getattr(ours, name), of_torch(name)
    assert fields(kind) == fields(like)
    assert parameters(kind) == parameters(like)
    assert [base.__name__ for base in kind.__mro__] == [base.__name__ for base in like.__mro__]


@pytest.mark.parametrize("dtype", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_a_dtype_is_a_floating_point_dtype(dtype):
    assert getattr(MixedPrecision(**{dtype: torch.bfloat16}), dtype) is torch.bfloat16
    with pytest.raises(TypeError, match=f"^MixedPrecision: {dtype} must be a torch.dtype or None, got 'bf16'$"):
        MixedPrecision(**{dtype: "bf16"})
    with pytest.raises(ValueError, match=f"^MixedPrecision: {dtype} must be a floating-point dtype, got torch.int8$"):
        MixedPrecision(**{dtype: torch.int8})


def flags():
    """Return every class and field with a bool default."""
    kinds = [getattr(ours, name) for name in CLASSES]
    return [(kind, f.name) for kind in kinds for f in dataclasses.fields(kind) if isinstance(f.default, bool)]


@pytest.mark.parametrize(("kind", "name"), flags(), ids=lambda value: getattr(value, "__name__", value))
def test_a_flag_is_a_bool(kind, name):
    for value in (True, False):
        assert getattr(kind(**{name: value}), name) is value
    with pytest.raises(TypeError, match=f"^{kind.__name__}: {name} must be a bool, got 1$"):
        kind(**{name: 1})


@pytest.mark.parametrize("classes", [nn.LayerNorm, [nn.Identity()], ["LayerNorm"], (int,), None])
def test_modules_kept_in_their_precision_are_named_by_class(classes):
    with pytest.raises(TypeError, match=r"^MixedPrecision: _module_classes_to_ignore must be a set or a "):
        MixedPrecision(_module_classes_to_ignore=classes)
    assert MixedPrecision(_module_classes_to_ignore=())._module_classes_to_ignore == ()


def test_settings_of_a_type_have_its_configs():
    settings = [StateDictSettings.of(kind) for kind in StateDictType]
    assert [s.configs() for s in settings] == [
        (type(s.state_dict_config), type(s.optim_state_dict_config)) for s in settings
    ]
    assert settings[0] == StateDictSettings(
        StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
    )


def test_settings_take_configs_that_are_given():
    settings = StateDictSettings.of(StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
    assert settings.state_dict_config.rank0_only
    assert not settings.optim_state_dict_config.rank0_only


def test_a_config_of_another_type_is_refused():
    message = "with FULL_STATE_DICT pass FullStateDictConfig and FullOptimStateDictConfig, got "
    with pytest.raises(ValueError, match=message + "FullStateDictConfig and ShardedOptimStateDictConfig$"):
        StateDictSettings.of(StateDictType.FULL_STATE_DICT, None, ShardedOptimStateDictConfig())
    for config in (StateDictConfig(), LocalStateDictConfig(), ShardedStateDictConfig()):
        with pytest.raises(ValueError, match=message + f"{type(config).__name__} and FullOptimStateDictConfig$"):
            StateDictSettings(StateDictType.FULL_STATE_DICT, config, FullOptimStateDictConfig())


def test_torchs_own_members_and_configs_are_distinguished_from_ours():
    message = r"state_dict_type must be a workbench.engine.classic.StateDictType, got .*, a torch.distributed.fsdp.api"
    with pytest.raises(TypeError, match=message):
        StateDictSettings.of(theirs.StateDictType.FULL_STATE_DICT)
    message = r"^StateDictSettings: state_dict_config must be a workbench.engine.classic.StateDictConfig, got "
    with pytest.raises(TypeError, match=message):
        StateDictSettings.of(StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig())


def test_changing_one_does_not_change_another():
    first, second = CPUOffload(), CPUOffload()
    first.offload_params = True
    assert not second.offload_params
