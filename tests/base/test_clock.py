import subprocess
import sys
from pathlib import Path

from workbench.base import clock
from workbench.base.clock import clock_here

PROGRAM = "from workbench.base.clock import clock_here; print(clock_here())"


def test_processes_of_one_machine_read_one_clock():
    other = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == clock_here() != ""


def test_a_time_namespace_has_its_own_clock(monkeypatch, tmp_path):
    here = clock_here()
    monkeypatch.setattr(clock, "_NAMESPACE", tmp_path)
    assert clock_here() != here


def test_without_a_boot_id_the_machine_counts(monkeypatch):
    here = clock_here()
    monkeypatch.setattr(clock, "_BOOT_ID", Path("/proc/nothing"))
    assert clock_here() == clock_here() != here
