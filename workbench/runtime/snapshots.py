"""Snapshots of a training in memory: each rank keeps its own, and that of the rank before it, in a ring.

When a rank is lost, the rank after it has what it held. A snapshot is taken between steps, in a process group of its
own. Two are kept: the older one stays whole until all ranks have the newer one, so there is a whole one at any moment.
A second rank lost beside the first takes the only other copy with it.

All tensors of a rank's state lie in one flat buffer, ``[num_bytes]``. On one host it is shared memory, which the next
rank has mapped: nothing is sent, and the memory outlives its rank. To another host it is sent beside the next steps.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from workbench.engine._torch import new_group
from workbench.engine.backends.async_work import PendingWork
from workbench.engine.backends.mappable_memory import mappable, mapped
from workbench.engine.errors import CollectiveFailed, StepAborted
from workbench.engine.process_groups import OWN
from workbench.errors import UsageError
from workbench.protocol.rank_messages import Marks, SnapshotMark
from workbench.runtime.distributed import ProcessGroups
from workbench.runtime.namespace import OFFERED, user_namespace, variables
from workbench.runtime.private_state import PrivateState
from workbench.runtime.training_state import (
    TrainingObjects,
    TrainingSnapshot,
    capture,
    local_part,
    model_tensors,
    restore,
    state_tensors,
)

_ALIGN = 64
_MANY = 10_000  # a container of more elements is data
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_NAME = f"{OWN}snapshots"
_KEPT = 2
_LONGEST = 256
"""Bytes of an address of shared memory, at most."""
_NOTHING = pickle.dumps({})

Layout = tuple[tuple[str, torch.dtype, torch.Size, int], ...]
"""Name, dtype, shape and first byte of each tensor."""


@dataclass(frozen=True)
class RankSnapshot:
    """The state of one rank between two steps.

    Attributes:
        mark: when.
        state: its training; the tensors are views of ``flat``.
        plain: the variables that are numbers, texts, or lists and the like of these, pickled.
        flat: bytes of the tensors, [num_bytes].
        layout: where each of them is in it.
        address: where processes of this host can map ``flat``; empty: they cannot.
    """

    mark: SnapshotMark
    state: TrainingSnapshot
    plain: bytes
    flat: torch.Tensor
    layout: Layout
    address: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return self.flat.nbytes + len(self.plain)

    def rest(self) -> bytes:
        """Return all that is not in the flat buffer."""
        return pickle.dumps((self.mark, replace(self.state, tensors={}), self.plain, self.layout, self.address))


@dataclass(frozen=True)
class _Transfer:
    """Snapshots on their way: this rank's to the next one, and that of the one before.

    Attributes:
        works: what is in flight.
        sent: memory that it reads.
        flat: receives the tensors; None: it is in memory that this rank can map.
        rest: receives all else.
    """

    works: tuple[PendingWork, ...]
    sent: tuple[torch.Tensor, ...]
    flat: torch.Tensor | None
    rest: torch.Tensor

    def finish(self, known: dict[str, torch.Tensor]) -> RankSnapshot:
        """Wait for it, and return the snapshot of the rank before.

        Args:
            known: that rank's memory by its address; gets what is mapped anew.

        Raises:
            OSError: its memory is gone.
        """
        for work in self.works:
            if not work.has_ended:  # else it counts even if this rank was aborted since
                work.wait()
            work.finish()
        return _made(self.rest.numpy().tobytes(), self.flat, known)

    @property
    def has_ended(self) -> bool:
        return all(work.has_ended for work in self.works)


class Snapshots:
    """The snapshots that this process keeps; they outlive the groups and models that they were taken of."""

    def __init__(self) -> None:
        self.own: list[RankSnapshot] = []  # oldest first
        self.held: list[RankSnapshot] = []
        self.replica: RankSnapshot | None = None  # the state now, for ranks that are lost; until they are healed
        self.replicas: tuple[int, ...] = ()  # the ranks that have its parameters too, this one included
        self._maps: list[bool] = []  # which ranks can map the memory of the rank before them
        self._mapped: dict[str, torch.Tensor] = {}
        self._transfer: _Transfer | None = None
        self._abandoned: list[_Transfer] = []  # their memory may still be written to
        self._group: dist.ProcessGroup | None = None
        self._world: object = None  # the default group that it was made for

    def forget(self) -> None:
        """Drop all snapshots: this process becomes a rank of another training."""
        self.own, self.held, self.replica = [], [], None
        self.leave()

    def leave(self) -> None:
        """Forget the process group, which is gone, and what is on its way in it."""
        if self._transfer is not None:
            if self._transfer.has_ended:
                with suppress(CollectiveFailed, StepAborted, OSError):
                    self._receive()
            else:
                self._abandoned = [self._transfer]
        self._transfer, self._group, self._world = None, None, None

    def marks(self) -> Marks:
        """Return when the snapshots of this rank, and of the rank before it, were taken."""
        if self._transfer is not None and self._transfer.has_ended:
            with suppress(CollectiveFailed, StepAborted, OSError):
                self._receive()
        return Marks(own=tuple(each.mark for each in self.own), held=tuple(each.mark for each in self.held))

    @property
    def num_bytes(self) -> int:
        """Bytes of all snapshots that this process keeps; what it has mapped is another one's."""
        return sum(each.num_bytes for each in self.own) + sum(each.num_bytes for each in self.held if not each.address)

    def take(self, mark: SnapshotMark, step: int, groups: ProcessGroups) -> RankSnapshot:
        """Take a snapshot, and begin to send it; collective. No model may hold full parameters.

        Args:
            mark: when.
            step: number of steps that led to it.
            groups: those of this rank.
        """
        self._join(groups)
        old = self.own.pop(0) if len(self.own) == _KEPT else None
        objects = TrainingObjects.among(variables())
        new = _flattened(mark, capture(objects, step, old.state if old is not None else None), old, plain_variables())
        self.own.append(new)
        self._send(new, groups)
        return new

    def finish(self) -> None:
        """Wait until the newest snapshot has arrived."""
        if self._transfer is not None:
            self._receive()

    def _receive(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            try:
                self.held.append(transfer.finish(self._mapped))
            except BaseException:
                self._abandoned = [transfer]
                raise
            del self.held[:-_KEPT]

    def _join(self, groups: ProcessGroups) -> None:
        """Have a process group, and all ranks the newest snapshot: only then is the one before given up."""
        if self._world is not dist.group.WORLD:
            self.leave()
            with groups.tracked():
                self._group = new_group(range(groups.world_size), f"{_NAME}", "")
            self._world = dist.group.WORLD
            self._find_maps(groups)
        self.finish()
        _done(dist.barrier(self._group, async_op=True))

    def _find_maps(self, groups: ProcessGroups) -> None:
        """Find out which ranks can map the memory of the rank before them; collective."""
        memory, address = mappable(_ALIGN)  # must exist until it is mapped
        mine, texts = (
            torch.zeros(_LONGEST, dtype=torch.uint8),
            torch.empty(groups.world_size, _LONGEST, dtype=torch.uint8),
        )
        mine[: len(address)] = torch.tensor([*address.encode()], dtype=torch.uint8)
        _done(dist.all_gather(list(texts), mine, self._group, async_op=True))
        before = bytes(texts[groups.rank - 1].tolist()).rstrip(b"\0").decode()
        answers = torch.empty(groups.world_size, 1, dtype=torch.uint8)
        answer = torch.tensor([_can_map(before)], dtype=torch.uint8)
        _done(dist.all_gather(list(answers), answer, self._group, async_op=True))
        self._maps = [bool(each) for each in answers]
        del memory

    def _send(self, new: RankSnapshot, groups: ProcessGroups) -> None:
        before, after = (groups.rank - 1) % groups.world_size, (groups.rank + 1) % groups.world_size
        rest = torch.frombuffer(bytearray(new.rest()), dtype=torch.uint8)
        sent = new.flat[:0] if new.address and self._maps[after] else new.flat
        sizes = torch.empty(groups.world_size, 2, dtype=torch.int64)
        mine = torch.tensor([sent.numel(), rest.numel()])
        _done(dist.all_gather(list(sizes), mine, self._group, async_op=True))
        num_flat, num_rest = (int(size) for size in sizes[before])
        old = self.held.pop(0) if len(self.held) == _KEPT else None
        is_alike = old is not None and old.flat.numel() == num_flat
        flat = old.flat if old is not None and is_alike else torch.empty(num_flat, dtype=torch.uint8)
        received = torch.empty(num_rest, dtype=torch.uint8)
        works = []
        for source, target, column in ((sent, flat, 0), (rest, received, 1)):
            if not sizes[:, column].any():
                continue
            to, come = [0] * groups.world_size, [0] * groups.world_size
            to[after], come[before] = source.numel(), target.numel()
            work = dist.all_to_all_single(target, source, come, to, group=self._group, async_op=True)
            works.append(PendingWork(work, "the transfer of a snapshot"))
        self._transfer = _Transfer(tuple(works), (sent, rest), flat if num_flat else None, received)

    # ---- healing

    def hold(self, state: TrainingSnapshot, private: PrivateState, replicas: tuple[int, ...]) -> None:
        """Hold the state of this rank, and for its replicas the part that they have too, until all ranks are healed."""
        self.replicas = replicas
        self.replica = _flattened(private.mark, private.over(state), None, private.plain)

    def state_of(self, mark: SnapshotMark | None) -> TrainingSnapshot | None:
        """Return the state of this rank's snapshot with a mark; without one, the state that it holds for its replicas.

        The result is None if this rank has no such state.
        """
        found = [self.replica] if mark is None else [each for each in self.own if each.mark == mark]
        return found[0].state if found and found[0] is not None else None

    def put_back(self, mark: SnapshotMark, sources: Mapping[int, int], groups: ProcessGroups) -> int:
        """Give all ranks the state of a snapshot; collective.

        Args:
            mark: its mark.
            sources: the ranks that were lost, each with the rank after it, from which it gets its state.
            groups: those of this rank.

        Returns:
            the number of steps that led to it.
        """
        mine = next((each for each in self.own if each.mark == mark), None)
        held = next((each for each in self.held if each.mark == mark), None)
        mine = _exchanged(mine, held, sources, groups)
        if mine is None:
            raise UsageError(f"rank {groups.rank} has no snapshot of {mark}")
        self.own, self.held = [mine], [] if held is None else [held]
        return _put_back(mine)

    def put_back_replica(
        self,
        sources: Mapping[int, int],
        private: PrivateState | None,
        replicas: tuple[int, ...],
        groups: ProcessGroups,
    ) -> int:
        """Give all ranks the state that replicas hold; collective.

        Args:
            sources: the ranks that hold none, each with a replica, from which it gets it.
            private: this rank's own part of it, or that of an earlier step; None: it is as the cells made it.
            replicas: the ranks that have its parameters too, this one included.
            groups: those of this rank.

        Returns:
            the number of steps that led to it.
        """
        mine = _exchanged(self.replica, self.replica, sources, groups)
        if mine is None:
            raise UsageError(f"rank {groups.rank} and its replicas hold no state")
        if groups.rank in sources:
            state = replace(mine.state, random={}) if private is None else private.over(mine.state)
            mine = replace(mine, state=state, plain=_NOTHING if private is None else private.plain)
            self.replica, self.replicas = mine, replicas  # if the source ends before all ranks are healed
        return _put_back(mine)


SNAPSHOTS = Snapshots()
"""The snapshots of this process."""


def _exchanged(
    mine: RankSnapshot | None, held: RankSnapshot | None, sources: Mapping[int, int], groups: ProcessGroups
) -> RankSnapshot | None:
    """Send what is held to the ranks that this one is the source of; return what is received, else ``mine``."""
    for rank, source in sources.items():
        if groups.rank == source and held is not None:
            rest = torch.frombuffer(bytearray(held.rest()), dtype=torch.uint8)
            dist.send(torch.tensor([held.flat.numel(), rest.numel()]), rank)
            dist.send(held.flat, rank)
            dist.send(rest, rank)
        if groups.rank == rank:
            sizes = torch.empty(2, dtype=torch.int64)
            dist.recv(sizes, source)
            flat, rest = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
            dist.recv(flat, source)
            dist.recv(rest, source)
            mine = _made(rest.numpy().tobytes(), flat)
    return mine


def _put_back(mine: RankSnapshot) -> int:
    """Give the objects of this rank the state of a snapshot; return the number of steps that led to it."""
    restore(TrainingObjects.among(variables()), mine.state)
    _put_plain(mine.plain)
    return mine.state.step


def _done(work: Any) -> None:  # noqa: ANN401 - c10d's
    pending = PendingWork(work, "the exchange before a snapshot")
    pending.wait()
    pending.finish()


def flat_bytes(objects: TrainingObjects) -> int:
    """Return the bytes of the flat buffer of a snapshot of objects: each tensor begins at a multiple of 64."""
    return sum(_padded(local_part(tensor).nbytes) for _, tensor in (*model_tensors(objects), *state_tensors(objects)))


def _padded(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGN) * _ALIGN


def _can_map(address: str) -> bool:
    try:
        return bool(address) and mapped(address, _ALIGN).numel() == _ALIGN
    except OSError:
        return False


def _flattened(mark: SnapshotMark, state: TrainingSnapshot, old: RankSnapshot | None, plain: bytes) -> RankSnapshot:
    """Return a snapshot whose tensors lie in one buffer: that of an old one, if it fits."""
    layout: list[tuple[str, torch.dtype, torch.Size, int]] = []
    end = 0
    for name, tensor in state.tensors.items():
        layout.append((name, tensor.dtype, tensor.shape, end))
        end += _padded(tensor.nbytes)
    found = tuple(layout)
    is_alike = old is not None and old.layout == found
    flat, address = (old.flat, old.address) if old is not None and is_alike else mappable(end)
    views = old.state.tensors if old is not None and is_alike else _views(flat, found)
    for name, view in views.items():
        if view is not state.tensors[name]:  # else it was copied there already
            view.copy_(state.tensors[name])
    return RankSnapshot(mark, replace(state, tensors=views), plain, flat, found, address)


def _views(flat: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    return {
        name: flat[begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for name, dtype, shape, begin in layout
    }


def _made(rest: bytes, flat: torch.Tensor | None, known: dict[str, torch.Tensor] | None = None) -> RankSnapshot:
    """Return a snapshot of its parts; without ``flat``, its tensors are in memory that is mapped here."""
    mark, state, plain, layout, address = pickle.loads(rest)
    if flat is None and known is not None and layout:
        _, dtype, shape, begin = layout[-1]
        end = begin + _padded(shape.numel() * dtype.itemsize)
        if address not in known:
            known[address] = mapped(address, end)
            for old in [*known][:-_KEPT]:
                del known[old]
        flat = known[address]
    else:
        address, flat = "", torch.empty(0, dtype=torch.uint8) if flat is None else flat
    return RankSnapshot(mark, replace(state, tensors=_views(flat, layout)), plain, flat, layout, address)


def plain_variables() -> bytes:
    """Return the plain variables, pickled."""
    found = {name: value for name, value in user_namespace().items() if not name.startswith("_") and _is_plain(value)}
    return pickle.dumps({name: value for name, value in found.items() if name not in OFFERED})


def _is_plain(value: Any, depth: int = 3) -> bool:  # noqa: ANN401 - anything
    if type(value) in _PLAIN:
        return not isinstance(value, (str, bytes)) or len(value) <= _MANY
    if type(value) not in {list, tuple, dict, set} or not depth:
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return len(value) <= _MANY and all(_is_plain(each, depth - 1) for each in items)


def _put_plain(plain: bytes) -> None:
    """Give the plain variables their values; lists and the like stay the same objects, which others may refer to."""
    own = user_namespace()
    for name, value in pickle.loads(plain).items():
        now: Any = own.get(name)
        if isinstance(value, (dict, set)) and type(now) is type(value):
            now.clear()
            now.update(value)
        elif isinstance(value, list) and type(now) is list:
            now[:] = value
        else:
            own[name] = value
