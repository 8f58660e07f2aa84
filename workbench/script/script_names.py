"""The global names of a script: those that its cells bind, and those that the lines around them need."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Mapping

from workbench.script.cell_code import CellCode

ENGINE, CLASSIC, TORCH = "workbench.engine", "workbench.engine.classic", "torch.distributed.fsdp"

_BASE: Mapping[str, tuple[str, str]] = {
    "os": ("os", ""),
    "torch": ("torch", ""),
    "dist": ("torch.distributed", ""),
    "replace": ("dataclasses", "replace"),
    "fnmatch": ("fnmatch", "fnmatch"),
    "fmean": ("statistics", "fmean"),
    "init_device_mesh": ("torch.distributed.device_mesh", "init_device_mesh"),
    "distribute_tensor": ("torch.distributed.tensor", "distribute_tensor"),
    "log_metric": ("workbench.watch", "log_metric"),
    "display": ("IPython.display", "display"),
}
"""What both engines need, by the name that it has in scripts: a module and an attribute, empty for the module."""

_MODULE_NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "workbench": {
        ENGINE: (
            *("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"),
            *("remap_optimizer", "reshard_module", "reshard_unit", "unshard_module"),
        ),
        CLASSIC: (
            *("CPUOffload", "CustomPolicy", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"),
            *("rewrap_optimizers", "unwrap"),
        ),
    },
    "torch": {
        TORCH: (
            *("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "fully_shard"),
            *("CPUOffload", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"),
        ),
        "torch.distributed.fsdp.wrap": ("CustomPolicy",),
    },
}
"""What the code of each engine needs, by module."""


class ScriptNames:
    """Names that are bound to nothing else in a script.

    Args:
        cells: the cells of the script.
        engine: the engine whose names it imports.
    """

    def __init__(self, cells: Iterable[CellCode], engine: str) -> None:
        self._sources: dict[str, set[tuple[str, str]]] = {}
        for cell in cells:
            for name in cell.bound:
                self._sources.setdefault(name, set()).add(cell.imported.get(name, ("", name)))
        own = {name: (module, name) for module, names in _MODULE_NAMES[engine].items() for name in names}
        self._known = {**_BASE, **own}
        self._imports: dict[str, tuple[str, str]] = {}

    def imported(self, name: str) -> str:
        """Return how a script refers to a name that it imports; the name itself unless cells bind it otherwise."""
        source = self._known[name]
        free = name if self._sources.get(name, {source}) == {source} else self.own(name)
        self._imports[free] = source
        return free

    def own(self, name: str) -> str:
        """Return a name like ``name`` that no cell binds."""
        while name in self._sources or name in vars(builtins):
            name += "_"
        return name

    def is_free(self, name: str) -> bool:
        """Return whether no cell binds ``name``."""
        return name not in self._sources

    def repeated(self) -> set[str]:
        """Return the names that the script imports and that a cell imports again."""
        return self._sources.keys() & self._imports.keys()

    def import_lines(self) -> list[str]:
        """Return the import statements of the names asked for so far, those of Python's own library first."""
        modules = [
            f"import {module}" + ("" if name == module else f" as {name}")
            for name, (module, attribute) in sorted(self._imports.items())
            if not attribute
        ]
        named: dict[str, list[str]] = {}
        for name, (module, attribute) in sorted(self._imports.items(), key=lambda each: each[1]):
            if attribute:
                named.setdefault(module, []).append(attribute + ("" if name == attribute else f" as {name}"))
        lines = sorted(modules, key=lambda line: line.split()[1]) + [
            _from(module, names) for module, names in sorted(named.items())
        ]
        python = [line for line in lines if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
        others = [line for line in lines if line not in python]
        return [*python, *[""] * bool(python and others), *others]


def _from(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
