"""Whole parameters outside of a step: gathered temporarily, and written back to shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from workbench.engine import unit_collectives
from workbench.engine.backends import backend_of
from workbench.engine.classic.flat_param import FlatParam
from workbench.engine.classic.shard_inventory import check_alike, sharded_flat
from workbench.engine.classic.wrapper_state import WrapperState, is_first, wrapper_states_below
from workbench.engine.fsdp_state import state_of
from workbench.engine.param_group import FSDPParamGroup
from workbench.engine.unit_collectives import UnitId

CPU = torch.device("cpu")


@torch.no_grad()
def gather_flat(unit: FSDPParamGroup, slot: torch.Tensor) -> torch.Tensor:
    """All-gather the ranks' slots ``[c]``; return ``[F * c]`` in their dtype, on the unit's device.

    Collective over the ranks that share one copy.
    """
    group = unit.shard_group
    if group is None:
        return slot.to(unit.device, copy=True)
    gather = backend_of(unit.device).pair().gather
    if slot.device != unit.device:
        slot = slot.to(unit.device)
    known = UnitId(unit.index, unit.name)
    gathered = unit_collectives.foreach_all_gather(slot, slot.dtype, unit.device, group, gather, known)
    whole = torch.cat([part.reshape(-1) for part in gathered.wait()])
    gathered.drop()
    return whole


def whole_parts(unit: FSDPParamGroup, flat: FlatParam, slot: torch.Tensor) -> list[torch.Tensor]:
    """All-gather the ranks' slots ``[c]`` and return the parts, as :meth:`FlatParam.parts_of` does; collective."""
    return flat.parts_of(flat.layout.full_view(gather_flat(unit, slot)))


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Put whole parameters on the modules within a ``with``; collective, between iterations.

    Args:
        module: a wrapper, or with ``recurse`` any module.
        recurse: also for all wrappers below ``module``.
        writeback: keep changes; each rank keeps those to its own piece.
        rank0_only: only for the first rank of each wrapper's mesh.
        offload_to_cpu: put the whole parameters on the CPU.
        with_grads: also gather gradients; needs ``use_orig_params``.

    Raises:
        ValueError: ``writeback`` with ``rank0_only``; ``with_grads`` with ``offload_to_cpu``.
        NotImplementedError: ``with_grads`` without ``use_orig_params``.
        RuntimeError: an iteration is in progress.
        RanksDisagreeError: an iteration is in progress on some ranks only; with ``with_grads``, only some ranks hold a
            gradient.
    """
    if writeback and rank0_only:
        raise ValueError(
            "summon_full_params: writeback=True with rank0_only=True is not supported, because the other ranks have "
            "no values to write back; pass writeback=False"
        )
    if with_grads and offload_to_cpu:
        raise ValueError("summon_full_params: with_grads=True needs offload_to_cpu=False")
    if recurse:
        states = wrapper_states_below(module)
    else:
        own = state_of(module)
        states = [own] if isinstance(own, WrapperState) else []
    check_alike(module, states, "summon_full_params", grads=with_grads)
    with ExitStack() as stack:
        for state in states:
            stack.enter_context(
                _whole(
                    state,
                    writeback=writeback,
                    is_kept=not rank0_only or is_first(state),
                    device=CPU if offload_to_cpu else None,
                    with_grads=with_grads,
                )
            )
        yield


@contextmanager
def _whole(
    state: WrapperState, *, writeback: bool, is_kept: bool, device: torch.device | None, with_grads: bool
) -> Iterator[None]:
    """In the body, the modules of one wrapper have whole parameters, if ``is_kept`` on this rank.

    A nested body changes nothing.
    """
    if state.is_summoned:
        yield
        return
    if with_grads and state.flat is not None and not state.flat.use_orig_params:
        raise NotImplementedError("summon_full_params: with_grads=True needs use_orig_params=True")
    found = sharded_flat(state)
    if found is None:
        state.is_summoned = state.unit is None  # a wrapper without parameters must also omit wrappers from names
        try:
            yield
        finally:
            state.is_summoned = False
        return
    unit, flat = found
    wholes = _on(device, whole_parts(unit, flat, flat.slot))
    grads = _on(device, whole_parts(unit, flat, flat.grad_slot())) if with_grads else None
    if is_kept:
        flat.show_wholes(wholes, grads)
    del wholes, grads
    state.is_summoned = True  # on every rank: no rank gathers again within the body
    try:
        yield
    finally:
        state.is_summoned = False
        if is_kept:
            flat.hide_wholes(write_back=writeback)


def _on(device: torch.device | None, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors if device is None else [tensor.to(device) for tensor in tensors]
