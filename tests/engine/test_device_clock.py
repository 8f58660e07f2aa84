"""The contract of device clocks, for the real one and the tests' fake; and the rounding of CUDA."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.simulated_device import LATENCY_NS, FakeDevice, HostClock
from workbench.engine.backends.cuda import Cuda
from workbench.engine.backends.device_clock import NOBODYS, REBASE_NS, DeviceClock
from workbench.events import COMPUTE_STREAM

MS = 1_000_000


class CountingDevice:
    """A device that counts its events."""

    def __init__(self, device) -> None:
        self.device, self.events = device, 0

    def event(self):
        self.events += 1
        return self.device.event()

    def __getattr__(self, name):
        return getattr(self.device, name)


class OnFake:
    """The fake device, with work."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.now_ns = self.device.now_ns
        self.side = self.device.new_stream("side")

    def work(self, ms: int) -> None:
        self.device.give(ms * MS)

    @contextmanager
    def other_stream(self):
        with self.device.on(self.side):
            yield

    def wait_for_other(self) -> None:
        self.device.current.wait_stream(self.side)


class OnCuda:
    """A GPU, with a spinning kernel as work."""

    def __init__(self) -> None:
        self.device = Cuda(torch.device("cuda", torch.cuda.current_device()))
        self.now_ns = time.monotonic_ns
        self.side = self.device.new_stream("side")
        self.work(1)  # loads the kernel
        torch.cuda.synchronize()
        begin_ns = self.now_ns()
        torch.cuda._sleep(10_000_000)
        torch.cuda.synchronize()
        self.cycles_per_ms = 10_000_000 * MS // (self.now_ns() - begin_ns)

    def work(self, ms: int) -> None:
        torch.cuda._sleep(ms * getattr(self, "cycles_per_ms", 1_000_000))

    @contextmanager
    def other_stream(self):
        with torch.cuda.stream(self.side):
            yield

    def wait_for_other(self) -> None:
        torch.cuda.current_stream().wait_stream(self.side)


@pytest.fixture(
    params=[
        OnFake,
        pytest.param(
            OnCuda,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
                pytest.mark.filterwarnings("ignore"),  # warnings of torch's engine
            ],
        ),
    ],
    ids=["fake", "cuda"],
)
def on(request):
    return request.param()


def numbered(*marks):
    for row, mark in enumerate(marks):
        mark.row = row
    return marks


def test_a_mark_is_timed_by_the_device_and_the_host_does_not_wait(on):
    clock = DeviceClock(on.device, on.now_ns)
    begin_ns = on.now_ns()
    first = clock.mark()
    on.work(40)
    last = clock.mark()
    numbered(first, last)
    assert last not in clock.read()  # 40 ms have not passed, and the host did not wait
    on.device.synchronize()
    end_ns = on.now_ns()
    clock.read()
    assert begin_ns <= first.made_ns <= first.t_ns < last.t_ns <= end_ns + clock.error_ns
    assert last.t_ns - first.t_ns >= 20 * MS
    assert (first.stream, last.stream) == (COMPUTE_STREAM, COMPUTE_STREAM)


def test_each_mark_is_read_once_in_the_order_of_its_stream(on):
    clock = DeviceClock(on.device, on.now_ns)
    marks = numbered(*(clock.mark() for _ in range(20)))
    on.device.synchronize()
    read = clock.read()
    assert [mark.row for mark in read] == list(range(20))
    assert [mark.t_ns for mark in marks] == sorted(mark.t_ns for mark in marks)
    assert clock.read() == []


def test_streams_do_not_wait_for_each_other(on):
    clock = DeviceClock(on.device, on.now_ns)
    with on.other_stream():
        on.work(40)
        late = clock.mark()
    early = clock.mark()
    numbered(late, early)
    on.device.synchronize()
    clock.read()
    assert (late.stream, early.stream) == ("side", COMPUTE_STREAM)
    assert early.t_ns < late.t_ns


