"""Process groups of a rank: join, leave, and rebuild after a failure."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from workbench.base.ports import LOOPBACK
from workbench.engine import process_groups
from workbench.engine._torch import init_default_group, name_groups_from, named_groups, new_group, reset_group_names
from workbench.engine.backends import backend_of
from workbench.engine.backends.base import Backend
from workbench.engine.cancellable_waits import cancellation
from workbench.errors import ClusterError
from workbench.protocol.starting import Address, HostInfo
from workbench.runtime.sockets import PeerSockets

NEVER = timedelta(days=7)
"""Timeout of groups: the workbench detects stalls, and knows when a rank is held; c10d must not end a group."""

AXES = ("replicate", "shard")
"""Axes of a mesh of copies x shards."""

_INTERFACE_OF = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass
class ProcessGroups:
    """The process groups of one rank.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        local_rank: index on its host.
        local_world_size: number of ranks on its host.
        device: this rank's device.
        device_name: display name: ``cuda:1``; for a simulated device, ``device`` is where it computes.
        host: its machine.
        mesh: 1-D mesh over all ranks, axis ``shard``; like all meshes of :meth:`mesh_of` it survives a rebuild.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    device_name: str
    host: HostInfo
    _server: Store | None = None
    _address: Address | None = None
    _variables: dict[str, str] = field(default_factory=dict)
    _sockets: PeerSockets = field(default_factory=PeerSockets)
    _lost: dict[str, tuple[dist.ProcessGroup, list[int]]] = field(default_factory=dict)  # by name, until rebuilt
    _num_named: int = 0
    _refusing: socket.socket | None = None
    _mesh: DeviceMesh | None = None
    _meshes: dict[tuple[int, int], DeviceMesh] = field(default_factory=dict)

    @property
    def _backend(self) -> Backend:
        return backend_of(self.device)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over all ranks; exists once the rank has joined."""
        if self._mesh is None:
            raise ClusterError(f"rank {self.rank} has not joined a process group yet")
        return self._mesh

    def mesh_of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Return the mesh of all ranks with this shape: one axis, or copies x shards; collective at first use.

        Args:
            shape: ``()`` or ``(F,)``, or ``(R, F)``; its product is the number of ranks.
        """
        if len(shape) < 2:
            return self.mesh
        copies, size = shape
        if (copies, size) not in self._meshes:
            with self._sockets.tracked():
                self._meshes[copies, size] = init_device_mesh(self._backend.kind, shape, mesh_dim_names=AXES)
        return self._meshes[copies, size]

    @property
    def backend(self) -> str:
        """Name of c10d's backend, such as ``gloo``."""
        return self._backend.c10d

    @property
    def device_type(self) -> str:
        """Kind of the device, such as ``cpu``, as meshes and c10d name it."""
        return self._backend.kind

    def tracked(self) -> AbstractContextManager[None]:
        """Return a context manager for the creation of a group, which an abort then frees as it frees the others."""
        return self._sockets.tracked()

    def listen(self) -> Address:
        """Open the store at which all ranks meet, on a free port of this host (rank 0 only); return its address."""
        host = self.host.address
        # torch's own listener would bind every address, and look up the name of each rank that connects
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return Address(host=host, port=port)

    def refuse(self) -> Address | None:
        """Reserve a port of this host on which nothing listens; return its address.

        The kernel of this host refuses connections to it, which proves that the host is alive. With several hosts, one
        rank of each host reserves such a port; the others return None.
        """
        if self.local_rank or self.host.address == LOOPBACK:
            return None
        self._refusing = socket.socket()
        self._refusing.bind((self.host.address, 0))
        return Address(host=self.host.address, port=self._refusing.getsockname()[1])

    def join(self, address: Address) -> None:
        """Join the other ranks; collective."""
        self._sockets.store_port = address.port
        self._address = address
        self._set_variables(address)
        self._backend.make_current()
        process_groups.around_creation = self._sockets.tracked
        self._init("0")
        with self._sockets.tracked():
            self._mesh = init_device_mesh(self._backend.kind, (self.world_size,), mesh_dim_names=("shard",))

    def _set_variables(self, address: Address) -> None:
        """Set the environment variables of torchrun and those that select the network interface; until :meth:`leave`.

        gloo would otherwise listen on the address of the host name, and NCCL on an interface of its choice. Interface
        variables that the user has set are kept.
        """
        libraries = ("GLOO_SOCKET_IFNAME",) if self.host.address == LOOPBACK else _INTERFACE_OF
        self._variables = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": address.host,
            "MASTER_PORT": str(address.port),
            **{name: self.host.interface for name in libraries if name not in os.environ},
        }
        os.environ.update(self._variables)

    def _init(self, generation: str) -> None:
        if self._address is None:
            raise ClusterError(f"rank {self.rank} has no store: join first")
        # a connection for each generation: that of the last one may have been shut
        store = TCPStore(self._address.host, self._address.port, is_master=False)
        with self._sockets.tracked():
            init_default_group(
                self._backend.c10d,
                store=PrefixStore(f"generation-{generation}", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=NEVER,
            )
        process_groups.rebuild_all()

    def abort(self, reason: str) -> None:
        """Cancel the engine's waits on this rank until groups are rebuilt; thread-safe, never blocks."""
        cancellation.cancel(reason)

    def shut(self) -> None:
        """Free this rank from a collective, or a wait for the store, that blocks inside C++; thread-safe, never blocks.

        Call :meth:`abort` first, and this once every rank has left what it can leave: a collective that still moves
        data when its peer's socket closes may wait forever to send the rest. :meth:`rebuild` connects anew.
        """
        self._sockets.shut()
        self._sockets.shut_store()

    def rebuild(self, generation: str) -> list[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
        """Rebuild every process group; collective over all ranks.

        A DeviceMesh, and so a DTensor, refers to its groups by name. So groups made here or by the user get their old
        names, and parameters, optimizers and collectives that refer to a mesh keep working.

        Returns:
            pairs of an old group and its replacement.
        """
        if dist.is_initialized():  # else an earlier rebuild failed
            found = {name: (group, dist.get_process_group_ranks(group)) for name, group in named_groups().items()}
            self._lost = {
                name: of for name, of in found.items() if not name.startswith(process_groups.OWN)
            } | self._lost
            self._num_named = max(self._num_named, name_groups_from(0))
            self._destroy()
        reset_group_names()  # equal on all ranks
        cancellation.reset()
        self._init(generation)
        new = self._revive({name: ranks for name, (_, ranks) in self._lost.items()}, self._num_named)
        replaced = [(group, new[name]) for name, (group, _) in self._lost.items() if name in new]
        self._lost, self._num_named = {}, 0
        return replaced

    def _revive(self, known: dict[str, list[int]], number: int) -> dict[str, dist.ProcessGroup]:
        """Make groups with their old names, if all of their ranks had them; return all groups by name.

        Args:
            known: global ranks of this rank's groups by name, the default one first.
            number: the next number that this rank would use in a group's name.
        """
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, (known, number))
        name_groups_from(max(following for _, following in everywhere))
        default = named_groups()
        with self._sockets.tracked():
            made = {  # in the same order on all ranks: a group is complete when all of its ranks are there
                name: new_group(ranks, name, device_type="")
                for name, ranks in sorted(known.items())
                if name not in default and all(everywhere[rank][0].get(name) == ranks for rank in ranks)
            }
        return default | made

    def largest(self, number: int) -> int:
        """Return the largest ``number`` that any rank has; collective over all ranks."""
        agreed = torch.tensor(number, device=self.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def leave(self) -> None:
        """Destroy all groups; without this, the process may crash when it exits."""
        if dist.is_initialized():
            self._destroy()
        if self._refusing is not None:
            self._refusing.close()
        process_groups.forget_all()
        cancellation.reset()  # this process may become another rank
        for name in self._variables:
            os.environ.pop(name, None)

    def _destroy(self) -> None:
        """Destroy c10d's groups, without waiting for peers."""
        self._sockets.shut()
        self._backend.destroy_process_groups()
