"""The engine as a source of events: what it is called, and the tensors of its units."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.param import FSDPParam, ShardedState, local_tensor
from workbench.engine.param_group import units
from workbench.events import ParamTensors


class EngineSource:
    """Implements :class:`workbench.events.Source`; a unit that was undone has no tensors."""

    name = "workbench.engine"

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return what this rank has of the parameters of a unit, by their names."""
        found = units.get(unit)
        return {} if found is None else {param.fqn: _tensors_of(param) for param in found.params_as_defined}


SOURCE = EngineSource()


def _tensors_of(param: FSDPParam) -> ParamTensors:
    grads = (param.unsharded_param.grad, param.accumulated_grad)
    return ParamTensors(
        shard=param.sharded_param,
        shard_rank=param.mesh_info.shard_mesh_rank,
        full=local_tensor(param.unsharded_param) if param.state is ShardedState.UNSHARDED else None,
        full_grads=tuple(local_tensor(grad) for grad in grads if grad is not None),
        sharded_grad=param.sharded_param.grad,
        places=param.info.places,
    )
