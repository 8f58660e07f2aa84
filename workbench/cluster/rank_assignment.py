"""Which engine becomes which rank, and whether the engines fit together: pure functions of :class:`EngineInfo`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workbench.base.devices import AUTO, DEVICES, HOST
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.errors import UsageError
from workbench.protocol.starting import Address, Boot, ConnectReply, HostInfo, World


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What an engine reports about itself and its host (:mod:`workbench.cluster.engine_probe`).

    Attributes:
        pid: process id.
        host: host name.
        identity: identity of the host; engines with equal ones share memory and the loopback interface.
        executable: path of its Python.
        python: version, such as ``3.12``.
        torch: version; empty: not installed.
        workbench: version; empty: not installed.
        devices: number of devices on the host, by each kind that ranks do not share; empty if not counted.
        address: address of the host for other hosts; empty: it has none on the chosen interface.
        interface: network interface with this address.
        interfaces: names of all interfaces with an address.
        world: the world it belongs to, if it is a rank already.
    """

    pid: int
    host: str
    identity: str
    executable: str
    python: str
    torch: str
    workbench: str
    devices: dict[str, int]
    address: str
    interface: str
    interfaces: tuple[str, ...]
    world: World | None = None


@dataclass(frozen=True, kw_only=True)
class RankAssignment:
    """An engine and the rank it becomes.

    Attributes:
        engine: its session id.
        info: its report about itself.
        local_rank: its number on its host, from 0.
        local_world_size: ranks on its host.
        label: unique name of its host.
    """

    engine: str
    info: EngineInfo
    local_rank: int
    local_world_size: int
    label: str


def seats(found: Mapping[str, EngineInfo], num_ranks: int | None = None) -> tuple[RankAssignment, ...]:
    """Return the first ``num_ranks`` engines (None: all) in rank order; the ranks of a host are consecutive.

    Hosts are ordered by name, ``node2`` before ``node10``; engines of a host keep their order in ``found``.
    """
    return in_order(dict(sorted(found.items(), key=lambda item: _host_key(item[1]))[:num_ranks]))


def in_order(found: Mapping[str, EngineInfo]) -> tuple[RankAssignment, ...]:
    """Return the engines as ranks in this order."""
    labels = _labels(found.values())
    on_host = Counter(info.identity for info in found.values())
    before = Counter[str]()
    result = []
    for engine, info in found.items():
        before[info.identity] += 1
        result.append(
            RankAssignment(
                engine=engine,
                info=info,
                local_rank=before[info.identity] - 1,
                local_world_size=on_host[info.identity],
                label=labels[info.identity],
            )
        )
    return tuple(result)


def _host_key(info: EngineInfo) -> tuple[list[tuple[int, str]], str]:
    """Return the sort key of a host; numbers in its name compare as numbers."""
    parts = re.findall(r"\d+|\D+", info.host)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], info.identity


def _labels(info: Iterable[EngineInfo]) -> dict[str, str]:
    """Return a unique name for each host, by identity; hosts of the same name get their address appended."""
    hosts = {one.identity: one for one in info}
    count = Counter(one.host for one in hosts.values())
    return {
        identity: one.host if count[one.host] == 1 else f"{one.host} ({one.address or identity})"
        for identity, one in hosts.items()
    }


def misfits(seated: Sequence[RankAssignment], workbench: str) -> list[str]:
    """Return a sentence for each host that cannot take part: why, and what to do.

    Args:
        seated: the engines.
        workbench: the notebook's version, which all must have.
    """
    python = _most(seat.info.python for seat in seated)
    torch = _most(_public(seat.info.torch) for seat in seated if seat.info.torch)
    sentences = [
        f"{seat.label} has {problem} (its engines run {seat.info.executable})"
        for seat in seated
        if (problem := _misfit(seat.info, workbench, python, torch))
    ]
    return list(dict.fromkeys(sentences))


