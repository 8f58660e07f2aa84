"""Where the ranks of a recorded run are, from recordings made by hand."""

import numpy as np
import pytest

from workbench.events import Edge, Kind, Phase
from workbench.replay.endings import Ending
from workbench.replay.run_positions import (
    ALIVE_NS,
    DEADLOCKED_NS,
    STALLED_NS,
    PendingCollective,
    RunPosition,
    RunState,
    begins_of_newest_step,
    live_positions,
    positions,
)
from workbench.trace.columns import RankTrace, Trace
from workbench.trace.read_recording import RecordedRank, Recording
from workbench.trace.recording import Heartbeat, RecordingStop, RunEnd, RunStart, SilentStack
from workbench.trace.schema import NO_CATEGORY, ROW_DTYPE, GroupInfo, Header, KeyFrame

S = 1_000_000_000
WALL = 1_800_000_000 * S
BEGIN, END, INSTANT = Edge.BEGIN, Edge.END, Edge.INSTANT


def row(kind, edge, t_s, *, number=-1, unit=-1, group=0, step=0):
    """Return the fields of a row; ``number`` counts the collectives of ``group``."""
    return {
        "kind": kind,
        "edge": edge,
        "t_ns": int(t_s * S),
        "comm_seq": number,
        "comm_group": -1 if number < 0 else group,
        "unit": unit,
        "step": step,
    }


def rows_of(*fields, first=0):
    rows = np.zeros(len(fields), ROW_DTYPE)
    rows["value"], rows["module"], rows["category"], rows["phase"] = np.nan, -1, NO_CATEGORY, Phase.IDLE
    for place, each in enumerate(fields):
        for name, value in each.items():
            rows[name][place] = value
    rows["seq"] = first + np.arange(len(fields))
    return rows


def rank(number, *fields, alive_s=10.0, world=2, first=0, start_s=0.0, **known):
    """Return what a rank recorded: its trace, and what is known of its process, alive at ``alive_s``."""
    start = RunStart(rank=number, world_size=world, clock="one", t_ns=int(start_s * S), wall_ns=WALL + int(start_s * S))
    event_s = known.pop("event_s", start_s)
    beat = Heartbeat(t_ns=int(alive_s * S), wall_ns=WALL + int(alive_s * S), event_ns=int(event_s * S))
    trace = RankTrace(number, rows_of(*fields, first=first), KeyFrame(seq=first))
    return trace, RecordedRank(start=start, header=Header(), **{"last_beat": beat, **known})


def recording(*ranks, groups=((0, 1),)):
    header = Header(
        world_size=max((len(group) for group in groups), default=1),
        comm_groups=tuple(GroupInfo(name=f"group {i}", ranks=group) for i, group in enumerate(groups)),
    )
    trace = Trace(header, tuple(trace for trace, _ in ranks))
    return Recording(trace=trace, ranks={trace.rank: known for trace, known in ranks})


def at(found, now_s=10.0):
    return positions(found, WALL + int(now_s * S))


FORWARD = row(Kind.FORWARD, BEGIN, 9, unit=3, step=7)


def gather(t_s, edge=BEGIN, number=4, kind=Kind.ALL_GATHER, **more):
    return row(kind, edge, t_s, number=number, **{"unit": 3, **more})


# ---- the states

STOP = RecordingStop(t_ns=9 * S, step=7, reason="No space left on device")


