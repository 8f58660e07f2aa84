import pytest

from workbench.cluster.pending import Reply
from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError
from workbench.session.jobs import Company, Done, Jobs, check_held, group_maker_in, to_error


class Door:
    """Answers with what is in ``where``, one entry per question and rank."""

    def __init__(self, *where, accepted=True):
        self.where, self.accepted, self.interrupted, self.asked = list(where), accepted, [], []

    def ask(self, request, ranks=None, timeout_s=0.0):
        self.asked.append(request["op"])
        if request["op"] == "enqueue":
            self.ticket, self.job = request["ticket"], request["job"]
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


def jobs(door, ranks, num_ranks=4):
    return Jobs(door, Company(ranks=ranks, held=range(num_ranks), num_ranks=num_ranks))


def test_it_asks_until_the_answer_is_there_and_forgets_it():
    door = Door("", "not yet", "done")
    assert jobs(door, [0, 2]).run("evaluate", "3 + 4") == {0: Done(ok=True, text="7"), 2: Done(ok=True, text="7")}
    assert door.asked == ["enqueue", "where", "where", "where", "forget"]


def test_a_rank_that_does_not_stand_in_the_gate():
    door = Door(accepted=False)
    with pytest.raises(UsageError, match="ranks 0-1 do not stand in the gate"):
        jobs(door, [0, 1]).run("cell", "x")
    assert door.asked[-1] == "forget"
    with pytest.raises(UsageError, match="rank 2 does not stand in the gate; there is ranks 0-1"):
        check_held([1, 2], [0, 1])


def test_a_rank_that_dies_meanwhile():
    with pytest.raises(RankDied):
        jobs(Door(RankDied("gone", ranks=(0,))), [0]).run("cell", "x")


def test_a_rank_that_goes_on_meanwhile():
    door = Door("not yet")
    door.with_ticket = lambda answer: {"held": None, "tickets": {}}
    with pytest.raises(ClusterError, match="left the gate"):
        jobs(door, [0]).run("cell", "x")


def test_ctrl_c_reaches_the_ranks_and_a_second_one_ends_the_wait():
    import signal

    class Pressed(Door):
        def with_ticket(self, answer):
            signal.raise_signal(signal.SIGINT)
            return super().with_ticket(answer)

    door = Pressed(*["not yet"] * 9)
    with pytest.raises(Interrupted, match="nobody waits for rank 0"):
        jobs(door, [0]).run("cell", "x")
    assert door.interrupted == [(0,)]
    assert door.asked[-1] == "forget"


def test_what_runs_on_some_ranks_only_says_so_to_them():
    door = Door("done")
    jobs(door, [0, 2]).run("evaluate", "x")
    part = "or look at the part of this rank with to_local()"
    assert door.job["alone"] == f"ranks 0, 2 would call it: leave -t out, {part}"
    assert door.job["ranks"] == [0, 2]
    one = Company(ranks=[1], held=[1], num_ranks=4)
    assert one.alone == f"rank 1 of 4 can call it here: stop where all ranks stop, {part}"
    for company, kind in ((Company(ranks=range(4), held=range(4), num_ranks=4), "cell"), (one, "inspect")):
        assert company.job(kind, "x")["alone"] == ""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("g = dist.new_group([0])", "new_group"),
        ("init_device_mesh('cpu', (2,))", "init_device_mesh"),
        ("dist.all_reduce(x)", ""),  # the rank sees it
        ("new_group", ""),
        ("not python", ""),
        ("broken(", ""),
    ],
)
def test_making_a_process_group_waits_for_others_without_a_collective(code, name):
    assert group_maker_in(code) == name
    assert Company(ranks=[0, 1], held=[0, 1], num_ranks=2).job("cell", code)["alone"] == ""
    if name:
        with pytest.raises(UsageError, match=rf"^{name}\(\) waits for other ranks, and only rank 1 would call it"):
            Company(ranks=[1], held=[0, 1], num_ranks=2).job("cell", code)


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
