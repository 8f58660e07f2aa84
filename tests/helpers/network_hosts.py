"""Several simulated hosts on one machine: network namespaces joined by a switch.

Each has a name, an address and an sshd. On the network, each behaves as a host: it reaches what listens on the others'
addresses, and nothing of their loopback interface. Its clock differs too: in its time namespace, the machine was booted
some hours earlier. Files, memory and processes are those of the machine.
"""

import fcntl
import functools
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import psutil

from tests.helpers.network_switch import DEVICE, Cables, Port, joined
from tests.helpers.waiting import wait_until

NEEDED = ("ip", "sshd", "ssh", "ssh-keygen", "unshare")
NETWORK = "10.203.7"  # a private range; the machine's only new route is the one to it
PORT = 22
INTERFACE = "wbtest0"
"""This machine's interface to the hosts; it stays until :func:`take_away`.

A browser aborts its requests when its machine loses an address (ERR_NETWORK_CHANGED), and other tests use pages
meanwhile.
"""
LOCK = Path("/run/lock/workbench-test-hosts")
HOURS = (7, 3, 26)
"""Hours by which the clocks of the hosts are ahead of this machine's, repeated for further hosts."""

SSHD = """
Port {port}
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
Subsystem sftp internal-sftp
SetEnv HOME={directory}
"""

SSH = """
Host {network}.*
  User root
  IdentityFile {directory}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  BatchMode yes
"""


@functools.cache
def why_not(needed: tuple[str, ...] = NEEDED) -> str:
    """Return why this machine cannot simulate hosts, empty if it can; ``needed``: the programs required."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.getuid() != 0:
        return "only root can make network namespaces"
    missing = [name for name in needed if find(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; on Debian: apt-get install iproute2 openssh-server openssh-client"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as error:
        return f"no network interface can be made here: {error}"
    name = f"wbtry{os.getpid()}"  # several processes may try at the same time
    tried = subprocess.run([find("ip") or "ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    tried = subprocess.run([*ahead_by(1), "true"], capture_output=True, text=True, check=False)
    return f"no time namespace can be made here: {tried.stderr.strip()}" if tried.returncode else ""


def ahead_by(hours: int) -> list[str]:
    """Return the beginning of a command whose clock is to be ahead of this machine's."""
    seconds = str(3600 * hours)
    return ["unshare", "--time", "--fork", "--kill-child", "--monotonic", seconds, "--boottime", seconds]


def find(program: str) -> str | None:
    """Return the path of a program, also in the folders for administrators; None if it is not installed."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True)
class Hosts:
    """The hosts.

    Attributes:
        names: host name of each.
        addresses: address of each on the network that joins them; ssh uses it.
        here: address of this machine on that network.
        interface: name of this machine's interface to it.
        cables: the switch; its port 0 is this machine's, the others are the hosts' in order.
        ssh_config: file for ``ssh -F``, which gives access without a password.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    here: str
    interface: str
    cables: Cables
    ssh_config: Path

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        """Unplug the cable of a host; its processes continue to run."""
        with self.cables.unplugged(1 + self.names.index(name)):
            yield


@contextmanager
def network_of(num_hosts: int, directory: Path) -> Iterator[Hosts]:
    """Create hosts; afterwards remove all but :data:`INTERFACE`."""
    names = tuple(f"wbhost{number}" for number in range(1, num_hosts + 1))
    addresses = tuple(f"{NETWORK}.{number + 1}" for number in range(1, num_hosts + 1))
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd confines its children there; its package normally creates it
    for key in ("host_key", "key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key))
    config = directory / "ssh_config"
    config.write_text(SSH.format(network=NETWORK, directory=directory))
    with ExitStack() as last:
        fcntl.flock(last.enter_context(LOCK.open("wb")), fcntl.LOCK_EX)  # until another process's hosts are gone
        _clear()
        last.callback(_clear)
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _have_interface()
        cables = last.enter_context(joined([Port("", INTERFACE), *(Port(name, "eth0") for name in names)]))
        for name, address, hours in zip(names, addresses, cycle(HOURS), strict=False):
            bring_up("eth0", address, "-n", name)
            _serve(last, name, address, directory, hours)
        yield Hosts(names, addresses, f"{NETWORK}.1", INTERFACE, cables, config)


def _have_interface() -> None:
    if _has_interface():
        _run("ip", "neighbour", "flush", "dev", INTERFACE)  # other hosts had these addresses
        return
    _run("ip", "tuntap", "add", "dev", INTERFACE, "mode", "tap")
    _run("ip", "link", "set", INTERFACE, "addrgenmode", "none")  # otherwise it gets a further address while joined
    bring_up(INTERFACE, f"{NETWORK}.1")


def _has_interface() -> bool:
    return Path("/sys/class/net", INTERFACE).exists()


def _is_joined() -> bool:
    """Return whether a switch has the interface open."""
    try:
        return Path("/sys/class/net", INTERFACE, "carrier").read_text() == "1\n"
    except OSError:  # it does not exist, or is not up
        return False


def take_away() -> None:
    """Remove the interface, if it exists and no process has hosts."""
    if not _has_interface():
        return
    with LOCK.open("wb") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _run("ip", "link", "delete", INTERFACE)


def bring_up(interface: str, address: str, *where: str) -> None:
    """Set an interface's address; its queue for the switch has room for as many frames as TCP ever sends."""
    _run("ip", *where, "address", "add", f"{address}/24", "dev", interface)
    _run("ip", *where, "link", "set", interface, "txqueuelen", "10000", "up")


def _serve(last: ExitStack, name: str, address: str, directory: Path, hours: int) -> None:
    """Start an sshd on the host ``name``, with this host name."""
    config = directory / f"sshd_config.{name}"
    config.write_text(SSHD.format(port=PORT, address=address, directory=directory))
    serve = f"hostname {name} && exec {find('sshd')} -D -e -f {config}"
    log = last.enter_context((directory / f"sshd.{name}.log").open("wb"))
    command = ["ip", "netns", "exec", name, *ahead_by(hours), "unshare", "--uts", "sh", "-c", serve]
    sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    last.callback(_end, psutil.Process(sshd.pid), sshd)
    wait_until(lambda: _is_open(address) or sshd.poll() is not None)
    if sshd.poll() is not None:
        raise RuntimeError((directory / f"sshd.{name}.log").read_text())


def _clear() -> None:
    """Remove all hosts, including those of a killed process."""
    wait_until(lambda: not _is_joined())  # the switch of a killed process ends a moment later
    for name in sorted(each.name for each in Path("/run/netns").glob("wbhost*")):
        # running processes would keep the namespace alive
        for pid in pids_on(name):
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()
        _run("ip", "netns", "delete", name)


def pids_on(name: str) -> list[int]:
    """Return the ids of the processes on a host, its sshd included."""
    found = subprocess.run([find("ip") or "ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return sorted(map(int, found.stdout.split()))


def _is_open(address: str) -> bool:
    try:
        socket.create_connection((address, PORT), timeout=1).close()
    except OSError:
        return False
    return True


def _end(process: psutil.Process, popen: subprocess.Popen[bytes]) -> None:
    """End one of our processes and its descendants."""
    for each in (*process.children(recursive=True), process):
        if each.is_running():
            each.kill()
    popen.wait()


def _run(program: str, *arguments: str) -> None:
    subprocess.run([find(program) or program, *arguments], check=True, capture_output=True)
