"""A Jupyter kernel with ranks of its own: whatever happens to it, nothing stays."""

import os
import signal

import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

SETUP = """
%load_ext workbench
%fsdp start -n 2 --device cpu
import psutil
print("family", *(p.pid for p in psutil.Process().children(recursive=True)))
"""


@pytest.fixture
def kernel():
    """A fresh IPython kernel of this Python and a client of it."""
    manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def run(client, code):
    """Run a cell and return what it wrote; fail with what it raised."""
    texts = []

    def keep(message):
        if message["msg_type"] == "stream":
            texts.append(message["content"]["text"])

    reply = client.execute_interactive(code, output_hook=keep, timeout=90)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(texts)


def family(client):
    """Processes that the kernel started."""
    line = next(line for line in run(client, SETUP).splitlines() if line.startswith("family"))
    return [psutil.Process(int(pid)) for pid in line.split()[1:]]


def gone(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("how", ["restart", "shutdown", "kill"])
def test_nothing_outlives_the_kernel(kernel, how):
    manager, client = kernel
    started = family(client)
    assert len(started) >= 4  # two ranks, their controller, the reaper
    if how == "restart":
        manager.restart_kernel()
    elif how == "shutdown":
        manager.shutdown_kernel()
    else:
        os.kill(manager.provisioner.pid, signal.SIGKILL)
    wait_until(lambda: gone(started), timeout_s=20)
