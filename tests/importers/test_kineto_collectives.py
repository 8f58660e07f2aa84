"""What a call in a profile becomes: its payload, group, number, unit and end, and when units are resharded."""

from array import array

import numpy as np
import pytest

from workbench.events import Kind
from workbench.importers.collective_names import MAX_NUMEL
from workbench.importers.kineto_collectives import ANY_GROUP, Label, collectives_of, labels_of, reshards_of
from workbench.importers.kineto_profile import HostSpan, Profile

SIZES = {"Out msg nelems": 8, "In msg nelems": 2, "dtype": "Float"}
MESH = {"1": ("mesh", (0, 1))}


def span(name, begin=10, end=20, thread=1, args=()):
    return HostSpan(begin, end, thread, name, dict(args))


def profile_of(**columns):
    return Profile(**{"kernels": tuple(np.empty((4, 0), np.int64)), **columns})


def collective(name="allgather_", *, comm=(), call=(), work=None, world=4, labels=(), **columns):
    """Return what becomes of one call from 10 to 20."""
    mine = profile_of(calls=[span(f"c10d::{name}", args=call)], comms=[span("", 11, 12, args=comm)], **columns)
    if work is not None:
        mine.gloo = [span(f"gloo:{name}", 15, 30, 2, work)]
    (found,) = collectives_of(mine, labels, world)
    return found


@pytest.mark.parametrize(
    ("name", "given", "num_bytes"),
    [
        ("allgather_", {"comm": SIZES}, 32),
        ("reduce_scatter_", {"comm": SIZES}, 8),
        ("allgather_", {"comm": SIZES | {"Out msg nelems": 0}}, 0),
        ("allgather_", {"comm": SIZES, "call": {"Input Dims": [[9]], "Input type": ["float"]}}, 32),
        ("allgather_", {"call": {"Input Dims": [[8], [2], [99]], "Input type": ["float"]}}, 32),
        ("allgather_", {"call": {"Input Dims": [], "Input type": ["float"]}}, 0),
        ("allgather_", {"call": {"Input Dims": [[MAX_NUMEL - 1, 2]], "Input type": ["float"]}}, 4 * MAX_NUMEL),
        ("allgather_", {"work": {"Input Dims": [[MAX_NUMEL - 1]], "Input type": ["float"]}}, 4 * MAX_NUMEL),
        ("allgather_", {"work": {"Input Dims": [[2], [9]], "Input type": ["float"]}}, 4 * 2 * 4),
        ("allgather_", {"work": {"Input Dims": [[2]], "Input type": ["float"]}, "groups": MESH}, 2 * 2 * 4),
        ("allreduce_", {"work": {"Input Dims": [[2]], "Input type": ["float"]}}, 2 * 4),
        ("allreduce_", {"work": {"Input Dims": [], "Input type": ["float"]}}, 0),
        ("allreduce_", {"work": {"Input Dims": [[2]], "Input type": []}}, 0),
        *[("allgather_", {"comm": SIZES | {"Out msg nelems": bad}}, 0) for bad in (-1, "8", True, MAX_NUMEL)],
    ],
)
def test_the_payload_is_what_the_profile_says_of_it(name, given, num_bytes):
    assert collective(name, **given).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("args", "groups", "group"),
    [
        ({"Process Group Name": "1"}, MESH, ("mesh", (0, 1))),
        ({"Process Group Name": "1", "Process Group Ranks": "[2, 3]"}, {"1": ("mesh", ())}, ("mesh", (2, 3))),
        (
            {"Process Group Name": "9", "Process Group Description": "d" * 200, "Process Group Ranks": "[0, 3]"},
            MESH,
            ("d" * 100, (0, 3)),
        ),
        ({"Process Group Name": "9"}, MESH, ("9", ())),
        ({"Process Group Name": "9", "Process Group Ranks": "[0, 4]"}, MESH, ("9", ())),  # there are 4 ranks
        ({}, MESH, ("mesh", (0, 1))),
        ({}, MESH | {"2": ("other", (2, 3))}, (ANY_GROUP, ())),
    ],
)
def test_the_group_is_the_named_one_or_the_only_one(args, groups, group):
    assert collective(comm=args, groups=groups).group == group


@pytest.mark.parametrize(("seq", "number"), [(0, 0), (2**31 - 1, 2**31 - 1), (2**31, None), (-1, None), (True, None)])
def test_the_number_is_that_of_nccl(seq, number):
    assert collective(comm={"Seq": seq}).number == number


