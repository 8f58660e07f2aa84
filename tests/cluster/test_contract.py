"""What is true of a cluster, of the real one and of the one that stands for it in other tests."""

import os
import signal

import pytest

from tests.cluster.conftest import RUNTIME, texts
from tests.fake_cluster import FakeCluster, prints
from tests.waiting import PATIENCE_S, wait_until
from workbench.cluster import Cluster
from workbench.cluster.pending import Reply
from workbench.errors import ClusterError, RankDied, RankError, UsageError

pytestmark = pytest.mark.cluster

WHERE = {"op": "where"}


class Fake(FakeCluster):
    """Ranks that print who they are, and die when they are told to."""

    def __init__(self):
        super().__init__(3)
        self.script["cell"] = [prints(f"{rank}\n") for rank in range(3)]

    def hold(self):
        self.script["cell"] = lambda cluster, rank, answer: None
        return self.run_cell("hold")

    def kill(self, *ranks):
        for rank in ranks:
            self.lose(rank)


class Real(Cluster):
    """The same with processes."""

    def __init__(self):
        super().__init__(3, "cpu", runtime=RUNTIME)

    def hold(self):
        return self.apply(f"{RUNTIME}:hold")

    def kill(self, *ranks):
        for rank in ranks:
            os.kill(self.rank_info[rank]["pid"], signal.SIGKILL)
        wait_until(lambda: set(ranks) <= self.losses().keys())


@pytest.fixture(scope="module", params=[Fake, Real], ids=["fake", "real"])
def shared(request):
    """A cluster of which no test kills a rank."""
    cluster = request.param()
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(params=[Fake, Real], ids=["fake", "real"])
def own(request):
    """A cluster of this test alone."""
    cluster = request.param()
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("ranks", [[3], [-1], [0, 7]])
def test_a_rank_that_there_is_not_is_refused_at_both_doors(shared, ranks):
    for ask in (
        lambda: shared.ask(WHERE, ranks),
        lambda: shared.interrupt(ranks),
        lambda: shared.run_cell("print(rank)", ranks),
        lambda: shared.apply(f"{RUNTIME}:recover", 1, ranks=ranks),
    ):
        with pytest.raises(UsageError, match=r"there is no rank .*: the ranks are 0 to 2"):
            ask()


def test_nobody_may_be_asked_at_the_side_door_and_answers(shared):
    assert shared.ask(WHERE, []) == {}
    shared.interrupt([])


def test_work_for_nobody_is_refused(shared):
    with pytest.raises(UsageError, match="no rank was named"):
        shared.run_cell("print(rank)", [])
    with pytest.raises(UsageError, match="no rank was named"):
        shared.apply(f"{RUNTIME}:recover", 1, ranks=[])


def test_answers_come_in_the_order_of_the_ranks_each_once(shared):
    assert list(shared.ask(WHERE, (2, 0, 2), timeout_s=PATIENCE_S)) == [0, 2]
    assert list(shared.ask(WHERE, timeout_s=PATIENCE_S)) == [0, 1, 2]
    pending = shared.run_cell("print(rank)", (2, 0, 2))
    assert pending.ranks == (0, 2)
    assert list(pending.results(PATIENCE_S)) == [0, 2]
    assert texts(pending, 2) == "2\n"


def test_all_are_alive_and_none_is_lost(shared):
    assert shared.alive() == (True, True, True)
    assert shared.losses() == {}
    assert [info["rank"] for info in shared.rank_info] == [0, 1, 2]


def test_a_dead_rank_ends_what_was_asked_and_refuses_what_is(own):
    held = own.hold()
    own.kill(1)
    with pytest.raises(RankDied, match="rank 1 died: the process was killed by SIGKILL") as caught:
        held.result(1, PATIENCE_S)
    assert caught.value.ranks == (1,)
    assert not held.done(0)
    assert own.alive() == (True, False, True)
    assert list(own.losses()) == [1]
    assert own.losses()[1].startswith("died: the process was killed by SIGKILL")
    replies = own.ask(WHERE, timeout_s=PATIENCE_S)
    assert [type(replies[rank]) for rank in range(3)] == [Reply, RankDied, Reply]
    assert isinstance(own.run_cell("print(rank)", [1]).error(1), RankDied)
    own.interrupt([1])


def test_dead_ranks_can_be_asked_and_stopped(own):
    own.kill(0, 1, 2)
    assert own.alive() == (False, False, False)
    assert list(own.losses()) == [0, 1, 2]
    assert {type(reply) for reply in own.ask(WHERE, timeout_s=PATIENCE_S).values()} == {RankDied}
    with pytest.raises(RankDied):
        own.run_cell("print(rank)").results(PATIENCE_S)
    assert [info["rank"] for info in own.rank_info] == [0, 1, 2]
    own.stop()
    assert own.alive() == (False, False, False)
    assert own.losses() == {}


def test_a_stop_ends_what_was_asked_and_can_come_again(own):
    held = own.hold()
    own.stop()
    own.stop()
    error = held.error(1)
    assert isinstance(error, ClusterError)
    assert not isinstance(error, RankDied | RankError)
    assert "rank 1 was stopped" in str(error)
    assert own.alive() == (False, False, False)
    for ask in (lambda: own.ask(WHERE), lambda: own.run_cell("print(rank)"), own.interrupt, lambda: own.rank_info):
        with pytest.raises(UsageError, match="the ranks are not started"):
            ask()


def test_it_can_be_started_again_but_not_twice(own):
    with pytest.raises(UsageError, match="started already"):
        own.start()
