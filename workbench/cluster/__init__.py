"""Starts, reaches and stops the processes of a cluster.

A rank is one ipyparallel engine with two channels. Its main thread serves the shell channel: calls and cells. Its
control thread serves the control channel, even while the main thread is busy. Rank-side functions are named by strings,
``"module:function"``, so nothing here imports torch.

Importing this package is cheap: its names are imported at first use.
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
