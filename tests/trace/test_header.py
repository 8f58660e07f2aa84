import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.helpers.trace_strategies import any_headers, any_key_frames, example_trace
from tests.replay.test_shards import make_flat, make_unit
from workbench.errors import TraceError
from workbench.events import UnitState
from workbench.trace import header_from_dict, header_to_dict, key_frame_from_dict, key_frame_to_dict
from workbench.trace.header import join, translate
from workbench.trace.schema import (
    SCHEMA_VERSION,
    BufferSum,
    ClockReading,
    GroupInfo,
    Header,
    HostClock,
    KeyFrame,
    RankInfo,
)


@given(any_headers())
def test_a_header_survives_json(header):
    data = header_to_dict(header)
    assert header_from_dict(data) == header
    assert header_from_dict(json.loads(json.dumps(data))) == header


@given(any_key_frames())
def test_a_key_frame_survives_json(key_frame):
    data = key_frame_to_dict(key_frame)
    assert key_frame_from_dict(data) == key_frame
    back = key_frame_from_dict(json.loads(json.dumps(data)))
    assert back == key_frame
    assert all(type(state) is UnitState for state in back.unit_states.values())


@pytest.mark.parametrize(
    ("version", "message"),
    [(SCHEMA_VERSION + 1, "update fsdp-workbench to read it"), (SCHEMA_VERSION - 1, "record the trace again")],
)
def test_a_header_of_another_schema_is_refused_whatever_else_it_holds(version, message):
    data = {"schema_version": version, "surprise": []}
    text = f"the trace has schema version {version}, and this workbench reads version {SCHEMA_VERSION}: {message}"
    with pytest.raises(TraceError, match=text):
        header_from_dict(data)


def test_an_older_header_has_the_defaults_of_later_fields():
    header = example_trace().header
    data = header_to_dict(header)
    for unit in data["units"]:
        del unit["gather_nbytes"]
        for param in unit["params"]:
            del param["compute_itemsize"]
    assert header_from_dict(data) == header


def test_a_header_keeps_the_parts_of_a_flat_parameter():
    header = Header(units=(make_unit(make_flat((3, 6), 2)),))
    data = json.loads(json.dumps(header_to_dict(header)))
    assert header_from_dict(data).units[0].params[0].parts == header.units[0].params[0].parts


def test_a_header_keeps_unmanaged_parameters():
    info = RankInfo(rank=0, host="a", device="cpu", pid=1, buffers=(BufferSum(name="model.mean", crc32=7),))
    header = Header(world_size=1, ranks=(info,), unmanaged=("model.scale",), hooks=("model.weight",))
    assert header_from_dict(json.loads(json.dumps(header_to_dict(header)))) == header


def test_the_newest_header_lists_unmanaged_parameters():
    before, after = (Header(world_size=2, unmanaged=params) for params in (("model.scale",), ()))
    assert join(after, before).unmanaged == ("model.scale",)
    assert join(before, after).unmanaged == ()


def changed(path: str, value: object) -> dict:
    """Return the example's header as JSON, with the entry at ``path`` set to ``value`` (...: removed)."""
    data = at = json.loads(json.dumps(header_to_dict(example_trace(steps=0).header)))
    *way, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    for key in way:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("units/1/params/0/shape", ..., r"header.units\[1\].params\[0\] lacks \['shape'\]"),
        ("ranks/0/color", "red", r"header.ranks\[0\] has unknown \['color'\]"),
        ("world_size", "4", "header.world_size is '4', expected int"),
        ("world_size", True, "header.world_size is True, expected int"),
        ("units/0/retired", 1, r"header.units\[0\].retired is 1, expected bool"),
        ("strings", "loss", "header.strings is 'loss', expected list or tuple"),
        ("units/0/reshard_after_forward", "yes", r"reshard_after_forward is 'yes', expected bool or int"),
        ("strings/0", None, r"header.strings\[0\] is None, expected str"),
        ("units/2", [], r"header.units\[2\] is \[\], expected dict"),
    ],
)
def test_a_wrong_header_is_refused_with_the_place(path, value, sentence):
    with pytest.raises(TraceError, match=sentence):
        header_from_dict(changed(path, value))


