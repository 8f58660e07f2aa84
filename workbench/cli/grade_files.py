"""Files of grades for other tools: JUnit XML, and the ``results.json`` of Gradescope's autograder."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from workbench.cli.grade import GradeReport

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: GradeReport) -> str:
    """Return a report as JUnit XML: one test case for each check, in one suite named after the notebook."""
    failed = sum(check.status != "passed" for check in report.checks)
    numbers = {"tests": str(len(report.checks)), "failures": str(failed), "time": f"{report.seconds:.3f}"}
    suites = ElementTree.Element("testsuites", numbers)
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _text(report.notebook.name), "errors": "0", **numbers})
    for check in report.checks:
        names = {"name": _text(check.name), "classname": _text(report.notebook.stem), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        if check.status != "passed":
            first = check.sentences[0] if check.sentences else check.status
            failure = ElementTree.SubElement(case, "failure", {"type": check.status, "message": _text(first)})
            failure.text = _text("\n".join(check.sentences))
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)


def _text(text: str) -> str:
    """Return text without the characters that XML cannot hold."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def not_run(error: Exception) -> str:
    """Return Gradescope's ``results.json`` for a notebook that could not be run: no points, and why."""
    return json.dumps({"score": 0, "output": str(error)}, ensure_ascii=False)


def to_gradescope(report: GradeReport) -> str:
    """Return a report as Gradescope's ``results.json``: one test for each check, with its points and sentences."""
    tests = [
        {
            "name": check.name,
            "score": check.score,
            "max_score": check.points,
            "status": "passed" if check.status == "passed" else "failed",
            "output": "\n".join(check.sentences),
        }
        for check in report.checks
    ]
    found = {
        "score": report.score,
        "execution_time": round(report.seconds),
        "output": f"The notebook did not run to its end: {report.problem}" if report.problem else "",
        "tests": tests,
    }
    return json.dumps(found, indent=2, ensure_ascii=False)
