"""CPU time of tests: of this process, of a running child, and of an ended child."""

import subprocess
import sys
import time

from tests.helpers.cpu_time import CpuTime

BURNT_S = 0.1
BURN = f"import time\nwhile time.process_time() < {BURNT_S}: pass\nprint('done', flush=True)\ninput()"
TICK_S = 0.05
"""The kernel counts CPU time in ticks."""


def test_what_this_process_uses_counts_once():
    used = CpuTime()
    begin = time.process_time()
    while time.process_time() - begin < BURNT_S:
        pass
    first = used.since_last()
    assert first >= BURNT_S - TICK_S
    assert used.since_last() < first


def test_what_a_child_uses_counts_while_it_runs_and_no_second_time_when_it_has_ended():
    used = CpuTime()
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        running = used.since_last()
        assert running >= BURNT_S - TICK_S
        child.communicate(b"\n")
    assert used.since_last() < running
