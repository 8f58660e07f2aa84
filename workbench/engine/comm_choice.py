"""The pair of collectives that a unit uses: chosen by the root, set by the user, or open."""

from __future__ import annotations

import torch

from workbench.engine.backends import backend_of
from workbench.engine.comm import CUSTOM, OF_GROUP, SET_BY_USER, AllGather, CommPair, ReduceScatter, group_pair
from workbench.engine.process_groups import CommGroup


class CommChoice:
    """The choice of one unit's collectives.

    Attributes:
        chosen: the pair; None until chosen.
        is_open: the root chooses at its next forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.chosen: CommPair | None = None
        self.is_open = True

    @property
    def pair(self) -> CommPair:
        """The chosen pair; until the root has chosen, one that works between any ranks."""
        if self.chosen is None:
            self.chosen = backend_of(self._device).pair()
        return self.chosen

    @property
    def is_set_by_user(self) -> bool:
        """True if the user set the pair, so that the root does not choose."""
        return self.chosen is not None and self.chosen.name in SET_BY_USER

    def settle(self, pair: CommPair) -> None:
        """Use ``pair`` from now on."""
        self.chosen, self.is_open = pair, False

    def reopen(self) -> None:
        """Let the root choose a pair at its next forward; all ranks must call this together."""
        self.chosen, self.is_open = None, True

    def custom(self, gather: AllGather | None = None, reduce: ReduceScatter | None = None) -> CommPair:
        """Return a pair with the user's all-gather, reduce-scatter or both."""
        others = self.pair if self.pair.name == CUSTOM else backend_of(self._device).pair()
        return CommPair(gather or others.gather, reduce or others.reduce, CUSTOM)

    def in_group_memory(self, group: CommGroup | None, unit: str) -> CommPair | None:
        """Return the pair whose buffers the backend of ``group`` allocates; None if it cannot, see :func:`group_pair`.

        Raises:
            ValueError: the user has set a custom object, which allocates its own buffers; the message names ``unit``.
        """
        if self.chosen is not None and self.chosen.name == CUSTOM:
            raise ValueError(
                f"unit {unit!r} communicates with a custom {type(self.chosen.gather).__name__} and "
                f"{type(self.chosen.reduce).__name__}, which allocate their own buffers: "
                "set_allocate_memory_from_process_group_for_comm cannot be combined with set_custom_all_gather or "
                "set_custom_reduce_scatter"
            )
        return None if group is None else group_pair(group, self._device)

    def leave_group_memory(self) -> None:
        """Let the root choose again if the pair is one of :meth:`in_group_memory`."""
        if self.chosen is not None and self.chosen.name == OF_GROUP:
            self.reopen()
