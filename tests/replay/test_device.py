"""Spans on devices, instead of the times at which their hosts issued them."""

import numpy as np
import pytest

from tests.helpers.device_trace import ERROR_NS, hung, on_devices
from tests.helpers.trace_strategies import example_trace
from workbench.events import BESIDE, COLLECTIVES, COMPUTE_STREAM, COPIES, Edge, Kind
from workbench.replay.collectives import compare, table
from workbench.replay.device import ClockSource, on_device
from workbench.replay.spans import of_kind, spans
from workbench.trace import Trace, check, load, save
from workbench.views.window import window

TRUE = example_trace()
TRACE = on_devices(TRUE)


def part_of(trace, step):
    """Return a rank and its rows of a step."""
    whole = trace.rank(1)
    return whole, window(trace, step, 1).stateless(whole)


def host_rows(rows):
    return rows[rows["kind"] != Kind.DEVICE]


def test_the_trace_of_devices_is_one():
    assert check(TRACE) == []


@pytest.mark.parametrize("step", [0, 1, 2])
def test_every_span_has_device_times_wherever_they_are_recorded(step):
    whole, part = part_of(TRACE, step)
    converted = on_device(whole, part, TRACE.header)
    _, true = part_of(TRUE, step)
    assert converted.end_seq == part.end_seq
    for kinds in ((Kind.FORWARD,), (Kind.BACKWARD,), (Kind.WAIT,), COLLECTIVES):
        found, expected = spans(converted.part.rows, kinds), spans(true.rows, kinds)
        assert found.begin_ns.tolist() == expected.begin_ns.tolist()
        assert found.end_ns.tolist() == expected.end_ns.tolist()
    assert table(converted.part).wait_ns.tolist() == table(true).wait_ns.tolist()
    assert Kind.DEVICE not in converted.part.rows["kind"]


def test_copies_next_to_compute_are_not_compute():
    whole, part = part_of(TRACE, 1)
    converted = on_device(whole, part, TRACE.header)
    copies = part.rows[of_kind(part.rows, COPIES)]
    device_rows = whole.rows[whole.rows["kind"] == Kind.DEVICE]
    stream = {int(row["value"]): TRACE.header.strings[row["module"]] for row in device_rows}
    beside = [seq for seq in copies["seq"].tolist() if stream[seq] != COMPUTE_STREAM]
    assert converted.copies["seq"].tolist() == beside
    assert not np.isin(converted.part.rows["seq"], beside).any()
    assert {Kind(kind) for kind in converted.part.rows["kind"][of_kind(converted.part.rows, COPIES)]} == {Kind.COPY_OUT}


def test_memory_keeps_the_hosts_times():
    whole, part = part_of(TRACE, 1)
    converted = on_device(whole, part, TRACE.header)
    rows = converted.part.rows
    mine, hosts = (
        rows[of_kind(rows, BESIDE)],
        part.rows[of_kind(part.rows, BESIDE) & (part.rows["kind"] != Kind.DEVICE)],
    )
    assert mine["t_ns"].tolist() == hosts["t_ns"].tolist()


def test_unreached_spans_are_left_out_and_the_current_one_is_open():
    whole = TRACE.rank(1)
    waits = (whole.rows["kind"] == Kind.WAIT) & (whole.rows["edge"] == Edge.END) & (whole.rows["step"] == 2)
    trace = hung(TRACE, 1, int(np.flatnonzero(waits)[2]))
    assert check(trace) == []
    stuck, part = part_of(trace, 2)
    converted = on_device(stuck, part, trace.header)
    assert converted.end_seq < part.end_seq
    found = spans(converted.part.rows, (Kind.WAIT,))
    assert (found.end_seq < 0).tolist() == [False, False, True]
    drawn = window(trace, 2, 1).drawn(trace)
    assert (drawn.clock, drawn.is_whole) == (ClockSource.DEVICE, False)


def test_without_device_rows_the_host_times_remain():
    trace = on_devices(TRUE, has_device_rows=False)
    assert on_device(*part_of(trace, 1), trace.header) is None
    assert window(trace, 1, 1).drawn(trace).clock is ClockSource.ENQUEUED
    assert window(TRUE, 1, 1).drawn(TRUE).clock is ClockSource.HOST


def test_selected_steps_keep_their_later_device_times(tmp_path):
    part = TRACE.slice(step=1)
    assert check(part) == []
    save(part, tmp_path / "one.trace")
    whole, rows = part_of(load(tmp_path / "one.trace"), 1)
    converted, expected = on_device(whole, rows, part.header), on_device(*part_of(TRACE, 1), TRACE.header)
    assert converted.end_seq == rows.end_seq
    assert converted.part.rows["t_ns"].tolist() == expected.part.rows["t_ns"].tolist()
    assert set(np.unique(host_rows(part.rank(1).rows)["step"])) == {1}


def test_exposed_time_is_the_devices():
    drawn = window(TRACE, 2, 1).drawn(TRACE)
    exposed = {(row.unit, row.kind): row.exposed_ns for row in compare(drawn.trace, 2)}
    expected = {(row.unit, row.kind): row.exposed_ns for row in compare(TRUE, 2)}
    assert exposed == expected
    hosts = {(row.unit, row.kind): row.exposed_ns for row in compare(on_devices(TRUE, has_device_rows=False), 2)}
    assert hosts != expected
    assert max(info.device_error_ns for info in TRACE.header.ranks) == ERROR_NS


def test_a_rank_without_device_rows_is_left_out():
    silent = on_devices(TRUE, has_device_rows=False)
    mixed = Trace(TRACE.header, (TRACE.rank(0), silent.rank(1), TRACE.rank(2)))
    drawn = window(mixed, 1, 1).drawn(mixed)
    assert [rank.rank for rank in drawn.trace.ranks] == [0, 2]
    assert not drawn.is_whole
