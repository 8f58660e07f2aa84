"""What the ``fully_shard`` calls of one model share; the model's root is found when it is first run."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.engine import groups, probe
from workbench.engine.call import ShardedCall, state_of, units_of
from workbench.engine.comm_context import FSDPCommContext
from workbench.engine.param import ShardedState
from workbench.engine.param_group import FSDPParamGroup, TrainingState
from workbench.engine.signature import check_same_units
from workbench.engine.tensors import unrecorded
from workbench.events import Phase

roots: weakref.WeakSet[ShardedCall] = weakref.WeakSet()
"""Every root that has run; recovery after a failure resets them."""


def _give_up_outdated(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # noqa: ANN401 - hook signature
    """After an optimizer's step: full parameters from before it are no longer what their shards say."""
    stepped: set[int] = set()
    for unit in (unit for root in roots for unit in units_of(root._states)):
        if unit.is_sharded and not unit.is_unsharding:
            continue
        stepped = stepped or {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p.sharded_param) in stepped for p in unit.fsdp_params):
            unit.reshard()


def _wait_for_readers(*_: Any) -> None:  # noqa: ANN401 - hook signature
    """Before an optimizer's step: other ranks may still read the shards, if no reduction came after their reads."""
    for root in tuple(roots):
        root._comm_ctx.comms.order_reads()


register_optimizer_step_pre_hook(_wait_for_readers)
register_optimizer_step_post_hook(_give_up_outdated)


class RootContext:
    """What the calls of one model share, from the first forward of its root on.

    Attributes:
        states: every call in the tree, parents first.
        is_last_backward: the next backward ends the iteration (False: more micro-batches follow).
        final_callback_queued: the current backward pass already has its end-of-backward callback.
        post_optim_event: CUDA event after which the next forward may read shards; None: all that was computed before.
    """

    def __init__(self) -> None:
        self.states: tuple[ShardedCall, ...] = ()
        self.is_last_backward = True
        self.final_callback_queued = False
        self.post_optim_event: torch.cuda.Event | None = None
        self._order: list[ShardedCall] = []  # of forwards in the last iteration
        self._order_now: list[ShardedCall] = []

    def begin_forward(self, ctx: FSDPCommContext) -> None:
        """The root's forward begins."""
        if self._order_now:
            self._order, self._order_now = self._order_now, []
        units = units_of(self.states)
        if any(unit.needs_comm for unit in units):
            ctx.choose_comms(units)
        self.shards_changed(ctx)

    def shards_changed(self, ctx: FSDPCommContext) -> None:
        """Let all-gathers from now on see what was written to shards since the last forward."""
        event, self.post_optim_event = self.post_optim_event, None  # it stands for one optimizer step
        ctx.streams.shards_changed(event)

    @property
    def all_states(self) -> tuple[ShardedCall, ...]:
        """The same as :attr:`states`, under the name that torch's pipelining knows."""
        return self.states

    @property
    def is_running(self) -> bool:
        """True within the root's forward, or a backward; else an inner module that runs was called by itself."""
        in_forward = bool(self.states) and self.states[0]._training_state is TrainingState.FORWARD
        return in_forward or self.final_callback_queued

    def expected_after(self, state: ShardedCall) -> tuple[ShardedCall, ...]:
        """Note that the forward of ``state`` begins, and return the one that followed it in the last iteration.

        Empty if this iteration has gone another way.
        """
        position, order = len(self._order_now), self._order
        self._order_now.append(state)
        if position + 1 < len(order) and order[position] is state:
            return (order[position + 1],)
        return ()

    def end_partial_forwards(self) -> None:
        """End the forward of every call of whose modules only some ran."""
        for state in self.states:
            if state._not_yet_run and not state._is_root:
                state._end_forward()

    def end_of_backward(self) -> None:
        """Finish every unit of the tree: some have no hooked input, some did not take part."""
        self.final_callback_queued = False
        ctx = self.states[0]._comm_ctx
        for state in self.states:
            state._training_state = TrainingState.IDLE
        for unit in reversed(units_of(self.states)):
            if unit.training_state is TrainingState.PRE_BACKWARD or unit.owes_reduction:
                unit.post_backward()
            if self.is_last_backward:
                unit.finalize_backward()
            unit.training_state = TrainingState.IDLE
        with torch.no_grad(), ctx.streams.reducing(after_compute=False):
            ctx.reductions.finish()
        ctx.join(all_streams=True)
        ctx.comms.order_reads()
        for unit in units_of(self.states):
            unit.wait_for_host()
        if self.is_last_backward:
            self.forget_order(ctx)
            groups.end_iteration()
        probe.phase(Phase.IDLE)

    def forget_order(self, ctx: FSDPCommContext) -> None:
        """The iteration is over: what follows has no forward before it."""
        ctx.post_forward_order.clear()
        for state in self.states:
            state.forget_order()

    def reset(self, states: Sequence[ShardedCall], ctx: FSDPCommContext) -> None:
        """Drop what an iteration that raised has left, without waiting for anything."""
        for state in states:
            state.reset()
        ctx.abandon()
        self.is_last_backward = True
        self.final_callback_queued = False
        self._order, self._order_now = [], []  # ranks may have come to differ


