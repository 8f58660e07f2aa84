"""Who chooses a unit's pair of collectives, and when it is chosen again."""

import pytest
import torch

from workbench.engine.backends.gloo import GlooAllGather, GlooReduceScatter
from workbench.engine.comm import CUSTOM, OF_GROUP, CommPair, DefaultAllGather, DefaultReduceScatter
from workbench.engine.comm_choice import CommChoice

CPU = torch.device("cpu")
ROOTS = CommPair(DefaultAllGather(), DefaultReduceScatter(), "c10d")


@pytest.fixture(autouse=True)
def usual_pair(monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMM", "gloo")


def test_until_the_root_has_chosen_there_is_a_pair_and_the_choice_stays_open():
    choice = CommChoice(CPU)
    assert (choice.chosen, choice.is_open) == (None, True)
    pair = choice.pair
    assert (type(pair.gather), type(pair.reduce)) == (GlooAllGather, GlooReduceScatter)
    assert choice.pair is choice.chosen is pair
    assert choice.is_open
    choice.settle(ROOTS)
    assert (choice.pair, choice.is_open, choice.is_set_by_user) == (ROOTS, False, False)
    choice.reopen()
    assert (choice.chosen, choice.is_open) == (None, True)


def test_an_object_of_the_user_replaces_one_of_the_usual_pair_and_keeps_the_users_other():
    choice, gather, reduce = CommChoice(CPU), DefaultAllGather(), DefaultReduceScatter()
    choice.settle(ROOTS)
    custom = choice.custom(gather=gather)
    assert (custom.gather, type(custom.reduce), custom.name) == (gather, GlooReduceScatter, CUSTOM)
    choice.settle(custom)
    assert choice.is_set_by_user
    both = choice.custom(reduce=reduce)
    assert (both.gather, both.reduce) == (gather, reduce)


def test_only_the_choice_of_group_memory_is_dropped():
    choice = CommChoice(CPU)
    assert choice.in_group_memory(None, "blocks.0") is None
    choice.settle(ROOTS)
    choice.leave_group_memory()
    assert choice.chosen is ROOTS
    choice.settle(CommPair(ROOTS.gather, ROOTS.reduce, OF_GROUP))
    assert choice.is_set_by_user
    choice.leave_group_memory()
    assert (choice.chosen, choice.is_open) == (None, True)


def test_an_object_of_the_user_allocates_its_own_buffers():
    choice = CommChoice(CPU)
    choice.settle(choice.custom(gather=DefaultAllGather()))
    with pytest.raises(ValueError, match=r"unit 'blocks\.0' communicates with a custom DefaultAllGather and Gloo"):
        choice.in_group_memory(None, "blocks.0")
