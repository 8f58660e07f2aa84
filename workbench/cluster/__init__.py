"""Where ranks live: start, reach and stop the processes of a cluster.

A rank is one ipyparallel engine. It is reached by two doors: the front door runs calls and cells in its main thread,
the side door is answered by its control thread even while the main thread is busy. What runs behind the doors is
named as a string, ``"module:function"``: nothing here imports torch.

Importing this package loads nothing heavy; its names are imported at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.cluster.cluster import Cluster
    from workbench.cluster.pending_replies import Output, PendingReplies

__all__ = ["Cluster", "Output", "PendingReplies"]

_HOME = {"Cluster": "cluster", "Output": "pending_replies", "PendingReplies": "pending_replies"}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