@pytest.mark.parametrize(
    ("labels", "unit"),
    [
        ([(5, 30, "all_gather", "a"), (6, 30, "post_backward_reduce", "b"), (11, 30, "all_gather", "c")], "b"),
        ([(5, 10, "all_gather", "a"), (6, 9, "all_gather", "b"), (10, 30, "pre_forward", "c")], "a"),
        ([(5, 9, "all_gather", "a")], None),
    ],
)
def test_the_unit_is_that_of_the_innermost_label(labels, unit):
    assert collective(labels=[Label(*label) for label in labels]).unit == unit


@pytest.mark.parametrize(
    ("given", "end_ns", "blocked"),
    [
        ({"work": {}, "starts": {1: array("q", [10, 30])}}, 30, True),
        ({"work": {}, "starts": {1: array("q", [10, 20])}}, 30, False),
        ({"work": {}, "starts": {1: array("q", [10]), 2: array("q", [15])}}, 30, True),
        ({"work": {}}, 30, False),
        ({"starts": {1: array("q", [10])}}, None, False),
        ({"device": 0}, 20, False),
    ],
)
def test_a_call_ends_with_the_work_of_gloo_and_blocks_if_its_thread_begins_nothing_until_then(given, end_ns, blocked):
    found = collective(**given)
    assert (found.begin_ns, found.issued_ns, found.end_ns, found.blocked) == (10, 20, end_ns, blocked)


def test_works_of_gloo_are_those_of_the_calls_in_their_order():
    names = ("broadcast_", "reduce_scatter_", "barrier", "allgather_", "allgather_")
    calls = [span(f"c10d::{name}", 10 * at, 10 * at + 1) for at, name in enumerate(names, start=1)]
    works = [("all_reduce", 5), ("all_reduce", 20), ("all_reduce", 31), ("broadcast", 42), ("all_gather", 50)]
    profile = profile_of(calls=calls[::-1], gloo=[span(f"gloo:{name}", at, at + 7, 2) for name, at in works])
    assert [each.end_ns for each in collectives_of(profile, (), 2)] == [None, 27, 38, None, 57]


def test_kernels_of_nccl_belong_to_the_call_that_launched_them():
    calls = [span("c10d::allreduce_", at, at + 5) for at in (10, 20, 30)]
    # begin, end, correlation and stream; NCCL's stream is negated, minus 1
    kernels = [(60, 70, 7, -4), (40, 50, 5, -3), (41, 42, 6, 0), (80, 90, 9, -3)]
    launches = [(5, 15), (6, 20), (7, 24)]
    profile = profile_of(calls=calls, kernels=tuple(np.array(kernels).T), launches=tuple(np.array(launches).T))
    found = collectives_of(profile, (), 2)
    assert [(each.device, each.stream) for each in found] == [((40, 50), 2), ((60, 70), 3), (None, 0)]


def test_a_collective_of_a_compiled_graph_has_no_call():
    comms = [span("", 1, 2, args={"Collective name": "allreduce"}), span("", 3, 4, args={"Collective name": "?"})]
    other = span("", 12, 13, 2, {"Collective name": "broadcast"})  # of another thread than the call around it
    profile = profile_of(calls=[span("c10d::allgather_")], comms=[*comms, other])
    found = collectives_of(profile, (), 2)
    assert [(each.kind, each.begin_ns) for each in found] == [
        (Kind.ALL_REDUCE, 1),
        (Kind.ALL_GATHER, 10),
        (Kind.BROADCAST, 12),
    ]


FORWARD, GATHER, BACKWARD = "post_forward", "all_gather", "post_backward_reshard"


@pytest.mark.parametrize(
    ("names", "ends", "after_forward"),
    [
        ([GATHER, FORWARD, GATHER, BACKWARD], [2, 4], True),
        ([GATHER, FORWARD, BACKWARD], [3], False),
        ([GATHER, FORWARD, GATHER, FORWARD], [2, 4], True),
        ([GATHER, FORWARD], [], False),
        ([GATHER, FORWARD, GATHER], [2], True),
        ([GATHER, BACKWARD, GATHER], [2], False),
    ],
)
def test_a_forward_frees_a_unit_if_it_is_gathered_again(names, ends, after_forward):
    labels = [Label(at, at + 1, name, "a") for at, name in enumerate(names)]
    labels = labels_of(Profile(labels=[span(f"FSDP::{e.what} (a)", e.begin_ns, e.end_ns) for e in labels]))
    others = [Label(0, 9, "post_forward", "b"), Label(0, 9, "pre_forward", "c")]
    assert reshards_of([*labels, *others]) == {"a": (ends, after_forward), "b": ([], False)}


def test_labels_without_a_unit_are_of_the_root_and_other_texts_are_none():
    spans = [span("FSDP::all_gather"), span("FSDP::all gather (a)"), span("FSDP::all_gather (a (b))")]
    assert [label.unit for label in labels_of(Profile(labels=spans))] == ["", "a (b)"]
