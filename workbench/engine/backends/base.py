"""The interface between the engine and a device, with defaults for a device that runs synchronously with the host."""

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
    """Memory that can be freed while tensors still point into it.

    Attributes:
        tensor: ``[numel]``; empty at first.
    """

    tensor: torch.Tensor

    def present(self) -> AbstractContextManager[None]:
        """Return a context in which views of :attr:`tensor` can be made although it is empty."""

    def fill(self, spare: SparePages) -> None:
        """Make the memory writable, from spare pages if there are any; its contents are unspecified."""

    def empty(self, spare: SparePages) -> None:
        """Free the memory; later reads return NaN or raise an error."""


class ResizedMemory:
    """A storage that is resized to free and refill it; the device's allocator caches the memory."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_bytes = numel * dtype.itemsize
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._shrink()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Return a context in which views of :attr:`tensor` can be made although it is empty."""
        self._grow()
        yield
        self._shrink()

    def fill(self, _spare: SparePages) -> None:
        """Make the memory writable; its contents are unspecified."""
        self._grow()

    def empty(self, _spare: SparePages) -> None:
        """Free the memory; later reads raise an error."""
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
    """Streams of one communication context, and the dependencies between them.

    This class is for devices without streams: work runs in the order it is issued, so every method is a no-op.
    """

    @property
    def are_there(self) -> bool:
        """True if work runs on streams, asynchronously to the host."""
        return False

    def gathering(self) -> AbstractContextManager[object]:
        """Return a context for work that prepares an all-gather's input."""
        return nullcontext()

    def reducing(self, *, after_compute: bool) -> AbstractContextManager[object]:
        """Return a context for the work of reductions; with ``after_compute`` it follows the compute issued so far."""
        return nullcontext()

    def trailing(self, *_outputs: torch.Tensor) -> AbstractContextManager[object]:
        """Return a context for work after reduce-scatters; it follows the work issued so far to the current stream."""
        return nullcontext()

    def shards_changed(self, event: Event) -> None:
        """Make later all-gathers wait for the optimizer step: for ``event``, or for all compute issued so far."""

    def was_read(self) -> None:
        """Let the next all-gather reuse the memory of the all-gather that was just copied out or waited for."""

    def join(self) -> None:
        """Make compute wait until full gradients are read, so that it can reuse their memory."""

    def join_all(self) -> None:
        """Make compute wait for the reduced gradients as well."""


Grads = Sequence[torch.Tensor | None]
"""Full gradients that make up one sharded parameter; None counts as a zero gradient."""


