"""Engines that were started over SSH: how they are waited for while connections break, and ended all at once.

ipyparallel ends them one after the other, in four connections each, with a Python at the other end of most. Here it is
one for a host, with nothing but a shell there.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence
from subprocess import SubprocessError

from ipyparallel.cluster.launcher import SSHLauncher

REACH_S = 10.0
"""How long a host may take to answer at all, in seconds."""

AGAIN_S = 10.0
"""How long after a connection broke a host is asked again, in seconds."""

GRACE_S = 2
"""How long a process of a host may take to end by itself, in seconds."""

_WINDOWS = "Windows_NT"

_END = """
for pid in {pids}; do kill -s TERM -- -$pid; done
n=0
for pid in {pids}; do while [ $n -lt {tenths} ] && kill -s 0 -- -$pid; do sleep 0.1; n=$((n + 1)); done; done
for pid in {pids}; do kill -s KILL -- -$pid; done
rm -f -- {files}
"""


def patient(launcher_class: type[SSHLauncher], gives_up: threading.Event) -> type[SSHLauncher]:
    """Return a launcher that waits for an engine through another connection when one breaks: the engine may run on.

    Args:
        launcher_class: of engines over SSH.
        gives_up: set when nothing is waited for any more.
    """
    one = getattr(launcher_class, "launcher_class", launcher_class)

    def wait_one(self: SSHLauncher, timeout: float) -> int:
        try:
            return int(one.wait_one(self, timeout))
        except (SubprocessError, RuntimeError) as error:
            gives_up.wait(AGAIN_S)
            raise TimeoutError(f"{self.location} could not be asked") from error

    is_patient = _derived(one, wait_one=wait_one)
    return is_patient if one is launcher_class else _derived(launcher_class, launcher_class=is_patient)


def _derived(base: type[SSHLauncher], **attributes: object) -> type[SSHLauncher]:
    """Return a class of the same name, by which it is configured and called in messages."""
    return type(base.__name__, (base,), {"__module__": base.__module__, **attributes})


def by_host(launchers: Sequence[SSHLauncher]) -> list[list[SSHLauncher]]:
    """Return launchers of one engine each, those of a host together; without hosts whose shell is not POSIX's."""
    found: dict[tuple[str, ...], list[SSHLauncher]] = {}
    for launcher in launchers:
        if launcher.ssh_sender.get_shell_info()[0] != _WINDOWS:
            found.setdefault((launcher.location, *launcher.ssh_args), []).append(launcher)
    return list(found.values())


def command_to_end(launchers: Sequence[SSHLauncher]) -> list[str]:
    """Return the command that ends the engines of one host, and removes what they wrote there, in one connection.

    An engine may be inside a collective, where it hears no SIGTERM: what has not ended after :data:`GRACE_S` is killed.
    So is what it has started itself: ipyparallel gives each engine a process group of its own.
    """
    sender = launchers[0].ssh_sender
    pids, files = ([getattr(each, name) for each in launchers] for name in ("pid", "remote_output_file"))
    program = _END.format(pids=" ".join(map(str, pids)), files=shlex.join(files), tenths=10 * GRACE_S)
    one_line = f"exec 2>/dev/null; {'; '.join(program.strip().splitlines())}"
    return [*sender.shell, *sender.args, f"sh -c {shlex.quote(one_line)}"]  # whatever the user's own shell is


def end_there(launchers: Sequence[SSHLauncher]) -> bool:
    """End the engines of one host (:func:`command_to_end`); False if it does not answer."""
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