def test_a_header_must_be_an_object():
    with pytest.raises(TraceError, match=r"header is \[1\], expected dict"):
        header_from_dict([1])


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("unit_states", {"x": 1}, "key_frame.unit_states has the key 'x', expected an integer"),
        ("unit_states", {"0": 9}, r"key_frame.unit_states\[0\] is 9, not a valid UnitState"),
        ("unit_states", {"0": "1"}, r"key_frame.unit_states\[0\] is '1', expected int"),
        ("reducing", [], r"key_frame.reducing is \[\], expected dict"),
        ("bytes_by_category", [0, 0], "key_frame.bytes_by_category has 2 entries, expected 10"),
    ],
)
def test_a_wrong_key_frame_is_refused_with_the_place(field, value, sentence):
    with pytest.raises(TraceError, match=sentence):
        key_frame_from_dict(key_frame_to_dict(KeyFrame()) | {field: value})


@given(any_headers())
def test_joining_with_nothing_new_changes_no_table(header):
    once = join(Header(), header)
    assert join(once, header) == once
    assert set(once.strings) == set(header.strings)
    assert len(set(once.strings)) == len(once.strings)


def test_join_keeps_places_and_lets_the_newer_win():
    old = Header(world_size=2, strings=("a", "b"), ranks=(RankInfo(rank=1, host="x", device="cpu", pid=1),))
    new = dataclasses.replace(
        old, producer="p", strings=("c", "b"), ranks=(RankInfo(rank=0, host="y", device="cpu", pid=2),)
    )
    both = join(old, new)
    assert both.strings == ("a", "b", "c")
    assert [r.host for r in both.ranks] == ["y", "x"]
    assert both.producer == "p"
    assert join(both, Header(strings=("d",))).producer == "p"


@pytest.mark.parametrize("ended", ["retired", "gone"])
def test_a_unit_retired_on_one_rank_is_retired_in_any_order(ended):
    first, second = make_unit(index=0), make_unit(index=1)
    used, over = Header(units=(first, second)), Header(units=(replace(first, **{ended: True}), second))
    for both in (join(used, over), join(over, used)):
        assert [unit.in_use for unit in both.units] == [False, True]


def test_join_keeps_every_reading_of_a_clock_once_in_the_order_of_their_times():
    first, second, third = (ClockReading(t_ns=t_ns, offset_ns=1, error_ns=1) for t_ns in (1, 2, 3))
    old = Header(clocks=(HostClock(ranks=(2, 3), readings=(first, third)),))
    new = Header(clocks=(HostClock(ranks=(1,), readings=(first,)), HostClock(ranks=(2, 3), readings=(second, third))))
    found = (HostClock(ranks=(1,), readings=(first,)), HostClock(ranks=(2, 3), readings=(first, second, third)))
    assert join(old, new).clocks == join(new, old).clocks == found
    assert join(old, Header()).clocks == join(Header(), old).clocks == old.clocks


def test_rows_are_translated_to_the_joined_tables():
    rows = example_trace(steps=1).rank(0).rows[:3].copy()
    rows["module"], rows["comm_group"] = [0, 1, -1], [-1, 0, 0]
    source = Header(strings=("b", "a"), comm_groups=(GroupInfo(name="g"),))
    target = join(Header(strings=("a",), comm_groups=(GroupInfo(name="f", ranks=(0,)),)), source)
    moved = translate(rows, source, target)
    assert moved["module"].tolist() == [1, 0, -1]
    assert moved["comm_group"].tolist() == [-1, 1, 1]
    assert rows["module"].tolist() == [0, 1, -1]
    assert np.shares_memory(translate(rows, source, source), rows)
