"""Wait for a condition or for the end of a process, not for a fixed time."""

import subprocess
import time

PATIENCE_S = 60.0
"""Timeout for what normally takes a moment: machines are shared, and a wait that succeeds ends early."""


def eventually(condition, timeout_s=PATIENCE_S):
    """Poll ``condition`` until it is true or the timeout passes, and return its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


def wait_until(condition, timeout_s=PATIENCE_S):
    """Poll ``condition`` until it is true and return its value; fail after ``timeout_s`` seconds."""
    value = eventually(condition, timeout_s)
    if not value:
        raise AssertionError(f"still not true after {timeout_s} s: {condition.__qualname__}")
    return value


def end(process, grace_s):
    """Terminate a process, and kill it after ``grace_s`` seconds."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
