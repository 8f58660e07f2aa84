import pytest

from workbench.cluster.pending import Reply
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError
from workbench.session.jobs import Done, Jobs, check_held, collective_in, refuse_collective, to_error


class Door:
    """Answers with what is in ``where``, one entry per question and rank."""

    def __init__(self, *where, accepted=True):
        self.where, self.accepted, self.interrupted, self.asked = list(where), accepted, [], []

    def ask(self, request, ranks=None, timeout_s=0.0):
        self.asked.append(request["op"])
        if request["op"] == "enqueue":
            self.ticket = request["ticket"]
            return {rank: Reply({"accepted": self.accepted}) for rank in ranks}
        if request["op"] == "forget":
            return {rank: Reply({}) for rank in ranks}
        answer = self.where.pop(0)
        return {rank: answer if isinstance(answer, Exception) else Reply(self.with_ticket(answer)) for rank in ranks}

    def with_ticket(self, answer):
        ended = {"ok": True, "text": "7", "result": None, "error": None}
        return {"held": {"ordinal": 1}, "tickets": {self.ticket: ended} if answer == "done" else {}} if answer else {}

    def interrupt(self, ranks=None):
        self.interrupted.append(tuple(ranks))


def test_it_asks_until_the_answer_is_there_and_forgets_it():
    door = Door("", "not yet", "done")
    assert Jobs(door).run("evaluate", "3 + 4", [0, 2]) == {0: Done(ok=True, text="7"), 2: Done(ok=True, text="7")}
    assert door.asked == ["enqueue", "where", "where", "where", "forget"]


def test_a_rank_that_does_not_stand_in_the_gate():
    door = Door(accepted=False)
    with pytest.raises(UsageError, match="ranks 0-1 do not stand in the gate"):
        Jobs(door).run("cell", "x", [0, 1])
    assert door.asked[-1] == "forget"
    with pytest.raises(UsageError, match="rank 2 does not stand in the gate; there is ranks 0-1"):
        check_held([1, 2], [0, 1])


def test_a_rank_that_dies_meanwhile():
    with pytest.raises(RankDied):
        Jobs(Door(RankDied("gone", ranks=(0,)))).run("cell", "x", [0])


def test_a_rank_that_goes_on_meanwhile():
    door = Door("not yet")
    door.with_ticket = lambda answer: {"held": None, "tickets": {}}
    with pytest.raises(ClusterError, match="left the gate"):
        Jobs(door).run("cell", "x", [0])


def test_ctrl_c_reaches_the_ranks_and_a_second_one_ends_the_wait():
    import signal

    class Pressed(Door):
        def with_ticket(self, answer):
            signal.raise_signal(signal.SIGINT)
            return super().with_ticket(answer)

    door = Pressed(*["not yet"] * 9)
    with pytest.raises(Interrupted, match="nobody waits for rank 0"):
        Jobs(door).run("cell", "x", [0])
    assert door.interrupted == [(0,)]
    assert door.asked[-1] == "forget"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("p.full_tensor().sum()", "full_tensor"),
        ("dist.all_reduce(x)", "all_reduce"),
        ("torch.distributed.barrier()", "barrier"),
        ("x.gather(0, i)", ""),
        ("dist.gather(x)", "gather"),
        ("p.to_local().norm()", ""),
        ("full_tensor", ""),
        ("not python", ""),
        ("broken(", ""),
    ],
)
def test_functions_in_which_ranks_wait_for_each_other(code, name):
    assert collective_in(code) == name
    refuse_collective(code, [0, 1], range(2))
    if name:
        with pytest.raises(UsageError, match=rf"{name}\(\) waits for all ranks, and only rank 1 would call it"):
            refuse_collective(code, [1], range(2))


def bad(ename, evalue):
    return Done(ok=False, error={"ename": ename, "evalue": evalue, "traceback": "long\nlong"})


def test_errors_are_one_line_each():
    error = to_error(
        {0: bad("KeyError", "'x'"), 1: Done(ok=True), 2: bad("KeyError", "'x'"), 3: bad("E", "a\nb")}, "here"
    )
    assert isinstance(error, RankError)
    assert str(error).splitlines() == ["ranks 0, 2 raised KeyError: 'x'", "rank 3 raised E: a", "the stop stays: here"]
    assert (error.rank, error.also, error.traceback) == (0, (2,), "")
    assert to_error({0: Done(ok=True)}, "here") is None
    assert isinstance(to_error({0: bad("UsageError", "no such parameter")}, "here"), UsageError)
