"""The machines that plans know."""

import json

import pytest

from tests.helpers.calibrations import CALIBRATION
from workbench.base.codec import encode
from workbench.base.machines import DEFAULT, MACHINES, TF32, machine, read_calibration, write_calibration
from workbench.errors import UsageError
from workbench.protocol.planning import most_ranks, planned_ranks


def test_each_machine_has_its_own_name_and_figures_that_go_together():
    for name, known in MACHINES.items():
        assert machine(name) is known
        assert str(known.memory_bytes // 2**30) in name
        assert known.flops["bfloat16"] > known.peak(TF32) > known.peak("float32") == known.peak("float64")
        assert known.memory_rate > known.link_rate > known.network_rate
    assert DEFAULT in MACHINES


def test_another_name_is_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match="no figures of a device 'a100-80g', did you mean 'a100-80gb'"):
        machine("a100-80g")


# ---- measured


def test_a_calibration_is_written_and_read(tmp_path):
    path = str(tmp_path / "machine.json")
    write_calibration(CALIBRATION, path)
    assert read_calibration(path) == CALIBRATION
    assert machine(path).calibration == CALIBRATION
    assert CALIBRATION.error_percent == pytest.approx(10)
    with pytest.raises(UsageError, match="cannot write"):
        write_calibration(CALIBRATION, str(tmp_path / "no" / "machine.json"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"op_ns": None}, r"machine.json lacks \['op_ns'\]"),
        ({"colour": "red"}, r"machine.json has unknown \['colour'\]"),
        ({"version": 9}, "version 9 of the format is unknown; this workbench reads 1"),
        ({"num_ranks": "two"}, "machine.json.num_ranks is 'two', expected int"),
        ({"memory_bytes_per_s": 0.0}, "a number that must be positive is not"),
        ({"flops_per_s": {}}, "flops_per_s lacks float32"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_in_a_sentence(change, sentence, tmp_path):
    path = tmp_path / "machine.json"
    data = {name: value for name, value in (encode(CALIBRATION) | change).items() if value is not None}
    path.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=f"is no file of workbench calibrate: .*{sentence}"):
        planned_ranks(str(path), 4, None)


@pytest.mark.parametrize("text", ["", "[]", "3", "{"])
def test_a_file_that_is_not_even_json_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="is no file of workbench calibrate"):
        machine(str(tmp_path / "x.json"))
    with pytest.raises(UsageError, match=r"cannot read .*no.json: .*; workbench calibrate --out .*no.json writes it"):
        machine(str(tmp_path / "no.json"))


@pytest.mark.parametrize(
    ("work", "time_ns"), [(10, 50), (100, 50), (1000, 500), (10_000, 5000), (20_000, 10_000), (300, 150)]
)
def test_the_time_of_an_operation_is_interpolated(work, time_ns):
    assert CALIBRATION.op_ns_of("aten.add", "float32", work) == pytest.approx(time_ns)
    assert CALIBRATION.op_ns_of("aten.add", "bfloat16", work) is None


@pytest.mark.parametrize(
    ("kind", "num_ranks", "time_ns"), [("all_gather", 2, 1100), ("all_gather", 4, 2600), ("barrier", 3, 1200)]
)
def test_the_time_of_a_collective_is_that_of_the_nearest_number_of_ranks(kind, num_ranks, time_ns):
    assert CALIBRATION.collective_ns(kind, 1000, num_ranks) == pytest.approx(time_ns)
    assert CALIBRATION.collective_ns(kind, 1000, 1) == 0


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(5, None), (4, 2)])
def test_a_plan_is_for_no_more_than_was_measured(num_ranks, num_hosts, tmp_path):
    path = str(tmp_path / "machine.json")
    write_calibration(CALIBRATION, path)
    assert planned_ranks(path, 4, None).seconds(1000, range(4), "all_gather") == pytest.approx(2.6e-6)
    assert most_ranks(path) == 4
    with pytest.raises(UsageError, match=f"measured with 4 ranks on one host.*calibrate -n {num_ranks} measures them"):
        planned_ranks(path, num_ranks, num_hosts)
