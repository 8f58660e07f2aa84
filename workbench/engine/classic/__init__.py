"""The first FSDP's API on this engine: a wrapper around modules whose parameters lie in one flat parameter.

``wrap.py`` has ``enable_wrap`` and ``wrap``, under the names that they have in torch's ``wrap.py``.
"""

from workbench.engine.classic.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    WrapperTrainingState,
)
from workbench.engine.classic.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from workbench.engine.classic.flat_param import FlatParameter
from workbench.engine.classic.sharded_grad_scaler import ShardedGradScaler
from workbench.engine.classic.undo import rewrap_optimizers, unwrap
from workbench.engine.classic.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from workbench.engine.classic.wrapper import FullyShardedDataParallel

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "DefaultState",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "LowPrecisionState",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "WrapperTrainingState",
    "allreduce_hook",
    "always_wrap_policy",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "lambda_auto_wrap_policy",
    "reduce_scatter_hook",
    "rewrap_optimizers",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "unwrap",
]
