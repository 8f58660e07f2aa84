"""A calibration from what ranks have measured, and from steps that were run and planned."""

from types import SimpleNamespace

import pytest

from tests.helpers.calibrations import CALIBRATION
from workbench.base.codec import encode
from workbench.base.machines import read_calibration
from workbench.errors import UsageError
from workbench.script import calibrator

RANK = {name: encode(getattr(CALIBRATION, name)) for name in ("ops", "collectives", "flops_per_s", "processor")} | {
    name: getattr(CALIBRATION, name)
    for name in ("memory_bytes_per_s", "host_copy_bytes_per_s", "op_ns", "dtensor_ns", "spread_percent", "memory_bytes")
}
TWICE = encode(CALIBRATION.ops[:1])[0] | {"time_ns": 100.0}


class Ranks:
    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def measure(self):
        return [RANK, RANK | {"op_ns": 3000.0, "ops": [TWICE, *RANK["ops"][1:]], "spread_percent": 9.0}]

    def train(self, _name):
        return 1000.0


def test_the_figures_are_medians_and_the_time_for_a_unit_is_what_a_plan_lacks(tmp_path, monkeypatch):
    def planned(_script, args, command, *_, **__):
        unit_ns = read_calibration(command.device).unit_ns
        calls = [SimpleNamespace(calls=3), SimpleNamespace(calls=5)]
        return SimpleNamespace(step_ns=600 + 8 * unit_ns + 50 * args[0].startswith("4"), collectives=calls)

    monkeypatch.setattr(calibrator, "CalibratingRanks", Ranks)
    monkeypatch.setattr(calibrator, "plan_script", planned)
    monkeypatch.setattr(calibrator, "PlannedRank", Ranks)
    out = str(tmp_path / "machine.json")
    report = calibrator.calibrate(2, "cpu", out, lambda _: None)
    found = read_calibration(out)
    assert report.calibration == found
    assert (found.op_ns, found.unit_ns, found.spread_percent, found.num_ranks) == (2000, 50, 9, 2)
    assert found.ops[0].time_ns == 75
    assert found.collectives == CALIBRATION.collectives
    assert [round(each.error_percent) for each in found.held_out] == [0, 5, 0]


@pytest.mark.parametrize(("out", "sentence"), [("m.txt", "ends with .json"), ("no/m.json", "cannot write no/m.json")])
def test_a_file_that_cannot_be_taken_is_refused_before_anything_is_measured(out, sentence, monkeypatch):
    monkeypatch.setattr(calibrator, "CalibratingRanks", None)
    with pytest.raises(UsageError, match=sentence):
        calibrator.calibrate(2, "cpu", out, lambda _: None)
