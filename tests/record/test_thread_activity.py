"""What a silent thread does is measured: it sleeps, or computes."""

import threading

import pytest

from tests.helpers.waiting import wait_until
from workbench.record.thread_activity import ThreadActivity


def waits(end):
    end.wait()


def computes(end):
    while not end.is_set():
        sum(range(1000))


@pytest.mark.parametrize(("work", "expected"), [(waits, "asleep"), (computes, "computing")])
def test_a_thread_sleeps_or_computes(work, expected):
    end = threading.Event()
    thread = threading.Thread(target=work, args=(end,))
    thread.start()
    try:
        activity = ThreadActivity(thread)

        def as_expected():
            found = activity.now()
            activity.begin()  # on a busy machine a thread may get no processor for a while
            return found == expected

        wait_until(as_expected)
    finally:
        end.set()
        thread.join()
