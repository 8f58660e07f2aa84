"""CPU time of tests: of this process, of a running child, and of an ended child."""

import subprocess
import sys
import time

from tests.helpers.cpu_time import CpuTime

BURNT_S = 0.1
BURN = f"import time\nwhile time.process_time() < {BURNT_S}: pass\nprint('done', flush=True)\ninput()"
TICK_S = 0.05
"""The kernel counts CPU time in ticks."""


def test_cpu_time_of_this_process_counts_once():
    used = CpuTime()
    begin = time.process_time()
    while time.process_time() - begin < BURNT_S:
        pass
    first = used.since_last()
    assert first >= BURNT_S - TICK_S
    assert used.since_last() < first


def test_cpu_time_of_a_child_counts_once():
    used = CpuTime()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = used.since_last()
        assert running >= BURNT_S - TICK_S
        child.communicate(b"\n")
    assert used.since_last() < running
