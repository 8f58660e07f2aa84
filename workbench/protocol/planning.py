"""What a plan is for, and what its rank is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.base.machines import Machine, machine
from workbench.errors import UsageError

PLANNED = "WORKBENCH_PLAN"
"""Environment variable that tells a script that it is planned."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What to plan.

    Attributes:
        script: path of the script, or name of the module.
        args: its arguments.
        module: whether it is a module.
        device: a name of :data:`workbench.base.machines.MACHINES`.
        num_ranks: number of ranks.
        num_hosts: number of hosts.
        steps: number of steps after which the script is ended.
        out: the trace file to write.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    device: str
    num_ranks: int
    num_hosts: int
    steps: int
    out: str


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

    def seconds(self, sent_bytes: float, ranks: Sequence[int]) -> float:
        """Return the time of a collective on a ring over ``ranks``: alpha-beta, by the slowest link that it crosses.

        Args:
            sent_bytes: what each rank sends.
            ranks: global ranks of the group.
        """
        if len(ranks) < 2:
            return 0.0
        crosses = len({rank // self.ranks_per_host for rank in ranks}) > 1
        rate = self.machine.network_rate if crosses else self.machine.link_rate
        return sent_bytes / rate + (len(ranks) - 1) * self.machine.latency_ns / 1e9


def planned_ranks(device: str, num_ranks: int, num_hosts: int | None) -> PlannedRanks:
    """Return the cluster of ``num_ranks`` devices; without ``num_hosts``, as few hosts as their devices need.

    Raises:
        UsageError: the device is unknown, a number is not positive, or the hosts cannot have equally many ranks.
    """
    found = machine(device)
    if num_ranks < 1:
        raise UsageError(f"a plan is for at least 1 rank, not {num_ranks}")
    hosts = -(-num_ranks // found.devices_per_host) if num_hosts is None else num_hosts
    if hosts < 1 or num_ranks % hosts:
        raise UsageError(
            f"{num_ranks} ranks do not divide into {hosts} hosts with equally many each; give --ranks, or --hosts, "
            "so that they do"
        )
    return PlannedRanks(machine=found, num_ranks=num_ranks, num_hosts=hosts)
