"""Reports of faults."""

from workbench.base.fault import Fault
from workbench.reports.fault_report import FaultReport

LATE = Fault(rule="late", verdict="rank 1 is late", evidence=("rank 1: 200 ms",), fix="%fsdp explain rank 1")
TIED = Fault(rule="tied", verdict="a <b> is tied")


def test_no_faults():
    report = FaultReport(num_checks=2, abstained=("bytes: no memory was recorded",))
    assert str(report) == "no faults found by 2 checks\n  not checked  bytes: no memory was recorded"
    assert report.problem == ""


def test_the_first_fault_is_the_headline():
    report = FaultReport(faults=(LATE, TIED), num_checks=2)
    assert report.headline == report.problem == "rank 1 is late (and 1 further fault)"
    assert report.facts() == [
        ("evidence", "rank 1: 200 ms"),
        ("fix", "%fsdp explain rank 1"),
        ("also", "a <b> is tied"),
    ]
    assert FaultReport(faults=(LATE,), num_checks=2).headline == "rank 1 is late"


def test_texts_are_escaped():
    assert "<b>" not in FaultReport(faults=(LATE, TIED), num_checks=2)._repr_html_()
