"""A running cluster to attach to: its controller and engines were started elsewhere and outlive this process."""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from workbench.cluster.engine_probe import identity
from workbench.cluster.engine_provider import EngineProvider, Registered, unused
from workbench.cluster.local_launch import profile_directory
from workbench.cluster.pending_replies import ranks_in_words
from workbench.errors import UsageError
from workbench.protocol.starting import ClusterOwner


def holder_here() -> ClusterOwner:
    """Return this process as an owner of ranks."""
    me = psutil.Process()
    return ClusterOwner(
        user=getpass.getuser(),
        host=socket.gethostname(),
        identity=identity(),
        pid=me.pid,
        created_s=me.create_time(),
    )


def is_gone(holder: ClusterOwner) -> bool:
    """Return whether the holder's process has ended; False for one on another host, where that is unknown."""
    if holder.identity != identity():
        return False
    try:
        process = psutil.Process(holder.pid)
        return process.create_time() != holder.created_s or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


BOOT_S = 180.0
"""Time in seconds that engines may take to import torch, perhaps all of them from one disk."""

_CLIENT = "ipcontroller{}-client.json"
_NEEDED = {"interface", "registration", "notification", "control", "signature_scheme"}


@dataclass(frozen=True, kw_only=True)
class AttachTarget:
    """The cluster to attach to; by default the only one of the default profile.

    Attributes:
        profile: IPython profile whose directory has its connection files; None: the default profile.
        cluster_id: its ipyparallel cluster id; empty: the only cluster of the profile.
        file: its connection file for clients, ``ipcontroller-client.json``; empty: searched for in the profile.
    """

    profile: str | None = None
    cluster_id: str = ""
    file: str = ""

    @property
    def words(self) -> str:
        """The target as the user named it, for messages."""
        if self.file:
            return f"the cluster of {self.file}"
        name = f"cluster {self.cluster_id!r}" if self.cluster_id else "the cluster"
        return f"{name} of profile {self.profile or 'default'!r}"

    def connection_file(self) -> Path:
        """Return its connection file for clients.

        Raises:
            UsageError: it does not exist, is another kind of file, or is ambiguous.
        """
        found = Path(self.file).expanduser() if self.file else self._in_profile()
        try:
            content = found.read_bytes()
            known = json.loads(content)
        except OSError as error:
            raise UsageError(f"{found} cannot be read: {error.strerror}") from error
        except ValueError as error:
            is_empty = "is empty: if the controller is starting, try again in a moment"
            raise UsageError(f"{found} {'is not a connection file of ipyparallel' if content else is_empty}") from error
        if not isinstance(known, dict) or not known.keys() >= _NEEDED:
            raise UsageError(f"{found} is not ipyparallel's connection file for clients, {_CLIENT.format('')}")
        return found

    def _in_profile(self) -> Path:
        name = self.profile or "default"
        security = profile_directory(name) / "security"
        wanted = security / _CLIENT.format(f"-{self.cluster_id}" if self.cluster_id else "")
        there = sorted(security.glob(_CLIENT.format("*")))
        if wanted.exists() or (there == [wanted]):
            return wanted
        if len(there) == 1 and not self.cluster_id:
            return there[0]
        ids = [path.name.removeprefix("ipcontroller-").removesuffix("-client.json") for path in there]
        known = (
            f"running: {', '.join(ids)}; choose one with --cluster-id ID"
            if ids
            else "start one with ipcluster start, or --file F"
        )
        chosen = f" with the id {self.cluster_id!r}" if self.cluster_id else ""
        if ids and not chosen:
            raise UsageError(
                f"several clusters of profile {name!r} are running: {', '.join(ids)}; choose one with --cluster-id ID"
            )
        raise UsageError(f"no cluster{chosen} of profile {name!r} is running; {known}")


class AttachedEngines(EngineProvider):
    """Provider of engines that run already, and keep running: how their processes end is not known.

    Args:
        target: which cluster.
        num_ranks: how many of its engines are needed; None: at least one.
        timeout_s: time in seconds it may take to find them.
    """

    def __init__(self, target: AttachTarget, num_ranks: int | None, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self._num_ranks = num_ranks
        self._file = target.connection_file()

    def wait_for_controller(self) -> Path:
        """Return the controller's connection file for clients."""
        return self._file

    def wait_for_engines(self, registered: Registered) -> tuple[str, ...]:
        """Return the session id of every registered engine.

        Raises:
            UsageError: there are fewer than needed.
        """
        engines = registered()
        if len(engines) < (self._num_ranks or 1):
            what = f"{len(engines)} engines, not {self._num_ranks}" if engines else "no engines"
            raise UsageError(f"the cluster of {self._file} has {what}: start more with ipcluster engines -n N")
        self.deadline = max(self.deadline, time.monotonic() + BOOT_S)
        return tuple(sorted(engines, key=engines.__getitem__))

    def replace(self, ranks: Sequence[int], registered: Registered, used: Sequence[str]) -> dict[int, str]:
        """Return an engine that is no rank yet for each of ``ranks``.

        Raises:
            UsageError: the cluster has too few.
        """
        free = unused(registered, used)
        if len(free) < len(ranks):
            more = len(ranks) - len(free)
            raise UsageError(
                f"the cluster of {self._file} has no engine for {ranks_in_words(ranks)}: start one with "
                f"ipcluster engines -n {more}, on the same host, then %fsdp heal"
            )
        self.deadline = time.monotonic() + BOOT_S
        return dict(zip(ranks, free, strict=False))

    def advice(self, _rank: int | None, *_others: int | None) -> str:
        """Return what to check and to do when the cluster does not answer."""
        return (
            f"; check that it is running and can be reached from here, at the address in {self._file}, and that no "
            f"other notebook keeps its engines busy"
        )
