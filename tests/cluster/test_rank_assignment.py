"""The assignment of ranks to engines, from the engines' information."""

import json
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.base.codec import decode
from workbench.base.ports import LOOPBACK, LOOPBACK_INTERFACE
from workbench.cluster import engine_probe
from workbench.cluster.rank_assignment import EngineInfo, boots, misfits, seats
from workbench.errors import UsageError

HERE = EngineInfo(
    pid=1,
    host="a",
    identity="id of a",
    executable="/usr/bin/python3",
    python="3.11",
    torch="2.13.0",
    workbench="0.2.0",
    devices={},
    address="10.0.0.1",
    interface="eth0",
    interfaces=("eth0", "lo"),
)


def on(host, **more):
    return replace(HERE, host=host, identity=f"id of {host}", **more)


names = st.sampled_from(["node1", "node2", "node10", "b", "1"])


@given(st.lists(names, min_size=1, max_size=12), st.integers(1, 12))
def test_ranks_of_a_host_are_neighbours_numbered_from_0(found, num_ranks):
    engines = {f"engine {number}": on(name) for number, name in enumerate(found)}
    seated = seats(engines, num_ranks)
    assert len(seated) == min(num_ranks, len(found))
    assert len({seat.engine for seat in seated}) == len(seated)
    runs = [list(run) for _, run in groupby(seated, key=lambda seat: seat.info.identity)]
    assert len(runs) == len({seat.info.identity for seat in seated})
    for run in runs:
        assert [seat.local_rank for seat in run] == list(range(len(run)))
        assert {seat.local_world_size for seat in run} == {len(run)}
        order = [list(engines).index(seat.engine) for seat in run]
        assert order == sorted(order)


def test_hosts_are_in_the_order_that_people_count():
    found = {str(number): on(name) for number, name in enumerate(["node10", "node2", "node1"])}
    assert [seat.label for seat in seats(found)] == ["node1", "node2", "node10"]


def test_hosts_of_one_name_are_distinguished():
    found = {"0": on("a"), "1": replace(on("a", address="10.0.0.2"), identity="another")}
    assert sorted(seat.label for seat in seats(found)) == ["a (10.0.0.1)", "a (10.0.0.2)"]


def test_ranks_of_one_host_meet_on_its_loopback_interface():
    requested = boots(seats({"0": on("a"), "1": on("a")}), "cpu")
    assert {(boot.host.address, boot.host.interface) for boot in requested.values()} == {(LOOPBACK, LOOPBACK_INTERFACE)}
    assert [(boot.rank, boot.world_size, boot.local_rank, boot.local_world_size) for boot in requested.values()] == [
        (0, 2, 0, 2),
        (1, 2, 1, 2),
    ]


def test_ranks_of_several_hosts_meet_where_their_hosts_do():
    requested = boots(seats({"0": on("a"), "1": on("b", address="10.0.0.2", interface="eth1"), "2": on("a")}), "cpu")
    assert [(boot.host.name, boot.host.address, boot.host.interface) for boot in requested.values()] == [
        ("a", "10.0.0.1", "eth0"),
        ("a", "10.0.0.1", "eth0"),
        ("b", "10.0.0.2", "eth1"),
    ]
    assert [(boot.rank, boot.local_rank, boot.local_world_size) for boot in requested.values()] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
    ]


@pytest.mark.parametrize(
    ("gpus", "device", "settled"),
    [((2, 1), "auto", "cuda"), ((2, 0), "auto", "cpu"), ((1, 1), "auto", "cpu"), ((8, 8), "cpu", "cpu")],
)
def test_auto_means_gpus_if_every_rank_can_have_one(gpus, device, settled):
    found = {
        "0": on("a", devices={"cuda": gpus[0]}),
        "1": on("a", devices={"cuda": gpus[0]}),
        "2": on("b", devices={"cuda": gpus[1]}),
    }
    assert {boot.device for boot in boots(seats(found), device).values()} == {settled}


def test_each_host_with_too_few_gpus_is_named():
    found = {
        str(i): on(name, devices={"cuda": num})
        for i, (name, num) in enumerate([("a", 1), ("a", 1), ("b", 0), ("c", 1)])
    }
    with pytest.raises(UsageError) as caught:
        boots(seats(found), "cuda")
    assert str(caught.value).splitlines() == [
        "2 ranks need 2 cuda devices, but a has 1: use --device cpu, or start at most 1 there",
        "1 rank needs 1 cuda device, but b has 0: use --device cpu",
    ]


