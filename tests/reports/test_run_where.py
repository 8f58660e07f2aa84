"""The report on where a recorded run is: whole sentences."""

from dataclasses import replace

import pytest

from tests.replay.test_run_positions import FORWARD, OWN, STOP, TORCH, WALL, S, gather, rank, recording, row
from workbench.events import C10D, Edge, Kind, Unit
from workbench.reports.run_where import where
from workbench.trace.columns import Trace
from workbench.trace.recording import THREAD_ENDED, TWO_THREADS, RunEnd, SilentStack
from workbench.trace.schema import RankInfo

UNITS = tuple(
    Unit(
        index=index,
        name=name,
        root=0,
        params=(),
        reshard_after_forward=True,
        shard_size=2,
        compute_dtype="float32",
        reduce_dtype="float32",
        compute_itemsize=4,
        reduce_itemsize=4,
        comm=C10D,
    )
    for index, name in enumerate(["", "blocks.0", "blocks.1", "blocks.2"])
)


def report(*ranks, now_s=30.0, groups=((0, 1),), notes=()):
    found = recording(*ranks, groups=groups)
    header = replace(found.trace.header, units=UNITS)
    return where(replace(found, trace=Trace(header, found.trace.ranks), notes=notes), WALL + int(now_s * S))


def alive(number, *fields, **known):
    return rank(number, *fields, alive_s=30, **known)


def quiet(*frames, seq=1):
    return {"quiet": (SilentStack(t_ns=29 * S, seq=seq, frames=frames),)}


RUNS = row(Kind.FORWARD, Edge.BEGIN, 29, unit=3, step=7)
DONE = {"end": RunEnd(t_ns=30 * S)}


@pytest.mark.parametrize(
    ("ranks", "headline", "stalled"),
    [
        ([alive(0, RUNS), alive(1, RUNS)], "the run continues, at step 7", False),
        (
            [alive(0, RUNS), alive(1, row(Kind.FORWARD, Edge.BEGIN, 29, step=8))],
            "the run continues, at steps 7-8",
            False,
        ),
        ([alive(0, row(Kind.FORWARD, Edge.BEGIN, 29, step=-1))], "the run continues", False),
        ([alive(0, RUNS, **DONE), alive(1, RUNS, **DONE)], "the run has ended", False),
        ([alive(0, RUNS, **DONE), alive(1, RUNS)], "the run continues, at step 7", False),
        # one rank that waits is no stall as long as another continues
        ([alive(0, gather(1)), alive(1, RUNS)], "the run continues, at steps 0-7", False),
        (
            [alive(0, gather(1)), alive(1, FORWARD)],
            "rank 1 does not come: the others wait for what it does outside of collectives",
            True,
        ),
        (
            [alive(0, gather(1)), alive(1, FORWARD, **quiet(*OWN, TORCH))],
            "rank 1 does not come: the others wait for what it does outside of collectives, in model.py:9",
            True,
        ),
        (
            [alive(0, gather(1)), alive(1, gather(2))],
            "ranks 0-1 wait for all-gather of blocks.2, which all of its ranks have started",
            True,
        ),
        (
            [alive(0, gather(1)), alive(1, gather(2, kind=Kind.ALL_REDUCE, unit=-1))],
            "ranks 0-1 part: rank 0 issued all-gather of blocks.2, rank 1 all-reduce",
            True,
        ),
        (
            [alive(0, gather(1, unit=0))],
            "rank 0 has waited 29.0 s for all-gather of (root): no record of rank 1",
            True,
        ),
        (
            [alive(0, gather(1)), alive(1, gather(1), **DONE)],
            "rank 0 waits for all-gather of blocks.2, which all of its ranks have started",
            True,
        ),
        (
            [alive(0, gather(1)), alive(1, FORWARD, **DONE)],
            "rank 1 has ended, while rank 0 still issued collectives: all-gather of blocks.2",
            True,
        ),
        (
            [alive(0, gather(1)), rank(1, FORWARD, alive_s=10)],
            "rank 1 was killed",
            True,
        ),
        (
            [rank(0, FORWARD, alive_s=10), rank(1, FORWARD, alive_s=10)],
            "ranks 0-1 were killed",
            True,
        ),
        (
            [alive(0, RUNS), alive(1, RUNS, end=RunEnd(t_ns=30 * S, reason="ValueError: x, at line 3 of train.py"))],
            "rank 1 failed: ValueError: x",
            True,
        ),
        (
            [alive(n, RUNS, end=RunEnd(t_ns=30 * S, reason="exit status 3")) for n in (0, 1)],
            "ranks 0-1 failed: exit status 3",
            True,
        ),
        ([alive(n) for n in (0, 1, 2)], "ranks 0-2 have recorded no event for 30.0 s", True),
        ([alive(0)], "rank 0 has recorded no event for 30.0 s", True),
        # neither a run that ended well, nor a rank that was killed
        ([alive(n, RUNS, stop=STOP) for n in (0, 1)], "ranks 0-1 are no longer recorded", True),
        ([alive(n, RUNS, stop=STOP, **DONE) for n in (0, 1)], "the run has ended", False),
        (
            [alive(0, gather(1)), alive(1, RUNS, stop=STOP)],
            "rank 1 is no longer recorded; rank 0 has waited 29.0 s for all-gather of blocks.2: no record of rank 1",
            True,
        ),
    ],
)
def test_the_headline(ranks, headline, stalled):
    found = report(*ranks)
    assert found.headline == headline
    assert found.is_stalled is stalled


