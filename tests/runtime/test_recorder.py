"""The ring and its key frames."""

import gc
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workbench.events import Category, Comm, Edge, Kind, Param, Phase, Unit, UnitState
from workbench.runtime.recorder import NO_STEP, Recorder
from workbench.trace import advance
from workbench.trace.schema import ROW, ROW_DTYPE, CommGroup, Header, KeyFrame

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
    assert recorder.header.comm_groups == (CommGroup(name="group 0", ranks=(0, 1)),)


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


def test_a_step_given_up_has_no_end():
    recorder = Recorder(Header())
    recorder.begin_step()
    recorder.give_up_step()
    recorder.begin_step()
    rows = rows_of(recorder.drain())
    assert rows["edge"].tolist() == [Edge.BEGIN, Edge.BEGIN]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("memory"), st.sampled_from(list(Category)), st.integers(-50, 50).filter(bool)),
        st.tuples(st.just("unshard"), st.integers(0, 3), st.sampled_from([Edge.BEGIN, Edge.END])),
        st.tuples(st.just("reshard"), st.integers(0, 3), st.none()),
        st.tuples(st.just("drain"), st.none(), st.none()),
    ),
    max_size=60,
)


def tell(recorder, events):
    for what, a, b in events:
        if what == "memory":
            recorder.memory(a, 0, b)
        elif what == "unshard":
            emit(recorder, Kind.UNSHARD, b, unit=a)
        elif what == "reshard":
            emit(recorder, Kind.RESHARD, unit=a)


@given(EVENTS, st.sampled_from([4, 7, 16, 128]))
def test_drains_add_up_to_what_was_recorded_and_key_frames_are_exact(events, capacity):
    recorder, everything = Recorder(Header(), capacity), Recorder(Header())
    drains = []
    for what, a, b in events:
        for r in (recorder, everything):
            tell(r, [(what, a, b)])
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
def test_what_is_off_the_record_leaves_only_what_it_changed(before, between, after):
    recorder, everything = Recorder(Header()), Recorder(Header())
    tell(everything, before + between + after)
    tell(recorder, before)
    frame = recorder.drain().key_frame
    with recorder.unrecorded():
        tell(recorder, between)
        recorder.metric("never", 1.0)
        emit(recorder, Kind.ALL_GATHER, Edge.BEGIN, unit=-1, comm=COMM)
    told = rows_of(recorder.drain(frame.seq))
    tell(recorder, after)
    emit(recorder, Kind.ALL_GATHER, Edge.END, unit=-1, comm=COMM)
    assert set(told["kind"]) <= {Kind.ALLOC, Kind.FREE, Kind.RESHARD, Kind.UNSHARD}
    assert len(told) <= len(Category) + 2 * 4
    expected = everything.drain().key_frame
    assert recorder.drain().key_frame.bytes_by_category == expected.bytes_by_category
    assert recorder.drain().key_frame.unit_states == expected.unit_states
    assert not np.isin(rows_of(recorder.drain())["kind"], (Kind.ALL_GATHER, Kind.METRIC)).any()
    assert recorder.ordinal == len([what for what, *_ in before + after if what in ("unshard", "reshard")]) + 1


def test_off_the_record_what_began_on_it_ends_on_it():
    recorder = Recorder(Header())
    emit(recorder, Kind.ALL_GATHER, Edge.BEGIN, comm=COMM)
    with recorder.unrecorded():
        emit(recorder, Kind.ALL_GATHER, Edge.END, comm=COMM)
    assert rows_of(recorder.drain())["edge"].tolist() == [Edge.BEGIN, Edge.END]


def test_what_the_garbage_collector_announces_within_an_append_is_kept():
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


def test_a_drain_can_be_asked_for_again():
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
    (unit,) = recorder.header.units
    assert (unit.name, unit.retired) == ("blocks.0", True)
    assert {name: getattr(unit, name) for name in policy} == policy
    assert vars(unit.params[0]) == vars(param)
    assert recorder.header_version > version


def test_a_slot_that_is_taken_and_given_back_moves_between_classes():
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
