"""Ctrl-C, dead ranks and dead kernels, on real ranks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.model import CELL
from tests.waiting import wait_until
from workbench import Workbench
from workbench.errors import Interrupted, RankDied

pytestmark = pytest.mark.cluster


@pytest.fixture
def bench():
    with Workbench(2, device="cpu") as wb:
        wb.run_cell(CELL)
        wb.shard("model", wrap=["Block"])
        wb.step(1)
        yield wb


def press_ctrl_c(after_s):
    timer = threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    return timer


def test_ctrl_c_stops_a_step_which_is_given_up_and_training_goes_on(bench):
    timer = press_ctrl_c(0.5)
    begin = time.monotonic()
    assert "2 ranks stopped before" in str(bench.step(100_000))
    timer.join()
    assert "ready again" in str(bench.abort())
    assert time.monotonic() - begin < 5
    assert bench.step(2).steps_done == 2
    assert bench.verify().ok


def test_ctrl_c_ends_a_cell_that_computes_or_sleeps(bench):
    for code in ("while True: pass", "import time; time.sleep(1000)"):
        timer = press_ctrl_c(0.3)
        with pytest.raises(Interrupted):
            bench.run_cell(code)
        timer.join()
    assert bench.run_cell("print('well')").texts[1].strip() == "well"


def test_a_killed_rank_is_named_and_the_others_keep_their_variables(bench):
    victim = bench.status().ranks[1].pid
    timer = threading.Timer(0.5, os.kill, [victim, signal.SIGKILL])
    timer.start()
    with pytest.raises(RankDied, match="rank 1") as caught:
        bench.step(100_000)
    timer.join()
    assert caught.value.ranks == (1,)
    assert "%fsdp stop" in str(caught.value)
    assert bench.run_cell("print(type(model).__name__)", ranks=[0]).texts[0].strip() == "FSDPNet"


SCRIPT = f"""
import sys
from workbench import Workbench
wb = Workbench(2, device="cpu")
wb.start()
wb.run_cell({CELL!r})
wb.shard("model", wrap=["Block"])
sys.stdout.write(" ".join(str(r.pid) for r in wb.status().ranks) + "\\n")
sys.stdout.flush()
wb.step(100_000)
"""


def descendants(process):
    return [process, *process.children(recursive=True)]


def gone(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_kernel_that_dies_in_a_step(how, tmp_path):
    root = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, cwd=root)
    with child:
        assert child.stdout.readline().split()
        family = descendants(psutil.Process(child.pid))
        assert len(family) > 3
        child.send_signal(how)
        child.wait(20)
        wait_until(lambda: gone(family), timeout_s=20)
