"""The engine as a source of events: its name and the tensors of its units."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.param_group import units
from workbench.events import OWN_ENGINE, ParamTensors


class EngineSource:
    """Implements :class:`workbench.events.Source`; a retired unit has no tensors."""

    name = OWN_ENGINE

    def has(self, unit: int) -> bool:
        """Return whether a unit exists, retired or not."""
        return unit in units

    def tensors(self, unit: int) -> Mapping[str, ParamTensors]:
        """Return this rank's tensors of a unit's parameters, by name."""
        found = units.get(unit)
        if found is None:
            return {}
        own = (param.tensors() for param in found.params_as_defined)
        return {found.in_model(name): tensors for each in own for name, tensors in each.items()}


SOURCE = EngineSource()
