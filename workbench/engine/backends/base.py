"""What the engine asks of the device it computes on, and what it gets of one that does all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist

from workbench.engine._torch import allow_reading, chunk_cat, forbid_reading
from workbench.engine.backends.async_work import Transport
from workbench.engine.backends.device_clock import DeviceClock, Event
from workbench.engine.backends.page_pool import Region, SparePages
from workbench.engine.comm import SET_BY_USER, CommPair, DefaultAllGather, DefaultReduceScatter, Peers
from workbench.engine.shard_layout import ShardLayout
from workbench.events import C10D


class FullMemory(Protocol):
    """Memory that can be emptied under the tensors that point into it.

    Attributes:
        tensor: ``[numel]``; empty at first.
    """

    tensor: torch.Tensor

    def present(self) -> AbstractContextManager[None]:
        """Within the body views of :attr:`tensor` can be made, though it is empty."""

    def fill(self, spare: SparePages) -> None:
        """Make it memory that can be written, of spare pages if there are any; what is in it is not specified."""

    def empty(self, spare: SparePages) -> None:
        """Give it up; who still reads it finds NaN, or gets an error."""


class ResizedMemory:
    """A storage that the device's own allocator, which keeps what it had, empties and fills."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_bytes = numel * dtype.itemsize
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._shrink()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Within the body views of :attr:`tensor` can be made, though it is empty."""
        self._grow()
        yield
        self._shrink()

    def fill(self, _spare: SparePages) -> None:
        """Make it memory that can be written; what is in it is not specified."""
        self._grow()

    def empty(self, _spare: SparePages) -> None:
        """Give it up; to read it is an error."""
        self._shrink()

    def _grow(self) -> None:
        if not self.tensor.is_meta:
            allow_reading(self.tensor)
            self.tensor.untyped_storage().resize_(self._num_bytes)

    def _shrink(self) -> None:
        if not self.tensor.is_meta:
            self.tensor.untyped_storage().resize_(0)
            forbid_reading(self.tensor, "a full parameter was read after its unit was resharded")


class Streams:
    """Where the work of one communication context goes, and what waits for what.

    Here all of it goes one way, in the order in which it is given: nothing has to wait, and nothing here does anything.
    """

    @property
    def are_there(self) -> bool:
        """True if work is handed over, and goes on while the host does."""
        return False

    def gathering(self) -> AbstractContextManager[object]:
        """Within the body work is for an all-gather's input."""
        return nullcontext()

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Within the body work is of reductions; ``after_compute``: after what was computed so far."""
        return nullcontext()

    def trailing(self, *_outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Within the body work is of what follows reduce-scatters, after what the present one was given so far."""
        return nullcontext()

    def shards_changed(self, event: Event) -> None:
        """Let later all-gathers see the optimizer's step: wait for ``event``, or for all that was computed so far."""

    def was_read(self) -> None:
        """Let the next all-gather have the memory of one that was copied out, or waited for, just now."""

    def join(self) -> None:
        """Let compute see that full gradients were read and freed."""

    def join_all(self) -> None:
        """Let compute see reduced gradients as well."""


Grads = Sequence[torch.Tensor | None]
"""Full gradients of what is one parameter when it is sharded; None: there is none, which counts as zero."""


class LaidOutParam(Protocol):
    """A parameter whose full gradients are laid out for the ranks.

    Attributes:
        layout: how it is split.
    """

    layout: ShardLayout

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) that lay ``grads`` out in ``slots`` ``[n, slot_numel]`` of n ranks."""


def _whole(layouts: Sequence[ShardLayout], grads: Sequence[Grads], num_chunks: int) -> list[torch.Tensor]:
    """Return the gradients in the shapes of ``layouts``, if cutting each into so many chunks lays them out; else none.

    That is so of one gradient each, of one dtype, split by rows over all the ranks that chunks are for.
    """
    found = [
        grad[0].reshape(layout.shape).contiguous()
        for layout, grad in zip(layouts, grads, strict=True)
        if len(grad) == 1 and grad[0] is not None and grad[0].numel()
        if layout.dim == 0 and layout.num_shards == num_chunks
    ]
    return found if len(found) == len(layouts) and len({grad.dtype for grad in found}) == 1 else []


class CommUser(Protocol):
    """A unit, as whoever chooses what it communicates with knows it.

    Attributes:
        comm: what it communicates with; None until that is chosen.
    """

    comm: CommPair | None

    @property
    def shard_group(self) -> Peers | None:
        """The ranks that share one copy; None if that is one rank."""

    @property
    def shard_numel(self) -> int:
        """Elements of its flat shard."""

    @property
    def orig_dtype(self) -> torch.dtype:
        """Dtype of the shards."""

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of the all-gather."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype of the reduction."""

    @property
    def is_trained(self) -> bool:
        """True if there will be gradients to reduce."""

    @property
    def shard_region(self) -> Region | None:
        """Where its flat shard lies, if other pages can lie beneath it."""

    def use_comm(self, pair: CommPair) -> None:
        """Communicate with ``pair`` from now on."""


