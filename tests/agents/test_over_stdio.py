"""A client of the SDK and ``workbench mcp`` over standard input and output, with real ranks."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers.leaks import is_running
from tests.helpers.mcp_client import connected
from tests.helpers.recorded_run import record
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.cluster

START_S = 250
BUILD = """\
import torch, torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
"""
TRAIN = """\
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train_step():
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        dist.all_reduce(loss.detach())
    return loss.item()
"""
LEFT_OUT = "if rank == 0:\n        dist.all_reduce(loss.detach())\n    "


@pytest.fixture(scope="module")
def control():
    """A client that leads two ranks."""
    with connected("--control") as found:
        assert found.ok("start", num_ranks=2, device="cpu", wait_s=START_S)["num_ranks"] == 2
        yield found


@pytest.fixture(scope="module")
def viewer(control):
    """A client of a server that only views."""
    with connected() as found:
        yield found


def file_of(connection):
    """Return the connection file of the ranks that a server has started."""
    (controller, _heartbeat) = [
        each for each in psutil.Process(connection.pid).children(recursive=True) if each.name() == "fsdp-controller"
    ]
    log = Path(os.readlink(f"/proc/{controller.pid}/fd/1"))
    return str(log.parent / "profile" / "security" / "ipcontroller-client.json")


def test_a_hang_is_named_and_ended_and_a_viewer_sees_it(control, viewer):
    control.ok("cell", code=BUILD)
    assert control.ok("shard", model="model", wrap=["Linear"])["units"] == ["0", "1"]
    control.ok("cell", code=TRAIN)
    assert control.call("step", wait_s=0)["notices"][0].startswith("step has not ended yet: wait, or abort it")
    cause = wait_until(lambda: control.ok("where")["cause"])
    assert cause["verdict"] == (
        "rank 1 has ended, while rank 0 still issued collectives: all-reduce number 0 of c10d group 0, in cell:9"
    )
    assert "rank 0 is in cell:9 in train_step, if 8 `rank == 0`: dist.all_reduce(loss.detach())" in cause["evidence"]
    assert viewer.ok("attach", file=file_of(control))["holder"].startswith("the notebook of ")
    assert wait_until(lambda: viewer.ok("where")["cause"]) == cause
    for tool in ("step", "abort", "cell", "start"):
        assert "this server only views" in viewer.refused(tool)
    viewer.call("detach")
    assert control.ok("abort")["headline"].startswith("Aborted. The ranks are idle again")
    assert control.call("wait")["error"]["type"] == "Interrupted"


def test_a_wrong_number_is_named(control):
    control.ok("cell", code=BUILD)
    control.ok("shard", model="model", wrap=["Linear"])
    control.ok("cell", code=TRAIN.replace("model.parameters()", "model[0].parameters()").replace(LEFT_OUT, ""))
    (fault,) = control.ok("lint")["faults"]
    assert fault["rule"] == "left-out-of-optimizer"
    control.ok("cell", code=TRAIN.replace(LEFT_OUT, "").replace("loss.backward()", "(rank * loss).backward()"))
    assert control.ok("lint")["faults"] == []
    control.ok("step")
    assert control.ok("verify", wait_s=START_S)["problem"] == ""


def test_what_ranks_write_does_not_disturb_the_protocol(control, caplog):
    code = "import os, sys\nos.write(1, b'to fd 1\\n')\nos.system('echo a child')\nprint('hello', rank, 'é\\n{}')"
    texts = control.ok("cell", code=code)["texts"]
    assert [texts[rank].splitlines()[-2:] for rank in ("0", "1")] == [["hello 0 é", "{}"], ["hello 1 é", "{}"]]
    assert control.ok("status")["headline"] == "2 ranks running"
    assert "Failed to parse" not in caplog.text


def test_a_viewer_says_where_a_recorded_run_is(viewer, tmp_path):
    record(tmp_path)
    assert viewer.ok("where", folder=str(tmp_path))["headline"] == "the run continues, at step 1"


def test_a_lost_rank_is_named(control):
    rank = control.ok("status")["ranks"][1]
    os.kill(rank["pid"], signal.SIGKILL)
    wait_until(lambda: not control.ok("status")["ranks"][1]["alive"])
    error = control.call("cell", code="1")["error"]
    assert (error["type"], error["ranks"]) == ("RankDied", [1])
    assert control.call("stop")["error"] is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_ended_leaves_no_process(number):
    with connected("--control") as found:
        found.ok("start", num_ranks=1, device="cpu", wait_s=START_S)
        server = psutil.Process(found.pid)
        below = server.children(recursive=True)
        assert any(each.name() == "fsdp-controller" for each in below)
        os.kill(found.pid, number)
        wait_until(lambda: not any(map(is_running, below)))
