"""The engine as a source of events: what it is called, and the tensors of its units."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.param_group import units
from workbench.events import ParamTensors


class EngineSource:
    """Implements :class:`workbench.events.Source`; a unit that was undone has no tensors."""

    name = "workbench.engine"

    def has(self, unit: int) -> bool:
        """Tell whether a unit is there, undone or not."""
        return unit in units

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return what this rank has of the parameters of a unit, by their names."""
        found = units.get(unit)
        params = () if found is None else found.params_as_defined
        return {name: tensors for param in params for name, tensors in param.tensors().items()}


SOURCE = EngineSource()
