"""Progress bars of tqdm on a rank are text, also those of ``tqdm.auto`` and of ``tqdm.notebook``.

``tqdm.auto`` takes its class from ``tqdm.autonotebook``, which makes a widget in each process that runs ipykernel;
``tqdm.notebook`` always makes one. A widget of a rank has no counterpart in the notebook, so its bar would stay at 0%;
text is shown, and compared.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAMES, _TEXT = {"tqdm.autonotebook", "tqdm.notebook"}, "tqdm.std"
_OTHER_NAMES = {"tqdm_notebook": "tqdm", "tnrange": "trange"}


class _TextBars(MetaPathFinder, Loader):
    """Finds modules of the text bars in the place of those with widgets."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module of text bars, for the name of a module with widgets."""
        return ModuleSpec(name, self) if name in _NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        """Let a module get everything from the text bars."""
        module.__dict__["__getattr__"] = _of_text


_FINDER = _TextBars()


def install() -> None:
    """Make later imports of modules with bars that are widgets get the text bars, without importing tqdm."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def _of_text(name: str) -> Any:  # noqa: ANN401 - whatever tqdm has
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module(_TEXT), _OTHER_NAMES.get(name, name))
