"""The contract of a cluster and its ranks: of real ones, and of the fakes in other tests."""

import json
import os
import signal
from dataclasses import replace

import pytest

from tests.cluster.conftest import RUNTIME, texts
from tests.helpers.fake_cluster import FakeCluster, inside, prints
from tests.helpers.notebook_model import CELL
from tests.helpers.waiting import PATIENCE_S, wait_until
from workbench.base.codec import decode, encode
from workbench.cluster import Cluster
from workbench.errors import ClusterError, RankDied, RankError, UsageError
from workbench.events import Edge, Kind
from workbench.protocol.breakpoints import Breakpoint
from workbench.protocol.commands import Continue, Evaluate, Next, Reshard, Shard, Step, StepReply, to_dict
from workbench.protocol.rank_messages import (
    Drain,
    Forget,
    Job,
    ListModels,
    ListNames,
    Locate,
    LocateLine,
    Position,
    PreviewUnits,
    RecordSummary,
    RunTo,
    SetBreakpoints,
    Stacks,
)

pytestmark = pytest.mark.cluster

WHERE = Locate()
EXECUTE = "workbench.runtime.rank:execute"


class Fake(FakeCluster):
    """Ranks that print their numbers, train on command, and die."""

    def __init__(self):
        super().__init__(3)
        self.script["cell"] = [prints(f"{rank}\n") for rank in range(3)]

    def prepare(self):
        self.sharded()
        self.modules = {rank: ["model", "plain"] for rank in range(3)}
        self.script["step"] = inside

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
            os.kill(self.rank_info[rank].pid, signal.SIGKILL)
        wait_until(lambda: set(ranks) <= self.losses().keys())


class Ranks(Cluster):
    """The same with the real runtime and engine, and a model."""

    def __init__(self):
        super().__init__(3, "cpu")

    def prepare(self):
        self.run_cell(f"{CELL}\nplain = Net()\n").results(PATIENCE_S)
        self.apply(EXECUTE, to_dict(Shard("model", wrap="Block"))).results(PATIENCE_S)


@pytest.fixture(scope="module", params=[Fake, Ranks], ids=["fake", "ranks"])
def training(request):
    """A cluster that can train."""
    cluster = request.param()
    cluster.start()
    cluster.prepare()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module", params=[Fake, Real], ids=["fake", "real"])
def shared(request):
    """A shared cluster; no test kills its ranks."""
    cluster = request.param()
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(params=[Fake, Real], ids=["fake", "real"])
def own(request):
    """A cluster for one test."""
    cluster = request.param()
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("ranks", [[3], [-1], [0, 7]])
def test_an_unknown_rank_is_refused_on_both_channels(shared, ranks):
    for ask in (
        lambda: shared.ask(WHERE, ranks),
        lambda: shared.interrupt(ranks),
        lambda: shared.run_cell("print(rank)", ranks),
        lambda: shared.apply(f"{RUNTIME}:recover", 1, ranks=ranks),
    ):
        with pytest.raises(UsageError, match=r"there is no rank .*: the ranks are 0 to 2"):
            ask()


def test_a_control_request_to_no_rank_returns_nothing(shared):
    assert shared.ask(WHERE, []) == {}
    shared.interrupt([])


def test_work_for_no_rank_is_refused(shared):
    with pytest.raises(UsageError, match="no rank was selected"):
        shared.run_cell("print(rank)", [])
    with pytest.raises(UsageError, match="no rank was selected"):
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
    assert [info.rank for info in shared.rank_info] == [0, 1, 2]


def test_a_dead_rank_ends_its_request_and_refuses_new_ones(own):
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
    assert [type(replies[rank]) for rank in range(3)] == [Position, RankDied, Position]
    assert isinstance(own.run_cell("print(rank)", [1]).error(1), RankDied)
    own.interrupt([1])


def test_dead_ranks_can_be_asked_and_stopped(own):
    own.kill(0, 1, 2)
    assert own.alive() == (False, False, False)
    assert list(own.losses()) == [0, 1, 2]
    assert {type(reply) for reply in own.ask(WHERE, timeout_s=PATIENCE_S).values()} == {RankDied}
    with pytest.raises(RankDied):
        own.run_cell("print(rank)").results(PATIENCE_S)
    assert [info.rank for info in own.rank_info] == [0, 1, 2]
    own.stop()
    assert own.alive() == (False, False, False)
    assert own.losses() == {}


def test_a_stop_ends_open_requests_and_can_be_repeated(own):
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
    with pytest.raises(UsageError, match="already started"):
        own.start()


# ---- the replies of ranks


def answers_of(cluster, request):
    """Return the replies of all ranks, in order."""
    replies = cluster.ask(request, timeout_s=PATIENCE_S)
    assert [rank for rank, reply in replies.items() if isinstance(reply, Exception)] == [], replies
    return list(replies.values())


def ended(cluster, pending):
    """Return the results of all ranks; fake ranks only advance when they are polled."""
    wait_until(lambda: answers_of(cluster, WHERE) and all(map(pending.done, range(3))))
    return pending.results(PATIENCE_S)


