"""A fault that a student has to name."""

from types import SimpleNamespace

import pytest

from workbench.course import drawn_faults, named_fault, student_seed
from workbench.protocol.fault_kinds import FaultReply

ON = FaultReply(name="straggler", rank=1, unit="blocks.0", ms=50, is_on=True, is_hidden=True)
OFF = FaultReply(name="straggler", rank=1, unit="blocks.0", ms=50, is_on=False)


@pytest.fixture
def replies(monkeypatch):
    """Replies of the commands that the session has completed."""
    found = []
    entries = SimpleNamespace(program=SimpleNamespace(entries=found))
    monkeypatch.setattr(drawn_faults, "find_workbench", lambda: entries)
    monkeypatch.setattr(drawn_faults, "_NAMED", [])
    return lambda *some: found.extend(SimpleNamespace(reply=each) for each in some)


def test_each_student_has_a_seed_of_their_own():
    assert student_seed("", 10) == student_seed("  ", 10) == 10
    assert student_seed("Ada L.") == student_seed(" ada  l. ")
    assert len({student_seed(name) for name in ("Ada", "Grace", "Katherine", "Mary")}) == 4


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("nan", "it is not nan: it is still on: compare"),
        ("stragler", "there is no fault 'stragler'"),
        ("", "the fault: there is no answer yet"),
        (None, "the fault: there is no answer yet"),
        (3, "the fault: 3 is a int: write its name"),
    ],
)
def test_a_wrong_answer_does_not_name_the_fault(answer, why, replies):
    replies(None, ON, "a step")
    finding = named_fault(answer)
    assert (finding.ok, finding.sentence.startswith(why)) == (False, True)
    assert "blocks.0" not in finding.sentence


def test_the_right_answer_stays_right_when_the_fault_is_removed(replies):
    replies(ON)
    assert named_fault(" Straggler").ok
    replies(OFF)
    assert named_fault("straggler").ok


def test_a_fault_that_was_removed_first_was_not_found_out(replies):
    assert named_fault("straggler").sentence.startswith("no fault was injected: run the cell")
    replies(ON, OFF)
    assert named_fault("straggler").sentence.startswith("the fault was removed, which names it, before the answer")