@pytest.mark.parametrize(
    ("fields", "known", "now_s", "state"),
    [
        ([FORWARD], {}, 10, RunState.RUNS),
        ([FORWARD], {"alive_s": 9 + STALLED_NS / S - 0.1}, 10, RunState.RUNS),
        ([FORWARD], {"alive_s": 9 + STALLED_NS / S}, 10, RunState.SILENT),
        ([gather(9)], {}, 10, RunState.IN_COLLECTIVE),
        ([gather(9)], {"alive_s": 9 + STALLED_NS / S}, 10, RunState.WAITS),
        ([gather(9), row(Kind.WAIT, BEGIN, 9, number=4, unit=3)], {"alive_s": 20}, 20, RunState.WAITS),
        ([gather(8), gather(9, END)], {"alive_s": 20}, 20, RunState.SILENT),
        # the ends of others are noticed while it waits
        ([gather(7, number=3), gather(8), gather(9, END, number=3)], {"alive_s": 20}, 20, RunState.WAITS),
        (
            [gather(7, number=3), gather(8), gather(9, END), gather(9, END, number=3)],
            {"alive_s": 20},
            20,
            RunState.SILENT,
        ),
        # one in flight, for which it does not wait: it computes
        ([gather(8), FORWARD], {"alive_s": 20}, 20, RunState.SILENT),
        ([gather(8), FORWARD], {}, 10, RunState.RUNS),
        # what goes on beside the events of a step is no progress
        ([gather(8), row(Kind.RESIDENT, INSTANT, 8.1)], {"alive_s": 20}, 20, RunState.WAITS),
        ([row(Kind.RECV, BEGIN, 9)], {"alive_s": 20}, 20, RunState.SILENT),
        ([FORWARD], {"alive_s": 10}, 10 + ALIVE_NS / S, RunState.RUNS),
        ([FORWARD], {"alive_s": 10}, 10.1 + ALIVE_NS / S, RunState.LOST),
        ([gather(9)], {"alive_s": 20}, 99, RunState.LOST),
        ([FORWARD], {"alive_s": 10, "stop": STOP}, 99, RunState.UNRECORDED),
        ([FORWARD], {"end": RunEnd(t_ns=10 * S), "stop": STOP}, 99, RunState.ENDED),
        ([FORWARD], {"end": RunEnd(t_ns=10 * S)}, 99, RunState.ENDED),
        ([FORWARD], {"end": RunEnd(t_ns=10 * S, reason="exit status 3")}, 99, RunState.FAILED),
        # no event yet: since it began
        ([], {"alive_s": 4}, 4, RunState.RUNS),
        ([], {"alive_s": 6}, 6, RunState.SILENT),
        ([], {"alive_s": 6, "start_s": 3}, 6, RunState.RUNS),
        ([], {"last_beat": None}, 4, RunState.RUNS),
        ([], {"last_beat": None}, 11, RunState.LOST),
        # its process lives, and writes nothing
        ([FORWARD], {"alive_s": 10, "process": "stopped"}, 40, RunState.SILENT),
        ([gather(9)], {"alive_s": 10, "process": "alive"}, 40, RunState.WAITS),
        # its process is gone: no need to wait
        ([gather(9)], {"alive_s": 10, "process": "gone"}, 10, RunState.LOST),
        # a step that is not recorded
        ([FORWARD], {"alive_s": 60, "event_s": 59.9}, 60, RunState.RUNS),
        ([FORWARD], {"alive_s": 60, "event_s": 50}, 60, RunState.SILENT),
    ],
)
def test_every_state(fields, known, now_s, state):
    (found,) = at(recording(rank(0, *fields, **known)), now_s)
    assert found.state is state
    assert (found.pending is not None) == (
        state in (RunState.IN_COLLECTIVE, RunState.WAITS, RunState.LOST) and fields[-1:] not in ([], [FORWARD])
    )


def test_every_state_has_a_test():
    (mark,) = (each for each in test_every_state.pytestmark if each.name == "parametrize")
    assert {state for *_, state in mark.args[1]} == set(RunState)


def test_what_a_position_says():
    found = at(recording(rank(0, FORWARD, row(Kind.FORWARD, END, 9.5, unit=3, step=7), alive_s=12)), 12)
    expected = RunPosition(
        rank=0,
        state=RunState.RUNS,
        step=7,
        kind=Kind.FORWARD,
        edge=END,
        unit=3,
        for_ns=int(2.5 * S),
        since_ns=int(9.5 * S),
    )
    assert found == (expected,)


def test_a_process_that_lives_and_writes_nothing_is_silent_until_now():
    (found,) = at(recording(rank(0, FORWARD, process="stopped")), 40)
    assert (found.for_ns, found.activity, found.is_over) == (31 * S, "stopped", False)


