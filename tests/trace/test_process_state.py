"""What the kernel says of a process that was recorded."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tests.helpers.waiting import wait_until
from workbench.base.clock import clock_here
from workbench.trace.process_state import process_state, processes_here
from workbench.trace.recording import RunStart
from workbench.trace.schema import RankInfo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_process_is_alive_stopped_or_gone():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    info = RankInfo(rank=0, host=socket.gethostname(), device="cpu", pid=child.pid)
    start = RunStart(rank=0, world_size=1, clock=clock_here(), t_ns=time.monotonic_ns(), wall_ns=0)
    start = replace(start, processes=processes_here())
    try:
        assert process_state(info, start) == "alive"
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(info, start) == "stopped")
        # another machine, another boot of it
        assert process_state(replace(info, host="elsewhere"), start) == ""
        assert process_state(info, replace(start, clock="another")) == ""
        # another process of the same number
        assert process_state(info, replace(start, t_ns=0)) == "gone"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(info, start) == "gone"  # a zombie
        child.communicate()
    assert process_state(info, start) == "gone"
    # of another container, or of a recording that does not know
    assert {process_state(info, replace(start, processes=each)) for each in ("pid:[1]", "")} == {""}
