"""The ring and its key frames."""

import dataclasses
import gc
import threading
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.simulated_device import FakeDevice
from tests.helpers.trace_strategies import example_trace
from workbench.events import Category, Comm, Edge, Kind, Param, Phase, Unit, UnitState
from workbench.runtime.recorder import NO_STEP, Recorder
from workbench.trace import RankTrace, Trace, advance, check
from workbench.trace.header import header_from_dict, header_to_dict
from workbench.trace.schema import ROW, ROW_DTYPE, BufferSum, GroupInfo, Header, KeyFrame, RankInfo

COMM = Comm(group=0, seq=3)


def rows_of(drained):
    return np.frombuffer(drained.rows, ROW_DTYPE)


def emit(recorder, kind, edge=Edge.INSTANT, unit=0, num_bytes=0, comm=None, t_ns=None):
    recorder.event(kind, edge, unit, num_bytes, comm, t_ns)


def test_an_event_becomes_one_row():
    recorder = Recorder(Header())
    recorder.comm_group(0, (0, 1))
    recorder.phase(Phase.BACKWARD)
    emit(recorder, Kind.ALL_GATHER, Edge.END, unit=2, num_bytes=64, comm=COMM, t_ns=77)
    (row,) = rows_of(recorder.drain())
    assert row["seq"] == 0
    assert row["t_ns"] == 77
    assert row["num_bytes"] == 64
    assert (row["comm_group"], row["comm_seq"]) == (0, 3)
    assert (row["kind"], row["edge"], row["phase"]) == (Kind.ALL_GATHER, Edge.END, Phase.BACKWARD)
    assert row["unit"] == 2
    assert row["step"] == NO_STEP
    assert recorder.header.comm_groups == (GroupInfo(name="group 0", ranks=(0, 1)),)


def test_memory_is_signed_and_has_its_category():
    recorder = Recorder(Header())
    recorder.memory(Category.SHARDED_GRADS, 1, 100)
    recorder.memory(Category.SHARDED_GRADS, 1, -40)
    drained = recorder.drain()
    assert [Kind(k) for k in rows_of(drained)["kind"]] == [Kind.ALLOC, Kind.FREE]
    assert drained.key_frame.bytes_by_category[Category.SHARDED_GRADS] == 60


def test_metrics_are_interned_and_valued():
    recorder = Recorder(Header())
    for value in (1.5, 2.5):
        recorder.metric("loss", value)
    rows = rows_of(recorder.drain())
    assert rows["value"].tolist() == [1.5, 2.5]
    assert {recorder.header.strings[m] for m in rows["module"]} == {"loss"}
    assert recorder.header.strings == ("loss",)


def test_steps_are_numbered_and_close_the_one_before():
    recorder = Recorder(Header())
    recorder.begin_step()
    recorder.begin_step()
    recorder.end_step()
    recorder.end_step()
    rows = rows_of(recorder.drain())
    assert rows["edge"].tolist() == [Edge.BEGIN, Edge.END, Edge.BEGIN, Edge.END]
    assert rows["step"].tolist() == [0, 0, 1, 1]


def test_an_aborted_step_has_no_end():
    recorder = Recorder(Header())
    recorder.begin_step()
    recorder.give_up_step()
    recorder.begin_step()
    rows = rows_of(recorder.drain())
    assert rows["edge"].tolist() == [Edge.BEGIN, Edge.BEGIN]


@pytest.mark.parametrize("drains", [False, True])
def test_a_step_that_is_only_expected_begins_when_something_follows_it(drains):
    recorder, clock = Recorder(Header(), now_ns=count().__next__), []
    recorder.begin_step(is_expected=True)
    recorder.metric("loss", 1)
    recorder.end_step()
    recorder.begin_step(is_expected=True)
    clock += [len(recorder.drain().rows), recorder.step] if drains else []
    recorder.give_up_step()
    assert recorder.next_step == 1, "as if it had never been"
    recorder.begin_step(is_expected=True)
    recorder.metric("loss", 2)
    recorder.give_up_step()
    rows = rows_of(recorder.drain())
    assert rows["step"].tolist() == [0, 0, 0, 1, 1]
    assert (np.diff(rows["t_ns"]) > 0).all()
    assert clock in ([], [3 * ROW_DTYPE.itemsize, 1]), "the step is under way meanwhile"