@unrecorded
def join_root(root: ShardedCall) -> None:
    """Make ``root`` the root of the tree below it.

    Raises:
        RuntimeError: a module below ran before this root did; a unit's module was taken out of the tree; parameters
            are still on the meta device.
        ValueError: parameters of the tree were tied, or exchanged for others of another shape, after fully_shard.
        RanksDisagreeError: ranks hold different units.
    """
    names = _names_below(root)
    states = tuple({id(s): s for m in names if (s := state_of(m)) is not None}.values())
    _check_tree(root, states, names)
    _check_not_tied(states, names)
    _name_units(root, states, names)
    units = units_of(states)
    _check_no_meta(units)
    _check_ranks_agree(units)
    root._comm_ctx.choose_comms(units)
    context = root._root  # it has what the user set before
    context.states = states
    for state in states:
        state._is_root = state is root
        state._comm_ctx = root._comm_ctx
        state._root = context
    roots.add(root)


def _names_below(root: ShardedCall) -> dict[nn.Module, str]:
    """Return the name of every module in the tree; the modules of a list are numbered, as a ModuleList's are."""
    if len(root.modules) == 1:
        return {module: name for name, module in root.modules[0].named_modules()}
    return {m: name for i, top in enumerate(root.modules) for name, m in top.named_modules(prefix=str(i))}


def _check_tree(root: ShardedCall, states: Sequence[ShardedCall], names: dict[nn.Module, str]) -> None:
    name = type(root.modules[0]).__name__
    early = [s for s in states if s is not root and s._is_root is not None]
    if early:
        raise RuntimeError(
            f"module {names[_first_known(early[0].modules, names)]!r} ran before its FSDP root {name}; "
            "run the root first, or give the modules one root by calling fully_shard on their common parent"
        )
    held = [(m, p.fqn) for u in units_of(states) for p in u.fsdp_params for m, _ in p.info.places]
    lost = {fqn: type(m).__name__ for m, fqn in held if m not in names}
    if lost:
        fqn, module = next(iter(lost.items()))
        raise RuntimeError(
            f"parameter {fqn!r} belongs to a unit of the FSDP root {name}, but the {module} that held it is not "
            "below that root: call fully_shard after the last change of the model's modules, and on a parent of "
            "all modules of a list"
        )


def _check_not_tied(states: Sequence[ShardedCall], names: dict[nn.Module, str]) -> None:
    """Check that no parameter was put into another one's place since ``fully_shard``."""
    seen: dict[int, str] = {}
    for param in (p for unit in units_of(states) for p in unit.fsdp_params):
        prefix = names[param.info.module]
        fqn = f"{prefix}.{param.info.name}" if prefix else param.info.name
        first = seen.setdefault(id(param.registered() if param.state is ShardedState.SHARDED else param), fqn)
        if first != fqn:
            raise ValueError(
                f"parameters {first!r} and {fqn!r} were tied after fully_shard; tie them before, and put both into "
                "one unit: call fully_shard on a module that holds both, or on a list of the two"
            )


def _first_known(modules: Iterable[nn.Module], names: dict[nn.Module, str]) -> nn.Module:
    return next(m for m in modules if m in names)


def _name_units(root: ShardedCall, states: Sequence[ShardedCall], names: dict[nn.Module, str]) -> None:
    """Give units and parameters their names relative to the root, and settle the root's policy."""
    if root.auto_reshard:
        for unit in root._fsdp_param_groups:
            unit.set_reshard_after_forward(False)
    own = root._fsdp_param_group
    root_index = own.index if own is not None else -1
    for state in states:
        name = ", ".join(names[m] for m in state.modules)
        for unit in state._fsdp_param_groups:
            for param in unit.fsdp_params:
                prefix = names[param.info.module]
                param.fqn = f"{prefix}.{param.info.name}" if prefix else param.info.name
            unit.lazy_init(name, root_index, root._comm_ctx)


def _check_no_meta(units: Iterable[FSDPParamGroup]) -> None:
    meta = [p.fqn for u in units for p in u.fsdp_params if p.state is ShardedState.SHARDED and p.registered().is_meta]
    if meta:
        raise RuntimeError(
            f"parameters still on the meta device: {', '.join(meta)}; call module.to_empty(device=...) and "
            "initialise them, or load a state dict with assign=True, before the first forward"
        )


def _check_ranks_agree(units: Iterable[FSDPParamGroup]) -> None:
    """Compare units across every group that communicates for them; all ranks together."""
    by_group: dict[groups.CommGroup, list[FSDPParamGroup]] = {}
    for unit in units:
        for group in (unit.mesh_info.shard_group, unit.mesh_info.replicate_group):
            if group is not None:
                by_group.setdefault(group, []).append(unit)
    for group, members in by_group.items():
        check_same_units([u.describe() for u in members], group)
