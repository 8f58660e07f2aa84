"""One unit's shards on this rank: a flat tensor; the sharded parameters are views of its slots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from workbench.engine import probe
from workbench.engine._torch import is_fake
from workbench.engine.backends import backend_of
from workbench.engine.backends.memory_aliasing import is_same_memory, storages_nbytes
from workbench.engine.backends.page_pool import Region
from workbench.engine.param import FSDPParam, check_uniform
from workbench.engine.policies import UnitPolicy
from workbench.engine.unit_collectives import ScatteredShard
from workbench.events import Category

CPU, META = torch.device("cpu"), torch.device("meta")


def in_flat_order(slot_numels: Sequence[int]) -> list[int]:
    """Return the order of slots in the flat shard, as indices; ``slot_numels`` are their sizes in elements.

    Slots whose size is divisible by a larger power of two, up to 32, come first; among equals, larger ones. So each
    slot is aligned, without padding, to the power of two, up to 32, that divides its size; so are the full parameters.
    Only odd-sized parameters after other odd-sized ones are unaligned: the smaller ones.

    Example: ``[1, 96, 6, 64, 3]`` -> ``[1, 3, 2, 4, 0]``: the slots begin at 0, 96, 160, 166 and 169.
    """
    return sorted(range(len(slot_numels)), key=lambda i: (-math.gcd(slot_numels[i], 32), -slot_numels[i]))


class FlatShard:
    """The shards of one unit on this rank.

    They are in one flat tensor, whose address never changes, although the pages behind it may be exchanged. A parameter
    that the user put elsewhere stays there, since other objects may refer to that memory; then all stay where they are,
    and each all-gather assembles them. Only parameters that ``.to`` or ``to_empty`` just created move into a flat
    tensor again.

    Attributes:
        flat: ``[S]``, the slots one after another; input of the all-gather, without a copy if it is a tensor.
        region: memory region of that tensor, if its pages can be exchanged; else None.
        numel: S.
    """

    flat: torch.Tensor | ScatteredShard
    region: Region | None

    def __init__(self, unit: int, params: Sequence[FSDPParam]) -> None:
        self._unit = unit
        self._params = params
        self.numel = sum(p.slot_numel for p in params)
        self._handle: probe.BufferHandle | None = None

    def _make(self, dtype: torch.dtype, device: torch.device, policy: UnitPolicy) -> tuple[torch.Tensor, ...]:
        """Create a flat tensor of zeros and return its slots; zeros, because collectives also send the padding."""
        place, pin = self._place(device, policy)
        self.region = None if pin or device == META else backend_of(place).shard_region(self.numel, dtype)
        if self.region is not None:
            flat = self.region.tensor
        else:
            flat = torch.zeros(self.numel, dtype=dtype, device=place, pin_memory=pin)
        self.flat = flat
        self._handle = None if flat.is_meta else self._counted(flat.nbytes)
        return self._slots()

    def _place(self, device: torch.device, policy: UnitPolicy) -> tuple[torch.device, bool]:
        """Return where the shards are, and whether their memory is pinned."""
        place = CPU if policy.offloads and device != META else device
        return place, policy.pins and place == CPU and not backend_of(self._params[0].mesh_info.device).is_host

    def _slots(self) -> tuple[torch.Tensor, ...]:
        """Return the slots of the flat tensor, each at the start of its own storage; empty if scattered."""
        if isinstance(self.flat, ScatteredShard):
            return ()
        slots = self.flat.split([p.slot_numel for p in self._params])
        return slots if self.flat.is_meta else tuple(map(in_own_storage, slots))

    def _counted(self, num_bytes: int) -> probe.BufferHandle:
        return probe.BufferHandle(Category.SHARDED_PARAMS, self._unit, num_bytes)

    @torch.no_grad()
    def fill(self, policy: UnitPolicy) -> None:
        """Create the flat tensor, and the sharded parameters from this rank's rows of the full ones."""
        first = self._params[0].first
        device = self._params[0].mesh_info.device if not first.is_meta else first.device
        if self._params[0].has_own_memory:
            place, pin = self._place(device, policy)
            for param in self._params:
                param.shard_from(torch.empty(0, dtype=first.dtype, device=place, pin_memory=pin))
            self._leave_scattered()
            return
        for param, slot in zip(self._params, self._make(first.dtype, device, policy), strict=True):
            param.shard_from(slot)

    def share_lease(self) -> None:
        """Make the shards' bytes count as alive as long as one of the parameters is referenced."""
        for param in self._params:
            for holder in param.holders:
                holder._workbench_handle = self._handle  # type: ignore[attr-defined]

    @torch.no_grad()
    def adopt_registered(self, policy: UnitPolicy, *, fresh: bool) -> bool:
        """Adopt parameters that were replaced, or whose data was; return True if :attr:`flat` was replaced.

        Args:
            policy: the unit's policy.
            fresh: replaced parameters are in newly allocated memory that nothing else refers to.

        Raises:
            TypeError: a parameter was replaced by a plain tensor.
            ValueError: parameters of the unit now differ in dtype or device.
        """
        locals_ = [p.registered_local() for p in self._params]
        if len({local.is_meta for local in locals_}) > 1:  # being loaded in pieces; the first forward lists the rest
            for param, local in zip(self._params, locals_, strict=True):
                if not local.is_meta:
                    param.keep()
            return False
        check_uniform([(p.fqn, local) for p, local in zip(self._params, locals_, strict=True)])
        if self._stay(locals_):
            return False
        has_own_memory = self._params[0].has_own_memory
        if not has_own_memory and (
            locals_[0].is_meta or all(self._may_move(*pair, fresh) for pair in zip(self._params, locals_, strict=True))
        ):
            for param, slot in zip(self._params, self._make(locals_[0].dtype, locals_[0].device, policy), strict=True):
                param.adopt(slot)
            self.share_lease()
        else:
            self._leave_scattered()
        return True

    def _stay(self, locals_: Sequence[torch.Tensor]) -> bool:
        """Adopt parameters that are in their slots or write back to them; return False if one is elsewhere."""
        if isinstance(self.flat, ScatteredShard):
            return all(p.is_registered for p in self._params)
        if (locals_[0].dtype, locals_[0].device) != (self.flat.dtype, self.flat.device):
            return False
        triples = list(zip(self._params, locals_, self._slots(), strict=True))
        if not all(p.writes_back or is_at(local, slot) for p, local, slot in triples):
            return False
        for param, _, slot in triples:
            if not param.is_registered:
                param.adopt(slot)
        self.share_lease()
        return True

    @staticmethod
    def _may_move(param: FSDPParam, local: torch.Tensor, fresh: bool) -> bool:
        return param.writes_back or (fresh and not (local.numel() and is_same_memory(local, param.local)))

    def _leave_scattered(self) -> None:
        for param in self._params:
            param.keep()
        first = self._params[0].local
        pairs = partial(_pairs, self._params)
        self.flat, self.region = (
            ScatteredShard([p.slot_numel for p in self._params], first.dtype, first.device, pairs),
            None,
        )
        uncounted = [h for p in self._params for h in p.holders if not hasattr(h, "_workbench_handle")]
        self._handle = self._counted(storages_nbytes(uncounted))  # flat tensors keep their own handle while referenced
        for holder in uncounted:
            holder._workbench_handle = self._handle  # type: ignore[attr-defined]


def _pairs(params: Sequence[FSDPParam], slots: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for param, slot in zip(params, slots, strict=True):
        yield param.local_view(slot), param.local


def is_at(local: torch.Tensor, slot: torch.Tensor) -> bool:
    """Return whether a rank's rows begin where ``slot`` does, or are empty."""
    return (local.is_meta and slot.is_meta) or local.numel() == 0 or is_same_memory(local, slot)


def in_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Return contiguous ``view`` as a tensor at the start of its own storage, over the same memory.

    torch saves and deep-copies a DTensor only if its local tensor begins at the start of its storage. A view without
    data stays as it is: it has no memory to share.
    """
    if is_fake(view):
        return view
    first = view.storage_offset() * view.element_size()
    storage = view.untyped_storage()[first : first + view.nbytes]  # keeps the memory alive
    return view.new_empty(0).set_(storage, 0, view.shape, view.stride())
