"""When ranks count as stopped: with a channel that answers from a table, and a clock that the test sets."""

from workbench.events import Edge, Kind
from workbench.protocol.commands import Next, Pause
from workbench.protocol.rank_messages import Hold, Locate, Position, RunTo, StepPosition
from workbench.session.pause_protocol import ALIGN_S, PAUSE_S, SETTLED_S, STARVED_S, PauseProtocol


class Channel:
    def __init__(self):
        self.sent = []

    def ask(self, request, ranks=None, timeout_s=0.0):
        self.sent.append((request, tuple(ranks)))
        return dict.fromkeys(ranks)


class Clock:
    now = 0.0

    def __call__(self):
        return 64.0 + self.now


def setup():
    channel, clock = Channel(), Clock()
    return PauseProtocol(channel, clock), channel, clock


def at(ordinal, *, held=True, since=1, waiting=False):
    hold = Hold(place=StepPosition(0, ordinal), kind=Kind.FORWARD, edge=Edge.BEGIN, since_ns=since) if held else None
    return Position(place=StepPosition(0, ordinal), held=hold, waiting=waiting, doing="step")


def test_all_at_one_event_is_a_stop():
    stopper, _, _ = setup()
    assert stopper.look({0: at(3)}, {0, 1}) is None
    stop = stopper.look({0: at(3), 1: at(3)}, {0, 1})
    assert stop.held == (0, 1)
    assert not stop.is_late


def test_a_pause_lets_all_run_to_the_furthest():
    stopper, channel, _ = setup()
    stopper.pause({0, 1})
    stopper.pause({0, 1})
    assert stopper.eager
    assert stopper.look({0: at(3), 1: at(5)}, {0, 1}) is None
    assert channel.sent == [(Pause(), (0, 1)), (RunTo(place=StepPosition(0, 5)), (0, 1))]
    assert stopper.look({0: at(3), 1: at(5)}, {0, 1}) is None  # rank 0 has not reacted yet
    assert stopper.look({0: at(5, since=2), 1: at(5)}, {0, 1}).held == (0, 1)
    assert len(channel.sent) == 2
    assert not stopper.eager


def test_a_rank_held_in_a_wait_runs_to_the_furthest_too():
    stopper, channel, _ = setup()
    stopper.pause({0, 1})
    in_wait = Hold(place=StepPosition(0, 3), kind=Kind.WAIT, edge=Edge.BEGIN, since_ns=1)
    assert stopper.look({0: Position(place=StepPosition(0, 3), held=in_wait), 1: at(5)}, {0, 1}) is None
    assert channel.sent[-1] == (RunTo(place=StepPosition(0, 5)), (0, 1))


def test_a_blocking_rank_lets_the_others_pass_after_a_moment():
    stopper, channel, clock = setup()
    stopper.pause({0, 1})
    assert stopper.look({0: at(3), 1: at(6, held=False)}, {0, 1}) is None
    assert len(channel.sent) == 1
    clock.now = ALIGN_S
    stopper.look({0: at(3), 1: at(6, held=False)}, {0, 1})
    assert channel.sent[-1] == (RunTo(place=StepPosition(0, 6)), (0, 1))
    assert stopper.look({0: at(6, since=2), 1: at(7, since=2)}, {0, 1}) is None  # it passed the event in between
    assert channel.sent[-1] == (RunTo(place=StepPosition(0, 7)), (0, 1))
    assert stopper.look({0: at(7, since=3), 1: at(7, since=2)}, {0, 1})


def test_a_rank_that_computes_on_is_late():
    stopper, _, clock = setup()
    stopper.pause({0, 1})
    clock.now = ALIGN_S
    assert stopper.look({0: at(3), 1: at(3, held=False)}, {0, 1}) is None
    clock.now = PAUSE_S
    stop = stopper.look({0: at(3), 1: at(3, held=False)}, {0, 1})
    assert (stop.held, stop.is_late) == ((0,), True)


def test_a_rank_that_has_not_polled_in_its_wait_counts_as_computing():
    stopper, _, clock = setup()
    assert SETTLED_S < PAUSE_S
    stopper.pause({0, 1})
    for clock.now in (0.0, SETTLED_S):
        assert stopper.look({0: at(3), 1: at(3, held=False, waiting=True)}, {0, 1}) is None
    clock.now = PAUSE_S
    stop = stopper.look({0: at(3), 1: at(3, held=False, waiting=True)}, {0, 1})
    assert (stop.held, stop.is_late) == ((0,), False)


def test_an_unresponsive_rank_is_named_as_well():
    stopper, _, clock = setup()
    stopper.pause({0, 1})
    clock.now = STARVED_S
    assert str(stopper.look({0: at(3)}, {0, 1})).endswith("; rank 1 stops at the next event")


