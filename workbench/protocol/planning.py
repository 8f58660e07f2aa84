"""The cluster of a plan, and the requests to its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from workbench.base.machines import Machine, machine
from workbench.base.text_formats import plural
from workbench.errors import UsageError
from workbench.events import Category
from workbench.protocol.commands import Reshard

PLANNED = "WORKBENCH_PLAN"
"""Environment variable that tells a script that it is planned."""


CALLED = "planned_model"
"""Variable of the first model that a script calls."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan's request.

    Attributes:
        script: path of the script, or name of the module.
        args: its arguments.
        module: whether it is a module.
        device: a name of :data:`workbench.base.machines.MACHINES`, or a file of a calibration.
        num_ranks: number of ranks.
        num_hosts: number of hosts.
        steps: number of steps after which the script is ended.
        out: the trace file to write.
        change: how the first model that the script calls is sharded then; what is not given stays as it is.
        checkpoint: classes whose modules that model calls within a checkpoint.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    device: str
    num_ranks: int
    num_hosts: int
    steps: int
    out: str
    change: Reshard = field(default_factory=lambda: Reshard(CALLED))
    checkpoint: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedPolicy:
    """A policy under which a program was planned.

    Attributes:
        options: the options that differ from the program's own policy, as typed; empty: none.
        line: the line that plans it.
        num_ranks: number of ranks.
        peak_bytes: most bytes in use at once, of one rank.
        peak_bytes_by_category: bytes of each class at that moment.
        step_ns: duration of a step.
        fits: whether the peak fits.
        is_best: whether it fits, and no other policy that was planned needs less memory and is as fast, or is faster
            and needs as little.
    """

    options: str
    line: str
    num_ranks: int
    peak_bytes: int
    peak_bytes_by_category: Mapping[Category, int]
    step_ns: int
    fits: bool
    is_best: bool = False

    @property
    def words(self) -> str:
        """The options, in words if there are none."""
        return self.options or "as it is"


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """The ranks of a plan, one device each.

    Attributes:
        machine: their device.
        num_ranks: number of ranks.
        num_hosts: number of hosts, with equally many ranks each.
    """

    machine: Machine
    num_ranks: int
    num_hosts: int = 1

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host."""
        return self.num_ranks // self.num_hosts

    def seconds(self, sent_bytes: float, ranks: Sequence[int], kind: str = "") -> float:
        """Return the time of a collective on a ring over ``ranks``: alpha-beta, by the slowest link that it crosses.

        Args:
            sent_bytes: what each rank sends.
            kind: of the collective, for a machine that was measured.
            ranks: global ranks of the group.
        """
        if len(ranks) < 2:
            return 0.0
        if self.machine.calibration is not None:
            return self.machine.calibration.collective_ns(kind, sent_bytes, len(ranks)) / 1e9
        crosses = len({rank // self.ranks_per_host for rank in ranks}) > 1
        rate = self.machine.network_rate if crosses else self.machine.link_rate
        return sent_bytes / rate + (len(ranks) - 1) * self.machine.latency_ns / 1e9


MAX_RANKS = 16_384


def most_ranks(device: str) -> int:
    """Return the largest number of ranks that a search tries: on a machine that was measured, as many as measured."""
    found = machine(device)
    return MAX_RANKS if found.calibration is None else found.devices_per_host


def planned_ranks(device: str, num_ranks: int, num_hosts: int | None) -> PlannedRanks:
    """Return the cluster of ``num_ranks`` devices; without ``num_hosts``, as few hosts as their devices need.

    Raises:
        UsageError: the device is unknown, a number is not positive, or the hosts cannot have equally many ranks.
    """
    found = machine(device)
    if num_ranks < 1:
        raise UsageError(f"a plan is for at least 1 rank, not {num_ranks}")
    if found.calibration is not None and (num_ranks > found.devices_per_host or (num_hosts or 1) > 1):
        raise UsageError(
            f"{found.name} was measured with {plural(found.devices_per_host, 'rank')} on one host, which does not say "
            f"how long others take; on one host, workbench calibrate -n {num_ranks} measures them"
        )
    hosts = -(-num_ranks // found.devices_per_host) if num_hosts is None else num_hosts
    if hosts < 1 or num_ranks % hosts:
        raise UsageError(
            f"{num_ranks} ranks do not divide into {hosts} hosts with equally many each; give --ranks, or --hosts, "
            "so that they do"
        )
    return PlannedRanks(machine=found, num_ranks=num_ranks, num_hosts=hosts)