def test_ranks_that_no_rank_waits_for_are_no_stall_unless_they_may_wait_for_a_device():
    def of(device, *ranks):
        found = recording(*ranks)
        infos = tuple(RankInfo(rank=n, host="a", device=device, pid=1) for n in (0, 1))
        header = replace(found.trace.header, units=UNITS, ranks=infos)
        return where(replace(found, trace=Trace(header, found.trace.ranks)), WALL + 30 * S)

    waits = alive(0, gather(1))
    for others in ([alive(1, RUNS, **DONE)], [alive(1, FORWARD)]):
        found = of("cpu", alive(0, FORWARD), *others)
        assert (found.is_stalled, found.cause) == (False, None)
        assert "recorded no event for 21.0 s" in found.headline
        assert of("cuda:0", alive(0, FORWARD), *others).is_stalled
        assert of("cpu", waits, *others).is_stalled


def test_several_ranks_are_named_together():
    group = tuple(range(6))
    ranks = [
        *(alive(number, gather(number + 1)) for number in (0, 1, 2)),
        alive(3, gather(1, kind=Kind.BARRIER), gather(2, Edge.END, kind=Kind.BARRIER)),
        alive(4, FORWARD),
    ]
    found = report(*ranks, groups=(group,))
    assert found.headline == "rank 3 issued barrier of blocks.2 where ranks 0-2 issued all-gather of blocks.2"
    assert str(found).splitlines()[3] == (
        "  ranks: ranks 0-2 have waited 29.0 s for all-gather of blocks.2: rank 3 issued barrier in its place, "
        "rank 4 has not started it, no record of rank 5; "
        "rank 3 has recorded no event for 28.0 s; rank 4 has recorded no event for 21.0 s"
    )


def test_the_whole_text():
    ranks = [
        alive(0, gather(1, step=7)),
        alive(1, FORWARD, **quiet(TORCH, *OWN, TORCH)),
        rank(2, alive_s=1),
        alive(3, RUNS, **DONE),
    ]
    found = report(*ranks, groups=((0, 1, 2, 3),), notes=("rank3.0000.rec ends within a frame",))
    assert str(found).splitlines() == [
        "rank 2 was killed",
        "  fix: find out what killed rank 2: the kernel, for lack of memory (dmesg), its launcher or queue (their "
        "logs), or its host",
        "  ranks: rank 2 was killed; rank 0 has waited 29.0 s for all-gather of blocks.2: "
        f"ranks 1-3 have not started it; rank 1 has recorded no event for 21.0 s, in {OWN[-1]}",
        f"  rank  {'state':21}  step  last event              ago",
        f"  0     {'waits':21}  7     all-gather of blocks.2  29.0 s",
        f"  1     {'has recorded no event':21}  7     forward of blocks.2     21.0 s",
        f"  2     {'was killed':21}                                29.0 s",
        f"  3     {'has ended':21}  7     forward of blocks.2     29.0 s after rank 2",
        "  rank 1 is in",
        f"    {OWN[0]}",
        f"    {OWN[1]}",
        f"    {TORCH}",
        "  note: rank3.0000.rec ends within a frame",
    ]


def test_the_table_has_a_row_for_each_rank():
    table = report(alive(0, RUNS), alive(1)).table()
    assert list(table.head) == ["rank", "state", "step", "last event", "ago"]
    assert [tuple(each) for each in table.rows] == [
        ("0", "runs", "7", "forward of blocks.2", "1.00 s"),
        ("1", "has recorded no event", "", "", ""),
    ]


def test_in_a_notebook_the_text_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    found = report(alive(0, FORWARD, **quiet(evil)), notes=(evil,))
    bundle = found._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == str(found)
    assert "<td" in bundle["text/html"]  # the table of ranks
    assert "rank 0 is in" in bundle["text/html"]
    assert evil in str(found)
    assert "<img" not in bundle["text/html"]
    assert "&lt;img" in bundle["text/html"]


def test_a_thread_that_an_error_has_ended_is_seen_first():
    note = f"{THREAD_ENDED} prefetch ended with AssertionError: no, in data.py:3"
    late = report(alive(0, gather(1)), alive(1, FORWARD, notes=(note,))).cause
    assert (late.rule, late.evidence[0]) == ("late-rank", f"rank 1: {note}")
    assert late.fix.startswith("see first whether it waited for the thread that an error has ended; else look at")
    other = report(alive(0, gather(1), notes=(note,)), alive(1, FORWARD)).cause
    assert not other.fix.startswith("see first")


def test_ranks_that_part_because_threads_share_a_group_get_the_fix_for_it():
    note = f"{TWO_THREADS}: MainThread, and monitor, which issues all-gather on group 0, in t.py:9 in run"
    parted = alive(0, gather(1, unit=1)), alive(1, gather(1, unit=2), notes=(note,))
    cause = report(*parted).cause
    assert cause.evidence[-1] == f"rank 1: {note}"
    assert cause.fix.endswith("make a group of its own for the other: dist.new_group()")
    late = alive(0, gather(1)), alive(1, FORWARD, notes=(note,))
    assert "new_group" not in report(*late).cause.fix
