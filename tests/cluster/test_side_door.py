"""Questions to the control thread of the ranks."""

import threading

import pytest

from tests.cluster.conftest import FOREVER_S, RUNTIME, wait_until_held
from tests.waiting import PATIENCE_S
from workbench.cluster import Reply
from workbench.errors import ClusterError, RankError

pytestmark = pytest.mark.cluster


def test_every_rank_answers_with_plain_data_and_buffers(cluster):
    replies = cluster.ask({"op": "look"}, timeout_s=PATIENCE_S)
    assert list(replies) == [0, 1, 2]
    for reply in replies.values():
        assert isinstance(reply, Reply)
        assert reply.content == {"held": False, "thread": "Control"}
        assert [bytes(buffer) for buffer in reply.buffers] == [b"\x00\xff", b"second"]


@pytest.mark.parametrize("occupation", ["spin", "hold"])
def test_ranks_answer_while_their_main_thread_is_occupied(cluster, occupation):
    pending = cluster.apply(f"{RUNTIME}:{occupation}")
    wait_until_held(cluster)
    replies = cluster.ask({"op": "look"}, timeout_s=FOREVER_S)
    assert all(reply.content["held"] for reply in replies.values())
    assert not any(map(pending.done, range(3)))
    cluster.ask({"op": "release"})
    assert pending.results(PATIENCE_S) == dict.fromkeys(range(3), True)


def test_an_error_of_the_handler_is_the_ranks_answer(cluster):
    replies = cluster.ask({"op": "raise"}, ranks=[1], timeout_s=PATIENCE_S)
    assert isinstance(replies[1], RankError)
    assert (replies[1].rank, replies[1].ename, replies[1].evalue) == (1, "ValueError", "no such thing")
    assert "side_door" in replies[1].traceback


def test_an_answer_that_is_no_plain_data_is_an_error(cluster):
    replies = cluster.ask({"op": "unanswerable"}, ranks=[0], timeout_s=PATIENCE_S)
    assert isinstance(replies[0], RankError)
    assert isinstance(cluster.ask({"op": "look"}, timeout_s=PATIENCE_S)[0], Reply)


def test_a_rank_that_does_not_answer_in_time_is_said_so(cluster):
    replies = cluster.ask({"op": "late"}, ranks=[1, 2], timeout_s=0.1)
    assert {type(reply) for reply in replies.values()} == {ClusterError}
    assert str(replies[2]) == "rank 2 has not answered at its side door within 0.1 s"
    cluster.apply(f"{RUNTIME}:let_the_late_one_go").results(PATIENCE_S)
    assert all(isinstance(reply, Reply) for reply in cluster.ask({"op": "look"}, timeout_s=PATIENCE_S).values())


def test_several_threads_may_ask_at_once(cluster):
    answers = []

    def ask():
        answers.extend(cluster.ask({"op": "look"}, timeout_s=PATIENCE_S).values() for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 40
    assert all(isinstance(reply, Reply) for replies in answers for reply in replies)