@pytest.mark.parametrize("address", ["", LOOPBACK])
def test_a_host_that_the_others_cannot_reach_is_named(address):
    found = {"0": on("a"), "1": on("b", address=address)}
    with pytest.raises(UsageError, match=r"b has no address that other hosts can reach: .* one of eth0, lo$"):
        boots(seats(found), "cpu")
    with pytest.raises(UsageError, match=r"b has no address on 'ib0'; it has eth0, lo: --interface NAME$"):
        boots(seats(found), "cpu", "ib0")


@pytest.mark.parametrize(
    ("other", "reported"),
    [
        ({"python": "3.12"}, "Python 3.12, but most have 3.11: use that version for its engines"),
        ({"workbench": ""}, "no workbench: install version 0.2.0"),
        ({"workbench": "0.0.9"}, "workbench 0.0.9, but this notebook has 0.2.0: install that version"),
        ({"torch": ""}, "no torch: install version 2.13.0"),
        ({"torch": "2.11.0+cpu"}, "torch 2.11.0+cpu, but most have 2.13.0: install that version"),
    ],
)
def test_a_host_that_does_not_fit_is_named_once_with_what_to_do(other, reported):
    found = {"0": on("a"), "1": on("a", torch="2.13.0+cu130"), "2": on("b", **other), "3": on("b", **other)}
    found["4"] = found["5"] = on("c")
    assert misfits(seats(found), "0.2.0") == [f"b has {reported} (its engines run /usr/bin/python3)"]


def test_hosts_that_fit_are_not_mentioned():
    assert misfits(seats({"0": on("a"), "1": on("b", torch="2.13.0+cpu")}), "0.2.0") == []


def test_missing_torch_is_reported_for_each_host():
    found = {"0": on("a", torch=""), "1": on("b", torch="")}
    assert [sentence.partition(" (")[0] for sentence in misfits(seats(found), "0.2.0")] == [
        "a has no torch: install it",
        "b has no torch: install it",
    ]


# ---- the engine's information


@pytest.fixture
def registered_at(monkeypatch):
    """Makes this process look like an engine that registered at a controller's address."""
    from ipyparallel.engine.app import IPEngine

    def register(host):
        engine = type("Engine", (), {"registration_url": f"tcp://{host}:1234"})
        monkeypatch.setattr(IPEngine, "instance", lambda: engine)

    return register


def reported(**more):
    return decode(EngineInfo, json.loads(engine_probe.survey(more.pop("interface", ""), count_for="")), "said")


def test_the_report_of_a_process_about_itself(registered_at):
    registered_at("127.0.0.1")
    found = reported()
    assert found.identity == engine_probe.identity()
    assert (found.python.count("."), found.devices) == (1, {})
    assert LOOPBACK_INTERFACE in found.interfaces
    assert found.torch.startswith("2.")
    assert found.workbench


def test_the_address_is_that_of_the_route_to_the_controller(registered_at, monkeypatch):
    routes = {"10.9.8.7": "10.9.0.2", "127.0.0.1": "127.0.0.1", engine_probe.ELSEWHERE: "192.168.0.3"}
    monkeypatch.setattr(engine_probe, "address_towards", routes.get)
    monkeypatch.setattr(
        engine_probe, "interfaces_here", lambda: {"lo": "127.0.0.1", "eth0": "192.168.0.3", "eth1": "10.9.0.2"}
    )
    registered_at("10.9.8.7")
    assert (reported().address, reported().interface) == ("10.9.0.2", "eth1")
    registered_at("127.0.0.1")  # on this machine, or through a tunnel
    assert (reported().address, reported().interface) == ("192.168.0.3", "eth0")
    assert (reported(interface="lo").address, reported(interface="lo").interface) == ("127.0.0.1", "lo")
    assert (reported(interface="ib0").address, reported(interface="ib0").interface) == ("", "")


def test_an_engine_without_the_workbench_and_torch_is_reported(registered_at, monkeypatch):
    registered_at("127.0.0.1")

    def no_version(name):
        raise engine_probe.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(engine_probe.metadata, "version", no_version)
    monkeypatch.setattr(engine_probe.util, "find_spec", lambda name: None)
    found = json.loads(engine_probe.survey("", count_for="0.2.0"))
    assert (found["torch"], found["workbench"], found["devices"]) == ("", "", {})


def test_an_address_that_cannot_be_reached_has_no_route(monkeypatch):
    assert engine_probe.address_towards("256.0.0.1") == ""
    assert engine_probe.address_towards("127.0.0.1") == "127.0.0.1"
