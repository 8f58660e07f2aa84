"""The demo, run once on four ranks and once on two, for all tests of its results."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

MARK = "WORKBENCH_TEST_MARK"  # in the environment of all processes of a run
TIMEOUT_S = 800


@dataclass(frozen=True)
class DemoRun:
    """The results of a run of ``workbench demo``.

    Attributes:
        folder: its output folder.
        code: its exit code.
        stdout: its output.
        stderr: its error output.
        peak_bytes: peak memory of all its processes together, where it is measured; shared memory counts once.
        survivors: command lines of processes that still run some time later.
    """

    folder: Path
    code: int
    stdout: str
    stderr: str
    peak_bytes: int
    survivors: tuple[str, ...]


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory) -> DemoRun:
    return _run(tmp_path_factory.mktemp("demo"), num_ranks=4)


@pytest.fixture(scope="session")
def binder_run(tmp_path_factory) -> DemoRun:
    return _run(tmp_path_factory.mktemp("binder"), num_ranks=2, measures_memory=True)


def _run(folder: Path, num_ranks: int, *, measures_memory: bool = False) -> DemoRun:
    mark = uuid.uuid4().hex
    texts = [folder / "stdout", folder / "stderr"]
    begin, peak_bytes = time.monotonic(), 0
    with texts[0].open("w") as stdout, texts[1].open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "workbench.cli.main", "demo", "--out", str(folder)],
            env=os.environ | {MARK: mark, "WORKBENCH_RANKS": str(num_ranks)},
            stdout=stdout,
            stderr=stderr,
        )
        while process.poll() is None and time.monotonic() - begin < TIMEOUT_S:
            if measures_memory:  # which takes a tenth of a second of CPU each time
                peak_bytes = max(peak_bytes, sum(map(_own_bytes, _marked(mark))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        process.kill()
        code = process.wait()
    return DemoRun(folder, code, *(text.read_text() for text in texts), peak_bytes, _survivors(mark))


def _survivors(mark: str, within_s: float = 30) -> tuple[str, ...]:
    """Return the processes with ``mark`` in their environment, after some time to end."""
    deadline = time.monotonic() + within_s
    while (found := _marked(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(found, timeout=0.2)
    return tuple(map(_command, found))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return f"process {process.pid}, which has ended just now"


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _own_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
    return getattr(memory, "pss", memory.uss)  # macOS has no proportional share
