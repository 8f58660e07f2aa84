"""All-gather and reduce-scatter as exchangeable objects, with torch's own call signatures.

The environment variable ``WORKBENCH_COMM`` chooses between them:

- unset: ranks of one host use shared memory (``backends/shared/``). Ranks of several hosts, with the same number on
  each, use shared memory within a host and gloo between hosts. Others use the fastest pair for their backend.
- ``gloo``: never shared memory.
- ``default``: c10d's single-tensor collectives. On gloo they are slow (``reduce_scatter_single`` runs as an
  all-reduce), so the engine otherwise picks others there (``backends/gloo.py``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from workbench.engine._torch import group_allocator
from workbench.engine.cancellable_waits import AsyncWork
from workbench.engine.collective_order import Collective
from workbench.engine.probe import BufferHandle

CHOICES = ("", "gloo", "default")
CUSTOM = "custom"
OF_GROUP = "c10d, memory of the group"
SET_BY_USER = frozenset({CUSTOM, OF_GROUP})


class Peers(Protocol):
    """A communication group as backends see it; see :mod:`workbench.engine.process_groups`."""

    ranks: tuple[int, ...]
    rank: int
    size: int
    process_group: dist.ProcessGroup | None
    index: int

    def part(self, ranks: tuple[int, ...], purpose: str) -> Peers:
        """Return a subgroup for steps within this group's collectives; its ranks must call this together."""

    def step(self, issue: Callable[[dist.ProcessGroup], AsyncWork]) -> AsyncWork:
        """Issue a step of another group's collective; callable from any thread, one call at a time."""

    def tell(self, collective: Collective, text: str) -> str:
        """Return the first rank's ``text``; collective."""

    def compare(self, collective: Collective, text: str) -> list[str]:
        """Return every rank's text, in group order; collective."""

    def check_peers(self) -> None:
        """Raise RanksDisagreeError if another rank issues a different collective than this one did."""

    def give_up(self, error: BaseException) -> None:
        """Refuse further collectives on this rank."""


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
        """Gather every rank's ``input_tensor`` ``[S]`` into ``output_tensor`` ``[F * S]``; return None if done."""


class ReduceScatter(Protocol):
    """Sums chunks across ranks; each rank gets its own chunk."""

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
        """Sum every rank's ``input_tensor`` ``[F * S]`` and write this rank's chunk to ``output_tensor`` ``[S]``.

        Return None if done.
        """


class Allocator:
    """Buffer allocation of the engine's own pairs."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised buffer of ``size``."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


def _no_staging(_num_bytes: int, _num_ranks: int) -> int:
    return 0


@dataclass(frozen=True)
class CommTraits:
    """What an all-gather or reduce-scatter does beyond torch's call signatures; the defaults suit any object.

    Attributes:
        leaves_own_out: an all-gather's output holds only the other ranks' shards, in order: ``[(F - 1) * S]``.
        reads_own_row: an all-gather expects this rank's shard in its row of the output ``[F * S]``.
        is_shared: an all-gather's output is shared memory itself, and needs no bytes.
        own_in_output: this rank's own chunk ``[S]`` of a reduce-scatter goes into the output, and only the others'
            chunks into the input buffer.
        reuses_buffers: it is a :class:`BufferReuser`.
        keeps_stages: it is a :class:`StageKeeper`.
        staging_nbytes: returns the bytes needed in addition to a buffer, given its bytes and the number of ranks.
    """

    leaves_own_out: bool = False
    reads_own_row: bool = False
    is_shared: bool = False
    own_in_output: bool = False
    reuses_buffers: bool = False
    keeps_stages: bool = False
    staging_nbytes: Callable[[int, int], int] = _no_staging

    def nbytes_in_flight(self, buffer: torch.Tensor, num_ranks: int) -> int:
        """Return the bytes that a collective holds in flight: an output or input buffer, and staging."""
        return 0 if self.is_shared else buffer.nbytes + self.staging_nbytes(buffer.nbytes, num_ranks)


class BufferReuser(Protocol):
    """A communication that reuses the buffers it has allocated."""

    def free(self, buffer: torch.Tensor) -> None:
        """Accept a buffer that nothing uses any more."""


class StageKeeper(Protocol):
    """A communication whose buffers are in memory that it keeps, and that counts as RESERVED while unused.

    Attributes:
        handle: handle of that memory; None while there is none.
    """

    handle: BufferHandle | None


_OF_ANY = CommTraits()


def traits_of(comm: AllGather | ReduceScatter) -> CommTraits:
    """Return the attribute ``traits`` of a communication; the defaults if it has none, as a user's own may."""
    traits = getattr(comm, "traits", None)
    return traits if isinstance(traits, CommTraits) else _OF_ANY


def give_back(comm: AllGather | ReduceScatter, buffer: torch.Tensor) -> None:
    """Return a buffer to the communication that allocated it, if that reuses buffers."""
    if traits_of(comm).reuses_buffers:
        cast("BufferReuser", comm).free(buffer)


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
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


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
        return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def all_reduce_in_place(
    tensor: torch.Tensor,
    group: dist.ProcessGroup,
    op: Any,  # noqa: ANN401 - see ReduceScatter
    async_op: bool = False,
) -> AsyncWork | None:
    """Reduce ``tensor`` over the ranks: c10d's all-reduce with the arguments in the order of the other collectives."""
    return cast("AsyncWork | None", dist.all_reduce(tensor, op, group, async_op))


@dataclass(frozen=True)
class CommPair:
    """A unit's all-gather and reduce-scatter.

    Attributes:
        gather: for its parameters.
        reduce: for its gradients.
        name: value for :attr:`workbench.events.Unit.comm`; "custom" once the user has set one of the two.
    """

    gather: AllGather
    reduce: ReduceScatter
    name: str


def comm_choice() -> str:
    """Return the value of WORKBENCH_COMM.

    Raises:
        ValueError: the value is unknown.
    """
    choice = os.environ.get("WORKBENCH_COMM", "")
    if choice not in CHOICES:
        raise ValueError(
            f"unknown WORKBENCH_COMM={choice!r}; use 'gloo' (never shared memory), 'default' (c10d's own "
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
    """c10d's all-gather, into memory that the backend allocates."""


class GroupReduceScatter(FromGroup, DefaultReduceScatter):
    """c10d's reduce-scatter, from memory that the backend allocates."""


def group_pair(group: Peers, device: torch.device) -> CommPair | None:
    """Return a pair that uses memory allocated by the backend of ``group``; None for all backends but NCCL."""
    allocate = group_allocator(group.process_group, device)
    return None if allocate is None else CommPair(GroupAllGather(allocate), GroupReduceScatter(allocate), OF_GROUP)
