"""A Jupyter kernel with its own ranks: whatever happens to it, nothing is left."""

import os
import signal

import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.helpers.ctrl_c import TOGETHER
from tests.helpers.leaks import is_running
from tests.helpers.notebook_model import CELL
from tests.helpers.pairwise import quick
from tests.helpers.waiting import wait_until
from workbench.base import ports

pytestmark = pytest.mark.cluster

SETUP = """
%load_ext workbench
%fsdp start -n 2 --device cpu
import psutil
print("family", *(p.pid for p in psutil.Process().children(recursive=True)))
"""


@pytest.fixture
def kernel():
    """A fresh IPython kernel of this Python, and a client of it."""
    manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **ports.of_a_kernel())
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def execute(client, code, on_output=lambda text: None):
    """Run a cell; return its status and output. ``heard`` gets each piece of output as it arrives."""
    texts = []

    def keep(message):
        content = message["content"]
        texts.append(content.get("text") or f"{content.get('data', {}).get('text/plain', '')}\n")
        on_output(texts[-1])

    reply = client.execute_interactive(code, output_hook=keep, timeout=250)["content"]
    return reply["status"], "".join([*texts, *reply.get("traceback", ())])


def run(client, code):
    """Run a cell that must not raise, and return its output."""
    status, text = execute(client, code)
    assert status == "ok", text
    return text


def family(client):
    """Return the processes that the kernel started."""
    line = next(line for line in run(client, SETUP).splitlines() if line.startswith("family"))
    return [psutil.Process(int(pid)) for pid in line.split()[1:]]


def gone(processes):
    return not any(map(is_running, processes))


def shard(client):
    run(client, f"%%fsdp\n{CELL}")
    run(client, "%fsdp shard model --wrap Block\n%fsdp step 1")


@pytest.mark.parametrize("inside", quick([False, True], [False]))
@pytest.mark.parametrize("how", quick(["restart", "shutdown", "kill"], ["kill"]))
def test_nothing_outlives_the_kernel(kernel, how, inside):
    manager, client = kernel
    started = family(client)
    assert len(started) >= 4  # two ranks, their controller, the reaper
    if inside:
        shard(client)
        assert "2 ranks stopped before backward" in run(client, "%fsdp step 9 --until backward:blocks.1")
    if how == "restart":
        manager.restart_kernel()
    elif how == "shutdown":
        manager.shutdown_kernel()
    else:
        os.kill(manager.provisioner.pid, signal.SIGKILL)
    wait_until(lambda: gone(started))


ABSENT = """%%fsdp
import time
here = train_step
def train_step():
    print("begins", flush=True)
    if rank == 1:
        time.sleep(60)
    return here()
"""


def test_a_person_presses_stop(kernel):
    """Ctrl-C as a notebook sends it: in a step that an absent rank delays, and in a cell; `%fsdp stop` in a step."""
    manager, client = kernel
    family(client)
    shard(client)

    def press(text):
        if "begins" in text:
            os.kill(manager.provisioner.pid, signal.SIGINT)

    run(client, ABSENT)
    status, text = execute(client, "%fsdp step", press)
    assert (status, text.count("begins")) == ("ok", 1), text
    assert "rank 1 stops at the next event" in text
    # a rank that the machine delays for a moment is reported as not answering
    wait_until(lambda: "rank 0 held; rank 1 running" in run(client, "%fsdp where"))
    assert "The ranks are idle again" in run(client, "%fsdp abort")
    status, text = execute(client, f"%%fsdp\n{TOGETHER}time.sleep(60)", press)
    assert (status, "Interrupted. The ranks are idle again" in text) == ("error", True), text
    run(client, "%%fsdp\ntrain_step = here")
    assert "1 step, loss" in run(client, "%fsdp step")
    assert "stopped before optimizer" in run(client, "%fsdp step --until optimizer")
    assert "Ranks stopped. The trace is kept" in run(client, "%fsdp stop")
    left = psutil.Process(manager.provisioner.pid).children(recursive=True)
    assert len(left) == 2  # those kept for the next start
    assert all(str(process.pid) in run(client, "%fsdp status") for process in left)
    assert "No ranks are running. Start them with %fsdp start" in execute(client, "%fsdp continue")[1]