def test_the_end_of_a_collective_does_not_depend_on_later_waits(on):
    clock = DeviceClock(on.device, on.now_ns)
    with on.other_stream():
        on.work(20)
    end = clock.mark_end(on.wait_for_other, group=0)
    on.work(60)  # compute is busy for longer
    on.wait_for_other()
    waited = clock.mark()
    numbered(end, waited)
    on.device.synchronize()
    clock.read()
    assert waited.t_ns - end.t_ns > 20 * MS


def test_work_without_a_wait_has_no_end(on):
    def fail():
        raise RuntimeError("the communicator was aborted")

    clock = DeviceClock(on.device, on.now_ns)
    assert clock.mark_end(fail, group=0) is None
    numbered(after := clock.mark())
    on.device.synchronize()
    assert clock.read() == [after]
    assert after.stream == COMPUTE_STREAM


def test_a_mark_is_reported_once_it_has_a_row_and_never_without_one(on):
    clock = DeviceClock(on.device, on.now_ns)
    later, never = clock.mark(), clock.mark()
    on.device.synchronize()
    assert clock.read() == []
    later.row, never.row = 7, NOBODYS
    assert clock.read() == [later]
    assert clock._passed == []


def test_events_are_used_again(on):
    device = CountingDevice(on.device)
    clock = DeviceClock(device, on.now_ns)
    made = []
    for _ in range(5):
        numbered(*(clock.mark() for _ in range(10)))
        on.device.synchronize()
        clock.read()
        made.append(device.events)
    assert made == made[:1] * 5


def test_an_idle_device_gives_a_new_reference_and_a_busy_one_does_not(on):
    clock = DeviceClock(on.device, on.now_ns)
    on.device.synchronize()
    before = clock._reference
    on.work(40)
    clock.compare_if_idle()
    assert clock._reference is before
    on.device.synchronize()
    for _ in range(100):  # one comparison is as quick as the first ones
        clock.compare_if_idle()
    assert clock._reference is not before
    (mark,) = numbered(clock.mark())
    on.device.synchronize()
    clock.read()
    assert mark.made_ns <= mark.t_ns <= on.now_ns()


# ---- only with a clock that can be moved


def worst_error_ns(clock, device, host, num_steps, step_ns) -> int:
    """Return the largest error of a mark in a loop that keeps the device busy throughout."""
    worst_ns = 0
    for _ in range(num_steps):
        at_ns = max(device.compute.until_ns, host.ns + LATENCY_NS)
        (mark,) = numbered(clock.mark())
        device.give(step_ns)
        host.ns += step_ns
        assert clock.read() == [mark]
        worst_ns = max(worst_ns, abs(mark.t_ns - at_ns))
    return worst_ns


def test_32_bit_milliseconds_stay_exact_in_a_loop_that_never_waits():
    host = HostClock(tick_ns=0)
    device = FakeDevice(host)
    clock = DeviceClock(device, host)
    assert worst_error_ns(clock, device, host, 12_000, 77_777_777) < clock.error_ns + 6_000
    assert device.compute.until_ns > 400 * REBASE_NS  # a quarter of an hour: a single reference would be off by 30 us


@given(st.floats(0.9999, 1.0001), st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**8)), max_size=30))
def test_a_mark_lies_between_its_creation_and_its_reading(rate, steps):
    host = HostClock()
    device = FakeDevice(host, rate=rate)
    clock = DeviceClock(device, host)
    marks = []
    for work_ns, pause_ns in steps:
        marks.append(clock.mark())
        device.give(work_ns)
        host.ns += pause_ns
        numbered(*marks)
        for mark in clock.read():
            assert mark.made_ns <= mark.t_ns <= host.ns
    device.synchronize()
    clock.read()
    assert [mark.t_ns for mark in marks] == sorted(mark.t_ns for mark in marks)
    assert all(mark.made_ns <= mark.t_ns <= host.ns for mark in marks)
