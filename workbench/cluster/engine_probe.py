"""What a process says of itself before it is a rank. The text of this file runs on every engine.

It is sent as text, for an engine may lack the workbench, or have another one: so it needs nothing but Python and what
ipyparallel needs itself. Torch, which takes seconds, is imported only where devices are to be counted.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module, metadata, util
from typing import Any

ELSEWHERE = "192.0.2.1"  # of a network that nobody has (RFC 5737): the way there is the default route


def survey(interface: str, *, count_for: str) -> str:
    """Return a JSON object with the fields of :class:`workbench.cluster.rank_assignment.EngineInfo`.

    Args:
        interface: whose address other hosts are to use, or several, of which it has one: ``eth0,ib0``; empty: the one
            on the route to the controller.
        count_for: the notebook's version of the workbench, if devices are to be counted; they are where this one has
            the same. Empty: they are not.
    """
    interfaces = interfaces_here()
    named = [interfaces[name] for name in interface.split(",") if name in interfaces]
    address = "".join(named[:1]) if interface else _route()
    torch, workbench = _torch(), workbench_version()
    said: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "identity": identity(),
        "executable": sys.executable,
        "python": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "torch": torch,
        "workbench": workbench,
        "devices": _devices() if torch and workbench and workbench == count_for else {},
        "address": address,
        "interface": next((name for name, own in interfaces.items() if own == address), ""),
        "interfaces": sorted(interfaces),
        "world": _world(),
    }
    return json.dumps(said)


def _world() -> Any:  # noqa: ANN401 - JSON data
    """Return what this engine is part of, if it is a rank already."""
    control = sys.modules.get("workbench.cluster._ipyparallel")
    return None if control is None else control.standing["world"]


def identity() -> str:
    """Name this host: processes on it share memory and its loopback interface.

    A network namespace counts as a host of its own, as a container's does: what listens on loopback in one cannot be
    reached from another, though both may see each other's processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()


def interfaces_here() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one."""
    import psutil  # noqa: PLC0415 - this file is a text first of all

    found = psutil.net_if_addrs().items()
    return {name: a.address for name, addresses in found for a in addresses if a.family == socket.AF_INET}


def _route() -> str:
    """Return this host's address on the way to the controller; if that is a tunnel's end, on the default route."""
    from ipyparallel.engine.app import IPEngine  # noqa: PLC0415 - this file is a text first of all

    controller = IPEngine.instance().registration_url.rpartition("/")[2].rpartition(":")[0]
    address = address_towards(controller)
    return address if not address.startswith("127.") else address_towards(ELSEWHERE) or address


def address_towards(host: str) -> str:
    """Return the address from which ``host`` would be reached; empty: it cannot be. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def workbench_version() -> str:
    """Return the version of the workbench here; empty: there is none."""
    return str(import_module("workbench").__version__) if util.find_spec("workbench") else ""


def _devices() -> dict[str, int]:
    """Return how many of each kind there are."""
    return dict(import_module("workbench.engine.backends").counts())
