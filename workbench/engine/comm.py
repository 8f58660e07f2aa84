"""How bytes travel: all-gather and reduce-scatter as exchangeable objects, with torch's own call signatures.

``WORKBENCH_COMM`` in the environment chooses: unset, ranks of one host use shared memory
(``backends/shared_memory.py``), those of several hosts with as many on each as well, and gloo between the hosts
(``backends/hierarchical_comm.py``), and others the fastest pair for their backend; ``gloo``, never shared memory;
``default``, c10d's single-tensor collectives. On gloo those are slow (``reduce_scatter_single`` runs as an all-reduce),
so there the engine picks others (``backends/gloo.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from workbench.engine._torch import all_gather_single, group_allocator, reduce_scatter_single
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.collective_order import Collective

CHOICES = ("", "gloo", "default")
CUSTOM = "custom"
OF_GROUP = "c10d, memory of the group"
SET_BY_USER = frozenset({CUSTOM, OF_GROUP})


class Peers(Protocol):
    """The ranks that communicate as one, as a backend knows them: see :mod:`workbench.engine.process_groups`."""

    ranks: tuple[int, ...]
    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    index: int

    def part(self, ranks: tuple[int, ...], purpose: str) -> Peers:
        """Return a group of some of these ranks for steps within this one's collectives; they call it together."""

    def step(self, issue: Callable[[dist.ProcessGroup], AsyncWork]) -> AsyncWork:
        """Issue a step within another group's collective, from any thread, in turn."""

    def tell(self, collective: Collective, text: str) -> str:
        """Return what the first of them tells; collective."""

    def compare(self, collective: Collective, text: str) -> list[str]:
        """Return every rank's text, in group order; collective."""

    def look(self) -> None:
        """Raise RanksDisagreeError if another rank does something else than this one did."""

    def give_up(self, error: BaseException) -> None:
        """Refuse collectives of this rank from now on."""


class AllGather(Protocol):
    """Gathers equal shards into one buffer."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output buffer of ``size``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> AsyncWork | None:
        """Gather ``input_tensor`` ``[S]`` of every rank into ``output_tensor`` ``[F * S]``; None if it is done."""


class ReduceScatter(Protocol):
    """Sums chunks across ranks; each rank gets its own."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input buffer of ``size``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401 - dist.ReduceOp or one of its kinds
        async_op: bool = False,
    ) -> AsyncWork | None:
        """Reduce: ``output_tensor`` ``[S]`` becomes the sum over ranks of their ``input_tensor`` ``[F * S]``, own part.

        None if it is done.
        """


class Allocator:
    """Where the engine's own pairs get their buffers."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


def give_back(comm: AllGather | ReduceScatter, buffer: torch.Tensor) -> None:
    """Return a buffer to the one who allocated it, if that one wants it."""
    free = getattr(comm, "free", None)
    if free is not None:
        free(buffer)


def is_of_others(gather: AllGather) -> bool:
    """Whether an all-gather's output ``[(F - 1) * S]`` holds the other ranks' shards alone, in order."""
    return getattr(gather, "is_of_others", False)


def reads_own_row(gather: AllGather) -> bool:
    """Whether this rank's shard has to lie in its row of the output ``[F * S]`` when the all-gather is called."""
    return getattr(gather, "reads_own_row", False)


def output_nbytes(gather: AllGather, output: torch.Tensor, group: Peers) -> int:
    """Bytes an all-gather costs while in flight: its output, and what it needs beside.

    None if the output is the ranks' shared memory itself.
    """
    return 0 if getattr(gather, "is_shared", False) else output.nbytes + _staging_nbytes(gather, output.nbytes, group)


def input_nbytes(reduce: ReduceScatter, chunks: torch.Tensor, group: Peers) -> int:
    """Bytes a reduce-scatter costs while in flight: its input, and what it needs beside."""
    return chunks.nbytes + _staging_nbytes(reduce, chunks.nbytes, group)


def _staging_nbytes(comm: AllGather | ReduceScatter, num_bytes: int, group: Peers) -> int:
    beside = getattr(comm, "staging_nbytes", None)
    return 0 if beside is None else beside(num_bytes, group)


def takes_own_in_output(reduce: ReduceScatter) -> bool:
    """Whether this rank's own chunk ``[S]`` goes into the output, and only the others' into what is allocated."""
    return getattr(reduce, "own_in_output", False)


class DefaultAllGather(Allocator):
    """c10d's single-tensor all-gather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> AsyncWork | None:
        """See :class:`AllGather`."""
        return cast("AsyncWork | None", all_gather_single(output_tensor, input_tensor, group, async_op))


class DefaultReduceScatter(Allocator):
    """c10d's single-tensor reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,  # noqa: ANN401 - see ReduceScatter
        async_op: bool = False,
    ) -> AsyncWork | None:
        """See :class:`ReduceScatter`."""
        return cast("AsyncWork | None", reduce_scatter_single(output_tensor, input_tensor, op, group, async_op))


@dataclass(frozen=True)
class CommPair:
    """What a unit communicates with.

    Attributes:
        gather: for its parameters.
        reduce: for its gradients.
        name: what :attr:`workbench.events.Unit.comm` says; "custom" once the user has set one of the two.
    """

    gather: AllGather
    reduce: ReduceScatter
    name: str


def comm_choice() -> str:
    """Return what WORKBENCH_COMM asks for.

    Raises:
        ValueError: something unknown.
    """
    choice = os.environ.get("WORKBENCH_COMM", "")
    if choice not in CHOICES:
        raise ValueError(
            f"WORKBENCH_COMM={choice!r} is not known; use 'gloo' (never shared memory), 'default' (c10d's own "
            "collectives), or unset it for the fastest pair"
        )
    return choice


class FromGroup(Allocator):
    """Allocates in memory that the backend can send from without a copy (NCCL with registered buffers)."""

    def __init__(self, allocate: Callable[..., torch.Tensor]) -> None:
        self._allocate = allocate

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``."""
        return self._allocate(math.prod(size), dtype=dtype, device=device).view(tuple(size))


class GroupAllGather(FromGroup, DefaultAllGather):
    """c10d's all-gather, into memory of the backend."""


class GroupReduceScatter(FromGroup, DefaultReduceScatter):
    """c10d's reduce-scatter, from memory of the backend."""


def group_pair(group: Peers, device: torch.device) -> CommPair | None:
    """Return the pair that communicates from memory which the backend of ``group`` allocates; None: it allocates none.

    Only NCCL does.
    """
    allocate = group_allocator(group.process_group, device)
    return None if allocate is None else CommPair(GroupAllGather(allocate), GroupReduceScatter(allocate), OF_GROUP)
