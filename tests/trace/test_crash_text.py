"""How a signal ended a process, from the text that faulthandler writes, and that this text is written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.trace.crash_text import crash_end
from workbench.trace.recording import Heartbeat, RunEnd, RunStart

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
from workbench.record.crash_report import CrashReport

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

out, name = Path(sys.argv[1]), sys.argv[2]
report = CrashReport(out, 3).begin()
threading.Thread(target=threading.Event().wait, daemon=True).start()
if name == "child":
    if os.fork() == 0:
        report.end()
        send("SIGTERM")
    os.wait()
elif name == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    send("SIGTERM")
elif name == "held back":
    with report.held_back():
        send("SIGTERM")
        report.end()
        (out / "written").touch()
elif name == "thread":
    thread = threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGSEGV))
    thread.start()
    thread.join()
elif name == "no signal":
    report.end()
else:
    send(name)
"""
START = RunStart(rank=3, world_size=4, clock="one", t_ns=5, wall_ns=1000)
ALIVE = Heartbeat(t_ns=7, wall_ns=3000, event_ns=0)  # the clock was set meanwhile


def run(folder, name):
    (folder / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, folder / "train.py", folder, name], check=False, capture_output=True
    ).returncode


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SIGSEGV", "SIGSEGV: Segmentation fault"),
        ("SIGABRT", "SIGABRT: Aborted"),
        ("SIGTERM", "SIGTERM"),
        ("SIGKILL", None),
    ],
)
def test_a_signal_ends_a_process_as_before_and_leaves_its_stack(tmp_path, name, reason):
    assert run(tmp_path, name) == -getattr(signal, name)
    path = tmp_path / "rank3.crash"
    found = crash_end(path, ALIVE)
    if reason is None:
        assert found is None
        return
    frames = (f"{tmp_path / 'train.py'}:32 in <module>", f"{tmp_path / 'train.py'}:7 in send")
    assert found == RunEnd(t_ns=path.stat().st_mtime_ns - ALIVE.wall_ns + 7, reason=reason, frames=frames)


def test_the_thread_that_crashed_is_shown(tmp_path):
    assert run(tmp_path, "thread") == -signal.SIGSEGV
    assert crash_end(tmp_path / "rank3.crash", ALIVE).frames[-1] == f"{tmp_path / 'train.py'}:26 in <lambda>"


@pytest.mark.parametrize(("name", "status"), [("handled", 7), ("child", 0), ("no signal", 0)])
def test_what_does_not_end_the_process_itself_leaves_nothing(tmp_path, name, status):
    assert run(tmp_path, name) == status
    assert crash_end(tmp_path / "rank3.crash", START) is None
    assert (tmp_path / "rank3.crash").exists() == (name != "no signal")


def test_a_signal_ends_a_process_once_it_is_written_how_its_program_ended(tmp_path):
    assert run(tmp_path, "held back") == -signal.SIGTERM
    assert (tmp_path / "written").exists()


def test_a_file_that_is_no_report_is_ignored(tmp_path):
    os.mkfifo(tmp_path / "rank0.crash")
    assert crash_end(tmp_path / "rank0.crash", START) is None
    Path(tmp_path / "rank1.crash").write_bytes(b"\xff" * 99)
    found = crash_end(tmp_path / "rank1.crash", START)
    assert (found.reason, found.frames) == ("SIGTERM", ())
