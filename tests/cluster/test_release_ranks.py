"""The escalating means to free ranks, and the ranks that each is applied to."""

import pytest

from workbench.cluster.pending_replies import Answer, PendingReplies, settle
from workbench.cluster.release_ranks import free
from workbench.protocol.rank_messages import GiveUp, Shut


class Ranks:
    """Doors of ranks, some of which end their work at the means ``by``."""

    def __init__(self, **by):
        self.answers = {rank: Answer() for rank in range(3)}
        self.by, self.used = by, []

    def ask(self, request, ranks, timeout_s):
        self._use(request.word, ranks)
        return {}

    def interrupt(self, ranks):
        self._use("interrupt", ranks)

    def _use(self, means, ranks):
        self.used.append((means, list(ranks)))
        for rank in self.by.get(means, ()):
            settle(self.answers[rank].future, None)


GIVE_UP, SHUT = GiveUp(reason="").word, Shut().word


@pytest.mark.parametrize(
    ("by", "used"),
    [
        ({GIVE_UP: (0, 1, 2)}, [(GIVE_UP, [0, 1, 2])]),
        ({GIVE_UP: (0,), SHUT: (1, 2)}, [(GIVE_UP, [0, 1, 2]), (SHUT, [1, 2])]),
        ({GIVE_UP: (2,), SHUT: (1,)}, [(GIVE_UP, [0, 1, 2]), (SHUT, [0, 1]), ("interrupt", [0])]),
    ],
)
def test_each_means_is_for_those_whom_the_one_before_has_not_freed(by, used):
    ranks = Ranks(**by)
    free(ranks, range(3), PendingReplies(ranks.answers), "stopped")
    assert ranks.used == used


def test_ranks_with_a_newer_request_get_no_signal():
    ranks = Ranks()
    free(ranks, [0, 1], PendingReplies(ranks.answers), "stopped", interrupts=False)
    assert ranks.used == [(GIVE_UP, [0, 1]), (SHUT, [0, 1])]


def test_a_rank_without_a_request_is_only_told_to_abort():
    ranks = Ranks()
    free(ranks, range(4), PendingReplies(ranks.answers), "stopped")
    assert ranks.used == [(GIVE_UP, [0, 1, 2, 3]), (SHUT, [0, 1, 2]), ("interrupt", [0, 1, 2])]
