"""One ``fully_shard`` call: its modules, their units, how to find it from a module. Its hooks are in ``state.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from workbench.engine import probe
from workbench.engine._torch import set_composed
from workbench.engine.comm_context import FSDPCommContext, RecordedForward
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.policies import MixedPrecisionPolicy
from workbench.events import Phase


class ShardedCall:
    """The modules that one ``fully_shard`` call was given, and the units it made of their parameters.

    Attributes:
        modules: the modules given to that call.
        original_classes: their classes before it.
        auto_reshard: no policy was given: reshard after forward unless this is the root.
        mp_policy: which dtypes inputs and outputs are cast to.
    """

    _root: Any  # RootContext: what the calls of one model share

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_groups: Sequence[FSDPParamGroup],
        *,
        device: torch.device,
        auto_reshard: bool,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        self.modules = modules
        self.original_classes = tuple(type(m) for m in modules)
        self.auto_reshard = auto_reshard
        self.mp_policy = mp_policy
        self._fsdp_param_groups = list(param_groups)
        self._comm_ctx = param_groups[0].comm_ctx if param_groups else FSDPCommContext(device)
        self._is_root: bool | None = None
        self._not_yet_run: set[int] = set()
        self._backward_follows = False
        self._recorded: RecordedForward | None = None  # the present forward, if autograd records it
        self._recomputes = False  # the present forward runs within a backward, for activation checkpointing
        self._is_recomputed = False  # that was seen: a backward follows also where autograd does not record the forward
        self._unrecorded_before: list[ShardedCall | None] = []  # what came before such forwards
        self._training_state = TrainingState.IDLE

    @property
    def _fsdp_param_group(self) -> FSDPParamGroup | None:
        """The call's unit; the first one if its parameters lie on several meshes, None if it has no parameters."""
        return self._fsdp_param_groups[0] if self._fsdp_param_groups else None

    @property
    def _states(self) -> tuple[ShardedCall, ...]:
        """Every call in the tree, once this is a root that ran."""
        states: tuple[ShardedCall, ...] = self._root.states if self._is_root else ()
        return states

    def use_comm_ctx(self, ctx: FSDPCommContext) -> None:
        """Share ``ctx`` with other roots."""
        self._comm_ctx = ctx
        for unit in self._fsdp_param_groups:
            unit.comm_ctx = ctx

    def overlaps(self, states: Iterable[ShardedCall]) -> bool:
        """Tell whether one of ``states`` belongs to this root."""
        return any(state in self._states for state in states)

    def _end_forward(self) -> None:
        for unit in self._fsdp_param_groups:
            unit.post_forward(backward_follows=self._backward_follows, recomputed=self._recomputes)
        if self._fsdp_param_groups:
            self._note_order()
        self._not_yet_run.clear()
        self._recorded = None  # from here on the graph alone keeps it alive
        self._training_state = TrainingState.IDLE

    def _note_order(self) -> None:
        """Note which forward came before; a forward that is run again takes the place of the one it repeats."""
        if self._recomputes:
            self._is_recomputed = True
            if self._recorded is not None and self._unrecorded_before:
                self._recorded.before = self._unrecorded_before.pop()
        elif self._recorded is not None or self._is_recomputed:
            order = self._comm_ctx.post_forward_order
            before = order[-1] if order else None
            if self._recorded is not None:
                self._recorded.before = before
            else:
                self._unrecorded_before.append(before)
            order.append(self)

    def forget_order(self) -> None:
        """The iteration is over."""
        self._unrecorded_before.clear()

    def reset(self) -> None:
        """Forget this call's part of an iteration that raised."""
        for unit in self._fsdp_param_groups:
            unit.reset_iter_state()
        self._recorded = None
        self._training_state = TrainingState.IDLE
        self._not_yet_run.clear()
        self.forget_order()

    def reset_iter_state(self) -> None:
        """Make the next iteration clean after an exception in forward or backward.

        Raises:
            RuntimeError: this is not the root; its tree communicates as one, and is reset as one.
        """
        if self._is_root is False:
            raise RuntimeError(
                f"reset_iter_state was called on a {type(self.modules[0]).__name__} inside of an FSDP root; "
                "call it on the root"
            )
        self._root.reset(self._states or (self,), self._comm_ctx)
        probe.phase(Phase.IDLE)


_ATTRIBUTE = "_workbench_fsdp_state"


def attach(module: nn.Module, state: ShardedCall) -> None:
    """Remember ``state`` on ``module``."""
    vars(module)[_ATTRIBUTE] = state
    set_composed(module, sharded=True)


def detach(module: nn.Module) -> None:
    """Forget it."""
    del vars(module)[_ATTRIBUTE]
    set_composed(module, sharded=False)


def state_of(module: nn.Module) -> ShardedCall | None:
    """Return the ``fully_shard`` call that ``module`` itself was given to."""
    state: ShardedCall | None = vars(module).get(_ATTRIBUTE)  # getattr would find that of a module inside a wrapper
    return state


def states_below(module: nn.Module) -> list[ShardedCall]:
    """Return every ``fully_shard`` call in ``module``'s tree, each once, parents first."""
    return list({id(s): s for m in module.modules() if (s := state_of(m)) is not None}.values())


def units_of(states: Iterable[ShardedCall]) -> list[FSDPParamGroup]:
    """Return the units of ``states``; a call on modules without parameters has none."""
    return [unit for state in states for unit in state._fsdp_param_groups]