LATE = (
    lambda recorder: recorder.memory(Category.OPTIMIZER_STATE, -1, -8),
    lambda recorder: recorder.resident(1 << 20),
    lambda recorder: emit(recorder, Kind.ALL_REDUCE, Edge.END, comm=COMM),
)


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("late", LATE, ids=["free", "resident", "end"])
def test_what_comes_late_is_not_of_a_step_that_is_only_expected(late, drains):
    """Ranks collect garbage at different moments, and their steps must keep the same numbers."""
    recorder = Recorder(Header(), now_ns=count().__next__)
    recorder.begin_step()
    emit(recorder, Kind.ALL_REDUCE, Edge.BEGIN, comm=COMM)
    recorder.begin_step(is_expected=True)
    late(recorder)
    if drains:
        recorder.drain()
    recorder.give_up_step()
    assert (recorder.next_step, rows_of(recorder.drain())["step"].tolist()) == (1, [0, 0, 0, NO_STEP])
    recorder.begin_step(is_expected=True)
    late(recorder)
    recorder.metric("loss", 1)
    assert rows_of(recorder.drain())["step"].tolist()[4:] == [1, 1, 1]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("memory"), st.sampled_from(list(Category)), st.integers(-50, 50).filter(bool)),
        st.tuples(st.just("unshard"), st.integers(0, 3), st.sampled_from([Edge.BEGIN, Edge.END])),
        st.tuples(st.just("reshard"), st.integers(0, 3), st.none()),
        st.tuples(st.just("drain"), st.none(), st.none()),
    ),
    max_size=60,
)


def report(recorder, events):
    for what, a, b in events:
        if what == "memory":
            recorder.memory(a, 0, b)
        elif what == "unshard":
            emit(recorder, Kind.UNSHARD, b, unit=a)
        elif what == "reshard":
            emit(recorder, Kind.RESHARD, unit=a)


