"""What ``fully_shard`` adds to a module: :class:`FSDPModule`, mixed into its class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import nn

from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.state import FSDPState, state_of, states_below, units_of


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Block until the module's parameters are full and registered.

        Raises:
            StepAborted: the wait was cancelled.
            CollectiveFailed: a peer died or left.
        """
        self._wait()


class FSDPModule:
    """Methods that a module gains through ``fully_shard``."""

    def _get_fsdp_state(self) -> FSDPState:
        """Return the state of the call that made this module an FSDP module."""
        state = state_of(cast("nn.Module", self))
        if state is None:
            raise AttributeError(f"no fully_shard state on this {type(self).__name__}")
        return state

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own unit (not its children's).

        Args:
            async_op: only start it; the returned handle waits.
        """
        unit = self._get_fsdp_state()._fsdp_param_group
        if unit is None:
            return UnshardHandle(lambda: None) if async_op else None
        unit.unshard()
        if async_op:
            return UnshardHandle(unit.wait_for_unshard)
        unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free the full parameters of this module's own unit."""
        unit = self._get_fsdp_state()._fsdp_param_group
        if unit is not None:
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward; call it on the root."""
        self._get_fsdp_state().reset_iter_state()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, recurse: bool = True) -> None:
        """Reduce gradients at the end of backward, or keep adding up full gradients (accumulation without sync)."""
        self._set("reduce_grads", requires_gradient_sync, recurse=recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters between forward and backward, or keep them; from the next forward on."""
        for state in self._states(recurse=recurse):
            state.auto_reshard = False
        for unit in self._set("reshard_after_forward", reshard_after_forward, recurse=recurse):
            unit.announce()

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Free full parameters after backward, or keep them for a next micro-batch."""
        self._set("reshard_after_backward", reshard_after_backward, recurse=recurse)

    def _states(self, *, recurse: bool) -> list[FSDPState]:
        return states_below(cast("nn.Module", self)) if recurse else [self._get_fsdp_state()]

    def _set(self, attribute: str, value: bool, *, recurse: bool) -> list[FSDPParamGroup]:
        units = units_of(self._states(recurse=recurse))
        for unit in units:
            setattr(unit, attribute, value)
        return units

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert parameters (``.to``, ``.double`` ...), then take the new ones over."""
        module = cast("nn.Module", self)
        units = units_of(states_below(module))
        for unit in units:
            unit.reshard()
        super()._apply(fn, recurse)  # type: ignore[misc]
        for unit in units:
            unit.adopt_registered()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise NotImplementedError(
            "an FSDP module cannot be deep-copied: copy the plain module before fully_shard, or after unshard_module"
        )


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``cls`` with FSDPModule mixed in, one per class."""
    if cls not in _classes:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _classes[cls]
