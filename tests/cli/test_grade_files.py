"""The files of a grade for other tools."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from workbench.cli.grade import GradedCheck, GradeReport
from workbench.cli.grade_files import not_run, to_gradescope, to_junit
from workbench.errors import UsageError


@pytest.fixture
def bad():
    """The report of a notebook in which one check passes, one fails and one is not reached."""
    wrong = "the values are not those of the reference: 2, expected 1"
    why = "not reached: cell 5 raised NameError: name 'nothing' is not defined"
    return GradeReport(
        notebook=Path("bad.ipynb"),
        seconds=2.6,
        checks=(
            GradedCheck(name="first", cell=3, points=2, status="failed", sentences=(wrong,)),
            GradedCheck(name="second", cell=4, points=1, status="passed"),
            GradedCheck(name="third", cell=6, points=1, status="not reached", sentences=(why,)),
        ),
        problem="cell 5 raised NameError",
    )


def test_junit_has_a_case_for_each_check(bad):
    suites = ElementTree.fromstring(to_junit(bad))
    (suite,) = suites
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("bad.ipynb", "3", "2")
    failures = {case.get("name"): case.find("failure") for case in suite}
    assert failures["second"] is None
    assert failures["third"].get("type") == "not reached"
    assert failures["first"].text.startswith("the values are not those")


def test_junit_holds_any_text(bad):
    odd = replace(bad.checks[0], name="a<b & \x1b[0m\x00", sentences=("\x07 > \ud800",))
    case = ElementTree.fromstring(to_junit(replace(bad, checks=(odd,))))[0][0]
    assert case.get("name") == "a<b & \ufffd[0m\ufffd"
    assert case.find("failure").text == "\ufffd > \ufffd"


def test_gradescope_gets_its_format(bad):
    found = json.loads(to_gradescope(bad))
    assert found["score"] == 1
    assert [(test["score"], test["max_score"], test["status"]) for test in found["tests"]] == [
        (0, 2, "failed"),
        (1, 1, "passed"),
        (0, 1, "failed"),
    ]
    assert found["tests"][2]["output"].startswith("not reached: cell 5 raised NameError")
    assert found["execution_time"] == round(bad.seconds)


def test_gradescope_is_told_that_a_notebook_could_not_be_run():
    assert json.loads(not_run(UsageError("x.ipynb is not a notebook"))) == {
        "score": 0,
        "output": "x.ipynb is not a notebook",
    }