@pytest.mark.parametrize(
    "request_",
    [
        *(ListModels(), PreviewUnits(command=Shard("plain", wrap="Block"))),
        *(Locate(), Stacks(), LocateLine(), ListNames(), Drain(known=dict.fromkeys(range(3), RecordSummary()))),
        *(SetBreakpoints(breakpoints=()), Job(ticket="1", work=Evaluate("1")), Forget(tickets=("1", "2"))),
    ],
    ids=lambda request: request.word,
)
def test_every_request_is_answered_by_its_type(training, request_):
    for answer in answers_of(training, request_):
        buffers = []
        data = json.loads(json.dumps(encode(answer, buffers)))
        assert decode(request_.reply, data, "reply", buffers) == answer


def test_ranks_report_their_identity_and_variables(training):
    assert [position.rank for position in answers_of(training, WHERE)] == [0, 1, 2]
    for names in answers_of(training, ListNames()):
        assert "model" in names.modules
        assert {"model", "train_step", "mesh"} <= set(names.variables)
        assert "Block" in names.classes
    for recorded in answers_of(training, Drain(known=dict.fromkeys(range(3), RecordSummary()))):
        assert any(unit["name"] == "blocks.0" for unit in recorded.header["units"])
        again = RecordSummary(next_seq=recorded.key_frame["seq"], header_version=recorded.header_version)
        (newer, *_) = answers_of(training, Drain(known=dict.fromkeys(range(3), again)))
        assert (newer.header, newer.header_version) == (None, recorded.header_version)


def test_ranks_report_their_models_and_preview_a_command(training):
    for models in answers_of(training, ListModels()):
        assert {"model", "plain"} <= {model.name for model in models}
        assert all("Block" in {offered.name for offered in model.classes} for model in models)
        assert all(model.num_bytes == 4 * model.num_elements for model in models)
    for command in (Shard("plain", wrap="Block"), Reshard("model", reshard_after_forward="true")):
        for units in answers_of(training, PreviewUnits(command=command)):
            assert {"blocks.0", "blocks.1", ""} <= {unit.name for unit in units}
            assert {(unit.shard_size, unit.replicate_size) for unit in units} == {(3, 1)}
            assert all(sum(p.rows_per_rank) == p.shape[p.shard_dim] for unit in units for p in unit.params)
    for reply in training.ask(PreviewUnits(command=Shard("plain", wrap="Blcok")), timeout_s=PATIENCE_S).values():
        assert isinstance(reply, RankError)
        assert (reply.ename, "the model has no module of class Blcok; its classes are: " in reply.evalue) == (
            "UsageError",
            True,
        )


def test_a_breakpoint_that_cannot_be_is_refused(training):
    for wrong in (Breakpoint(id=1, event="farward"), Breakpoint(id=1, event="forward", when="f(1)")):
        for reply in training.ask(SetBreakpoints(breakpoints=(wrong,)), timeout_s=PATIENCE_S).values():
            assert isinstance(reply, RankError)
            assert reply.ename == "UsageError"


def test_a_step_is_stopped_inspected_and_continued(training):
    def held(condition):
        """Wait until all ranks are held and ``condition`` is true; return the hold."""
        seen = []

        def stand():
            seen[:] = [position.held for position in answers_of(training, WHERE)]
            return all(hold is not None and condition(hold) for hold in seen)

        wait_until(stand)
        assert len({(hold.place, hold.kind, hold.edge) for hold in seen}) == 1
        return seen[0]

    answers_of(training, SetBreakpoints(breakpoints=(Breakpoint(id=7, event="forward"),)))
    pending = training.apply(EXECUTE, to_dict(Step()))
    first = held(lambda hold: hold.kind is Kind.FORWARD)
    assert (first.breakpoint, first.edge, first.place.step >= 0) == (7, Edge.BEGIN, True)
    assert answers_of(training, Job(ticket="t", work=Evaluate("1 + 1"))) == [True] * 3
    wait_until(lambda: all("t" in position.tickets for position in answers_of(training, WHERE)))
    assert all(position.tickets["t"].error is None for position in answers_of(training, WHERE))
    answers_of(training, Forget(tickets=("t",)))
    assert all(position.tickets == {} for position in answers_of(training, WHERE))
    answers_of(training, SetBreakpoints(breakpoints=()))
    answers_of(training, Next())
    second = held(lambda hold: hold.place > first.place)
    answers_of(training, RunTo(place=replace(second.place, ordinal=second.place.ordinal + 3)))
    third = held(lambda hold: hold.place > second.place)
    assert third.place.ordinal == second.place.ordinal + 3
    assert not any(map(pending.done, range(3)))
    answers_of(training, Continue())
    for data in ended(training, pending).values():
        assert decode(StepReply, data, "answer").steps_done == 1
    assert answers_of(training, Job(ticket="late", work=Evaluate("1"))) == [False] * 3
    assert [position.held for position in answers_of(training, WHERE)] == [None] * 3


def test_a_breakpoint_of_one_rank_holds_that_one(training):
    answers_of(training, SetBreakpoints(breakpoints=(Breakpoint(id=1, event="optimizer", rank=1),)))
    pending = training.apply(EXECUTE, to_dict(Step()))
    wait_until(lambda: answers_of(training, WHERE)[1].held is not None)
    assert answers_of(training, WHERE)[1].held.kind is Kind.OPTIMIZER
    answers_of(training, SetBreakpoints(breakpoints=()))
    answers_of(training, Continue())
    ended(training, pending)
