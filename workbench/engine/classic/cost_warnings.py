"""Warnings about wrappers that work, but cost more or do less than the script expects."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType

from torch import nn

from workbench.engine.classic.options import ShardingStrategy

_ENGINE = "workbench.engine."


def caution(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the engine, so that Python shows a message once for any number of units.

    Args:
        message: what happened, and what to do.
        category: class of the warning.
    """
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_ENGINE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def check_is_called(module: nn.Module) -> None:
    """Warn about a container: a wrapper gathers when its module is called, and a container is never called."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        caution(
            f"FullyShardedDataParallel around {type(module).__name__}, which has no forward: its parameters are "
            "never gathered, so computing with them raises an error. Wrap each of its modules, or the module that "
            "contains it"
        )


def check_splits(num_ranks: int, strategy: ShardingStrategy) -> None:
    """Warn if a strategy that splits parameters runs on a single rank."""
    if num_ranks == 1 and strategy is not ShardingStrategy.NO_SHARD:
        caution(
            f"FullyShardedDataParallel: on one rank, {strategy.name} is the same as NO_SHARD; start several ranks, "
            "or pass a process_group= or device_mesh= of several"
        )


def check_gradient_memory(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Warn if only some of a unit's (name, parameter) pairs are trained: the unit reduces gradients of all."""
    trained = [path for path, param in named if param.requires_grad]
    frozen = [path for path, param in named if not param.requires_grad]
    if trained and frozen:
        numel = sum(param.numel() for _, param in named)
        needed = sum(param.numel() for _, param in named if param.requires_grad)
        caution(
            f"{trained[0]!r} is trained and {frozen[0]!r} is frozen in one unit: its reduction allocates gradients "
            f"of {numel} elements, of which {needed} are trained. Wrap the frozen modules separately"
        )


def check_own_precision(kinds: Iterable[type[nn.Module]]) -> None:
    """Warn that modules of the given classes do not compute in the requested precision."""
    names = sorted({kind.__name__ for kind in kinds})
    if names:
        caution(
            f"mixed_precision with auto_wrap_policy: every {' and '.join(names)} becomes a separate unit that "
            "computes in the dtype of its parameters. To keep them in the enclosing units, at their precision, pass "
            "MixedPrecision(_module_classes_to_ignore=())"
        )