def test_the_last_event_of_a_rank_that_waits_is_what_it_waits_for():
    waits = row(Kind.WAIT, BEGIN, 8, number=4, unit=3)
    (found,) = at(recording(rank(0, gather(6), gather(7, number=5), waits, gather(9, END, number=5), alive_s=20)), 20)
    assert (found.kind, found.edge, found.pending.number) == (Kind.WAIT, BEGIN, 4)


@pytest.mark.parametrize(("event_s", "ended_s"), [(9, 10), (10.7, 10.7)])
def test_an_event_is_a_sign_of_life_too(event_s, ended_s):
    (found,) = at(recording(rank(0, row(Kind.FORWARD, BEGIN, event_s - 1), offset_ns=S)), 40)
    assert (found.state, found.ended_ns) == (RunState.LOST, (ended_s - 1) * S)
    assert found.ago_ns == (40 - ended_s) * S


def test_a_rank_that_has_ended_says_why_and_in_which_collective():
    end = RunEnd(t_ns=8 * S, reason="ValueError: x", frames=OWN)
    (found,) = at(recording(rank(0, gather(3), end=end, offset_ns=S)))
    assert (found.state, found.reason, found.ending) == (RunState.FAILED, "ValueError: x", Ending.ERROR)
    assert (found.pending.number, found.for_ns, found.frames) == (4, 4 * S, OWN)
    assert (found.ended_ns, found.ago_ns) == (7 * S, 2 * S)  # on the trace's clock, and by the time of day
    (found,) = at(recording(rank(0, gather(3), end=RunEnd(t_ns=8 * S))))
    assert (found.pending, found.ending, found.frames) == (None, Ending.SUCCESS, ())


def test_a_clock_that_was_set_during_the_run_does_not_change_how_long_ago_it_ended():
    beat = Heartbeat(t_ns=7 * S, wall_ns=WALL + 3607 * S, event_ns=0)
    (found,) = at(recording(rank(0, gather(3), last_beat=beat, end=RunEnd(t_ns=8 * S))), 3610)
    assert found.ago_ns == 2 * S


def test_a_wait_that_raised_has_not_ended_though_its_collective_has():
    waits = [gather(3), row(Kind.WAIT, BEGIN, 4, number=4), gather(5, END)]
    (found,) = at(recording(rank(0, *waits, end=RunEnd(t_ns=8 * S, reason="RuntimeError: x"))))
    assert found.pending.number == 4
    assert at(recording(rank(0, *waits)))[0].pending is None


def test_a_rank_without_an_event_has_no_place():
    (found,) = at(
        recording(rank(0, alive_s=6, quiet=(SilentStack(t_ns=S, seq=0, frames=("train.py:3 in <module>: f()",)),))), 6
    )
    expected = RunPosition(rank=0, state=RunState.SILENT, for_ns=6 * S, frames=("train.py:3 in <module>: f()",))
    assert found == expected


def test_times_of_another_host_s_clock_are_taken_back_to_it():
    """The trace has rank 0's times; whether a rank is stalled is a matter of its own clock."""
    (found,) = at(recording(rank(0, FORWARD, alive_s=10 + 500, offset_ns=500 * S, event_s=1)), 510)
    assert (found.state, found.for_ns) == (RunState.RUNS, S)


@pytest.mark.parametrize(
    ("reason", "number"), [("RuntimeError: Connection closed by peer", 4), ("ValueError: x", None)]
)
def test_a_collective_that_failed_is_the_one_in_which_its_rank_waited(reason, number):
    """Its end is recorded as it raises; the rank's clock is one second ahead of the trace's."""
    end = RunEnd(t_ns=8 * S, reason=reason)
    (found,) = at(recording(rank(0, gather(3), gather(6.9, END), end=end, offset_ns=S)))
    assert (None if found.pending is None else found.pending.number) == number
    assert found.since_ns == (6.9 if number is None else 3) * S


def test_ranks_are_in_order():
    assert [each.rank for each in at(recording(rank(1, FORWARD), rank(0, FORWARD)))] == [0, 1]


# ---- who is waited for


def pending_of(*ranks, groups=((0, 1, 2, 3),)):
    found = at(recording(*ranks, groups=groups))
    return next(each.pending for each in found if each.rank == 0)


