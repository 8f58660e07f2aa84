"""Engines of ipyparallel that are not attached yet, of a profile or on several hosts."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ipyparallel
import pytest

from tests.helpers.waiting import end, wait_until
from tests.helpers.warm_python import WARM
from workbench.cluster.attached import AttachTarget
from workbench.cluster.local_launch import is_complete

LONG_S, GRACE_S = 60.0, 3.0


_ON_HOST = """
import ctypes, runpy, socket, sys
from tests.helpers.network_switch import enter
namespace = sys.argv.pop(1)
enter(namespace)
ctypes.CDLL(None).unshare(0x04000000)  # CLONE_NEWUTS: the name of the host is its own
socket.sethostname(namespace)
runpy.run_module("ipyparallel.engine", run_name="__main__", alter_sys=True)
"""


@contextmanager
def engines_on(namespaces: Sequence[str], address: str, python: str = sys.executable) -> Iterator[AttachTarget]:
    """Run an ipyparallel engine in each network namespace, and their controller here, on ``address``.

    Each namespace simulates a host of the same name. ``python`` runs the engines.
    """
    with tempfile.TemporaryDirectory(prefix="engines-") as folder, ExitStack() as last:
        security = Path(folder) / "profile_test" / "security"
        where = [f"--ipython-dir={folder}", "--profile=test"]
        controller = [sys.executable, "-m", "ipyparallel.controller"]
        _run(last, *controller, *where, f"--ip={address}", f"--location={address}")
        file = security / "ipcontroller-engine.json"
        wait_until(lambda: is_complete(file), LONG_S)
        for namespace in namespaces:
            _run(last, python, "-c", _ON_HOST, namespace, *where, f"--file={file}")
        client_file = security / "ipcontroller-client.json"
        wait_for_engines(client_file, len(namespaces))
        yield AttachTarget(file=str(client_file))


def _run(last: ExitStack, *command: str) -> None:
    """Run a command until ``last`` closes."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    last.callback(end, process, GRACE_S)  # a rank that waits in a collective does not react to SIGTERM


@pytest.fixture(scope="module")
def running_profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a profile with a running cluster of three engines."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ipython = tmp_path_factory.mktemp("ipython")
        monkeypatch.setenv("IPYTHONDIR", str(ipython))
        profile = ipython / "profile_running"
        (profile / "startup").mkdir(parents=True)
        engine = [WARM.executable(), "-m", "ipyparallel.engine"]
        (profile / "ipcluster_config.py").write_text(f"get_config().EngineLauncher.engine_cmd = {engine!r}")
        command = [sys.executable, "-m", "ipyparallel.cluster", "start", "-n", "3"]
        with subprocess.Popen(
            [*command, "--profile=running", "--cluster-id=one"], stderr=subprocess.DEVNULL
        ) as started:
            try:
                # ipcluster itself reports them only half a minute later
                wait_for_engines(profile / "security" / "ipcontroller-one-client.json", 3)
                yield profile
            finally:
                started.terminate()


def wait_for_engines(client_file: Path, num_engines: int) -> None:
    """Wait until this number of engines has registered with the controller that writes the file."""
    wait_until(lambda: is_complete(client_file), LONG_S)
    with ipyparallel.Client(str(client_file)) as client:
        client.wait_for_engines(num_engines, timeout=LONG_S, interactive=False)


def ipyparallel_ids(client_file: Path) -> list[int]:
    """Return the ids of the engines that a controller has."""
    with ipyparallel.Client(str(client_file)) as client:
        return client.ids
