"""Ranks on three hosts of a network, two on each, which ipyparallel starts over SSH."""

import os
import sys

import pytest

from tests.helpers import network_hosts
from workbench.errors import ClusterError

ON_HOSTS = [
    pytest.mark.cluster,
    pytest.mark.needs("hosts"),
    pytest.mark.timeout(900),  # SSH starts the engines one by one, each after three other Python processes
]
"""Marks of a file with such ranks."""

CONFIG = """
c = get_config()
c.SSHLauncher.ssh_cmd = ["ssh", "-F", {ssh!r}]
c.SSHLauncher.scp_cmd = ["scp", "-F", {ssh!r}]
c.SSHLauncher.remote_python = {python!r}
c.SSHLauncher.poll_seconds = 3600  # it waits for each engine in a process of its own, and every minute in a new one
c.SSHEngineSetLauncher.engines = {engines!r}
c.SSHEngineSetLauncher.environment = {environment!r}
"""

TRIES = 3
"""ipyparallel waits 10 s for a host's first reply, which a busy machine may exceed."""


@pytest.fixture(scope="module")
def network_of_hosts(tmp_path_factory):
    with network_hosts.network_of(3, tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture(scope="module")
def profile_of_hosts(network, tmp_path_factory):
    """The directory of a profile with the addresses of the hosts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ipython = tmp_path_factory.mktemp("ipython")
        monkeypatch.setenv("IPYTHONDIR", str(ipython))
        directory = ipython / "profile_hosts"
        (directory / "startup").mkdir(parents=True)
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        config = CONFIG.format(
            ssh=str(network.ssh_config),
            python=sys.executable,
            engines=dict.fromkeys(network.addresses, 2),
            environment={"PYTHONPATH": path, "IPYTHONDIR": str(ipython), "OMP_NUM_THREADS": "1"},
        )
        (directory / "ipcluster_config.py").write_text(config)
        yield directory


def start(bench):
    """Start ranks, again if a host was too busy to answer."""
    for tries_left in reversed(range(TRIES)):
        try:
            bench.start()
            break
        except ClusterError as error:
            if not tries_left or "Timeout of 10s" not in str(error):
                raise


def told_by(bench, expression, rank):
    written = []
    bench.run_cell(f"print({expression})", [rank], on_output=written.append)
    return "".join(output.text for output in written).strip()