@given(EVENTS, st.sampled_from([4, 7, 16, 128]))
def test_drains_add_up_and_key_frames_are_exact(events, capacity):
    recorder, everything = Recorder(Header(), capacity), Recorder(Header())
    drains = []
    for what, a, b in events:
        for r in (recorder, everything):
            report(r, [(what, a, b)])
        if what == "drain":
            drains.append(recorder.drain(drains[-1].key_frame.seq if drains else 0))
    drains.append(recorder.drain(drains[-1].key_frame.seq if drains else 0))
    whole = rows_of(everything.drain())
    assert sum(d.lost + len(d.rows) // ROW.size for d in drains) == len(whole)
    at = 0
    for drained in drains:
        rows = rows_of(drained)
        assert drained.first_seq == at + drained.lost
        assert rows["seq"].tolist() == list(range(drained.first_seq, drained.first_seq + len(rows)))
        at = drained.first_seq + len(rows)
        assert drained.key_frame == advance(KeyFrame(), whole[:at])


@given(EVENTS, EVENTS, EVENTS)
def test_unrecorded_work_leaves_only_its_memory_changes(before, between, after):
    recorder, everything = Recorder(Header()), Recorder(Header())
    report(everything, before + between + after)
    report(recorder, before)
    frame = recorder.drain().key_frame
    with recorder.unrecorded():
        report(recorder, between)
        recorder.metric("never", 1.0)
        emit(recorder, Kind.ALL_GATHER, Edge.BEGIN, unit=-1, comm=COMM)
    reported = rows_of(recorder.drain(frame.seq))
    report(recorder, after)
    emit(recorder, Kind.ALL_GATHER, Edge.END, unit=-1, comm=COMM)
    assert set(reported["kind"]) <= {Kind.ALLOC, Kind.FREE, Kind.RESHARD, Kind.UNSHARD}
    assert len(reported) <= len(Category) + 2 * 4
    expected = everything.drain().key_frame
    assert recorder.drain().key_frame.bytes_by_category == expected.bytes_by_category
    assert recorder.drain().key_frame.unit_states == expected.unit_states
    assert not np.isin(rows_of(recorder.drain())["kind"], (Kind.ALL_GATHER, Kind.METRIC)).any()
    assert recorder.ordinal == len([what for what, *_ in before + after if what in ("unshard", "reshard")]) + 1


def test_recorded_spans_end_while_recording_is_off():
    recorder = Recorder(Header())
    emit(recorder, Kind.ALL_GATHER, Edge.BEGIN, comm=COMM)
    with recorder.unrecorded():
        emit(recorder, Kind.ALL_GATHER, Edge.END, comm=COMM)
    assert rows_of(recorder.drain())["edge"].tolist() == [Edge.BEGIN, Edge.END]


def test_events_from_the_garbage_collector_within_an_append_are_kept():
    recorder = Recorder(Header())

    class Dies:
        def __del__(self):
            recorder.memory(Category.SHARDED_GRADS, 0, 1)

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            cycle = Dies()
            cycle.self = cycle
            emit(recorder, Kind.FORWARD, Edge.BEGIN)
    finally:
        gc.set_threshold(*before)
    del cycle
    gc.collect()
    rows = rows_of(recorder.drain())
    assert rows["seq"].tolist() == list(range(400))
    assert (rows["kind"] == Kind.ALLOC).sum() == 200


def test_events_from_the_garbage_collector_within_the_packing_of_others_follow_them(monkeypatch):
    recorder = Recorder(Header(), capacity=8)

    def collecting(*row):
        monkeypatch.undo()
        for _ in range(5):  # more than make a batch
            recorder.memory(Category.SHARDED_GRADS, 0, 1)
        ROW.pack_into(*row)

    monkeypatch.setattr("workbench.runtime.recorder._pack_row", collecting)
    for _ in range(4):  # a batch
        emit(recorder, Kind.FORWARD, Edge.BEGIN)
    rows = rows_of(recorder.drain(1))
    assert rows["seq"].tolist() == list(range(1, 9))
    assert [Kind(kind) for kind in rows["kind"]] == [Kind.FORWARD] * 3 + [Kind.ALLOC] * 5


def test_drains_from_another_thread_lose_nothing():
    recorder = Recorder(Header())
    count, got, done = 20_000, [], threading.Event()

    def drain():
        while not done.is_set():
            got.append(recorder.drain(got[-1].key_frame.seq if got else 0))
        got.append(recorder.drain(got[-1].key_frame.seq if got else 0))

    thread = threading.Thread(target=drain)
    thread.start()
    for _ in range(count):
        emit(recorder, Kind.FORWARD, Edge.BEGIN)
    done.set()
    thread.join()
    seqs = np.concatenate([rows_of(d)["seq"] for d in got])
    assert seqs.tolist() == list(range(count))


def test_a_drain_can_be_repeated():
    recorder = Recorder(Header())
    for _ in range(3):
        emit(recorder, Kind.FORWARD, Edge.BEGIN)
    assert recorder.drain(1) == recorder.drain(1)
    assert rows_of(recorder.drain(1))["seq"].tolist() == [1, 2]
    assert recorder.drain(3).rows == b""


def test_units_are_described_and_replaced():
    recorder = Recorder(Header())
    param = Param(
        fqn="w",
        shape=(3, 5),
        global_shape=(6, 5),
        dtype="float32",
        itemsize=4,
        shard_dim=1,
        rows_per_rank=(3, 2),
        padded_rows=3,
        trainable=True,
    )
    policy = {
        "reshard_after_forward": 2,
        "shard_size": 2,
        "replicate_size": 3,
        "compute_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "compute_itemsize": 2,
        "reduce_itemsize": 4,
        "offload": True,
        "comm": "gloo",
    }
    recorder.unit(Unit(index=4, root=-1, name="", params=(param,), retired=False, **policy))
    version = recorder.header_version
    recorder.unit(Unit(index=4, root=-1, name="blocks.0", params=(param,), retired=True, **policy))
    *others, unit = recorder.header.units
    assert [(each.index, each.in_use) for each in others] == [(index, False) for index in range(4)]
    assert (unit.name, unit.retired) == ("blocks.0", True)
    assert {name: getattr(unit, name) for name in policy} == policy
    assert vars(unit.params[0]) == vars(param)
    assert recorder.header_version > version


def test_a_unit_keeps_the_policies_of_earlier_steps():
    recorder, unit = Recorder(Header()), example_trace().header.units[0]
    recorder.unit(unit)
    recorder.begin_step()
    recorder.end_step()
    recorder.unit(dataclasses.replace(unit, reshard_after_forward=False))
    assert [recorder.header.units[0].at_step(step).reshard_after_forward for step in (0, 1)] == [True, False]
    assert recorder.header == header_from_dict(header_to_dict(recorder.header))


def test_a_reader_gets_the_units_that_changed_since_its_version():
    recorder, unit = Recorder(Header()), example_trace().header.units[0]
    for index in range(3):
        recorder.unit(dataclasses.replace(unit, index=index))
    version, header = recorder.header_since(0)
    assert header == recorder.header
    assert recorder.header_since(version) == (version, None)
    recorder.comm_group(7, (0, 1))
    recorder.unit(dataclasses.replace(unit, index=1, name="renamed"))
    newer, changed = recorder.header_since(version)
    assert newer > version
    assert changed == dataclasses.replace(recorder.header, units=(recorder.header.units[1],))


class UnitSource:
    """A source of some units."""

    def __init__(self, name, *units):
        self.name, self.units = name, set(units)

    def has(self, unit):
        return unit in self.units

    def tensors(self, unit):
        raise AssertionError("nobody asks for tensors here")


def test_units_without_a_source_are_removed():
    recorder, first, second = Recorder(Header()), UnitSource("first", 0, 1), UnitSource("second", 2)
    for index in range(3):
        recorder.unit(dataclasses.replace(example_trace().header.units[0], index=index))
    recorder.note_gone()
    assert all(unit.in_use for unit in recorder.header.units)  # without a source, units count as in use
    recorder.source(first)
    recorder.source(second)
    version = recorder.header_version
    recorder.note_gone()
    assert recorder.header_version == version
    first.units.remove(1)
    recorder.begin_step()
    assert [unit.gone for unit in recorder.header.units] == [False, True, False]
    assert [unit.in_use for unit in recorder.header.units] == [True, False, True]
    assert recorder.header_version > version


def test_an_acquired_and_released_slot_moves_between_classes():
    recorder = Recorder(Header())
    for category, delta in (
        (Category.UNSHARDED_PARAMS, 64),
        (Category.UNSHARDED_PARAMS, -64),
        (Category.RESERVED, 64),
    ):
        recorder.memory(category, 0, delta)
    live = recorder.drain().key_frame.bytes_by_category
    assert (live[Category.UNSHARDED_PARAMS], live[Category.RESERVED]) == (0, 64)


def test_a_reset_leaves_the_unit_sharded():
    recorder = Recorder(Header())
    emit(recorder, Kind.UNSHARD, Edge.END, unit=1)
    emit(recorder, Kind.REDUCE_SCATTER, Edge.BEGIN, unit=1, comm=COMM)
    assert recorder.drain().key_frame.unit_states == {1: UnitState.UNSHARDED}
    emit(recorder, Kind.RESET, unit=1)
    frame = recorder.drain().key_frame
    assert frame.unit_states == {}
    assert frame.reducing == {}


def told_after_a_reset(recorder):
    """Return the rows of a reset of three units by recovery: sharded, unsharded, and with an all-gather in flight."""
    recorder.give_up_step()
    known = recorder.drain()
    for unit in range(3):
        emit(recorder, Kind.RESET, unit=unit)
    reported = rows_of(recorder.drain(known.first_seq + len(rows_of(known))))
    assert recorder.drain().key_frame.unit_states == {}
    assert not reported["num_bytes"].any()
    return [(Kind(row["kind"]), int(row["unit"])) for row in reported]


def left_by_an_evaluation(recorder):
    emit(recorder, Kind.UNSHARD, Edge.END, unit=1)
    emit(recorder, Kind.ALL_GATHER, Edge.BEGIN, unit=2, comm=COMM)


def test_a_failed_cell_between_steps_aborts_no_step():
    recorder = Recorder(Header())
    recorder.begin_step()
    recorder.end_step()
    assert told_after_a_reset(recorder) == []
    left_by_an_evaluation(recorder)
    assert told_after_a_reset(recorder) == [(Kind.RESHARD, 1), (Kind.RESET, 2)]


@pytest.mark.parametrize("begin", [Recorder.begin_step, lambda recorder: recorder.phase(Phase.FORWARD)])
def test_an_abort_is_recorded_once_even_if_repeated(begin):
    recorder = Recorder(Header())
    begin(recorder)
    left_by_an_evaluation(recorder)
    recorder.give_up_step()  # where it raised; then all ranks recover
    assert told_after_a_reset(recorder) == [(Kind.RESET, 0), (Kind.RESET, 1), (Kind.RESET, 2)]
    recorder.begin_step()
    recorder.end_step()
    assert told_after_a_reset(recorder) == []


def test_the_late_end_of_a_collective_has_its_group_and_is_no_progress():
    recorder = Recorder(Header())
    recorder.comm_group(7, (0, 1))
    emit(recorder, Kind.ALL_REDUCE, Edge.BEGIN, comm=Comm(group=7, seq=3))
    recorder.late_end(Kind.ALL_REDUCE, 0, 8, Comm(group=7, seq=3), 55)
    recorder.late_end(Kind.SEND, 0, 8, None, 56)
    recorder.late_end(Kind.ALL_REDUCE, 0, 8, Comm(group=9, seq=4), 57)  # of a group that nobody has announced
    rows = rows_of(recorder.drain())[1:]
    assert list(zip(rows["comm_group"].tolist(), rows["comm_seq"].tolist(), strict=True)) == [(0, 3), (-1, -1), (-1, 4)]
    assert (rows["edge"].tolist(), rows["t_ns"].tolist()) == ([Edge.END] * 3, [55, 56, 57])
    assert recorder.ordinal == 1


def test_a_wait_for_readers_names_the_last_and_is_no_progress():
    recorder = Recorder(Header())
    emit(recorder, Kind.FORWARD, Edge.BEGIN)
    recorder.readers(Edge.BEGIN)
    recorder.readers(Edge.END, 3)
    rows = rows_of(recorder.drain())[1:]
    assert rows["kind"].tolist() == [Kind.READERS] * 2
    assert rows["value"][1] == 3
    assert (recorder.ordinal, recorder.last_event()["kind"]) == (1, Kind.FORWARD)


def test_groups_of_one_name_are_numbered():
    recorder = Recorder(Header())
    for index, name in enumerate(("shard", "shard", "", "shard")):
        recorder.comm_group(index, (0,), name)
    assert [group.name for group in recorder.header.comm_groups] == [
        "shard",
        "shard (rebuild 1)",
        "group 2",
        "shard (rebuild 2)",
    ]


def test_checksums_of_buffers_are_those_of_this_rank():
    info = RankInfo(rank=3, host="here", device="cpu", pid=1)
    recorder = Recorder(Header(ranks=(info,)))
    recorder.note_buffers({"m.mean": 5})
    assert recorder.header.ranks == (dataclasses.replace(info, buffers=(BufferSum(name="m.mean", crc32=5),)),)
    version = recorder.header_version
    recorder.note_buffers({"m.mean": 5})
    assert recorder.header_version == version


# ---- on a device


def on_device() -> tuple[Recorder, FakeDevice]:
    """Return a recorder, and its device without work."""
    device = FakeDevice()
    recorder = Recorder(Header(world_size=2))
    recorder.device_clock = device.clock()
    recorder.comm_group(0, (0, 1))
    return recorder, device


def tell_one(recorder, kind, edge=Edge.INSTANT, comm=None, num_bytes=0):
    emit(recorder, kind, edge, unit=-1, comm=comm, num_bytes=num_bytes)


def reported(rows):
    """Return when the device reached each row, and in which stream, by the row's number."""
    found = rows[rows["kind"] == Kind.DEVICE]
    return {int(row["value"]): (int(row["t_ns"]), int(row["module"])) for row in found}


def gather(recorder, device, *, ends=True):
    """Run an all-gather in a separate stream that takes longer than the host's wait."""
    side = device.new_stream("nccl")
    side.wait_stream(device.current)
    tell_one(recorder, Kind.ALL_GATHER, Edge.BEGIN, comm=COMM, num_bytes=8)
    with device.on(side):
        device.give(50_000_000)
    recorder.issued(COMM, lambda: device.current.wait_stream(side))
    if ends:
        tell_one(recorder, Kind.WAIT, Edge.BEGIN, comm=COMM)
        device.current.wait_stream(side)
        tell_one(recorder, Kind.WAIT, Edge.END, comm=COMM)
        tell_one(recorder, Kind.ALL_GATHER, Edge.END, comm=COMM, num_bytes=8)
    return side


def checked(recorder):
    """Return all recorded rows, after checking them against the invariants of a trace."""
    rows = rows_of(recorder.drain())
    assert check(Trace(recorder.header, (RankTrace(0, rows),))) == []
    return rows


def test_device_times_are_recorded_without_blocking_the_host():
    recorder, device = on_device()
    recorder.begin_step()
    tell_one(recorder, Kind.FORWARD, Edge.BEGIN)
    device.give(80_000_000)
    tell_one(recorder, Kind.FORWARD, Edge.END)
    recorder.optimizer_edge(Edge.BEGIN)
    recorder.optimizer_edge(Edge.END)
    recorder.end_step()
    early = rows_of(recorder.drain())
    assert sorted(reported(early)) == [0, 1]  # the host has finished, the device begins its forward
    recorder.wait_for_device(device.synchronize)
    rows = checked(recorder)
    times = reported(rows)
    assert sorted(times) == list(range(6))
    assert [times[row][0] for row in range(6)] == sorted(t_ns for t_ns, _ in times.values())
    assert times[2][0] - times[1][0] == pytest.approx(80_000_000, abs=100_000)
    assert {recorder.header.strings[stream] for _, stream in times.values()} == {"compute"}


def test_a_collective_ends_where_the_device_ends_it_and_compute_waits_until_then():
    recorder, device = on_device()
    begin = device.compute.until_ns
    gather(recorder, device)
    recorder.wait_for_device(device.synchronize)
    rows = checked(recorder)
    times, kinds = reported(rows), rows["kind"].tolist()
    issued, waits, waited, ended = (times[row] for row in range(4))
    assert kinds[:4] == [Kind.ALL_GATHER, Kind.WAIT, Kind.WAIT, Kind.ALL_GATHER]
    assert ended[0] == pytest.approx(issued[0] + 50_000_000, abs=100_000)
    assert recorder.header.strings[ended[1]] == "communication"
    assert waited[0] >= ended[0] > waits[0] > begin  # the time that compute waited is the exposed time
    assert rows["t_ns"][3] < ended[0]  # the host had passed it long before


def test_an_aborted_step_has_no_false_end():
    recorder, device = on_device()
    recorder.begin_step()
    gather(recorder, device, ends=False)
    recorder.give_up_step()
    recorder.wait_for_device(device.synchronize)
    rows = checked(recorder)
    assert sorted(reported(rows)) == [0, 1]
    assert [Edge(edge) for edge in rows["edge"][:2]] == [Edge.BEGIN, Edge.BEGIN]
    tell_one(recorder, Kind.ALL_GATHER, Edge.END, comm=COMM)  # of an older one, announced later
    recorder.wait_for_device(device.synchronize)
    assert len(reported(checked(recorder))) == 3


@given(st.lists(st.sampled_from(["forward", "gather", "drain", "pass", "step"]), max_size=40))
def test_drains_in_the_middle_of_a_step_lose_nothing_of_the_device(doing):
    recorder, device = on_device()
    drains, at = [], 0
    for what in doing:
        if what == "forward":
            tell_one(recorder, Kind.FORWARD, Edge.BEGIN)
            device.give(3_000_000)
            tell_one(recorder, Kind.FORWARD, Edge.END)
        elif what == "gather":
            recorder.comm_group(len(recorder.header.comm_groups), (0, 1))
            comm = Comm(group=len(recorder.header.comm_groups) - 1, seq=0)
            tell_one(recorder, Kind.ALL_GATHER, Edge.BEGIN, comm=comm)
            recorder.issued(comm, lambda: None)
            tell_one(recorder, Kind.ALL_GATHER, Edge.END, comm=comm)
        elif what == "drain":
            drains.append(rows_of(recorder.drain(at)))
            at += len(drains[-1])
        elif what == "pass":
            device.now_ns.ns += 2_000_000
        else:
            recorder.begin_step()
    recorder.wait_for_device(device.synchronize)
    rows = np.concatenate([*drains, rows_of(recorder.drain(at))])
    assert rows["seq"].tolist() == list(range(len(rows)))
    of_host = rows["seq"][rows["kind"] != Kind.DEVICE]
    assert sorted(reported(rows)) == of_host.tolist()
    assert len(rows) == 2 * len(of_host)
    checked(recorder)


def test_device_rows_are_neither_events_nor_positions():
    recorder, device = on_device()
    recorder.begin_step()
    for _ in range(400):
        tell_one(recorder, Kind.RESHARD)
    before = recorder.ordinal, recorder.last_event()["seq"]
    recorder.wait_for_device(device.synchronize)
    assert (recorder.newest(300)["kind"] == Kind.DEVICE).all()
    assert (recorder.ordinal, recorder.last_event()["seq"]) == before
    assert device.events < 500


def test_unrecorded_work_is_not_marked_and_earlier_marks_arrive_later():
    recorder, device = on_device()
    tell_one(recorder, Kind.FORWARD, Edge.BEGIN)
    with recorder.unrecorded():
        made = device.events
        gather(recorder, device)
        recorder.drain()
        assert device.events == made
        device.synchronize()
        recorder.drain()
    rows = rows_of(recorder.drain())
    assert rows["kind"].tolist() == [Kind.FORWARD, Kind.DEVICE]


def test_a_host_that_computes_marks_nothing():
    recorder = Recorder(Header())
    tell_one(recorder, Kind.FORWARD, Edge.BEGIN)
    recorder.issued(COMM, lambda: pytest.fail("nothing waits"))
    recorder.begin_step()
    recorder.end_step()
    recorder.wait_for_device(lambda: pytest.fail("nothing to wait for"))
    assert Kind.DEVICE not in rows_of(recorder.drain())["kind"]
