"""Garbage is collected although another thread collects."""

import gc
import threading
import weakref

from workbench.models import garbage


class Cycle:
    def __init__(self, ends=lambda: None):
        self.own, self.ends = self, ends

    def __del__(self):
        self.ends()


def test_it_waits_for_a_collection_of_another_thread(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def collects():
        Cycle(lambda: (begun.set(), may_end.wait(60)))
        gc.collect()

    thread = threading.Thread(target=collects)
    thread.start()
    assert begun.wait(60)
    left = weakref.ref(Cycle())
    gc.collect()
    assert left() is not None, "a collection within another one does nothing"
    monkeypatch.setattr(garbage.time, "sleep", lambda _: (may_end.set(), thread.join()))
    garbage.collect()
    assert left() is None