def test_a_rank_that_answers_late_may_be_the_furthest():
    stopper, channel, clock = setup()
    stopper.pause({0, 1})
    clock.now = PAUSE_S
    assert stopper.look({0: at(3)}, {0, 1}) is None
    assert stopper.look({0: at(3), 1: at(6, held=False)}, {0, 1}) is None
    assert channel.sent[-1] == (RunTo(place=StepPosition(0, 6)), (0, 1))
    assert stopper.look({0: at(6, since=2), 1: at(6)}, {0, 1}).held == (0, 1)


def test_ranks_that_wait_for_a_held_one_are_stopped_once_all_is_quiet():
    stopper, _, clock = setup()
    waits = {0: at(9, held=False, waiting=True), 1: at(3)}
    assert stopper.look(waits, {0, 1}) is None
    clock.now = SETTLED_S / 2
    assert stopper.look({**waits, 0: at(10, held=False, waiting=True)}, {0, 1}) is None
    clock.now = SETTLED_S
    assert stopper.look({**waits, 0: at(10, held=False, waiting=True)}, {0, 1}) is None
    clock.now += SETTLED_S
    stop = stopper.look({**waits, 0: at(10, held=False, waiting=True)}, {0, 1})
    assert (stop.held, stop.is_late) == ((1,), False)


def test_a_rank_behind_the_held_one_waits_and_continues():
    stopper, _, clock = setup()
    behind = {0: at(2, held=False, waiting=True), 1: at(3)}
    for clock.now in (0.0, 2 * SETTLED_S):
        assert stopper.look(behind, {0, 1}) is None
    assert stopper.look({**behind, 0: at(3, since=2)}, {0, 1}).held == (0, 1)
    assert stopper.look(behind, {0, 1}) is None
    clock.now += STARVED_S
    assert stopper.look(behind, {0, 1}).held == (1,)


def test_a_released_rank_is_no_longer_held():
    stopper, channel, _ = setup()
    stopper.release({0, 1}, {0: at(3), 1: at(3)}, "unit")
    assert channel.sent == [(Next(what="unit"), (0, 1))]
    assert stopper.is_armed
    assert stopper.look({0: at(3), 1: at(3)}, {0, 1}) is None
    assert stopper.look({0: at(4, since=2), 1: at(3)}, {0, 1}) is None
    assert stopper.look({0: at(4, since=2), 1: at(4, since=2)}, {0, 1})
    stopper.disarm({0, 1})
    stopper.disarm({0, 1})
    assert [request.word for request, _ in channel.sent] == ["next", "continue"]


def test_a_rank_that_has_ended_does_not_count():
    stopper, _, _ = setup()
    assert stopper.look({0: at(3), 1: at(0, held=False)}, {0}).held == (0,)


def test_a_held_rank_is_not_queried_again_until_released():
    """With many ranks on few cores, some answer each poll late: they need not all answer the same one."""
    stopper, channel, _ = setup()
    ranks = set(range(64))
    stopper.release(ranks, {rank: at(3) for rank in ranks}, "collective")
    for first in range(0, 64, 16):
        some = {rank: at(4, since=2) for rank in range(first, first + 16)}
        stop = stopper.look(some, ranks)
        assert (stop is not None) == (first == 48)
        if stop is None:
            assert stopper.ask_where(ranks) == dict.fromkeys(range(first + 16, 64))
    assert stop.held == tuple(range(64))
    requested = [len(ranks) for request, ranks in channel.sent if request == Locate()]
    assert requested == [48, 32, 16]
    stopper.release(ranks, stop.positions, "collective")
    assert stopper.look({0: at(5, since=3)}, ranks) is None


def test_a_rank_held_in_a_wait_is_queried_again():
    stopper, channel, _ = setup()
    in_wait = Hold(place=StepPosition(0, 3), kind=Kind.WAIT, edge=Edge.BEGIN, since_ns=1)
    assert stopper.look({0: Position(place=StepPosition(0, 3), held=in_wait, doing="step")}, {0, 1}) is None
    stopper.ask_where({0, 1})
    assert channel.sent == [(Locate(), (0, 1))]


def test_polls_back_off_by_the_time_of_the_answer():
    stopper, channel, clock = setup()
    ask = channel.ask

    def slowly(request, ranks=None, timeout_s=0.0):
        clock.now += 0.5
        return ask(request, ranks, timeout_s)

    channel.ask = slowly
    assert stopper.ask_where({0, 1}) is not None
    clock.now = 0.9
    assert stopper.ask_where({0, 1}) is None
    clock.now = 1.0
    assert stopper.ask_where({0, 1}) is not None
    assert len(channel.sent) == 2