def test_ranks_that_have_not_begun_it_are_absent():
    found = pending_of(
        rank(0, gather(1)),
        rank(1, gather(1, number=3), gather(2, END, number=3)),
        rank(2, gather(2)),
        rank(3),
    )
    assert found == PendingCollective(kind=Kind.ALL_GATHER, unit=3, group="group 0", number=4, absent=(1, 3))


def test_a_rank_that_is_ahead_has_begun_it():
    assert pending_of(rank(0, gather(1)), rank(1, gather(1), gather(2, END), gather(3, number=5))).absent == ()


def test_ranks_that_issued_another_collective_in_its_place_are_named_with_it():
    found = pending_of(
        rank(0, gather(1)),
        rank(1, gather(1, kind=Kind.ALL_REDUCE)),
        rank(2, gather(2)),
        rank(3, gather(2, kind=Kind.BARRIER), gather(3, END, kind=Kind.BARRIER), gather(4, number=5)),
    )
    assert found.others == ((1, Kind.ALL_REDUCE), (3, Kind.BARRIER))
    assert (found.absent, found.unknown) == ((), ())


def test_ranks_without_a_recording_are_unknown():
    found = pending_of(rank(0, gather(1)), rank(2, gather(1)))
    assert (found.absent, found.others, found.unknown) == ((), (), (1, 3))


def test_what_a_rank_issued_after_its_recording_stopped_is_unknown():
    stopped = rank(1, gather(1, number=3), stop=STOP)
    assert pending_of(rank(0, gather(1)), stopped, groups=((0, 1),)).unknown == (1,)
    assert pending_of(rank(0, gather(1, number=3)), stopped, groups=((0, 1),)).unknown == ()


def test_a_rank_whose_older_rows_are_lost_may_have_begun_it():
    found = pending_of(rank(0, gather(1)), rank(1, FORWARD, first=500), rank(2, gather(3, number=2), first=500))
    assert (found.absent, found.unknown) == ((2,), (1, 3))


def test_all_have_begun_it():
    ranks = [rank(number, gather(number)) for number in range(4)]
    assert pending_of(*ranks) == PendingCollective(kind=Kind.ALL_GATHER, unit=3, group="group 0", number=4)


def test_only_ranks_of_the_group_count():
    ranks = [rank(0, gather(1, group=1)), rank(1, FORWARD), rank(2, FORWARD), rank(3, gather(1, group=1))]
    found = pending_of(*ranks, groups=((0, 1), (0, 2, 3)))
    assert (found.group, found.absent) == ("group 1", (2,))


def test_a_rank_that_receives_waits_for_the_sender_alone():
    groups = ((0, 1, 2), (1, 0))
    receives = gather(5, number=1, group=1, kind=Kind.RECV)
    sent = gather(1, number=0, group=1, kind=Kind.SEND)
    ranks = [rank(0, receives), rank(1, sent, gather(2, END, number=0, group=1, kind=Kind.SEND)), rank(2)]
    found = pending_of(*ranks, groups=groups)
    assert found == PendingCollective(kind=Kind.RECV, unit=3, group="group 1", number=1, absent=(1,))
    ranks[1] = rank(1, sent, gather(3, number=1, group=1, kind=Kind.SEND))
    assert pending_of(*ranks, groups=groups) == PendingCollective(kind=Kind.RECV, unit=3, group="group 1", number=1)


def test_a_wait_is_for_the_collective_that_it_names_and_not_for_the_newest():
    waits = row(Kind.WAIT, BEGIN, 3, number=4, unit=-1)
    reduces = gather(2, number=5, kind=Kind.REDUCE_SCATTER, unit=1)
    found = pending_of(rank(0, gather(1), reduces, waits), rank(1, gather(1)))
    assert (found.kind, found.unit, found.number, found.absent) == (Kind.ALL_GATHER, 3, 4, ())


def test_a_wait_for_a_collective_of_lost_rows_is_a_silence():
    (found,) = at(recording(rank(0, row(Kind.WAIT, BEGIN, 3, number=4), alive_s=20, first=9)), 20)
    assert (found.state, found.pending) == (RunState.SILENT, None)


# ---- stacks

