"""Progress bars of tqdm on a rank are text, also those of ``tqdm.auto``.

``tqdm.auto`` takes its class from ``tqdm.autonotebook``, which makes a widget in each process that runs ipykernel. A
widget of a rank has no counterpart in the notebook, so its bar would stay at 0%; text is shown, and compared.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME, _TEXT = "tqdm.autonotebook", "tqdm.std"


def install() -> None:
    """Make later imports of ``tqdm.autonotebook`` get the text bars, without importing tqdm."""
    module = ModuleType(_NAME, __doc__)
    module.__dict__["__getattr__"] = _of_text
    sys.modules[_NAME] = module


def _of_text(name: str) -> Any:  # noqa: ANN401 - whatever tqdm has
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(importlib.import_module(_TEXT), name)
