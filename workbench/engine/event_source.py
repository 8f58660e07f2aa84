"""The engine as a source of events: its name and the tensors of its units."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.param_group import units
from workbench.events import ParamTensors


class EngineSource:
    """Implements :class:`workbench.events.Source`; a retired unit has no tensors."""

    name = "workbench.engine"

    def has(self, unit: int) -> bool:
        """Return whether a unit exists, retired or not."""
        return unit in units

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        found = units.get(unit)
        params = () if found is None else found.params_as_defined
        return {name: tensors for param in params for name, tensors in param.tensors().items()}


SOURCE = EngineSource()
