"""The simulated device: streams on a virtual clock."""

import torch

from workbench.engine.backends.simulated import SimulatedDevice


def test_streams_run_beside_each_other_and_wait_for_each_other():
    device = SimulatedDevice(torch.device("cpu"))
    begin_ns = device.host.now_ns
    compute, copies = device.current_stream(), device.new_stream("copies")
    compute.add(100)
    with device.on(copies):
        device.current_stream().add(300)
        event = device.record_event()
    assert (compute.query(), event.query()) == (False, False)
    compute.wait_stream(copies)
    compute.add(50)
    assert (compute.until_ns - begin_ns, copies.until_ns - begin_ns) == (350, 300)
    event.synchronize()
    assert event.query()
    assert not compute.query()
    device.synchronize()
    assert compute.query()
    assert device.host.now_ns - begin_ns == 350


def test_the_clock_reads_marks_in_virtual_time():
    device = SimulatedDevice(torch.device("cpu"))
    clock = device.clock()
    first = clock.mark()
    device.current_stream().add(1_000_000)
    last = clock.mark()
    assert clock.is_behind
    first.row, last.row = 0, 1
    assert [mark.row for mark in clock.read()] == [0, 1]
    assert abs(last.t_ns - first.t_ns - 1_000_000) < 1_000