class Comms:
    """What the units of one communication context communicate with.

    Here nobody reads another rank's shard where it lies: who is about to write one waits for nobody.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def choose(self, units: Sequence[CommUser], max_scatters: int) -> None:
        """Give each unit its pair; what the user has set stays. Collective.

        Args:
            units: all units of a root.
            max_scatters: reduce-scatters that may be in flight at once.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not come to an answer.
        """
        for unit in units:
            if unit.comm is None or unit.comm.name not in SET_BY_USER:
                unit.use_comm(self.pair_for(unit, max_scatters))

    def pair_for(self, _unit: CommUser, _max_scatters: int) -> CommPair:
        """Return what a unit communicates with."""
        return self._backend.pair()

    def release(self) -> None:
        """Free what is kept for the next step."""
        self.release_buffers()

    def release_buffers(self) -> None:
        """Let the system have what was given back by collectives that have ended."""
        self._backend.release_buffers()

    def empty(self) -> None:
        """Let the system have memory that nothing needs before gradients are reduced again.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: a wait for other ranks was given up.
        """
        self.release_buffers()

    def has_read(self, unit: CommUser) -> None:
        """Note that this rank has read the shards of other ranks, and they its own, or will soon."""

    def reduces(self, unit: CommUser) -> None:
        """Note that a reduction is issued: before it is finished, all ranks have read."""

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read what this one has, so that shards may be written.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: the wait was given up.
        """


class Backend:
    """One device. What is here does for a device of which no more is known; other kinds say what they do better.

    Attributes:
        is_host: it is where data loaders leave inputs, and offloaded shards lie.
        averages: its collectives can divide.
        fuses_copies: it has kernels that copy many strided pieces at once; a copy for each is dear there.
        c10d: what ``init_process_group`` calls the collectives that ranks on such devices use.
        kind: what a ``DeviceMesh`` of such devices is made for.
    """

    is_host = False
    averages = False
    fuses_copies = False
    c10d = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = device.type

    @classmethod
    def of_rank(cls, _local_rank: int) -> torch.device:
        """Return the device of a rank, of its number on its host."""
        return torch.device("cpu")

    @classmethod
    def num_here(cls) -> int | None:
        """Return how many this host has, of which each rank needs one; None: ranks share what there is."""
        return None

    def make_current(self) -> None:
        """Let this process compute here."""

    # ---- memory

    def full_memory(self, numel: int, dtype: torch.dtype) -> FullMemory:
        """Return memory for a unit's full parameters, empty."""
        return ResizedMemory(numel, dtype, self.device)

    def shard_region(self, _numel: int, _dtype: torch.dtype) -> Region | None:
        """Return memory for shards, whose pages can be exchanged; None: this device has none."""
        return None

    # ---- gather and reduce

    def pair(self) -> CommPair:
        """Return what works between any ranks."""
        return CommPair(DefaultAllGather(), DefaultReduceScatter(), C10D)

    def release_buffers(self) -> None:
        """Let the system have memory that is kept for what will be in flight."""

    def comms(self) -> Comms:
        """Return what chooses, and knows, what the units of a communication context communicate with."""
        return Comms(self)

    def copy_out(self, gathered: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy flat shards of n ranks, ``[n, S]``, into the targets, ``[n, ...]`` each; casts if need be."""
        num_ranks = len(gathered)
        sizes = [target.numel() // num_ranks for target in targets]
        if self.fuses_copies and all(
            t.dtype == gathered.dtype and t.shape == (num_ranks, size) and t.is_contiguous()
            for t, size in zip(targets, sizes, strict=True)
        ):
            torch.split_with_sizes_copy(gathered, sizes, dim=1, out=list(targets))
            return
        pairs = zip(targets, gathered.split_with_sizes(sizes, dim=1), strict=True)
        slots = [slot if slot.shape == target.shape else slot.view(target.shape) for target, slot in pairs]
        torch._foreach_copy_(list(targets), slots)

    def copy_in(
        self, params: Sequence[LaidOutParam], grads: Sequence[Grads], chunks: torch.Tensor, first_rank: int = 0
    ) -> None:
        """Copy full gradients, cast, into ``chunks`` ``[n, S]``, of n ranks from ``first_rank`` on."""
        wholes = _whole([param.layout for param in params], grads, len(chunks)) if self.fuses_copies else []
        if wholes:
            chunk_cat(wholes, len(chunks), out=chunks)
            return
        slots = chunks.split_with_sizes([param.layout.slot_numel for param in params], dim=1)
        pairs = [
            pair for p, g, s in zip(params, grads, slots, strict=True) for pair in p.copy_in_pairs(g, s, first_rank)
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])

    # ---- who waits for what

    def streams(self) -> Streams:
        """Return where the work of a communication context goes."""
        return Streams()

    def transport(self, _process_group: dist.ProcessGroup) -> Transport:
        """Return how the collectives of a process group are waited for, and left when they cannot end."""
        return Transport()

    def record_event(self) -> Event:
        """Return where the work given so far ends; None where the host has waited for it already."""
        return None

    def wait_event(self, event: Event) -> None:
        """Let what is given from now on come after ``event``."""

    def wait_on_host(self, event: Event) -> None:
        """Let the host wait for ``event``."""

    def within(
        self,
        stream: Any,  # noqa: ANN401 - of whatever kind the device has
        *_tensors: torch.Tensor,
    ) -> AbstractContextManager[object]:
        """Within the body work goes to a stream of the user's, between what was and will be given; it uses tensors."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == self.kind:
            torch.accelerator.synchronize(self.device)

    # ---- abort and clock

    def destroy_process_groups(self) -> None:
        """Leave c10d, whatever collectives have not ended."""
        dist.destroy_process_group()

    def clock(self) -> DeviceClock | None:
        """Return what tells when the device came to what it was given; None where the host does the work itself."""
        return None
