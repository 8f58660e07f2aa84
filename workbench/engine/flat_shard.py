"""One unit's shards on this rank: a flat tensor whose slots the sharded parameters are views of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from workbench.engine import probe
from workbench.engine.backends.addresses import lies_in
from workbench.engine.param import FSDPParam, check_uniform
from workbench.engine.policies import UnitPolicy
from workbench.events import Category

CPU, META = torch.device("cpu"), torch.device("meta")


def in_flat_order(slot_numels: Sequence[int]) -> list[int]:
    """Return the order in which slots of so many elements lie in the flat shard, as indices.

    Those that are whole multiples of more elements come first, up to 32. So a slot begins at a multiple of whatever
    power of two, up to 32 elements, its own size is a multiple of, and no byte is spent on it; the same is true of the
    full parameters. What is left out of line are parameters of odd sizes behind others of odd sizes, the smaller ones.

    Example: ``[1, 96, 6, 64, 3]`` -> ``[1, 3, 2, 4, 0]``: the slots begin at 0, 96, 160, 166 and 169.
    """
    return sorted(range(len(slot_numels)), key=lambda i: (-math.gcd(slot_numels[i], 32), -slot_numels[i]))


class FlatShard:
    """The shards of one unit on this rank, in one flat tensor.

    Attributes:
        flat: ``[S]``, the slots one after another; the all-gather's input as it lies.
        numel: S.
    """

    flat: torch.Tensor

    def __init__(self, unit: int, params: Sequence[FSDPParam]) -> None:
        self._unit = unit
        self._params = params
        self.numel = sum(p.slot_numel for p in params)

    def _slots(self) -> tuple[torch.Tensor, ...]:
        slots = self.flat.split([p.slot_numel for p in self._params])
        return slots if self.flat.is_meta else tuple(map(in_own_storage, slots))

    def _make(self, dtype: torch.dtype, device: torch.device, policy: UnitPolicy) -> None:
        # zeros: padding travels in collectives, it must not hold signalling garbage
        place = CPU if policy.offloads and device != META else device
        pin = policy.pins and place == CPU
        self._use(torch.zeros(self.numel, dtype=dtype, device=place, pin_memory=pin))

    def _use(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._lease = probe.Lease(Category.SHARDED_PARAMS, self._unit, 0 if flat.is_meta else flat.nbytes)

    @torch.no_grad()
    def fill(self, policy: UnitPolicy) -> None:
        """Copy this rank's rows of the full parameters and make the sharded ones of them."""
        first = self._params[0].first
        device = self._params[0].mesh_info.device if not first.is_meta else first.device
        self._make(first.dtype, device, policy)
        for param, slot in zip(self._params, self._slots(), strict=True):
            param.shard_from(slot)

    def share_lease(self) -> None:
        """Let the shards count as alive as long as anyone holds one of the parameters."""
        for param in self._params:
            for holder in param.holders:
                holder._workbench_lease = self._lease  # type: ignore[attr-defined]

    def _owns(self, local: torch.Tensor) -> bool:
        return lies_in(local, self.flat)

    @torch.no_grad()
    def adopt_registered(self, policy: UnitPolicy) -> bool:
        """Take over parameters that were replaced, or whose data was; returns True if they have another flat tensor.

        Raises:
            TypeError: a parameter was replaced by a plain tensor.
            ValueError: parameters of the unit now differ in dtype or device.
        """
        locals_ = [p.registered_local() for p in self._params]
        if len({local.is_meta for local in locals_}) > 1:
            return False  # being filled piece by piece; the first forward lists what was left out
        check_uniform([(p.fqn, local) for p, local in zip(self._params, locals_, strict=True)])
        first = locals_[0]
        same_kind = first.dtype == self.flat.dtype and first.device == self.flat.device
        if same_kind and all(p.is_registered or self._owns(v) for p, v in zip(self._params, locals_, strict=True)):
            self._note_registered()
            return False
        self._make(first.dtype, first.device, policy)
        self._adopt()
        return True

    def _note_registered(self) -> None:
        for param, slot in zip(self._params, self._slots(), strict=True):
            if not param.is_registered:
                param.adopt(slot)

    def _adopt(self) -> None:
        for param, slot in zip(self._params, self._slots(), strict=True):
            param.adopt(slot)
        self.share_lease()

    @torch.no_grad()
    def move_to(self, memory: torch.Tensor) -> None:
        """Keep the shards in ``memory`` ``[S]`` from now on."""
        self._use(memory)
        for param, slot in zip(self._params, self._slots(), strict=True):
            param.move(slot)
        self.share_lease()


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return contiguous ``view`` as a tensor at the start of a storage of its own, over the same memory.

    torch saves and deep-copies a DTensor only if what it wraps begins where its storage does.
    """
    first = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[first : first + view.nbytes]  # keeps the memory alive
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())
