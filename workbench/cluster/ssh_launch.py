"""Engines started over SSH: waiting for them across broken connections, and ending all of them in parallel.

ipyparallel ends them one after the other, with four connections each, most of which run Python on the host. Here each
host gets one connection, which needs only a shell there.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence
from subprocess import SubprocessError

from ipyparallel.cluster.launcher import SSHLauncher

REACH_S = 10.0
"""Timeout of a connection to a host, in seconds."""

AGAIN_S = 10.0
"""Delay before reconnecting to a host after a broken connection, in seconds."""

GRACE_S = 2
"""Time between SIGTERM and SIGKILL, in seconds."""

_WINDOWS = "Windows_NT"

_END = """
for pid in {pids}; do kill -s TERM -- -$pid; done
n=0
for pid in {pids}; do while [ $n -lt {tenths} ] && kill -s 0 -- -$pid; do sleep 0.1; n=$((n + 1)); done; done
for pid in {pids}; do kill -s KILL -- -$pid; done
rm -f -- {files}
"""


def patient(launcher_class: type[SSHLauncher], gives_up: threading.Event) -> type[SSHLauncher]:
    """Return a launcher class that reconnects when a connection breaks while it waits for an engine, which may run on.

    Args:
        launcher_class: a launcher class of engines over SSH.
        gives_up: set to end all waits.
    """
    one = getattr(launcher_class, "launcher_class", launcher_class)

    def wait_one(self: SSHLauncher, timeout: float) -> int:
        try:
            return int(one.wait_one(self, timeout))
        except (SubprocessError, RuntimeError) as error:
            gives_up.wait(AGAIN_S)
            raise TimeoutError(f"{self.location} could not be queried") from error

    is_patient = _derived(one, wait_one=wait_one)
    return is_patient if one is launcher_class else _derived(launcher_class, launcher_class=is_patient)


def _derived(base: type[SSHLauncher], **attributes: object) -> type[SSHLauncher]:
    """Return a subclass of the same name, which configuration and messages refer to."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **attributes})


def by_host(launchers: Sequence[SSHLauncher]) -> list[list[SSHLauncher]]:
    """Group launchers of single engines by host; hosts without a POSIX shell are left out."""
    found: dict[tuple[str, ...], list[SSHLauncher]] = {}
    for launcher in launchers:
        if launcher.ssh_sender.get_shell_info()[0] != _WINDOWS:
            found.setdefault((launcher.location, *launcher.ssh_args), []).append(launcher)
    return list(found.values())


def command_to_end(launchers: Sequence[SSHLauncher]) -> list[str]:
    """Return the command that ends the engines of one host and removes their output files there, in one connection.

    An engine inside a collective does not handle SIGTERM, so it is killed after :data:`GRACE_S`. So are its child
    processes: ipyparallel gives each engine its own process group.
    """
    sender = launchers[0].ssh_sender
    pids, files = ([getattr(each, name) for each in launchers] for name in ("pid", "remote_output_file"))
    program = _END.format(pids=" ".join(map(str, pids)), files=shlex.join(files), tenths=10 * GRACE_S)
    one_line = f"exec 2>/dev/null; {'; '.join(program.strip().splitlines())}"
    return [*sender.shell, *sender.args, f"sh -c {shlex.quote(one_line)}"]  # the user's shell may be another


def end_there(launchers: Sequence[SSHLauncher]) -> bool:
    """End the engines of one host (:func:`command_to_end`); return False if it does not answer."""
    try:
        subprocess.run(
            command_to_end(launchers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=REACH_S + GRACE_S,
            check=True,
        )
    except (SubprocessError, OSError):
        return False
    return True