OWN = ("/home/me/train.py:31 in main: loss.backward()", "/home/me/model.py:9 in forward: return f(x)")
TORCH = "/x/lib/python3.11/site-packages/torch/autograd/graph.py:829 in _engine_run_backward: return run()"


def test_the_stack_of_the_last_silence_counts_and_only_if_no_event_followed():
    stacks = (SilentStack(t_ns=1, seq=1, frames=("older",)), SilentStack(t_ns=2, seq=1, frames=OWN))
    assert at(recording(rank(0, FORWARD, quiet=stacks)))[0].frames == OWN
    assert at(recording(rank(0, FORWARD, FORWARD, quiet=stacks)))[0].frames == ()
    assert at(recording(rank(0, FORWARD)))[0].frames == ()


def test_the_users_frame_is_the_innermost_that_is_not_of_a_library():
    (found,) = at(recording(rank(0, FORWARD, quiet=(SilentStack(t_ns=1, seq=1, frames=(*OWN, TORCH, TORCH)),))))
    assert found.users_frame == OWN[-1]
    assert found.short_frames == (*OWN, TORCH)
    (found,) = at(recording(rank(0, FORWARD, quiet=(SilentStack(t_ns=1, seq=1, frames=(TORCH,)),))))
    assert (found.users_frame, found.short_frames) == ("", (TORCH,))
    (found,) = at(recording(rank(0, FORWARD)))
    assert (found.users_frame, found.short_frames) == ("", ())


# ---- ranks of a running request


def test_the_newest_step_that_all_ranks_have_begun():
    def steps(*numbers):
        return [row(Kind.STEP, edge, t, step=step) for t, step in enumerate(numbers) for edge in (BEGIN, END)]

    def begins(*ranks):
        return begins_of_newest_step(recording(*(rank(i, *rows) for i, rows in enumerate(ranks))).trace)

    assert begins(steps(0, 1), steps(0, 1, 2)) == {0: 2, 1: 2}
    assert begins(steps(1), steps(0, 1)) == {0: 0, 1: 2}
    assert begins(steps(0), steps()) == begins(steps(2), steps(0)) == begins() == {}


def test_where_the_ranks_of_a_request_are():
    trace = recording(rank(0, gather(1)), rank(1, gather(1, number=3), gather(2, END, number=3), FORWARD)).trace
    frames = {0: OWN, 1: OWN[:1]}
    found = live_positions(trace, {0: DEADLOCKED_NS, 1: STALLED_NS}, {}, {0: 0, 1: 0}, frames)
    assert [each.frames for each in found] == [OWN, OWN[:1]]
    assert [each.state for each in found] == [RunState.WAITS, RunState.SILENT]
    assert (found[0].pending.absent, found[1].pending) == ((1,), None)
    assert [(each.kind, each.edge) for each in found] == [(Kind.ALL_GATHER, BEGIN), (Kind.FORWARD, BEGIN)]
    found = live_positions(trace, {0: DEADLOCKED_NS - 1, 1: STALLED_NS - 1}, {}, {0: 0, 1: 0}, {})
    assert [each.state for each in found] == [RunState.IN_COLLECTIVE, RunState.RUNS]
    found = live_positions(trace, {}, {0: "", 1: "KeyError: 'lang'"}, {0: 0, 1: 0}, {1: ("train.py:9",)})
    assert [(each.state, each.pending, each.users_frame) for each in found] == [
        (RunState.ENDED, None, ""),
        (RunState.FAILED, None, "train.py:9"),
    ]
    assert [each.ending for each in found] == [Ending.SUCCESS, Ending.ERROR]


@pytest.mark.parametrize(("since", "absent", "unknown"), [(70, (1,), ()), (60, (), (1,))])
def test_a_group_that_a_rank_has_not_used_since_the_request_began_is_not_begun_there(since, absent, unknown):
    trace = recording(rank(0, gather(1, group=1), first=70), rank(1, FORWARD, first=70), groups=((0, 1), (0, 1))).trace
    waits, _ = live_positions(trace, {0: DEADLOCKED_NS}, {}, {0: since, 1: since}, {})
    assert (waits.pending.absent, waits.pending.unknown) == (absent, unknown)