def _misfit(info: EngineInfo, workbench: str, python: str, torch: str) -> str:
    """Return what is wrong with an engine, and what to install; empty: nothing."""
    if info.python != python:
        return f"Python {info.python}, but most have {python}: use that version for its engines"
    if not info.workbench:
        return f"no workbench: install version {workbench}"
    if info.workbench != workbench:
        return f"workbench {info.workbench}, but this notebook has {workbench}: install that version"
    if not info.torch:
        return f"no torch: install {f'version {torch}' if torch else 'it'}"
    if _public(info.torch) != torch:
        return f"torch {info.torch}, but most have {torch}: install that version"
    return ""


def _most(versions: Iterable[str]) -> str:
    """Return the most frequent version, the first one of a tie; empty if there is none."""
    return next((version for version, _ in Counter(versions).most_common(1)), "")


def _public(version: str) -> str:
    """Return a version without its local part: ``2.13.0+cu130`` -> ``2.13.0``."""
    return version.partition("+")[0]


def boots(seated: Sequence[RankAssignment], device: str, interface: str = "") -> dict[int, Boot]:
    """Return the boot request of each rank.

    Args:
        seated: the engines, by rank.
        device: one of :data:`workbench.base.devices.CHOICES`.
        interface: network interface between the hosts, as given by the user; empty: not given.

    Raises:
        UsageError: a host has fewer devices than ranks, or other hosts cannot reach it; a sentence for each.
    """
    settled = _settle_device(seated, device)
    is_alone = len({seat.info.identity for seat in seated}) == 1
    if not is_alone:
        _check_addresses(seated, interface)
    return {
        rank: Boot(
            rank=rank,
            world_size=len(seated),
            local_rank=seat.local_rank,
            local_world_size=seat.local_world_size,
            device=settled,
            host=HostInfo(
                name=seat.label,
                identity=seat.info.identity,
                address=LOOPBACK if is_alone else seat.info.address,
                interface=LOOPBACK_INTERFACE if is_alone else seat.info.interface,
            ),
        )
        for rank, seat in enumerate(seated)
    }


def _settle_device(seated: Sequence[RankAssignment], device: str) -> str:
    """Return the device kind of all ranks: ``device``, or the kind that :data:`.AUTO` resolves to."""
    if device == AUTO:
        counted = [kind for kind in DEVICES if kind in seated[0].info.devices]
        return next((kind for kind in counted if not _lacking(seated, kind)), HOST)
    if lacking := _lacking(seated, device):
        raise UsageError(
            "\n".join(few_devices(s.label, s.local_world_size, s.info.devices[device], device) for s in lacking)
        )
    return device


def _lacking(seated: Sequence[RankAssignment], kind: str) -> list[RankAssignment]:
    """Return one seat of each host that has fewer devices of a kind than ranks."""
    counted = [seat for seat in seated if kind in seat.info.devices]
    return list({seat.label: seat for seat in counted if seat.info.devices[kind] < seat.local_world_size}.values())


def few_devices(host: str, needed: int, there: int, kind: str) -> str:
    """Return the message that a host has only ``there`` devices for ``needed`` ranks, and what to do."""
    need = f"{needed} ranks need {needed} {kind} devices" if needed > 1 else f"1 rank needs 1 {kind} device"
    fewer = f", or start at most {there} there" if there else ""
    return f"{need}, but {host} has {there}: use --device {HOST}{fewer}"


def _check_addresses(seated: Sequence[RankAssignment], interface: str) -> None:
    without = {seat.label: seat.info for seat in seated if seat.info.address in {"", LOOPBACK}}
    wrong = [
        f"{label} has no address on {interface!r}; it has {', '.join(info.interfaces)}: --interface NAME"
        if interface
        else f"{label} has no address that other hosts can reach: --interface NAME, one of {', '.join(info.interfaces)}"
        for label, info in without.items()
    ]
    if wrong:
        raise UsageError("\n".join(wrong))


def lookouts(ranks: Sequence[ConnectReply]) -> dict[int, dict[str, Address]]:
    """Return which rank monitors which hosts: their addresses by host name, by rank.

    The first host monitors all others, and the second one monitors the first.
    """
    hosts = [(rank, rank.refuses) for rank in ranks if rank.refuses is not None]
    if len(hosts) < 2:
        return {}
    (first, at), *others = hosts
    return {first.rank: {other.host: there for other, there in others}, others[0][0].rank: {first.host: at}}
