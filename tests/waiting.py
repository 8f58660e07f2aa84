"""Waiting for a condition instead of for some time."""

import time


def wait_until(condition, timeout_s=10.0):
    """Poll ``condition`` until it is true and return its value; fail when ``timeout_s`` seconds were not enough."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still not true after {timeout_s} s: {condition.__qualname__}")
        time.sleep(0.01)
    return value
