"""What a calibration says: the steps that were planned and measured, and the figures."""

from dataclasses import replace

from tests.helpers.calibrations import CALIBRATION
from workbench.reports.calibration_report import CalibrationReport, error_words


def test_it_says_how_far_plans_are_off():
    report = CalibrationReport(file="m.json", calibration=CALIBRATION)
    assert report.headline == (
        "wrote m.json: 4 ranks on 2 cores of here; a step that is planned with it is off by up to 10.0%"
    )
    facts = dict(report.facts())
    assert facts["one"] == "planned 104 µs, measured 100 µs: +4.0%"
    assert facts["all-gather on 4"] == "0.60 µs and 477 MiB/s"
    assert facts["plan with it"] == "workbench plan --ranks 4 --device m.json train.py"
    assert error_words(replace(CALIBRATION, held_out=())) == "an unknown amount"
