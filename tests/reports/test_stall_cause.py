"""Why a stalled run does not continue: each cause, with its evidence."""

from dataclasses import replace
from typing import get_args

import pytest

from tests.replay.test_run_positions import FORWARD, OWN, TORCH, S, gather, rank, row
from tests.reports.test_run_where import alive, quiet, report
from workbench.events import Edge, Kind
from workbench.trace.recording import Activity, RunEnd

SAME_CALLS = "let all ranks issue the same collectives: none within `if rank == 0:`, nor in a branch that data decides"


def cause_of(*ranks, **more):
    return report(*ranks, **more).cause


def test_a_run_that_continues_has_no_cause():
    assert cause_of(alive(0, gather(1)), alive(1, row(Kind.FORWARD, Edge.BEGIN, 29, unit=3))) is None


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ({"end": RunEnd(t_ns=9 * S, reason="ValueError: x")}, "rank 1: ValueError: x"),
        ({"alive_s": 9}, "rank 1: was killed, or its host or disk failed"),
    ],
)
def test_a_rank_that_is_gone(end, why):
    found = cause_of(alive(0, gather(1)), rank(1, FORWARD, **{"alive_s": 30, **end}))
    assert (found.rule, found.evidence) == ("dead-rank", (why,))
    assert found.verdict == "rank 1 is gone, and no collective ends without all ranks"


def test_ranks_that_part_and_go_on_are_told_too():
    runs = row(Kind.FORWARD, Edge.BEGIN, 29, unit=3)
    found = report(alive(0, gather(1, unit=1), runs), alive(1, gather(1, unit=2), runs))
    assert not found.is_stalled
    assert found.cause.verdict == "rank 1 issued all-gather of blocks.1 where rank 0 issued all-gather of blocks.0"


def test_a_rank_that_issued_something_else():
    other = gather(2, kind=Kind.ALL_REDUCE, unit=-1)
    found = cause_of(
        alive(0, gather(1)), alive(1, other, **quiet(*OWN, TORCH)), alive(2, gather(1)), groups=((0, 1, 2),)
    )
    assert found.verdict == "rank 1 issued all-reduce where ranks 0, 2 issued all-gather of blocks.2"
    assert found.evidence == (
        "number 4 of group 0 of step 0: rank 1 all-reduce, ranks 0, 2 all-gather of blocks.2",
        f"rank 1 is in {OWN[-1]}",
    )
    assert (found.rule, found.fix) == ("other-collective", SAME_CALLS)


def test_ranks_in_another_order():
    first = [gather(1, number=4, unit=1), gather(2, number=5, unit=2)]
    second = [gather(1, number=4, unit=2), gather(2, number=5, unit=1)]
    found = cause_of(alive(0, *first), alive(1, *second))
    assert found.rule == "wrong-order"
    assert found.verdict == (
        "rank 1 issued all-gather of blocks.1 before all-gather of blocks.0, rank 0 the other way round"
    )
    assert found.fix == "let all ranks run the same units in the same order"


def test_a_call_more_and_a_call_less():
    extra = [gather(1, number=4, kind=Kind.BARRIER, unit=-1), gather(2, number=5)]
    found = cause_of(alive(0, gather(1)), alive(1, *extra))
    assert found.verdict == "rank 1 issued barrier, which rank 0 left out"
    found = cause_of(alive(0, *extra), alive(1, gather(1)))
    assert found.verdict == "rank 1 left out barrier, which rank 0 issued"
    assert found.fix == SAME_CALLS


def test_another_payload():
    found = cause_of(alive(0, {**gather(1), "num_bytes": 8}), alive(1, {**gather(1), "num_bytes": 2048}))
    assert found.verdict == "rank 1 issued all-gather of blocks.2 with 2.00 KiB, rank 0 with 8 B"
    assert found.rule == "other-payload"


def test_a_rank_whose_batches_were_fewer():
    forwards = [row(Kind.FORWARD, Edge.BEGIN, at, unit=0) for at in (1, 2)]
    done = row(Kind.OPTIMIZER, Edge.BEGIN, 3)
    found = cause_of(alive(0, *forwards, done, gather(4)), alive(1, *forwards[:1], done, end=RunEnd(t_ns=9 * S)))
    assert found.rule == "uneven-batches"
    assert found.verdict == "rank 1 has ended, while rank 0 still issued collectives"
    assert found.evidence == (
        "rank 1: 1 forward, 1 step of the optimizer",
        "rank 0: 2 forwards, 1 step of the optimizer",
    )


def test_a_rank_that_failed_because_another_had_ended_early():
    """The sockets of the one that has ended are closed, and so the other one raises."""
    ended = alive(1, FORWARD, gather(2), gather(3, Edge.END), end=RunEnd(t_ns=9 * S))
    calls = [gather(1), gather(2, Edge.END), gather(3, number=5)]
    found = cause_of(alive(0, *calls, end=RunEnd(t_ns=9 * S, reason="RuntimeError: closed by peer")), ended)
    assert found.rule == "uneven-batches"
    found = cause_of(alive(0, *calls[:2], end=RunEnd(t_ns=9 * S, reason="ValueError: x")), ended)
    assert found.rule == "dead-rank"


def test_ranks_that_wait_for_each_other_in_two_groups():
    groups = ((0, 1), (1, 0))
    found = cause_of(alive(0, gather(1)), alive(1, gather(1, group=1, kind=Kind.ALL_REDUCE)), groups=groups)
    assert found.rule == "crossed-groups"
    assert found.verdict == "ranks 0-1 wait for each other, in different groups"
    assert found.evidence == (
        "rank 0 waits for all-gather of blocks.2 in group 0, which rank 1 has not started",
        "rank 1 waits for all-reduce of blocks.2 in group 1, which rank 0 has not started",
    )


def test_a_rank_that_does_not_come():
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, **quiet(*OWN, TORCH)))
    assert found.rule == "late-rank"
    assert found.evidence == (f"rank 1 has recorded no event for 21.0 s, in {OWN[-1]}",)
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD))
    assert found.evidence == ("rank 1 has recorded no event for 21.0 s; it has written no stack since",)


@pytest.mark.parametrize("activity", [each for each in get_args(Activity) if each])
def test_it_is_said_what_a_rank_does_that_does_not_come(activity):
    (silent,) = quiet(*OWN)["quiet"]
    found = cause_of(alive(0, gather(1)), alive(1, FORWARD, quiet=(replace(silent, activity=activity),)))
    assert found.evidence == (f"rank 1 has recorded no event for 21.0 s, {activity}, in {OWN[-1]}",)
    assert "it sleeps, waits for data, or computes" not in found.fix


def test_where_all_have_started_the_cause_is_not_recorded():
    assert cause_of(alive(0, gather(1)), alive(1, gather(2))) is None


def test_the_cause_stands_below_the_headline_and_is_escaped():
    found = report(alive(0, gather(1)), alive(1, FORWARD, **quiet("<b>")))
    _, cause, evidence, fix, *_ = str(found).splitlines()
    assert cause == "  fault: rank 1 does not come: the others wait for what it does outside of collectives"
    assert evidence == "  evidence: rank 1 has recorded no event for 21.0 s, in <b>"
    assert fix.startswith("  fix: look at that line")
    assert "<b>" not in found._repr_html_()
