"""An engine's report about itself and its host, before it is a rank. The text of this file runs on every engine.

It is sent as text, as an engine may lack the workbench or have another version, so it depends only on Python and on
ipyparallel's own dependencies. Torch takes seconds to import, so it is imported only to count devices.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib import import_module, metadata, util
from typing import Any

ELSEWHERE = "192.0.2.1"  # reserved network (RFC 5737), so its route is the default route


def survey(interface: str, *, count_for: str) -> str:
    """Return a JSON object with the fields of :class:`workbench.cluster.rank_assignment.EngineInfo`.

    Args:
        interface: network interface whose address other hosts use, or a list of which this host has one:
            ``eth0,ib0``; empty: the interface of the route to the controller.
        count_for: the notebook's version of the workbench; devices are counted if this host has the same. Empty:
            devices are not counted.
    """
    interfaces = interfaces_here()
    named = [interfaces[name] for name in interface.split(",") if name in interfaces]
    address = "".join(named[:1]) if interface else _route()
    torch, workbench = _torch(), workbench_version()
    info: dict[str, Any] = {
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
    return json.dumps(info)


def _world() -> Any:  # noqa: ANN401 - JSON data
    """Return the world of this engine if it is a rank already, else None."""
    control = sys.modules.get("workbench.cluster._ipyparallel")
    return None if control is None else control.standing["world"]


def identity() -> str:
    """Return the identity of this host, on which processes share memory and the loopback interface.

    A network namespace, such as a container's, counts as a separate host: its loopback sockets cannot be reached from
    another one, even if both see each other's processes.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()


def interfaces_here() -> dict[str, str]:
    """Return the IPv4 address of every network interface that has one."""
    import psutil  # noqa: PLC0415 - this file is sent as text

    found = psutil.net_if_addrs().items()
    return {name: a.address for name, addresses in found for a in addresses if a.family == socket.AF_INET}


def _route() -> str:
    """Return this host's address on the route to the controller; behind a tunnel, that on the default route."""
    from ipyparallel.engine.app import IPEngine  # noqa: PLC0415 - this file is sent as text

    controller = IPEngine.instance().registration_url.rpartition("/")[2].rpartition(":")[0]
    address = address_towards(controller)
    return address if not address.startswith("127.") else address_towards(ELSEWHERE) or address


def address_towards(host: str) -> str:
    """Return this host's address on the route to ``host``; empty: there is no route. Sends nothing."""
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
    """Return the installed version of the workbench; empty: not installed."""
    return str(import_module("workbench").__version__) if util.find_spec("workbench") else ""


def _devices() -> dict[str, int]:
    """Return the number of devices of each kind."""
    return dict(import_module("workbench.engine.backends").counts())
