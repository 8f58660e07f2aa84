import pytest

from workbench.errors import ClusterError, Interrupted, RankDied, RankError, UsageError
from workbench.events import Edge, Kind
from workbench.protocol.commands import Evaluate, Inspect
from workbench.protocol.rank_messages import Forget, Hold, Job, JobError, JobReply, Position, RunCell, StepPosition
from workbench.session.remote_eval import JobRanks, RemoteEval, check_held, group_maker_in, to_error

HELD = Hold(place=StepPosition(0, 1), kind=Kind.FORWARD, edge=Edge.BEGIN)


class Door:
    """Answers from ``where``, one entry per request and rank."""

    def __init__(self, *where, accepted=True):
        self.where, self.accepted, self.interrupted, self.asked = list(where), accepted, [], []

    def ask(self, request, ranks=None, timeout_s=0.0):
        self.asked.append(request.word)
        match request:
            case Job():
                self.job = request
                return dict.fromkeys(ranks, self.accepted)
            case Forget():
                return dict.fromkeys(ranks)
        answer = self.where.pop(0)
        return {rank: answer if isinstance(answer, Exception) else self.position(answer) for rank in ranks}

    def position(self, answer):
        if not answer:
            return ClusterError("no answer in time")
        return Position(held=HELD, tickets={self.job.ticket: JobReply(text="7")} if answer == "done" else {})

    def interrupt(self, ranks=None):
        self.interrupted.append(tuple(ranks))


def jobs(door, ranks, num_ranks=4):
    return RemoteEval(door, JobRanks(ranks=ranks, held=range(num_ranks), num_ranks=num_ranks))


def test_it_asks_until_the_answer_is_there_and_forgets_it():
    door = Door("", "not yet", "done")
    assert jobs(door, [0, 2]).run(Evaluate(expr="3 + 4")) == {0: JobReply(text="7"), 2: JobReply(text="7")}
    assert door.asked == ["job", "locate", "locate", "locate", "forget"]


def test_a_rank_that_does_not_stand_in_the_gate():
    door = Door(accepted=False)
    with pytest.raises(UsageError, match="ranks 0-1 are not held in the gate"):
        jobs(door, [0, 1]).run(RunCell(code="x"))
    assert door.asked[-1] == "forget"
    with pytest.raises(UsageError, match="rank 2 is not held in the gate, only ranks 0-1"):
        check_held([1, 2], [0, 1])


def test_a_rank_that_dies_meanwhile():
    with pytest.raises(RankDied):
        jobs(Door(RankDied("gone", ranks=(0,))), [0]).run(RunCell(code="x"))


def test_a_rank_that_goes_on_meanwhile():
    door = Door("not yet")
    door.position = lambda answer: Position()
    with pytest.raises(ClusterError, match="left the gate"):
        jobs(door, [0]).run(RunCell(code="x"))


def test_ctrl_c_reaches_the_ranks_and_a_second_one_ends_the_wait():
    import signal

    class Pressed(Door):
        def position(self, answer):
            signal.raise_signal(signal.SIGINT)
            return super().position(answer)

    door = Pressed(*["not yet"] * 9)
    with pytest.raises(Interrupted, match="no longer waits for rank 0"):
        jobs(door, [0]).run(RunCell(code="x"))
    assert door.interrupted == [(0,)]
    assert door.asked[-1] == "forget"


def test_what_runs_on_some_ranks_only_says_so_to_them():
    door = Door("done")
    jobs(door, [0, 2]).run(Evaluate(expr="x"))
    part = "or read this rank's shard with to_local()"
    assert door.job.alone == f"ranks 0, 2 would call it: leave -t out, {part}"
    assert door.job.ranks == (0, 2)
    one = JobRanks(ranks=[1], held=[1], num_ranks=4)
    assert one.alone == f"rank 1 of 4 can call it here: stop where all ranks stop, {part}"
    everyone = JobRanks(ranks=range(4), held=range(4), num_ranks=4)
    for company, work in ((everyone, RunCell(code="x")), (one, Inspect(fqn="x"))):
        assert company.job("1", work).alone == ""


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("g = dist.new_group([0])", "new_group"),
        ("init_device_mesh('cpu', (2,))", "init_device_mesh"),
        ("dist.all_reduce(x)", ""),  # the rank detects it
        ("new_group", ""),
        ("not python", ""),
        ("broken(", ""),
    ],
)
def test_making_a_process_group_waits_for_others_without_a_collective(code, name):
    assert group_maker_in(code) == name
    assert JobRanks(ranks=[0, 1], held=[0, 1], num_ranks=2).job("1", RunCell(code=code)).alone == ""
    if name:
        with pytest.raises(UsageError, match=rf"^{name}\(\) waits for other ranks, and only rank 1 would call it"):
            JobRanks(ranks=[1], held=[0, 1], num_ranks=2).job("1", RunCell(code=code))


def bad(ename, evalue):
    return JobReply(error=JobError(ename=ename, evalue=evalue, traceback="long\nlong"))


def test_errors_are_one_line_each():
    error = to_error({0: bad("KeyError", "'x'"), 1: JobReply(), 2: bad("KeyError", "'x'"), 3: bad("E", "a\nb")}, "here")
    assert isinstance(error, RankError)
    assert str(error).splitlines() == [
        "ranks 0, 2 raised KeyError: 'x'",
        "rank 3 raised E: a",
        "the step is still stopped: here",
    ]
    assert (error.rank, error.also, error.traceback) == (0, (2,), "")
    assert to_error({0: JobReply()}, "here") is None
    assert isinstance(to_error({0: bad("UsageError", "no such parameter")}, "here"), UsageError)
