"""Replies of several ranks, without any ranks."""

import pytest

from workbench.cluster.pending_replies import Answer, Output, PendingReplies, settle
from workbench.errors import ClusterError, RankDied, RankError, UsageError


def rank_error(rank, evalue="no", line=3):
    return RankError(f"rank {rank}: {evalue}", rank=rank, ename="ValueError", evalue=evalue, line=line)


def pending_with(**outcomes):
    answers = {int(name[1:]): Answer() for name in outcomes}
    for name, outcome in outcomes.items():
        if outcome is not ...:
            settle(answers[int(name[1:])].future, outcome)
    return PendingReplies(answers)


def test_values_come_back_by_rank():
    pending = pending_with(r2="two", r0="zero")
    assert pending.ranks == (0, 2)
    assert pending.wait(0)
    assert pending.results() == {0: "zero", 2: "two"}
    assert repr(pending) == "<Pending: 2 of 2 ranks done>"


def test_a_rank_that_runs_has_neither_result_nor_error():
    pending = pending_with(r0=..., r1="one")
    assert not pending.wait(0)
    assert not pending.done(0)
    assert pending.error(0) is None
    with pytest.raises(ClusterError, match="rank 0 has not answered within 0 s"):
        pending.result(0, timeout_s=0)
    with pytest.raises(ClusterError, match="no answer within 0 s from rank 0"):
        pending.results(timeout_s=0)


def test_waiting_can_end_at_the_first_error():
    pending = pending_with(r0=..., r1=rank_error(1))
    assert not pending.wait(60, or_error=True)
    with pytest.raises(RankError, match="rank 1: no"):
        pending.raise_error()


def test_equal_errors_are_raised_once_and_name_the_other_ranks():
    pending = pending_with(
        r0="fine", r1=rank_error(1), r2=rank_error(2, "else"), r3=rank_error(3), r4=rank_error(4, line=4)
    )
    with pytest.raises(RankError) as caught:
        pending.results()
    assert (caught.value.rank, caught.value.also) == (1, (3,))


def test_an_exception_of_a_rank_takes_precedence_over_a_death():
    pending = pending_with(r0=RankDied("rank 0 died", ranks=(0,)), r1=rank_error(1))
    with pytest.raises(RankError):
        pending.results()
    with pytest.raises(RankDied):
        pending.result(0)


def test_no_error_is_raised_when_there_is_none():
    pending_with(r0="fine", r1=...).raise_error()


def test_the_first_outcome_stays():
    answer = Answer()
    settle(answer.future, RankDied("gone", ranks=(0,)))
    settle(answer.future, "too late")
    assert isinstance(PendingReplies({0: answer}).error(0), RankDied)


def test_outputs_can_be_read_from_where_one_stopped():
    answer = Answer(outputs=[Output("stdout", text="a"), Output("stderr", text="b")])
    pending = PendingReplies({5: answer})
    assert [output.text for output in pending.outputs(5)] == ["a", "b"]
    answer.outputs.append(Output("stdout", text="c"))
    assert [output.text for output in pending.outputs(5, start=2)] == ["c"]


def test_a_rank_without_a_request_is_refused():
    with pytest.raises(UsageError, match="rank 7 has no request; ranks with one: 0, 1"):
        pending_with(r0=1, r1=2).outputs(7)
