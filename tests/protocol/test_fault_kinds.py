"""The table of faults: what each does, and what names it."""

import pytest

from workbench.magics.command_lines import parse_line
from workbench.protocol.commands import InjectFault
from workbench.protocol.fault_kinds import KINDS, FaultReply, check_name


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_fault_says_what_it_does_and_what_names_it(kind):
    assert kind.rules
    assert kind.summary[:1].islower() or kind.name == "nan"
    assert "{" not in kind.summary
    if not kind.shown_by.startswith("the "):
        assert parse_line(kind.shown_by).word == kind.shown_by.split()[0]


def test_the_nearest_fault_is_named():
    with pytest.raises(ValueError, match="there is no fault 'stragler', did you mean 'straggler'"):
        check_name("stragler")
    with pytest.raises(ValueError, match=r"there is no fault 'xyz': they are straggler, .*, random, off"):
        check_name("xyz")


@pytest.mark.parametrize("wrong", [{"ms": 0}, {"seed": -1}, {"rank": -1}])
def test_numbers_are_checked(wrong):
    with pytest.raises(ValueError, match="--ms is at least 1"):
        InjectFault("nan", **wrong)


def test_random_draws_rank_and_unit_itself():
    with pytest.raises(ValueError, match="random draws rank and unit itself"):
        InjectFault("random", rank=1)


def test_a_fault_in_words():
    reply = FaultReply(name="straggler", rank=1, unit="", ms=20, is_on=True)
    assert reply.words == "rank 1 sleeps 20 ms in every forward of unit (root)"