class LaidOutParam(Protocol):
    """A parameter whose full gradients can be laid out by rank.

    Attributes:
        layout: how the parameter is split.
    """

    layout: ShardLayout

    def copy_in_pairs(
        self, grads: Grads, slots: torch.Tensor, first_rank: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (destination, source) copies that lay ``grads`` out in the ``slots`` ``[n, slot_numel]`` of n ranks."""


def _whole(layouts: Sequence[ShardLayout], grads: Sequence[Grads], num_chunks: int) -> list[torch.Tensor]:
    """Return the gradients in the shapes of ``layouts``, if plain chunking lays them out; otherwise an empty list.

    Plain chunking works if each parameter has one gradient, all of one dtype, split by rows over ``num_chunks`` ranks.
    """
    found = [
        grad[0].reshape(layout.shape).contiguous()
        for layout, grad in zip(layouts, grads, strict=True)
        if len(grad) == 1 and grad[0] is not None and grad[0].numel()
        if layout.dim == 0 and layout.num_shards == num_chunks
    ]
    return found if len(found) == len(layouts) and len({grad.dtype for grad in found}) == 1 else []


class CommUser(Protocol):
    """The view of a unit that the choice of its collectives needs."""

    @property
    def comm(self) -> CommPair | None:
        """The pair of collectives that the unit uses; None until one is chosen."""

    @property
    def shard_group(self) -> Peers | None:
        """The ranks that share one copy of the unit; None if there is only one."""

    @property
    def shard_numel(self) -> int:
        """Number of elements of the unit's flat shard."""

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
        """True if the unit has gradients to reduce."""

    @property
    def shard_region(self) -> Region | None:
        """Memory of the flat shard, if its pages can be exchanged; otherwise None."""

    def use_comm(self, pair: CommPair) -> None:
        """Use ``pair`` for communication from now on."""


class Comms:
    """The collectives of the units of one communication context.

    In this class no rank reads another rank's shard in place, so a rank never waits before it writes a shard.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def choose(self, units: Sequence[CommUser], max_scatters: int) -> None:
        """Give each unit its pair of collectives, except units whose pair the user has set. Collective.

        Args:
            units: all units of a root.
            max_scatters: maximum number of reduce-scatters in flight.

        Raises:
            StepAborted, CollectiveFailed: the ranks could not agree on the pairs.
        """
        for unit in units:
            if unit.comm is None or unit.comm.name not in SET_BY_USER:
                unit.use_comm(self.pair_for(unit, max_scatters))

    def pair_for(self, _unit: CommUser, _max_scatters: int) -> CommPair:
        """Return the pair of collectives for a unit."""
        return self._backend.pair()

    def release(self) -> None:
        """Free the buffers that are cached for the next step."""
        self.release_buffers()

    def release_buffers(self) -> None:
        """Return the buffers of finished collectives to the system."""
        self._backend.release_buffers()

    def empty(self) -> None:
        """Return memory to the system that is not needed until gradients are reduced again.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: a wait for other ranks was aborted.
        """
        self.release_buffers()

    def has_read(self, unit: CommUser) -> None:
        """Note that this rank and the others have read each other's shards of ``unit``, or soon will."""

    def reduces(self, unit: CommUser) -> None:
        """Note that a reduction of ``unit`` is issued: once it finishes, all ranks have read the shards."""

    def wait_for_readers(self) -> None:
        """Wait until the other ranks have read the shards that this rank has read, so that shards may be written.

        Raises:
            StepAborted, CollectiveFailed, RanksDisagreeError: the wait was aborted.
        """


class Backend:
    """One device. The defaults work on any device; subclasses override what their kind does better.

    Attributes:
        is_host: the device is host memory, where data loaders put inputs and offloaded shards are stored.
        averages: its collectives can divide.
        fuses_copies: it has kernels that copy many strided pieces at once; one copy per piece is expensive there.
        c10d: the backend name for ``init_process_group``.
        kind: the device type for a ``DeviceMesh``.
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
        """Return the device of a rank, given its index on its host."""
        return torch.device("cpu")

    @classmethod
    def num_here(cls) -> int | None:
        """Return the number of devices on this host, one per rank; None if ranks can share a device."""
        return None

    def make_current(self) -> None:
        """Make this the current device of the process."""

    # ---- memory

    def full_memory(self, numel: int, dtype: torch.dtype) -> FullMemory:
        """Return memory for a unit's full parameters; it starts empty."""
        return ResizedMemory(numel, dtype, self.device)

    def shard_region(self, _numel: int, _dtype: torch.dtype) -> Region | None:
        """Return memory for shards whose pages can be exchanged; None if the device has no such memory."""
        return None

    # ---- gather and reduce

    def pair(self) -> CommPair:
        """Return a pair of collectives that works between any ranks."""
        return CommPair(DefaultAllGather(), DefaultReduceScatter(), C10D)

    def release_buffers(self) -> None:
        """Return the memory cached for future collectives to the system."""

    def comms(self) -> Comms:
        """Return a new object that chooses and tracks the collectives of a communication context's units."""
        return Comms(self)

    def copy_out(self, gathered: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        """Copy the flat shards of n ranks, ``[n, S]``, into the targets, ``[n, ...]`` each; cast if dtypes differ."""
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
        """Cast and copy full gradients into ``chunks`` ``[n, S]``, for the n ranks from ``first_rank`` on."""
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

    # ---- ordering

    def streams(self) -> Streams:
        """Return streams for a communication context."""
        return Streams()

    def transport(self, _process_group: dist.ProcessGroup) -> Transport:
        """Return the object that waits for a process group's collectives and aborts those that cannot end."""
        return Transport()

    def record_event(self) -> Event:
        """Return an event after the work issued so far; None if the host runs the work itself."""
        return None

    def wait_event(self, event: Event) -> None:
        """Make work issued from now on wait for ``event``."""

    def wait_on_host(self, event: Event) -> None:
        """Block the host until ``event``."""

    def within(
        self,
        stream: Any,  # noqa: ANN401 - its type depends on the device
        *_tensors: torch.Tensor,
    ) -> AbstractContextManager[object]:
        """Return a context for work with these tensors on a user's stream, after earlier and before later work."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block until the device has finished all work."""
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None and accelerator.type == self.kind:
            torch.accelerator.synchronize(self.device)

    # ---- abort and clock

    def destroy_process_groups(self) -> None:
        """Destroy all process groups, even with collectives unfinished."""
        dist.destroy_process_group()

    def clock(self) -> DeviceClock | None:
        """Return a clock for the work on the device; None if the host runs the work itself."""
        return None
