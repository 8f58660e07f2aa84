"""The FSDP1 API on this engine: a wrapper around a module whose parameters are stored in one flat parameter.

Every public function, attribute and argument of torch's wrapper exists here under the same name: this package has what
``torch.distributed.fsdp`` exports for it, and ``wrap.py`` has ``enable_wrap`` and ``wrap``. Differences:

``fully_shard``, ``FSDPModule``, ``MixedPrecisionPolicy``, ``OffloadPolicy``, ``CPUOffloadPolicy``,
``DataParallelMeshDims``, ``UnshardHandle``, ``GradientReductionHandle``, ``register_fsdp_forward_method``,
``share_comm_ctx``
    belong to the FSDP2 API; they are in ``workbench.engine``.
torch's own enums and configs
    are refused, because they are not classes of this package: "must be a workbench.engine.classic.ShardingStrategy,
    got ...". Import both from one place.
setting ``sharding_strategy``, ``mixed_precision``, ``cpu_offload``, ``process_group``, ``compute_device``, ``rank``,
``world_size``, ``params``, ``training_state``
    would not change a wrapper that exists, and is refused: "sharding_strategy of a FullyShardedDataParallel
    cannot be set to ...: wrap the plain module with another sharding_strategy=, after unwrap".
``SHARDED_STATE_DICT`` without a ``device_mesh``
    has DTensors, where torch has the deprecated ShardedTensors; both can be loaded.
``copy.deepcopy`` and ``pickle`` of a wrapper
    are refused, because a wrapper holds a part of a model and process groups: "can be neither copied nor pickled".
gradients of a tensor that several units take as input, such as an encoder's output in a decoder's layers
    are summed within each unit first, as with ``fully_shard``: they differ from torch's wrapper in the last bits.
names that begin with an underscore
    are not part of the API, except ``_has_params``, ``_flat_param`` and ``_handle``, which Accelerate reads.
"""

from workbench.engine.classic.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)
from workbench.engine.classic.flat_param import FlatParameter
from workbench.engine.classic.options import (
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
from workbench.engine.classic.sharded_grad_scaler import ShardedGradScaler
from workbench.engine.classic.unwrapping import rewrap_optimizers, unwrap
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
