"""The reports of ``fault`` and ``faults``: a drawn fault stays hidden until it is removed."""

from dataclasses import replace

import pytest

from workbench.protocol.fault_kinds import KINDS, FaultReply
from workbench.reports.injected_fault import FaultListReport, inject_report, instrument_words

REPLY = FaultReply(name="straggler", rank=1, unit="blocks.0", ms=200, is_on=True)


def report(**changes):
    return inject_report([replace(REPLY, **changes)] * 2)


def test_a_fault_that_is_on_says_what_names_it():
    assert str(report()).splitlines() == [
        "fault straggler is on: rank 1 sleeps 200 ms in every forward of unit blocks.0",
        "  named by   %fsdp explain step, after %fsdp step 16",
        "  remove it  %fsdp fault off",
    ]


def test_a_drawn_fault_is_hidden_until_it_is_removed():
    hidden = report(is_hidden=True)
    assert (hidden.name, hidden.words, hidden.rank, hidden.unit) == ("random", "", None, None)
    assert "straggler" not in f"{hidden}{hidden._repr_html_()}"
    shown = report(is_hidden=True, is_on=False, notes=("values are restored",))
    assert shown.headline == "fault straggler is off; it was: rank 1 sleeps 200 ms in every forward of unit blocks.0"
    assert shown.facts() == [("note", "values are restored")]


def test_the_list_has_a_sentence_for_each_fault():
    found = FaultListReport()
    assert [name for name, _ in found.facts()] == list(KINDS)
    assert found.headline == f"{len(KINDS)} faults: inject one with %fsdp fault NAME, or with %fsdp fault random"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("straggler", "%fsdp explain step, after %fsdp step 16"),
        ("skip-collective", "%fsdp where, after %fsdp step --background"),
        ("wrong-scale", "%fsdp verify"),
        ("oom", "the error of %fsdp step"),
    ],
)
def test_what_names_a_fault_is_a_line_to_type(name, words):
    assert instrument_words(KINDS[name]) == words
