import signal

import pytest

from workbench.errors import ClusterError, RankDied, RankError, UsageError
from workbench.events import Edge, Kind
from workbench.protocol.commands import Evaluate, Inspect
from workbench.protocol.rank_messages import (
    CellLine,
    Forget,
    Hold,
    Job,
    JobError,
    JobReply,
    LocateLine,
    Position,
    RunCell,
    StepPosition,
)
from workbench.session import remote_eval
from workbench.session.remote_eval import JobRanks, RemoteEval, abandoned, check_held, group_maker_in, to_error

LINE = CellLine(line=2, function="<module>", text="dist.barrier()", inside="cell")
HELD = Hold(place=StepPosition(0, 1), kind=Kind.FORWARD, edge=Edge.BEGIN)


class Channel:
    """Answers from ``where``, one entry per request and rank."""

    def __init__(self, *where, accepted=True):
        self.where, self.accepted, self.interrupted, self.sent = list(where), accepted, [], []

    def ask(self, request, ranks=None, timeout_s=0.0):
        assert timeout_s > 0  # a rank may never answer
        self.sent.append(request.word)
        match request:
            case Job():
                self.job = request
                return dict.fromkeys(ranks, self.accepted)
            case Forget():
                return dict.fromkeys(ranks)
            case LocateLine():
                return dict.fromkeys(ranks, LINE)
        answer = self.where.pop(0)
        if isinstance(answer, dict):  # by rank
            return {rank: self.position(answer.get(rank, "not yet")) for rank in ranks}
        return {rank: answer if isinstance(answer, Exception) else self.position(answer) for rank in ranks}

    def position(self, answer):
        if not answer:
            return ClusterError("no answer in time")
        return Position(held=HELD, tickets={self.job.ticket: JobReply(text="7")} if answer == "done" else {})

    def interrupt(self, ranks=None):
        self.interrupted.append(tuple(ranks))


def jobs(channel, ranks, num_ranks=4):
    return RemoteEval(channel, JobRanks(ranks=ranks, held=range(num_ranks), num_ranks=num_ranks))


def test_it_polls_until_the_answer_arrives_and_deletes_it():
    channel = Channel("", "not yet", "done")
    assert jobs(channel, [0, 2]).run(Evaluate(expr="3 + 4")) == {0: JobReply(text="7"), 2: JobReply(text="7")}
    assert channel.sent == ["job", "locate", "locate", "locate", "forget"]


def test_a_rank_that_is_not_held_in_the_gate():
    channel = Channel(accepted=False)
    with pytest.raises(UsageError, match="ranks 0-1 are not held in the gate: see %fsdp where"):
        jobs(channel, [0, 1]).run(RunCell(code="x"))
    assert channel.sent[-1] == "forget"
    with pytest.raises(UsageError, match="rank 2 is not held in the gate, only ranks 0-1"):
        check_held([1, 2], [0, 1])


def test_a_rank_that_dies_meanwhile():
    with pytest.raises(RankDied):
        jobs(Channel(RankDied("gone", ranks=(0,))), [0]).run(RunCell(code="x"))


def test_a_rank_that_continues_meanwhile():
    channel = Channel("not yet")
    channel.position = lambda answer: Position()
    with pytest.raises(ClusterError, match="left the gate"):
        jobs(channel, [0]).run(RunCell(code="x"))


def test_ranks_that_do_not_end_a_cell_are_named_and_a_second_ctrl_c_leaves_them(monkeypatch):
    monkeypatch.setattr(remote_eval, "INTERRUPTED_S", 0.0)
    channel, sentences = Channel(*[{1: "done"}] * 9), []

    def press(sentence):
        sentences.append(sentence)
        signal.raise_signal(signal.SIGINT)

    company = JobRanks(ranks=[0, 1], held=[0, 1], num_ranks=2)
    done = RemoteEval(channel, company, press, quiet_s=0.0).run(RunCell(code="x"))
    place = "rank 0 has run for 0 s, in dist.barrier() at line 2 of the cell; rank 1 has ended"
    assert sentences == [place, f"{place}; Ctrl-C did not end this, Ctrl-C again stops waiting"]
    assert (done, channel.interrupted, channel.sent[-1]) == ({1: JobReply(text="7")}, [(0,)], "forget")
    assert str(abandoned({0: LINE, 2: None})) == (
        "Interrupted; the notebook no longer waits for rank 0, in dist.barrier() at line 2 of the cell; rank 2: "
        "%fsdp abort ends this and the step"
    )


def test_code_for_some_ranks_carries_that_information():
    channel = Channel("done")
    jobs(channel, [0, 2]).run(Evaluate(expr="x"))
    part = "or read this rank's shard with to_local()"
    assert channel.job.alone == f"ranks 0, 2 would call it: leave -t out, {part}"
    assert channel.job.ranks == (0, 2)
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
        ("make()(x)", ""),
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
    raised = {0: bad("KeyError", "'x'"), 1: JobReply(), 2: bad("KeyError", "'x'"), 3: bad("E", "a\nb"), 4: bad("F", "")}
    error = to_error(raised, "here")
    assert isinstance(error, RankError)
    assert str(error).splitlines() == [
        "ranks 0, 2 raised KeyError: 'x'",
        "rank 3 raised E: a",
        "rank 4 raised F",
        "the step is still stopped: here",
    ]
    assert (error.rank, error.ename, error.evalue, error.also, error.traceback) == (0, "KeyError", "'x'", (2,), "")
    assert to_error({0: JobReply()}, "here") is None
    assert isinstance(to_error({0: bad("UsageError", "no such parameter")}, "here"), UsageError)
