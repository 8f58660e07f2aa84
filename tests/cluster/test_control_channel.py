"""Requests to the control thread of the ranks."""

import threading

import pytest

from tests.cluster.conftest import FOREVER_S, RUNTIME, wait_until_held
from tests.helpers.fake_rank import Answer, AnswerLate, GetThreadState, Raise, Release, ThreadState
from tests.helpers.waiting import PATIENCE_S
from workbench.errors import ClusterError, RankError
from workbench.protocol.rank_messages import Stacks

pytestmark = pytest.mark.cluster


def test_every_rank_answers_with_plain_data_and_buffers(cluster):
    replies = cluster.ask(GetThreadState(), timeout_s=PATIENCE_S)
    assert list(replies) == [0, 1, 2]
    for reply in replies.values():
        assert isinstance(reply, ThreadState)
        assert (reply.held, reply.thread) == (False, "Control")
        assert [bytes(reply.first), bytes(reply.second)] == [b"\x00\xff", b"second"]


@pytest.mark.parametrize("occupation", ["spin", "hold"])
def test_ranks_answer_while_their_main_thread_is_occupied(cluster, occupation):
    pending = cluster.apply(f"{RUNTIME}:{occupation}")
    wait_until_held(cluster)
    replies = cluster.ask(GetThreadState(), timeout_s=FOREVER_S)
    assert all(reply.held for reply in replies.values())
    assert not any(map(pending.done, range(3)))
    cluster.ask(Release())
    assert pending.results(PATIENCE_S) == dict.fromkeys(range(3), True)


def test_a_main_thread_that_computes_in_python_makes_way_for_it_soon(cluster):
    assert cluster.apply("sys:getswitchinterval").results(PATIENCE_S) == dict.fromkeys(range(3), 0.001)


def test_an_error_of_the_handler_is_the_ranks_answer(cluster):
    replies = cluster.ask(Raise(), ranks=[1], timeout_s=PATIENCE_S)
    assert isinstance(replies[1], RankError)
    assert (replies[1].rank, replies[1].ename, replies[1].evalue) == (1, "ValueError", "no such thing")
    assert "handle_request" in replies[1].traceback


def test_an_answer_that_is_not_plain_data_is_an_error(cluster):
    replies = cluster.ask(Answer("unsendable"), ranks=[0], timeout_s=PATIENCE_S)
    assert isinstance(replies[0], RankError)
    assert isinstance(cluster.ask(GetThreadState(), timeout_s=PATIENCE_S)[0], ThreadState)


def test_an_answer_of_another_type_is_an_error(cluster):
    replies = cluster.ask(Answer("other"), ranks=[0], timeout_s=PATIENCE_S)
    assert type(replies[0]) is ClusterError
    assert str(replies[0]) == "rank 0 sent an invalid reply to 'answer': reply is {'surprise': 1}, expected nothing"


def test_a_request_that_the_rank_does_not_know_is_refused(cluster):
    replies = cluster.ask(Stacks(), ranks=[0], timeout_s=PATIENCE_S)
    assert replies[0].evalue.startswith("unknown request 'stacks'; known: locate, look")


def test_a_rank_that_does_not_answer_in_time_is_reported(cluster):
    replies = cluster.ask(AnswerLate(), ranks=[1, 2], timeout_s=0.1)
    assert {type(reply) for reply in replies.values()} == {ClusterError}
    assert str(replies[2]) == "the control thread of rank 2 has not answered within 0.1 s"
    cluster.apply(f"{RUNTIME}:let_the_late_one_go").results(PATIENCE_S)
    assert all(isinstance(reply, ThreadState) for reply in cluster.ask(GetThreadState(), timeout_s=PATIENCE_S).values())


def test_several_threads_can_send_requests_concurrently(cluster):
    answers = []

    def ask():
        answers.extend(cluster.ask(GetThreadState(), timeout_s=PATIENCE_S).values() for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 40
    assert all(isinstance(reply, ThreadState) for replies in answers for reply in replies)
