"""Fully Sharded Data Parallel engine: per-parameter sharding on DTensor, with the shape of torch's public API.

Differences from torch's engine:

- A user's mistake is a ValueError, TypeError, NotImplementedError or RuntimeError, never an AssertionError. Flags must
  be bools, and policies instances of the classes here.
- Not supported: transforms of ``torch.func`` around a sharded module, deprecated names and ``set_symm_mem_for_comm``.
- A full parameter kept past its reshard reads as NaN.
- Parameters that ``param_dtype_override_fn`` keeps in their own dtype have an all-gather and a reduce-scatter of their
  own, and so have tensors with ``fsdp_pre_all_gather``, which are split along dim 0 only. What torch 2.15 added works
  with older versions too; ``reduce_dtype=None`` means what the installed one says.
- Allowed: writing to a view that a module returned, inference mode between training steps, a list of modules as root.
- From the second iteration on, a unit's forward starts the all-gather of the unit that ran next in the last iteration.
  ``set_modules_to_forward_prefetch([])`` on every unit disables this: all-gathers and reduce-scatters then come in
  torch's order, so that traces of the two can be compared.

``torch.distributed.pipelining``, imported before ``fully_shard`` is called, treats sharded stages as torch's. With its
zero-bubble schedules use ``reshard_after_forward=False``, as with torch's engine: they do not find the parameters of a
module resharded between its forward and backward, and leave them without gradients.

To follow one all-gather from hook to wire, read ``fsdp_state.py`` (hooks), ``param_group.py`` (a unit),
``unit_collectives.py`` (layouts) and ``comm.py`` (the wire). To follow a gradient from the hook, read
``param_group.py`` and ``reduction.py``.
"""

from workbench.engine.api import fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx
from workbench.engine.comm import AllGather, DefaultAllGather, DefaultReduceScatter, ReduceScatter
from workbench.engine.errors import CollectiveFailed, RanksDisagreeError, StepAborted
from workbench.engine.fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle
from workbench.engine.mesh import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from workbench.engine.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from workbench.engine.process_groups import rebuild_all as rebuild_groups
from workbench.engine.reshard import reshard_module, reshard_unit
from workbench.engine.shard_placement import ShardPlacementResult
from workbench.engine.unsharding import remap_optimizer, unshard_module

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "CollectiveFailed",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPMeshInfo",
    "FSDPModule",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RanksDisagreeError",
    "ReduceScatter",
    "ShardPlacementResult",
    "StepAborted",
    "UnshardHandle",
    "fully_shard",
    "rebuild_groups",
    "register_fsdp_forward_method",
    "remap_optimizer",
    "replicate",
    "reshard_module",
    "reshard_unit",
    "share_comm_ctx",
    "unshard_module",
]
