"""Engines of ipyparallel that are not attached yet, on several hosts."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ipyparallel

from tests.helpers.network_hosts import find
from tests.helpers.waiting import end, wait_until
from workbench.cluster.attached import AttachTarget
from workbench.cluster.local_launch import is_complete

LONG_S, GRACE_S = 60.0, 3.0


@contextmanager
def engines_on(namespaces: Sequence[str], address: str) -> Iterator[AttachTarget]:
    """Run an ipyparallel engine in each network namespace, and their controller here, on ``address``.

    Each namespace simulates a host of the same name.
    """
    with tempfile.TemporaryDirectory(prefix="engines-") as folder, ExitStack() as last:
        security = Path(folder) / "profile_test" / "security"
        where = [f"--ipython-dir={folder}", "--profile=test"]
        _run(last, "ipyparallel.controller", *where, f"--ip={address}", f"--location={address}")
        file = security / "ipcontroller-engine.json"
        wait_until(lambda: is_complete(file), LONG_S)
        for namespace in namespaces:
            _run(last, "ipyparallel.engine", *where, f"--file={file}", in_namespace=namespace)
        client_file = security / "ipcontroller-client.json"
        wait_for_engines(client_file, len(namespaces))
        yield AttachTarget(file=str(client_file))


def _run(last: ExitStack, module: str, *arguments: str, in_namespace: str = "") -> None:
    """Run a module in a new process, in a network namespace or here, until ``last`` closes."""
    command = [sys.executable, "-m", module, *arguments]
    if in_namespace:
        named = f'hostname {in_namespace} && exec "$@"'
        command = [
            find("ip") or "ip",
            "netns",
            "exec",
            in_namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            named,
            "sh",
            *command,
        ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last.callback(end, process, GRACE_S)  # a rank that waits in a collective does not react to SIGTERM


def wait_for_engines(client_file: Path, num_engines: int) -> None:
    """Wait until this number of engines has registered with the controller that writes the file."""
    wait_until(lambda: is_complete(client_file), LONG_S)
    with ipyparallel.Client(str(client_file)) as client:
        client.wait_for_engines(num_engines, timeout=LONG_S, interactive=False)
