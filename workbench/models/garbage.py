"""Collecting garbage for certain: models are cycles of references, and their units live until they are collected."""

from __future__ import annotations

import gc
import time

_PATIENT_S = 2.0


def collect() -> None:
    """Collect all garbage, after any collection that another thread has begun.

    ``gc.collect()`` does nothing meanwhile, and a collection runs finalizers, which may let other threads go on.
    """
    deadline = time.monotonic() + _PATIENT_S  # in a finalizer of this thread, the other collection never ends
    before = _num_full()
    gc.collect()
    while _num_full() == before and time.monotonic() < deadline:
        time.sleep(0.001)
        gc.collect()


def _num_full() -> int:
    return int(gc.get_stats()[-1]["collections"])
